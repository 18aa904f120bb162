"""Which workers there are: by a row for each queue of each worker, renewed each minute, and by the kernel.

This is for people and for the health check. No job is claimed, given back or kept because of it.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from django.db import connections
from django.db.models import QuerySet

from django_alkstore import clock, names
from django_alkstore.clock import LAST_US, SECOND, from_us
from django_alkstore.dialects import Operations, sqlite_health
from django_alkstore.dialects.liveness import LivenessView
from django_alkstore.dialects.transactions import write_transaction
from django_alkstore.models import Lock

TTL = 150.0
"""Seconds that a sign of life lasts: two and a half upkeep intervals, so that one may be missed."""
LISTED = 3_600.0
"""Seconds for which a dead worker stays listed after its last sign has lapsed."""


class WorkerState(StrEnum):
    """What is known of a worker."""

    ALIVE = "alive"  # its process is not known to be dead, and its last sign is younger than TTL
    SUSPENDED = "suspended"  # its process lives, and its last sign is older
    DEAD = "dead"  # its process is known to be dead; or its last sign is older, and nothing else is known


class Worker(NamedTuple):
    """One worker that is running, or that ended without taking its signs back."""

    id: str
    queues: list[str]
    state: WorkerState
    started_at: datetime
    last_sign_at: datetime
    known_dead: bool
    """True if the kernel says that its process has ended."""
    has_crash_detection: bool


class Presence(NamedTuple):
    """What was found at one moment."""

    workers: list[Worker]
    """In the order of their starts."""
    served: set[str]
    """Queues that a worker lives for, or from which a job was claimed lately.

    A program of the project's own, which calls `claim_batch`, leaves no other sign.
    """
    deserted: set[str]
    """Queues of which a worker is known to be dead, and none is alive or suspended."""
    leader: Lock | None
    """The scheduler's leadership, if it lasts and its process is not known to be dead."""
    crash_detection: str | None
    """What is wrong with crash detection, in one sentence; `None` if it works, or if no worker uses it."""


def leave(alias: str, worker_id: str, queues: Sequence[str], liveness: str | None = None) -> None:
    """Let the worker's signs last for `TTL` from now, in one transaction. `liveness`: the file that it has locked."""

    def write(db: Operations) -> None:
        now = clock.now_us()
        started, ends = from_us(now), from_us(min(now + round(TTL * SECOND), LAST_US))
        mine = _signs_of(alias, worker_id)
        if mine.update(expires_at=ends) == len(queues):
            return
        mine.delete()
        Lock.objects.using(alias).bulk_create(
            Lock(
                name=names.sign_name(worker_id, queue),
                owner=worker_id,
                acquired_at=started,
                expires_at=ends,
                liveness=liveness,
            )
            for queue in queues
        )

    write_transaction(alias, write)


def take_back(alias: str, worker_id: str) -> None:
    """Delete the worker's signs."""
    write_transaction(alias, lambda _: _signs_of(alias, worker_id).delete())


def remove_lapsed(alias: str) -> None:
    """Delete the signs of workers that have been dead for long. A suspended worker keeps its own."""
    lapsed = signs(alias).filter(expires_at__lte=clock.now() - timedelta(seconds=LISTED))
    if not lapsed.exists():
        return
    with LivenessView(alias) as view:
        gone = [sign.token for sign in lapsed if not view.knows(sign.owner, sign.liveness)]
    if gone:
        write_transaction(alias, lambda _: lapsed.filter(token__in=gone).delete())


def look(alias: str) -> Presence:
    """Look which workers are there. Reads only."""
    with LivenessView(alias) as view:
        workers = _workers(alias, view)
        served, deserted = _queues(alias, view, workers)
        return Presence(workers, served, deserted, _leader(alias, view), _crash_detection(view, workers))


def _workers(alias: str, view: LivenessView) -> list[Worker]:
    by_owner: dict[str, list[Lock]] = {}
    for sign in signs(alias).order_by("acquired_at", "name"):
        by_owner.setdefault(sign.owner, []).append(sign)
    return [_worker(mine, view) for mine in by_owner.values()]


def _worker(mine: list[Lock], view: LivenessView) -> Worker:
    """The worker that left these signs, which it renews together."""
    first = mine[0]
    lives = view.knows(first.owner, first.liveness)
    is_fresh = first.expires_at > clock.now()
    if lives is False:
        state = WorkerState.DEAD
    elif is_fresh:
        state = WorkerState.ALIVE
    else:
        state = WorkerState.SUSPENDED if lives else WorkerState.DEAD
    return Worker(
        id=first.owner,
        queues=[queue for sign in mine if (queue := names.queue_of_sign(sign.name)) is not None],
        state=state,
        started_at=first.acquired_at,
        last_sign_at=first.expires_at - timedelta(seconds=TTL),
        known_dead=lives is False,
        has_crash_detection=first.liveness is not None,
    )


def _queues(alias: str, view: LivenessView, workers: list[Worker]) -> tuple[set[str], set[str]]:
    """The queues that are served, and those that are deserted."""
    served = {queue for worker in workers if worker.state is WorkerState.ALIVE for queue in worker.queues}
    suspended = {queue for worker in workers if worker.state is WorkerState.SUSPENDED for queue in worker.queues}
    deserted = {queue for worker in workers if worker.known_dead for queue in worker.queues}
    now = clock.now_us()
    for lease in sqlite_health.last_leases(connections[alias], now):
        if view.is_dead(lease.worker_id, lease.liveness):
            deserted.add(lease.queue)
        elif lease.written > now - round(TTL * SECOND):
            served.add(lease.queue)
    return served, deserted - served - suspended


def _leader(alias: str, view: LivenessView) -> Lock | None:
    row = Lock.objects.using(alias).filter(name=names.LEADERSHIP_LOCK, expires_at__gt=clock.now()).first()
    return None if row is None or view.is_dead(row.owner, row.liveness) else row


def _crash_detection(view: LivenessView, workers: list[Worker]) -> str | None:
    if view.is_blind:
        return f"this command cannot see whether workers live: {view.reason}"
    reason = view.reason or _off_for_some(workers)
    return reason and f"crash detection is off, so the jobs of a killed worker wait for their leases: {reason}"


def _off_for_some(workers: list[Worker]) -> str | None:
    without = [worker.id for worker in workers if worker.state is WorkerState.ALIVE and not worker.has_crash_detection]
    if not without:
        return None
    more = f" and of {len(without) - 1} more" if len(without) > 1 else ""
    return f"worker {without[0]}{more} could not set it up; the first lines of its log say why"


def signs(alias: str) -> QuerySet[Lock]:
    """Every worker's signs, the lapsed ones too."""
    return Lock.objects.using(alias).filter(name__gte=names.SIGN_PREFIX, name__lt=names.AFTER_SIGNS)


def locks(alias: str) -> QuerySet[Lock]:
    """The locks, without the signs."""
    return without_signs(Lock.objects.using(alias))


def without_signs(rows: QuerySet[Lock]) -> QuerySet[Lock]:
    """Those rows of the lock table that are locks."""
    return rows.exclude(name__gte=names.SIGN_PREFIX, name__lt=names.AFTER_SIGNS)


def _signs_of(alias: str, worker_id: str) -> QuerySet[Lock]:
    return signs(alias).filter(owner=worker_id)
