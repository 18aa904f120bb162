"""What a page needs to know about the workers of its database, read with two statements at most."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db.models import BinaryField
from django.db.models.functions import Cast
from django.http import HttpRequest

from django_alkstore import clock
from django_alkstore.admin.readable import decoded
from django_alkstore.admin.show import age
from django_alkstore.models import Job, State
from django_alkstore.names import describe_queue, queue_of_sign

if TYPE_CHECKING:
    from django_alkstore.dialects.liveness import LivenessView

MAX_RUNNING = 5_000
"""Leased jobs that are read. More of them are possible only if a program claims by hand."""
_LONGEST = 1e9
"""Seconds of a visibility timeout, past which a moment cannot be computed."""


class RunningJob(NamedTuple):
    """A job whose lease has not run out."""

    id: int
    queue: str
    worker_id: str
    since: datetime | None

    @property
    def described_queue(self) -> str:
        return describe_queue(self.queue)

    @property
    def running_for(self) -> str:
        return "" if self.since is None else age((clock.now() - self.since).total_seconds())


class _Sign(NamedTuple):
    """A sign of life of a worker that is not dead, for one of its queues."""

    worker_id: str
    queue: str
    is_fresh: bool
    """False if the worker is suspended: its process lives, but the sign is old."""


class _Lease(NamedTuple):
    """A lease that has not run out."""

    job: RunningJob
    is_fresh: bool
    """True if it was written lately."""
    is_orphaned: bool
    """True if the process that holds it is known to be dead."""


class Workers:
    """The workers of one database, as they are when a page is made. Nothing is read before it is asked for."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.now = clock.now()

    @cached_property
    def registered(self) -> set[str]:
        """The queues for which an installed app has a handler, or which are queues of tasks."""
        from django_alkstore.handled import handled

        return {registration.queue for registration in handled(self.alias)}

    @cached_property
    def served(self) -> set[str]:
        """The queues for which a worker is alive, or for which somebody has just claimed a job."""
        fresh = {lease.job.queue for lease in self._leases if lease.is_fresh and not lease.is_orphaned}
        return fresh | {sign.queue for sign in self._signs if sign.is_fresh}

    @cached_property
    def suspended(self) -> set[str]:
        """The queues that have workers, of which none has given a sign of life lately though their processes live."""
        return {sign.queue for sign in self._signs} - self.served

    @cached_property
    def orphaned(self) -> set[int]:
        """The ids of the jobs whose worker is known to be dead, though their lease has not run out."""
        return {lease.job.id for lease in self._leases if lease.is_orphaned}

    def busy_with(self, queue: str) -> list[RunningJob]:
        """What the workers that serve `queue` are running, the job that has run longest first."""
        serving = {sign.worker_id for sign in self._signs if sign.queue == queue}
        running = [lease.job for lease in self._leases if lease.job.worker_id in serving and not lease.is_orphaned]
        return sorted(running, key=lambda job: (job.since or self.now, job.id))

    @property
    def _signs(self) -> list[_Sign]:
        return self._read[0]

    @property
    def _leases(self) -> list[_Lease]:
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[list[_Sign], list[_Lease]]:
        from django_alkstore.dialects.liveness import LivenessView

        with LivenessView(self.alias) as processes:
            return list(self._read_signs(processes)), list(self._read_leases(processes))

    def _read_signs(self, processes: LivenessView) -> Iterator[_Sign]:
        """The signs of the workers that are not dead. The states are those of `services.presence`."""
        from django_alkstore.services.presence import signs

        rows = signs(self.alias).values_list(*_as_bytes("owner", "name", "liveness"), "expires_at")
        for owner, name, file, ends in rows:
            worker_id, queue, is_fresh = _text(owner), queue_of_sign(_text(name)), ends > self.now
            lives = processes.knows(worker_id, _text(file) or None)
            if queue is not None and (lives or (lives is None and is_fresh)):
                yield _Sign(worker_id, queue, is_fresh)

    def _read_leases(self, processes: LivenessView) -> Iterator[_Lease]:
        from django_alkstore.services.presence import TTL

        leased = Job.objects.using(self.alias).filter(state=State.PROCESSING, lease_expires_at__gt=self.now)
        texts = _as_bytes("queue", "worker_id", "liveness")
        others = ("last_attempted_at", "lease_expires_at", "visibility_timeout")
        recently = self.now - timedelta(seconds=TTL)
        for pk, queue, worker_id, file, since, ends, timeout in leased.values_list("pk", *texts, *others)[:MAX_RUNNING]:
            job = RunningJob(pk, _text(queue), _text(worker_id), since)
            # When the lease was written, if the visibility timeout was what it was written for.
            written = ends - timedelta(seconds=min(timeout, _LONGEST))
            yield _Lease(job, written > recently, processes.is_dead(job.worker_id, _text(file) or None))


def workers_for(request: HttpRequest) -> Workers:
    """The workers of the admin's database, read once for each request."""
    from django_alkstore.dialects.transactions import resolve_alias

    workers: Workers | None = getattr(request, "_alkstore_workers", None)
    if workers is None:
        workers = Workers(resolve_alias(None))
        request._alkstore_workers = workers  # type: ignore[attr-defined]
    return workers


def attach(row: Any, workers: Workers) -> None:
    """Let the columns of this row use `workers`, so that a list does not read them for each row."""
    row._alkstore_workers = workers


def workers_of(row: Any) -> Workers:
    """The workers that were attached to this row, or those of its database."""
    workers: Workers | None = getattr(row, "_alkstore_workers", None)
    return Workers(row._state.db) if workers is None else workers


def _text(stored: bytes | None) -> str:
    return decoded(stored) or ""


def _as_bytes(*columns: str) -> list[Cast]:
    return [Cast(column, BinaryField()) for column in columns]
