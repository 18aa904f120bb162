"""Jobs of dead workers: found soon after the death, and made claimable again.

Leases decide. This only shortens the wait for a lease whose worker is known to be dead.
"""

from collections import deque
from functools import partial
from typing import NamedTuple

from django_alkstore import backoff, clock, failures, signals
from django_alkstore.clock import LAST_US, SECOND, from_us
from django_alkstore.dialects import Operations
from django_alkstore.dialects.base import UNTAKEN, AbandonedJob
from django_alkstore.dialects.liveness import Liveness
from django_alkstore.dialects.transactions import after_commit, read, write_operations
from django_alkstore.services.outcomes import curve_wait

BATCH = 200
"""Jobs recovered in one transaction."""
LOOKS_AFTER_EVENT = (0.0, 0.01, 0.1, 1.0)
"""Seconds. The kernel may tell of a closed file a moment before it frees the lock."""
LOOK_EVERY = 60.0
LOOK_EVERY_UNTOLD = 1.0
"""Seconds between looks without inotify."""


class Recovered(NamedTuple):
    """One job that was taken from a dead worker."""

    job_id: int
    queue: str
    dead: bool
    """True if no attempt was left."""


class Recovery:
    """When a running worker or scheduler looks for dead workers, and what it does with their jobs.

    Its times are real ones, under a `ManualClock` too: processes die in real time.
    """

    def __init__(self, alias: str, liveness: Liveness) -> None:
        self.alias = alias
        self._liveness = liveness
        self._looks = deque([clock.waiting_from()])
        """The moments of the next looks, the earliest first. Never empty."""

    def due_in(self) -> float:
        """Seconds until the next look; 0 if it is due. Endless if leases decide alone."""
        if self._liveness.file is None:
            return float("inf")
        return max(0.0, self._looks[0] - clock.waiting_from())

    def note_event(self) -> None:
        """Look at once and a few times more: the kernel has told that a process closed the file."""
        now = clock.waiting_from()
        self._looks = deque(now + after for after in LOOKS_AFTER_EVENT)

    def step(self) -> int:
        """Look, if it is time, and recover one batch of jobs in a short transaction: how many.

        The next step is due at once while there may be more.
        """
        if self.due_in() > 0:
            return 0
        now = clock.waiting_from()
        recovered = recover_batch(self.alias, self._liveness)
        if recovered:
            return recovered
        while self._looks and self._looks[0] <= now:
            self._looks.popleft()
        if not self._looks:
            self._looks.append(now + (LOOK_EVERY_UNTOLD if self._liveness.fileno() is None else LOOK_EVERY))
        return 0


def recover_batch(alias: str, liveness: Liveness) -> int:
    """Recover one batch of jobs of one worker that is known to be dead. Returns how many; 0 if there are none."""
    file = liveness.file
    if file is None:
        return 0
    for worker_id in read(alias, lambda db: db.claiming_workers(file)):
        if liveness.is_dead(worker_id, file):
            # A worker's id is never used again, so that a dead worker stays dead.
            batch = write_operations(alias, partial(_recover_from, worker_id, file))
            if batch:
                after_commit(alias, partial(_announce, worker_id, batch))
                return len(batch)
    return 0


def _recover_from(worker_id: str, file: str, db: Operations) -> list[Recovered]:
    """The jobs that were changed. None is, for example, if a lease ends before every moment: it is left to a sweep."""
    now = clock.now_us()
    recovered = [_recover_job(db, job, now) for job in db.abandoned(worker_id, file, BATCH)]
    return [job for job in recovered if job is not None]


def _recover_job(db: Operations, job: AbandonedJob, now: int) -> Recovered | None:
    """End the attempt, which counts. None if the claim no longer holds."""
    entry = failures.failure(job.attempts, from_us(now), failures.describe_reason(failures.WORKER_DIED))
    errors = failures.append(job.errors, entry)
    claim = (job.id, job.fence, UNTAKEN)
    dead = job.attempts >= job.max_attempts
    if dead:
        took_effect = db.bury(claim, now, errors, failures.WORKER_DIED)
    else:
        took_effect = db.retry(claim, _next_run_at(job, now), errors, failures.WORKER_DIED)
    return Recovered(job.id, job.queue, dead) if took_effect else None


def _next_run_at(job: AbandonedJob, now: int) -> int:
    """Due as before; after a second death in a row, by the backoff curve: the job may be what kills its workers."""
    if job.last_error != failures.WORKER_DIED.encode():
        return job.run_at
    wait = curve_wait(job.backoff_base, job.attempts, backoff.rng.random())
    return min(now + round(wait * SECOND), LAST_US)


def _announce(worker_id: str, batch: list[Recovered]) -> None:
    for job in batch:
        signals.emit(signals.job_abandoned, job_id=job.job_id, queue=job.queue, worker_id=worker_id, dead=job.dead)
