"""A worker's rounds: what it knows of the jobs that it holds, and what it writes about them.

Each round is one transaction, if there is anything to write: it finishes what has ended, renews the leases that
need it and claims what the free threads can start. With many short jobs a round finishes and claims many at once;
a lone job is claimed and finished at once, waiting for nobody. A crash between a handler's end and the commit of
its round means a redelivery, as a crash before the handler's end does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from django.db import DatabaseError, connections

from django_alkstore import clock, failures, signals
from django_alkstore.clock import LAST_US, SECOND
from django_alkstore.dialects import Operations
from django_alkstore.dialects.base import UNTAKEN, ClaimedJob
from django_alkstore.dialects.transactions import (
    busy_timeout,
    is_contention,
    limit_wait,
    write_operations,
    write_statement,
)
from django_alkstore.registry import Registration
from django_alkstore.runtime.lines import gathered
from django_alkstore.runtime.perform import Ending, announce_failure
from django_alkstore.runtime.prospects import Prospects
from django_alkstore.runtime.threads import Run, Threads
from django_alkstore.services import JobHandle, outcomes
from django_alkstore.services.claims import Swept, bury_unreadable, handles_of, sweep_batch
from django_alkstore.services.maintenance import Upkeep
from django_alkstore.services.outcomes import RELEASE, Kind, Outcome
from django_alkstore.services.patience import Patience

LONGEST_PREFETCH = 1.0
"""Seconds that a claimed job may wait for a free thread before it is given back."""
QUICK = 0.1
"""Seconds. Only while handlers take less than this on average is anything claimed ahead."""
INSTANT = 0.002
"""Seconds. Handlers that take less on average have one thread called after the other, this far apart."""
RENEWALS_PER_LEASE = 3
LONGEST_WAIT = 0.1
"""Seconds that a round waits in line for the writer lock, before signals and time limits are looked after again."""
IN_LINE = 0.025
"""Seconds until the next try of a round that did not get the writer lock."""
LONGEST_SLEEP = 60.0


@dataclass(slots=True)
class Work:
    """What one round is to write."""

    planned_at: int
    """Microseconds. What had not lapsed by then is not swept: a process that is frozen after its plan, in which its own
    leases are renewed, would sweep its own jobs when it goes on."""
    began_at: float
    """Monotonic, and no later than any lease that it writes begins to count: a process that is frozen on the way to its
    commit, or right after it, has leases to renew when it goes on, before it sweeps."""
    acks: list[Run] = field(default_factory=list)
    endings: list[tuple[Run, Outcome]] = field(default_factory=list)
    renewals: list[Run] = field(default_factory=list)
    queues: list[str] = field(default_factory=list)
    """Those to claim from."""
    wanted: int = 0
    """How many to claim from them."""

    def __bool__(self) -> bool:
        return bool(self.acks or self.endings or self.renewals or self.queues)


@dataclass(slots=True)
class Written:
    """What one round has written, for once it is committed."""

    acked: set[int] = field(default_factory=set)
    endings: list[bool] = field(default_factory=list)
    renewals: list[int | None] = field(default_factory=list)
    """Where each lease ends now; `None`: it was lost."""
    claimed: list[JobHandle] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    """Queues that had less than was asked for: when they have more is to be looked up."""
    broken: list[tuple[ClaimedJob, Exception]] = field(default_factory=list)
    """Claimed, and not to be read."""
    swept: list[Swept] = field(default_factory=list)


class Rounds:
    """The jobs in a worker's hands. Used by one thread at a time."""

    def __init__(
        self,
        alias: str,
        registrations: Mapping[str, Registration],
        worker_id: str,
        threads: Threads,
        version: Callable[[], object],
    ) -> None:
        """`version`: the database's, which is another once anybody has committed."""
        self.alias = alias
        self.registrations = registrations
        self.worker_id = worker_id
        self.runs: dict[Run, None] = {}
        """Claimed and not ended: those that wait for a thread, and those that have one."""
        self.stuck: set[Run] = set()
        """Past their time limit: the attempt has been failed, the thread is still held."""
        self.unwritten: list[tuple[Run, Outcome]] = []
        """Ended, and not on the row yet."""
        self.stopping = False
        """Set it, and nothing more is claimed."""
        self.completed = 0
        self.failed = 0
        self._threads = threads
        self.prospects = Prospects(alias, registrations, version)
        self._mean_seconds = LONGEST_PREFETCH
        self._upkeep = Upkeep(alias, registrations, worker_id)
        self._patience = Patience("working", alias)
        self._paused_until = 0.0
        self._in_line_since: float | None = None
        """Since when others have kept the writer lock from this worker."""

    @property
    def is_paused(self) -> bool:
        """Is there trouble with the database, and the next try not due yet?"""
        return clock.monotonic() < self._paused_until

    def wants_more(self) -> bool:
        """Could more be claimed, if there were any?"""
        return not self.stopping and self._capacity() > 0

    def due_in(self) -> float:
        """Seconds until a round has something to do, though nobody tells."""
        now = clock.monotonic()
        if self.is_paused:
            return self._paused_until - now
        moments = [now + LONGEST_SLEEP, now + self._upkeep.due_in()]
        if self.wants_more():
            moments.append(now + self.prospects.due_in())
        for run in self.runs:
            if run.holds_lease:
                moments.append(run.renew_at)
            # A thread may be about to start it: then its time limit is counted from now at the earliest.
            started_at = now if run.started_at is None else run.started_at
            moments.append(started_at + run.registration.time_limit)
            if run.started_at is None:
                moments.append(run.claimed_at + LONGEST_PREFETCH)
        return max(0.0, min(moments) - now)

    def run(self, *, call: bool = True) -> None:
        """One round. `call`: wake a thread for what is claimed; one of them would start it by itself."""
        with gathered():
            self._collect()
            self.prospects.look_around()
            if not self.is_paused:
                self._try(call=call)

    def _try(self, *, call: bool) -> None:
        try:
            limit_wait(self.alias, LONGEST_WAIT)
            work = self._plan()
            if work:
                written = write_operations(self.alias, partial(self._write, work))
                self.unwritten.clear()
                self.prospects.note_write()
                self._in_line_since = None
                self._follow_up(work, written, call=call)
            # After what has ended is on its row and what runs is renewed: it sweeps.
            self._upkeep.step(work.planned_at)
            self.prospects.look_ahead()
            self._patience.reset()
            self._in_line_since = None
        except DatabaseError as error:
            self._paused_until = clock.monotonic() + self._pause_after(error)
        connections[self.alias].queries_log.clear()

    def _pause_after(self, error: DatabaseError) -> float:
        """Seconds to wait before the round is tried again. That another writes is no news for a busy timeout's time."""
        if is_contention(self.alias, error):
            now = clock.monotonic()
            if self._in_line_since is None:
                self._in_line_since = now
            if now - self._in_line_since < busy_timeout(self.alias):
                return IN_LINE
        return self._patience.after(error)

    # What there is to write

    def _collect(self) -> None:
        """Take in what has ended, what is over its time, and what has waited too long for a thread."""
        for run, ending in self._threads.endings():
            if run in self.stuck:
                self.stuck.discard(run)
                continue  # it was failed at its time limit; its thread is free again
            del self.runs[run]
            run.seconds = ending.seconds
            self._mean_seconds += (ending.seconds - self._mean_seconds) / 8
            if ending.outcome is None:
                self._note_settled(run, ending)
            else:
                self.unwritten.append((run, ending.outcome))
        self._threads.one_by_one = self._mean_seconds < INSTANT
        now = clock.monotonic()
        for run in list(self.runs):
            if run.started_at is not None and now - run.started_at >= run.registration.time_limit:
                self._fail_at_time_limit(run)
        if self.stopping or self._waited_too_long(now):
            self.take_back("stopping" if self.stopping else "no thread became free")

    def _waited_too_long(self, now: float) -> bool:
        oldest = next((run for run in self.runs if run.started_at is None), None)
        return oldest is not None and now - oldest.claimed_at >= LONGEST_PREFETCH

    def _fail_at_time_limit(self, run: Run) -> None:
        run.seconds = run.registration.time_limit
        del self.runs[run]
        self.stuck.add(run)
        self.unwritten.append((run, outcomes.retry(failures.TIME_LIMIT)))
        self._threads.cut_off(run)
        run.job.lease_lost.set()

    def take_back(self, reason: str) -> None:
        """Give back what no thread has started; nothing is claimed ahead until handlers are quick again."""
        withdrawn = self._threads.withdraw()
        for run in withdrawn:
            del self.runs[run]
            self.unwritten.append((run, RELEASE))
        if withdrawn:
            self._mean_seconds = LONGEST_PREFETCH
            signals.emit(signals.worker_gave_back, job_ids=[run.job.id for run in withdrawn], reason=reason)

    def _plan(self) -> Work:
        planned_at = clock.now_us()  # first: whatever had lapsed by then is due for its renewal by the other clock
        now = clock.monotonic()
        work = Work(planned_at, now, renewals=[run for run in self.runs if now >= run.renew_at and run.holds_lease])
        for run, outcome in self.unwritten:
            if outcome.kind is Kind.ACK:
                work.acks.append(run)
            else:
                work.endings.append((run, outcome))
        if self.wants_more():
            work.wanted = self._capacity()
            work.queues = self.prospects.due()
        return work

    def _capacity(self) -> int:
        """How many jobs to claim: what the free threads can start, and as many again while handlers are quick."""
        held = len(self.runs) + len(self.stuck)
        prefetch = self._threads.count if self._mean_seconds < QUICK and not self.stuck else 0
        return max(0, self._threads.count + prefetch - held)

    def _write(self, work: Work, db: Operations) -> Written:
        """The round's transaction. It changes nothing but the database: it may be run again."""
        now = clock.now_us()
        written = Written()
        if work.acks:
            claims = [run.job.claim(self._held_at(run, now)) for run in work.acks]
            written.acked = outcomes.ack_all(db, claims, now)
        for run, outcome in work.endings:
            written.endings.append(outcomes.apply(db, run.job, outcome, now, self._held_at(run, now)))
        for run in work.renewals:
            # Not earlier than the handler's own heartbeat has it.
            ends = min(now + round(run.job.visibility_timeout * SECOND), LAST_US)
            ends = max(ends, run.job.lease_expires_us)
            written.renewals.append(ends if db.renew(run.job.claim(self._held_at(run, now)), ends) else None)
        self._claim(db, work, written)
        return written

    def _held_at(self, run: Run, now: int) -> int:
        """The moment at which a run's lease must not have run out.

        There is none while the worker lives: the lease may have run out while another held the writer lock (an
        atomic handler, for as long as it runs), when nobody could renew it, nor take it. If anybody has taken it
        since, the fence says so. Only where the handler has been told that it is lost, it is.
        """
        return now if run.job.is_lost and run not in self.stuck else UNTAKEN

    def _claim(self, db: Operations, work: Work, written: Written) -> None:
        """Claim what is wanted; a queue with nothing to claim is swept instead, and asked again next round."""
        left = work.wanted
        for queue in work.queues:
            rows = db.claim(queue, self.worker_id, left, clock.now_us())
            if rows:
                claimed, broken = handles_of(self.alias, rows)
                written.claimed += claimed
                written.broken += broken
                left -= len(rows)
                if left <= 0:
                    return
                # There may be more, of a lower priority. What has been claimed does not wait for the answer.
                written.drained.append(queue)
            else:
                swept = sweep_batch(queue, work.planned_at, db)
                written.swept.append(swept)
                if not swept:
                    written.drained.append(queue)

    # After its commit

    def _follow_up(self, work: Work, written: Written, *, call: bool) -> None:
        self._hand_out(written.claimed, work.began_at)
        if call:
            self._threads.call_next()
        for queue in written.drained:
            self.prospects.forget(queue)
        if work.queues:
            self.prospects.note_claim(written.claimed[0].queue if written.claimed else None)
        self._note_renewals(work.renewals, written.renewals, work.began_at)
        for run in work.acks:
            self._note_ack(run, took_effect=run.job.id in written.acked)
        for (run, outcome), took_effect in zip(work.endings, written.endings, strict=True):
            self._note_ending(run, outcome, took_effect=took_effect)
        for swept in written.swept:
            swept.announce()
        # Last, since each is a statement of its own that may fail: then the lease lapses, and it is tried again.
        for row, error in written.broken:
            write_statement(self.alias, partial(bury_unreadable, row, error))

    def _hand_out(self, claimed: list[JobHandle], began_at: float) -> None:
        now = clock.monotonic()
        runs = [Run(job, self.registrations[job.queue], claimed_at=now) for job in claimed]
        for run in runs:
            self._set_renewal(run, began_at)
            self.runs[run] = None
        self._threads.give(runs)

    def _set_renewal(self, run: Run, began_at: float) -> None:
        run.renew_at = began_at + run.job.visibility_timeout / RENEWALS_PER_LEASE

    def _note_renewals(self, runs: list[Run], renewals: list[int | None], began_at: float) -> None:
        for run, ends in zip(runs, renewals, strict=True):
            if ends is not None:
                run.job.lease_expires_us = ends
                self._set_renewal(run, began_at)
            elif run.holds_lease and not run.registration.atomic:
                self._note_lost(run, "renewal")

    def _note_settled(self, run: Run, ending: Ending) -> None:
        self.completed += 1
        event = signals.job_completed if run.registration.atomic else signals.job_settled
        signals.emit(event, job=run.job, seconds=ending.seconds)

    def _note_ack(self, run: Run, *, took_effect: bool) -> None:
        if took_effect:
            self.completed += 1
            signals.emit(signals.job_completed, job=run.job, seconds=run.seconds)
        else:
            self._note_lost(run, "ack")

    def _note_ending(self, run: Run, outcome: Outcome, *, took_effect: bool) -> None:
        if not took_effect:
            if run.job.settled:
                signals.emit(signals.job_raised_late, job=run.job, error=outcome.error, traceback=outcome.traceback)
            else:
                self._note_lost(run, outcome.kind.name.lower().replace("_", " "), outcome.traceback)
            return
        if outcome.kind is Kind.GIVE_BACK:
            if outcome.delay is not None:
                signals.emit(signals.job_snoozed, job=run.job, delay=outcome.delay)
            return
        self.failed += 1
        announce_failure(run.job, outcome, run.seconds)

    def _note_lost(self, run: Run, what: str, traceback: str = "") -> None:
        run.lost = True
        run.job.lease_lost.set()
        signals.emit(signals.lease_lost, job=run.job, what=what, traceback=traceback)

    # The end

    def give_back_all(self, reason: str) -> None:
        """Write what has ended, and give back the rest, attempts refunded. The process ends right after."""
        self._collect()
        held = list(self.runs)
        if held:
            signals.emit(signals.worker_gave_back, job_ids=[run.job.id for run in held], reason=reason)
            for run in held:
                self._threads.cut_off(run)
        self.end()
        signals.flush()
        work = Work(clock.now_us(), clock.monotonic(), endings=[*self.unwritten, *((run, RELEASE) for run in held)])
        if not work:
            return
        try:
            write_operations(self.alias, partial(self._write, work))
        except DatabaseError as error:
            # The leases lapse by themselves; there is nobody left here to try again.
            signals.emit(signals.database_trouble, doing="giving jobs back", error=error, pause=0.0)

    def end(self) -> None:
        """Take back the worker's sign of life."""
        self._upkeep.end()
