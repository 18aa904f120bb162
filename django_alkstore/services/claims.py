"""Claiming, and putting right what keeps a job from being claimed: lapsed leases and expired jobs.

One short transaction either claims or sweeps, never both: the claim takes nothing while its queue holds
something to sweep, so that a lapsed job takes its place in the order before others are handed out, and a
sweep of thousands holds the writer lock for one small batch at a time.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from django.db import connections
from django.db.backends.utils import CursorWrapper

from django_alkstore import clock, failures, signals
from django_alkstore.clock import from_us
from django_alkstore.dialects import Dialect, dialect_of
from django_alkstore.dialects.base import Claim
from django_alkstore.dialects.transactions import refuse_open, resolve_alias, write_transaction
from django_alkstore.names import validate_name
from django_alkstore.services import outcomes
from django_alkstore.services.handles import JobHandle, unreadable
from django_alkstore.services.options import check_limit, check_text

SWEEP_BATCH = 200
"""Jobs put right in one transaction."""


@dataclass(slots=True)
class Swept:
    """What a sweep has changed; `announce` says so, once it is committed."""

    reopened: list[tuple[int, str]] = field(default_factory=list)
    spent: list[tuple[int, str]] = field(default_factory=list)
    expired: list[tuple[int, str]] = field(default_factory=list)
    unreadable: list[tuple[int, str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.reopened) + len(self.spent) + len(self.expired) + len(self.unreadable)

    def announce(self) -> None:
        for job_id, queue in self.reopened:
            signals.emit(signals.job_lapsed, job_id=job_id, queue=queue, dead=False)
        for job_id, queue in self.spent:
            signals.emit(signals.job_lapsed, job_id=job_id, queue=queue, dead=True)
        for job_id, queue in self.expired:
            signals.emit(signals.job_expired, job_id=job_id, queue=queue)
        for job_id, queue, reason in self.unreadable:
            signals.emit(signals.job_unreadable, job_id=job_id, queue=queue, reason=reason)


def claim_batch(queue: str, worker_id: str, limit: int = 1, *, using: str | None = None) -> list[JobHandle]:
    """Lease up to `limit` due jobs of `queue` to `worker_id`, by priority (high first), `run_at` and id.

    Returns an empty list when nothing is due. Raises `RuntimeError` inside an open transaction, where the
    lease would be seen by nobody; `InvalidName`, `InvalidOption` for bad arguments.
    """
    validate_name("queue", queue)
    return claim_from(resolve_alias(using), queue, worker_id, limit, "claim_batch")


def claim_from(alias: str, queue: str, worker_id: str, limit: int, what: str) -> list[JobHandle]:
    """As `claim_batch`, for any queue; `what` is its name in the error."""
    check_text("worker_id", worker_id)
    check_limit("limit", limit)
    refuse_open(alias, what)
    dialect = dialect_of(connections[alias])
    while True:
        claimed, swept = write_transaction(alias, partial(claim_or_sweep, dialect, alias, queue, worker_id, limit))
        swept.announce()
        if claimed or not swept:
            return claimed


def claim_or_sweep(
    dialect: Dialect, alias: str, queue: str, worker_id: str, limit: int, cursor: CursorWrapper
) -> tuple[list[JobHandle], Swept]:
    """Claim from `queue`, or sweep a batch of it where there is nothing to claim. Needs the writer lock.

    Neither claimed nor swept: nothing is due. Something swept and nothing claimed: ask again.
    """
    now = clock.now_us()
    swept = Swept()
    rows = dialect.claim(cursor, queue, worker_id, limit, now)
    if not rows:
        sweep_queue(dialect, cursor, queue, now, swept)
        return [], swept
    claimed = []
    for row in rows:
        try:
            claimed.append(JobHandle(alias, row))
        except (TypeError, ValueError, RecursionError) as error:
            end = unreadable(error)
            outcomes.apply(cursor, dialect, _Unreadable(row), end, now)
            swept.unreadable.append((row.id, row.queue, end.error))
    return claimed, swept


class _Unreadable:
    """A claimed row without its payload, for ending it."""

    def __init__(self, row: Any) -> None:
        self.claim: Claim = (row.id, row.fence)
        self.attempt: int = row.attempts
        self.max_attempts: int = row.max_attempts
        self.backoff_base: float = row.backoff_base
        self.history: str = row.errors


def sweep(queue: str | None = None, *, using: str | None = None) -> int:
    """Put right the lapsed and the expired jobs of `queue` (default: of all queues and outboxes): how many.

    A lapsed job is pending again while attempts are left, else dead; an expired one is dead.
    """
    alias = resolve_alias(using)
    connection = connections[alias]
    dialect = dialect_of(connection)
    if queue is not None:
        queues = [validate_name("queue", queue)]
    else:
        with connection.cursor() as cursor:
            queues = dialect.live_queues(cursor)
    return sum(_sweep_whole_queue(alias, dialect, name) for name in queues)


def _sweep_whole_queue(alias: str, dialect: Dialect, queue: str) -> int:
    changed: set[int] = set()

    def batch(cursor: CursorWrapper) -> Swept:
        swept = Swept()
        sweep_queue(dialect, cursor, queue, clock.now_us(), swept)
        return swept

    while swept := write_transaction(alias, batch):
        swept.announce()
        # A job that lapsed and had expired too is touched twice and counted once.
        changed.update(job_id for job_id, _ in (*swept.reopened, *swept.spent, *swept.expired))
    return len(changed)


def sweep_queue(dialect: Dialect, cursor: CursorWrapper, queue: str, now: int, swept: Swept) -> None:
    """Put right one batch of `queue`'s lapsed and expired jobs, and note them in `swept`. Needs the writer lock."""
    at = from_us(now)
    reopened: list[tuple[str, str, int]] = []
    spent: list[tuple[str, str, int]] = []
    for lapsed in dialect.lapsed(cursor, queue, now, SWEEP_BATCH):
        entry = failures.failure(lapsed.attempts, at, failures.LEASE_EXPIRED)
        change = (failures.append(lapsed.errors, entry), failures.LEASE_EXPIRED, lapsed.id)
        (reopened if lapsed.attempts < lapsed.max_attempts else spent).append(change)
    expired = []
    for job in dialect.expired(cursor, queue, now, SWEEP_BATCH):
        entry = failures.failure(job.attempts, at, failures.EXPIRED)
        expired.append((failures.append(job.errors, entry), failures.EXPIRED, job.id))
    if reopened:
        dialect.reopen(cursor, reopened)
    if spent or expired:
        dialect.close(cursor, now, [*spent, *expired])
    swept.reopened += [(change[-1], queue) for change in reopened]
    swept.spent += [(change[-1], queue) for change in spent]
    swept.expired += [(change[-1], queue) for change in expired]
