"""Every operation that the library needs from a database, and what each means.

Rules for all of them:

- `now` and every other moment is microseconds since the epoch; nothing here reads a clock.
- An operation on a `Claim` takes effect only while that claim's lease is held (state processing, same fence, lease not
  run out at the claim's moment), and returns whether it did.
- No operation opens or ends a transaction. `transactions.py` does that.
- An operation marked *one statement* is atomic by itself and may run in autocommit. The others need the writer lock.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from django.db import OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper

from django_alkstore.clock import FIRST_US
from django_alkstore.dialects.cursors import Cursor


class DatabaseReplaced(OperationalError):
    """The database file was replaced or deleted: no other process sees what this one writes to the old file."""


class Change(Protocol):
    """Sees the commits of others, over a connection of its own."""

    def version(self) -> object:
        """A value that differs from the last one if anything has been committed since. `DatabaseReplaced`.

        Any thread may ask.
        """

    def renew(self) -> None:
        """Close the connection; the next call of `version` opens another. The version after that differs from before.

        A connection keeps files open that somebody may have repaired since.
        """

    def watched_file(self) -> str | None:
        """The file whose writes announce a commit, or `None` if there is none."""

    def close(self) -> None: ...


class NewJob(NamedTuple):
    """A pending job about to be stored; moments in microseconds, durations in seconds."""

    queue: str
    payload: str
    """JSON text."""
    priority: int
    run_at: int
    max_attempts: int
    visibility_timeout: float
    backoff_base: float
    expires_at: int | None
    unique_key: str | None
    schedule: str | None
    fire_at: int | None
    created_at: int
    task: str = ""
    """The dotted path of a task; empty for a handler's job."""


class ClaimedJob(NamedTuple):
    """A row just leased, as stored."""

    id: int
    fence: int
    queue: str
    payload: bytes
    """Not known to be JSON, nor even text."""
    attempts: int
    max_attempts: int
    priority: int
    created_at: int
    run_at: int
    lease_expires_at: int
    last_error: bytes | None
    schedule: bytes | None
    fire_at: int | None
    visibility_timeout: float
    backoff_base: float
    errors: bytes
    lock_errors: int
    task: bytes
    worker_ids: bytes
    started_at: int
    last_attempted_at: int


class LapsedJob(NamedTuple):
    """A processing job whose lease has run out."""

    id: int
    fence: int
    attempts: int
    max_attempts: int
    errors: bytes


class AbandonedJob(NamedTuple):
    """A processing job whose worker is dead."""

    id: int
    fence: int
    queue: str
    attempts: int
    max_attempts: int
    run_at: int
    backoff_base: float
    errors: bytes
    last_error: bytes | None


class EndedJob(NamedTuple):
    """A pending job whose `expires_at` has passed, or a running one that is cancelled."""

    id: int
    fence: int
    attempts: int
    errors: bytes


class SweptJob(NamedTuple):
    """What a sweep writes on a job that it has read; the fence is the one that it read."""

    errors: str
    last_error: str
    id: int
    fence: int


class StoredSchedule(NamedTuple):
    """A schedule as stored. Nothing about it is known to be readable, so its texts are bytes."""

    id: int
    name: bytes
    spec: bytes
    queue: bytes
    payload: bytes
    priority: int
    max_attempts: int | None
    visibility_timeout: float | None
    backoff_base: float | None
    expires_in: float | None
    next_fire_at: int
    timezone: bytes | None
    task: bytes
    ends_at: int | None
    catch_up: bytes | None
    grace: float | None
    overlap: bytes
    jitter: float


class BoundaryCounts(NamedTuple):
    """What became of the boundaries that a schedule has passed."""

    fired: int = 0
    coalesced: int = 0
    too_late: int = 0
    overlapped: int = 0


class QueueCounts(NamedTuple):
    """One queue's jobs, counted; `oldest_due` is the earliest `run_at` of a due one."""

    queue: str
    pending: int
    processing: int
    completed: int
    dead: int
    cancelled: int
    due: int
    oldest_due: int | None


Claim = tuple[int, int, int]
"""A job's id, the fence of the claim, and the moment at which its lease must not have run out."""

UNTAKEN = FIRST_US
"""Pass as the moment of a claim to skip the expiry check: the fence alone decides."""


class Operations(ABC):
    """What the library does to its rows, over one cursor."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor

    # Jobs in

    @abstractmethod
    def insert_job(self, job: NewJob) -> int | None:
        """Store a job and return its id; `None` if its live unique key or its boundary is taken. *One statement.*"""

    @abstractmethod
    def insert_jobs(self, jobs: Sequence[tuple[Any, ...]]) -> list[int]:
        """Store jobs (the values of `NewJob`s) without unique keys and return their ids, in order."""

    @abstractmethod
    def live_job(self, queue: str, unique_key: str) -> int | None:
        """The id of the live job of the queue with this unique key."""

    # Jobs out

    @abstractmethod
    def claim(self, queue: str, worker_id: str, limit: int, now: int, liveness: str | None = None) -> list[ClaimedJob]:
        """Lease up to `limit` due jobs of the highest priority that has any; return them by `run_at`, id.

        `liveness`: the liveness file in which the worker holds its byte.

        Leases nothing while the queue holds a lapsed lease or an expired job. Those are swept first, so that they
        take their place in the order. *One statement.*
        """

    @abstractmethod
    def ack(self, claims: Sequence[Claim], now: int, *, delete: bool) -> set[tuple[int, int]]:
        """Complete the jobs of these claims (or delete them); return those that took effect, by id and fence.

        Two of them may be claims of one job. *One statement.*
        """

    @abstractmethod
    def complete(self, claim: Claim, now: int, result: str) -> bool:
        """Complete the job of a task and store what it returned, as JSON. *One statement.*"""

    @abstractmethod
    def retry(self, claim: Claim, run_at: int, errors: str, last_error: str) -> bool:
        """Make the job pending again at `run_at`, with its history and no lock errors. *One statement.*"""

    @abstractmethod
    def bury(self, claim: Claim, now: int, errors: str, last_error: str) -> bool:
        """Make the job dead, with its history. *One statement.*"""

    @abstractmethod
    def give_back(self, claim: Claim, run_at: int | None, lock_errors: int | None = None) -> bool:
        """Make the job pending again, its attempt refunded, at `run_at` and with so many lock errors in a row.

        `None`: as it was. *One statement.*
        """

    @abstractmethod
    def renew(self, claim: Claim, lease_expires_at: int) -> bool:
        """Let the claim's lease end at `lease_expires_at`. *One statement.*"""

    @abstractmethod
    def held(self, claims: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
        """Those of the claims (id and fence each) that still hold their job, also if the lease ran out."""

    # Jobs swept, cancelled, requeued and pruned

    @abstractmethod
    def lapsed(self, queue: str, now: int, limit: int) -> list[LapsedJob]:
        """Up to `limit` jobs of the queue whose lease has run out, the longest first."""

    @abstractmethod
    def claiming_workers(self, liveness: str) -> list[str]:
        """The worker ids of the processing jobs that were claimed under this liveness file."""

    @abstractmethod
    def abandoned(self, worker_id: str, liveness: str, limit: int) -> list[AbandonedJob]:
        """Up to `limit` processing jobs that this worker claimed under this liveness file."""

    @abstractmethod
    def expired(self, queue: str, now: int, limit: int) -> list[EndedJob]:
        """Up to `limit` pending jobs of the queue that have expired, the longest first."""

    @abstractmethod
    def reopen(self, now: int, jobs: Iterable[SweptJob]) -> list[int]:
        """Make jobs pending, due as before, with no lock errors, if their lease had run out at `now`; return the ids
        that took effect.

        A job that was acked, renewed, claimed or cancelled since it was read is left as it is.
        """

    @abstractmethod
    def close(self, now: int, jobs: Iterable[SweptJob]) -> list[int]:
        """Make jobs dead if their lease had run out, or they had expired, at `now`; return the ids that took effect.

        A job that was acked, renewed, claimed, cancelled or rescheduled since it was read is left as it is.
        """

    @abstractmethod
    def cancel_pending(self, job_id: int, now: int) -> bool:
        """Cancel a pending job. *One statement.*"""

    @abstractmethod
    def running(self, job_id: int) -> EndedJob | None:
        """A processing job."""

    @abstractmethod
    def cancel_running(self, now: int, job: SweptJob) -> bool:
        """Cancel a processing job whose fence is still the one that was read. *One statement.*"""

    @abstractmethod
    def requeue(self, job_id: int, now: int) -> bool:
        """Make a dead or cancelled job pending, due at `now`, with no attempts spent, no lock errors and no expiry,
        unless its unique key is taken. *One statement.*"""

    @abstractmethod
    def run_now(self, job_id: int, now: int) -> bool:
        """Make a pending job that is not due yet due at `now`. *One statement.*"""

    @abstractmethod
    def reschedule(self, job_id: int, run_at: int, now: int) -> bool:
        """Make a pending job that has not expired at `now` due at `run_at`; its expiry keeps its distance from
        `run_at`. *One statement.*"""

    @abstractmethod
    def prune(self, state: str, before: int, limit: int) -> int:
        """Delete up to `limit` jobs of a finished state that finished at `before` or earlier. *One statement.*"""

    # Reading

    @abstractmethod
    def live_queues(self) -> list[str]:
        """The queues that hold a live job, at a cost that follows their number and not the jobs'."""

    @abstractmethod
    def live_tasks(self) -> list[tuple[str, str]]:
        """Each queue that holds live jobs of tasks, with each of their tasks, at a cost that follows their number."""

    @abstractmethod
    def next_claims(self, queues: Sequence[str]) -> dict[str, int | None]:
        """For each queue the earliest `run_at` of a pending job or lease end of a processing one."""

    @abstractmethod
    def count_queues(self, now: int) -> list[QueueCounts]:
        """Every queue that holds a job, by name."""

    # Locks

    @abstractmethod
    def acquire_lock(
        self, name: str, owner: str, now: int, expires_at: int, token: int, liveness: str | None = None
    ) -> int | None:
        """Take a lock that is free or has lapsed; `None` if it is held.

        Returns its token: `token`, or more where the database has given out one as great.
        """

    @abstractmethod
    def renew_lock(self, name: str, token: int, owner: str, expires_at: int) -> bool:
        """Let the lock of this token and owner end at `expires_at`, though it may have lapsed. *One statement.*"""

    # Schedules

    @abstractmethod
    def due_schedules(self, now: int, limit: int) -> list[StoredSchedule]:
        """Up to `limit` enabled schedules whose next boundary has come, the earliest first."""

    @abstractmethod
    def next_boundary(self) -> int | None:
        """The earliest next boundary of an enabled schedule."""

    @abstractmethod
    def move_schedule(
        self,
        schedule_id: int,
        boundary: int,
        now: int,
        next_fire_at: int | None,
        last_fire_at: int | None,
        counts: BoundaryCounts,
    ) -> bool:
        """Set the schedule's next boundary and the last that it fired (None: as it was), and count what became of those
        that it has passed. Takes effect only while `boundary` is the next.

        So a schedule that was declared anew, or moved, since it was read is left as it is. *One statement.*
        """

    @abstractmethod
    def has_live_fire(self, schedule: str) -> bool:
        """True if a job of one of the schedule's boundaries is live."""

    @abstractmethod
    def pause_broken(self, schedule_id: int, boundary: int, now: int, error: str) -> bool:
        """Pause a schedule that cannot be read, with the reason on its row. Takes effect only while `boundary` is the
        next. *One statement.*"""


class Dialect(ABC):
    """What one database does its own way."""

    @abstractmethod
    def operations(self, cursor: Cursor) -> Operations:
        """The operations, over this cursor."""

    @abstractmethod
    def open_cursor(self, connection: BaseDatabaseWrapper) -> Cursor:
        """A cursor for the operations: Django's, or one that behaves in the same way."""

    @abstractmethod
    def take_writer_lock(self, connection: BaseDatabaseWrapper, cursor: Cursor, *, fresh: bool) -> None:
        """Take the lock of the only writer until the transaction ends. `fresh`: the transaction has just begun."""

    @abstractmethod
    def begin(self, connection: BaseDatabaseWrapper, cursor: Cursor) -> AbstractContextManager[object]:
        """A transaction that has the lock of the only writer from its start. None is open yet."""

    @abstractmethod
    def is_contention(self, error: OperationalError) -> bool:
        """True if the error only says that another process or thread was writing: by its code, never by its text."""

    @abstractmethod
    def busy_timeout(self, connection: BaseDatabaseWrapper) -> float:
        """Seconds that the database itself waits for another writer."""

    @abstractmethod
    def limit_wait(self, connection: BaseDatabaseWrapper, seconds: float) -> None:
        """Let the database itself wait no longer than this for another writer, on this open connection."""

    @abstractmethod
    def is_at_rest(self, connection: BaseDatabaseWrapper) -> bool:
        """True if every statement has ended. One that was left halfway would keep an old snapshot."""

    @abstractmethod
    def cut_off(self, connection: BaseDatabaseWrapper) -> None:
        """Roll back the transaction of another thread's connection, and refuse every later write on that connection.

        For a thread that has the writer lock and cannot be ended. Waits until the thread's current statement has ended.
        The connection cannot be used afterwards.
        """

    @abstractmethod
    def change(self, using: str) -> Change:
        """Open a connection that sees the commits of others."""

    @abstractmethod
    def write_obstacle(self, connection: BaseDatabaseWrapper) -> str | None:
        """Say what keeps this process from writing, by file and owner; None if nothing of that kind is known."""
