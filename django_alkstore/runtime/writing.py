"""The worker's transactions: results, renewals and claims, over one connection that one thread uses at a time.

A crash between the end of a handler and the commit of its result means that the job is delivered again, like a
crash before the end of the handler.
"""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from django.db import DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper

from django_alkstore import clock, signals
from django_alkstore.clock import LAST_US, SECOND
from django_alkstore.dialects import Operations
from django_alkstore.dialects.base import UNTAKEN, ClaimedJob
from django_alkstore.dialects.forks import guard
from django_alkstore.dialects.transactions import busy_timeout, is_contention, limit_wait_on, read_on, write_on
from django_alkstore.runtime.claim_limits import Room, kept, starts_alone
from django_alkstore.runtime.jobs import Plan, Result, Run, is_suspected
from django_alkstore.services import JobHandle, outcomes
from django_alkstore.services.claims import Swept, announce_unreadable, bury_unreadable, handles_of, sweep_batch
from django_alkstore.services.error_backoff import ErrorBackoff
from django_alkstore.services.outcomes import Kind

T = TypeVar("T")

SLICE = 0.1
"""Seconds that one transaction waits for the writer lock. Between two slices the worker has time for other duties."""
BETWEEN_SLICES = 0.025
"""Seconds between two slices."""


@dataclass(slots=True)
class Written:
    """What one transaction has changed."""

    results: list[tuple[Result, bool]] = field(default_factory=list)
    """Each result, and whether it took effect."""
    completed: int = 0
    failed: int = 0
    renewals: list[tuple[Run, int | None]] = field(default_factory=list)
    """The end of each renewed lease in microseconds; None if the lease was lost."""
    claimed: list[JobHandle] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)
    """Queues that had less than was asked for."""
    swept: list[Swept] = field(default_factory=list)
    unreadable: list[tuple[ClaimedJob, Exception]] = field(default_factory=list)
    alone: dict[str, bool] = field(default_factory=dict)
    """By queue: whether its first claimed job had to be claimed alone."""

    @property
    def has_news(self) -> bool:
        """True if there is something to announce."""
        return bool(self.results or self.swept)


class Trouble:
    """Errors of the database, and the pause after each. Shared by the leader and the keeper, with the turn held."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._error_backoff = ErrorBackoff("working", connection.alias, connection)
        self._paused_until = 0.0
        self._contended_since: float | None = None
        """Since when other writers have kept the writer lock from this worker; None if they do not."""

    def pause(self) -> float:
        """Seconds until the next attempt; 0 without trouble."""
        return max(0.0, self._paused_until - clock.monotonic())

    def note(self, error: DatabaseError) -> None:
        """Pause after an error. Contention is logged only after the busy timeout."""
        now = clock.monotonic()
        pause = BETWEEN_SLICES
        alias = self._connection.alias
        if is_contention(alias, error):
            self._contended_since = now if self._contended_since is None else self._contended_since
            if now - self._contended_since >= busy_timeout(alias):
                pause = self._error_backoff.after(error)
        else:
            pause = self._error_backoff.after(error)
        self._paused_until = clock.monotonic() + pause

    def try_at_once(self) -> None:
        """End the pause: the worker is told to stop."""
        self._paused_until = 0.0

    def is_over(self) -> None:
        """An attempt has succeeded."""
        self._contended_since = None
        self._paused_until = 0.0
        self._error_backoff.reset()


class Writer:
    """Writes for the leader and for the keeper. Only the thread that has the turn uses the connection."""

    def __init__(
        self,
        connection: BaseDatabaseWrapper,
        worker_id: str,
        liveness: str | None,
        post: Callable[[Callable[[], None]], object],
    ) -> None:
        """`liveness`: stamped on claims, so that others notice the death of this process.

        `post`: passes a function to the events thread, which calls it.
        """
        self.connection = connection
        self.alias = connection.alias
        self.worker_id = worker_id
        self.liveness = liveness
        self.trouble = Trouble(connection)
        self._post = post
        self._write_failed = False
        """True from the start of a write that failed until one succeeds. Reads may work all the while."""
        self._turn = guard()
        self._one_by_one: set[str] = set()
        """Queues of quick handlers whose next job may have caused a crash, or has its last attempt."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Use the connection, alone. A fork waits for the end. After it, the events thread sends the block's events."""
        kept: list[Callable[[], None]] = []
        try:
            with signals.passed_to(kept.append), self._turn:
                yield
                self.connection.queries_log.clear()
        finally:
            for send in kept:
                self._post(send)

    def write(
        self,
        results: list[Result],
        renewals: list[Run],
        claims: Callable[[Operations, Written], None] | None = None,
    ) -> Written:
        """Write results and renewals, and claim, in one transaction. Needs the turn."""
        with self.writing():
            written = write_on(self.connection, partial(self._write, results, renewals, claims))
        for queue, alone in written.alone.items():
            (self._one_by_one.add if alone else self._one_by_one.discard)(queue)
        return written

    def read(self, body: Callable[[Operations], T]) -> T:
        """Run reading operations. Needs the turn."""
        self.limit_wait()
        found = read_on(self.connection, body)
        if not self._write_failed:
            self.trouble.is_over()
        return found

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around a write: if it fails, the trouble is not over until one succeeds. Needs the turn."""
        self.limit_wait()
        self._write_failed = True
        yield
        self._write_failed = False
        self.trouble.is_over()

    def limit_wait(self) -> None:
        """Let every statement on the connection wait for the writer lock in slices. Opens the connection."""
        limit_wait_on(self.connection, SLICE)

    def is_contention(self, error: DatabaseError) -> bool:
        """True if the error only says that another process was writing."""
        return is_contention(self.alias, error)

    def _write(
        self,
        results: list[Result],
        renewals: list[Run],
        claims: Callable[[Operations, Written], None] | None,
        db: Operations,
    ) -> Written:
        """May run again after contention: it has no effect outside the database."""
        now = clock.now_us()
        written = Written()
        acks = [one.run for one in results if one.outcome.kind is Kind.ACK and one.outcome.result is None]
        acked = outcomes.ack_all(db, [run.job._claim(_held_at(run, now)) for run in acks], now) if acks else set()
        for result in results:
            job, outcome = result.run.job, result.outcome
            if outcome.kind is Kind.ACK and outcome.result is None:
                took_effect = (job.id, job._fence) in acked
                written.completed += took_effect
            elif outcome.kind is Kind.ACK:
                took_effect = outcomes.apply(db, job, outcome, now, _held_at(result.run, now))
                written.completed += took_effect
            else:
                took_effect = outcomes.apply(db, job, outcome, now, _held_at(result.run, now))
                written.failed += took_effect and outcome.kind is not Kind.GIVE_BACK
            written.results.append((result, took_effect))
        for run in renewals:
            # Not earlier than the end that the handler's own heartbeat has set.
            ends = max(min(now + round(run.job._visibility_timeout * SECOND), LAST_US), run.job._lease_expires_us)
            renewed = db.renew(run.job._claim(_held_at(run, now)), ends)
            written.renewals.append((run, ends if renewed else None))
        if claims is not None:
            claims(db, written)
        return written

    def claim(
        self,
        queues: list[str],
        of_coroutines: Container[str],
        mixed: Container[str],
        plan: Plan,
        planned_at: int,
        db: Operations,
        written: Written,
    ) -> None:
        """Claim what free threads and the event loop can start, and batches for quick handlers.

        A queue that has nothing to claim is swept. `of_coroutines`: the queues whose handlers are coroutines; `mixed`:
        those whose jobs may be of either kind.
        `planned_at`: a job that has lapsed since then is not swept. It may be this worker's own, if the process was
        suspended, and is renewed first.
        """
        room = Room(plan, of_coroutines, mixed, self._one_by_one)
        for queue in queues:
            limit = room.limit(queue)
            if limit <= 0:
                continue
            rows = db.claim(queue, self.worker_id, limit, clock.now_us(), self.liveness)
            if len(rows) < limit:
                swept = None if rows else sweep_batch(queue, planned_at, db)
                if swept:
                    written.swept.append(swept)
                else:
                    written.emptied.append(queue)
            if not rows:
                continue
            claimed, unreadable = handles_of(self.alias, rows)
            if queue in plan.batches and claimed:
                written.alone[queue] = starts_alone(claimed[0])
                claimed = kept(claimed, db, starts_alone)
            elif claimed:
                claimed = kept(claimed, db, is_suspected)
            written.claimed += claimed
            written.unreadable += unreadable
            room.take(queue, len(claimed))

    def bury_unreadable(self, rows: list[tuple[ClaimedJob, Exception]]) -> None:
        """Make claimed jobs dead that cannot be read. Needs the turn."""
        for row, error in rows:
            if write_on(self.connection, partial(bury_unreadable, row, error)):
                announce_unreadable(row, error)


def _held_at(run: Run, now: int) -> int:
    """The moment at which the lease of a run must not have run out.

    There is none while the worker lives. The lease may have run out while another held the writer lock, when nobody
    could renew it, nor take it: then the fence alone decides. A lease that is known to be lost stays lost. So does
    one that was refused to the handler: its transaction was rolled back, and the job must not count as done.
    """
    return now if run.lost or run.job._refused else UNTAKEN
