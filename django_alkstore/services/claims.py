"""Claiming, and putting right what keeps a job from being claimed: lapsed leases and expired jobs.

The claim takes nothing while its queue holds something to sweep, so that a lapsed job takes its place in the
order before others are handed out, and a sweep of thousands holds the writer lock for one small batch at a time.
"""

from functools import partial

from django.db import OperationalError

from django_alkstore import clock, failures, signals
from django_alkstore.clock import from_us
from django_alkstore.conf import positive_int
from django_alkstore.dialects import Operations
from django_alkstore.dialects.base import ClaimedJob, SweptJob
from django_alkstore.dialects.transactions import (
    after_commit,
    refuse_open,
    resolve_alias,
    write_operations,
    write_statement,
)
from django_alkstore.names import validate_name
from django_alkstore.services.handles import JobHandle
from django_alkstore.services.options import check_text

SWEEP_BATCH = 200
"""Jobs put right in one transaction."""
STALE = 0.05
"""Seconds in line after which a claim's leases are renewed, since they began to count before the wait."""


class Swept:
    """The ids of one queue's jobs that a sweep has changed."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.reopened: list[int] = []
        self.spent: list[int] = []
        self.expired: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.ids)

    @property
    def ids(self) -> list[int]:
        return self.reopened + self.spent + self.expired

    def announce(self) -> None:
        """Announce what has changed, once it is committed."""
        for job_id in self.reopened:
            signals.emit(signals.job_lapsed, job_id=job_id, queue=self.queue, dead=False)
        for job_id in self.spent:
            signals.emit(signals.job_lapsed, job_id=job_id, queue=self.queue, dead=True)
        for job_id in self.expired:
            signals.emit(signals.job_expired, job_id=job_id, queue=self.queue)


def claim_batch(queue: str, worker_id: str, limit: int = 1, *, using: str | None = None) -> list[JobHandle]:
    """Lease up to `limit` due jobs of `queue` to `worker_id`, by priority (high first), `run_at` and id.

    Returns an empty list if nothing is due. Raises `RuntimeError` inside an open transaction, since no other process
    would see the lease; `InvalidName` or `InvalidOption` for bad arguments.
    """
    validate_name("queue", queue)
    return claim_from(resolve_alias(using), queue, worker_id, limit, "claim_batch")


def claim_from(alias: str, queue: str, worker_id: str, limit: int, what: str) -> list[JobHandle]:
    """As `claim_batch`, for any queue; `what` is its name in the error."""
    check_text("worker_id", worker_id)
    positive_int("limit", limit)
    refuse_open(alias, what)
    claimed, now = claim_due(alias, queue, worker_id, limit), clock.monotonic()
    for job in claimed:
        job._claimed_at = now  # no worker announces how it ends, so the handle does
    return claimed


def claim_due(alias: str, queue: str, worker_id: str, limit: int) -> list[JobHandle]:
    """Sweep and claim, also inside an open transaction. The arguments have been checked."""
    while True:
        started = clock.waiting_from()
        rows = _claim_rows(alias, queue, worker_id, limit)
        claimed, broken = handles_of(alias, rows)
        if broken:
            _bury(alias, broken)
        if claimed and clock.waited_since(started) >= STALE:
            claimed = _renewed(claimed)
        if claimed:
            return claimed
        # What was claimed, and could not be kept, is due again as well.
        if not rows and not sweep_once(alias, queue):
            return []


def _claim_rows(alias: str, queue: str, worker_id: str, limit: int) -> list[ClaimedJob]:
    """Claim statement by statement, priority by priority, each committed by itself."""
    rows: list[ClaimedJob] = []
    while (left := limit - len(rows)) > 0:
        try:
            more = write_statement(alias, partial(_claim, queue, worker_id, left))
        except OperationalError:
            if not rows:
                raise
            break  # return what is leased already: nobody else could run it before the lease ends
        if not more:
            break
        rows += more
    return rows


def _claim(queue: str, worker_id: str, limit: int, db: Operations) -> list[ClaimedJob]:
    return db.claim(queue, worker_id, limit, clock.now_us())


def _renewed(claimed: list[JobHandle]) -> list[JobHandle]:
    """Let the leases begin now. They began before the claim waited for the writer lock."""
    try:
        return [job for job in claimed if job.heartbeat()]
    except OperationalError:
        return claimed  # with shorter leases: nobody else could run the jobs before these end


def _bury(alias: str, broken: list[tuple[ClaimedJob, Exception]]) -> None:
    for row, error in broken:
        try:
            is_dead = write_statement(alias, partial(bury_unreadable, row, error))
        except OperationalError as failure:
            # The other claimed jobs must not be lost. This one comes back when its lease lapses.
            signals.emit(signals.database_trouble, doing=f"burying job {row.id}", error=failure, pause=0.0)
        else:
            if is_dead:
                after_commit(alias, partial(announce_unreadable, row, error))


def handles_of(alias: str, rows: list[ClaimedJob]) -> tuple[list[JobHandle], list[tuple[ClaimedJob, Exception]]]:
    """Handles on rows that were just claimed; and the rows that cannot be read, with the reasons."""
    handles: list[JobHandle] = []
    broken: list[tuple[ClaimedJob, Exception]] = []
    for row in rows:
        try:
            handles.append(JobHandle(alias, row))
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            broken.append((row, error))
    return handles, broken


def bury_unreadable(row: ClaimedJob, error: Exception, db: Operations) -> bool:
    """Make a claimed job dead because it cannot be read: no attempt can help. False if its lease was lost.

    May run again after contention. Call `announce_unreadable` once it is committed.
    """
    now = clock.now_us()
    described = failures.describe(error)._replace(error=failures.describe(_reason(error)).error, traceback="")
    entry = failures.failure(row.attempts, from_us(now), described)
    return db.bury((row.id, row.fence, now), now, failures.append(row.errors, entry), entry["error"])


def announce_unreadable(row: ClaimedJob, error: Exception) -> None:
    """Announce that `bury_unreadable` has made the job dead."""
    signals.emit(signals.job_unreadable, job_id=row.id, queue=row.queue, attempt=row.attempts, reason=_reason(error))


def _reason(error: Exception) -> str:
    return f"unreadable payload: {error}"


def sweep(queue: str | None = None, *, using: str | None = None) -> int:
    """Put right the lapsed and the expired jobs of `queue` (default: of all queues and outboxes). Returns how many.

    A lapsed job is pending again while attempts are left, else dead; an expired one is dead.
    """
    alias = resolve_alias(using)
    if queue is not None:
        return sweep_whole_queue(alias, validate_name("queue", queue))
    # Read with the writer lock held: a transaction of the caller that has read first may be refused its first write.
    queues = write_operations(alias, lambda db: db.live_queues())
    return sum(sweep_whole_queue(alias, name) for name in queues)


def sweep_whole_queue(alias: str, queue: str) -> int:
    """Sweep all lapsed and expired jobs of a queue or an outbox. Returns how many."""
    changed: set[int] = set()
    while ids := sweep_once(alias, queue):
        changed.update(ids)  # a job that has lapsed and expired is changed twice, and counts once
    return len(changed)


def sweep_once(alias: str, queue: str, as_of: int | None = None) -> list[int]:
    """Sweep one batch of a queue: the ids of the jobs that were changed.

    `as_of`: the moment (microseconds; default: now) at which a job must have lapsed or expired.
    """
    swept = write_operations(alias, partial(sweep_batch, queue, as_of))
    after_commit(alias, swept.announce)
    return swept.ids


def sweep_batch(queue: str, as_of: int | None, db: Operations) -> Swept:
    """Put right one batch of jobs that had lapsed or expired by the moment `as_of`. Needs the writer lock."""
    now = clock.now_us() if as_of is None else as_of
    at = from_us(now)
    swept = Swept(queue)
    reopened: list[SweptJob] = []
    spent: list[SweptJob] = []
    expiring: list[SweptJob] = []
    for lapsed in db.lapsed(queue, now, SWEEP_BATCH):
        entry = failures.failure(lapsed.attempts, at, failures.describe_reason(failures.LEASE_EXPIRED))
        errors = failures.append(lapsed.errors, entry)
        job = SweptJob(errors, failures.LEASE_EXPIRED, lapsed.id, lapsed.fence)
        (reopened if lapsed.attempts < lapsed.max_attempts else spent).append(job)
    for expired in db.expired(queue, now, SWEEP_BATCH):
        entry = failures.failure(expired.attempts, at, failures.describe_reason(failures.EXPIRED))
        errors = failures.append(expired.errors, entry)
        expiring.append(SweptJob(errors, failures.EXPIRED, expired.id, expired.fence))
    swept.reopened = db.reopen(now, reopened)
    swept.spent = db.close(now, spent)
    swept.expired = db.close(now, expiring)
    return swept
