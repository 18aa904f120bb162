"""What a worker's threads share: the jobs that it holds, and which thread leads.

One lock protects every attribute of `Crew`. No method calls foreign code or the database, so the lock is held for
microseconds. `docs/worker.md` has the states of a thread and of a job.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from django_alkstore import clock
from django_alkstore.registry import Registration
from django_alkstore.runtime.perform import Ending
from django_alkstore.services import JobHandle
from django_alkstore.services.outcomes import RELEASE, TIME_LIMIT, Outcome

QUICK = 0.002
"""Seconds. A thread that leads keeps the leadership while it runs a handler that takes less on average."""
SLOW = 0.005
"""Seconds after which a handler, or a receiver of an event, turns out not to be quick: another thread leads."""
BATCH_SECONDS = 0.05
"""Seconds of work that one claim takes for quick handlers."""
LARGEST_BATCH = 64
LONGEST_WAIT_TO_START = 1.0
"""Seconds that a claimed job may wait for a thread. Then it is given back."""
LONGEST_UNWRITTEN = 0.05
"""Seconds that a result may wait for the leader. Then the keeper writes it."""
RENEWALS_PER_LEASE = 3
LOOK_FOR_LOSS = 1.0
"""Seconds between two looks for running jobs that were cancelled, deleted or taken."""
_PUNCTUAL = 0.001
"""Seconds that the keeper may wake later than it should."""


class Runner(Protocol):
    """A handler thread, as far as the keeper uses it."""

    def has_open_transaction(self, run: "Run") -> bool: ...
    def cut_off(self, run: "Run") -> None: ...


@dataclass(slots=True, eq=False)
class Run:
    """One claimed job in this worker."""

    job: JobHandle
    registration: Registration
    claimed_at: float
    """Monotonic seconds, like every moment here."""
    renew_at: float
    started_at: float | None = None
    fails_at: float = inf
    """When its time limit is over. An atomic handler's time counts from the moment at which it has the writer lock."""
    lost: bool = False
    """True once the lease is known to be lost."""
    thread: Runner | None = None
    """The thread that started it."""

    @property
    def holds_lease(self) -> bool:
        return not (self.lost or self.job.settled)


class Result(NamedTuple):
    """What is to be written about a job that this worker is done with."""

    run: Run
    outcome: Outcome
    seconds: float
    ended_at: float


class Plan(NamedTuple):
    """What the leader is to do next."""

    results: list[Result]
    free: int
    """Threads that could start a job now, the leader included; 0 if nothing more is to be claimed."""
    batches: dict[str, int]
    """How many jobs to claim from each queue whose handler is known to be quick."""
    renewals: list[Run]
    """Jobs whose leases are to be renewed."""


class Crew:
    """The shared state. Every attribute is read and changed with `_lock` held."""

    def __init__(self, count: int, ring_leader: Callable[[], None], ring_keeper: Callable[[], None]) -> None:
        """`count`: handler threads. The two functions end the wait of the leader and of the keeper."""
        self.size = count
        self._ring_leader = ring_leader
        self._ring_keeper = ring_keeper
        self._lock = threading.Lock()
        self._followers = threading.Condition(self._lock)
        self._idle = 0
        """Threads that wait in `lead`."""
        self._leader: Runner | None = None
        self._leader_waits = False
        """True while the leader waits for work, and must be rung to notice a result."""
        self._busy_since: float | None = None
        """Since when the leader has been at a handler or at receivers of events; None otherwise."""
        self._waiting: deque[Run] = deque()
        """Claimed, not started."""
        self._lapsed: list[Run] = []
        """Claimed, not started, and to be renewed first: the process was suspended for longer than a lease."""
        self._running: dict[Run, None] = {}
        self._overdue: dict[Run, None] = {}
        """Past their time limit: the attempt has failed, and the handler still keeps its thread."""
        self._results: list[Result] = []
        """What is to be written. A writer takes them out, and puts them back if the database refuses."""
        self._taken = 0
        """How many results a writer has taken out and not written yet."""
        self._means: dict[str, float] = {}
        """By queue: how long its handler takes on average, in seconds."""
        self._keeper_wakes_at = inf
        self._completed = 0
        self._failed = 0
        self._stopping = False
        self._ended = False
        self._fault: BaseException | None = None

    # For handler threads

    def lead(self, me: Runner) -> bool:
        """Wait as a follower until this thread leads. False at the end of the worker."""
        with self._lock:
            while not self._ended:
                if self._leader is None or self._leader_is_slow():
                    self._leader, self._busy_since = me, None
                    return True
                if self._busy_since is not None:
                    self._wake_keeper_by(self._busy_since + SLOW)
                self._idle += 1
                self._followers.wait()
                self._idle -= 1
            return False

    def leads(self, me: Runner) -> bool:
        """True while this thread leads."""
        with self._lock:
            return self._leader is me

    def start_next(self, me: Runner, now: float, now_us: int) -> Run | None:
        """Take the next job to start. None if this thread does not lead, or should write first, or if no job waits.

        Before a handler that is not quick the thread gives up the leadership.
        """
        with self._lock:
            if self._leader is not me or self._results_are_old(now):
                return None
            while self._waiting:
                run = self._waiting.popleft()
                if run.job.lease_expires_us <= now_us:
                    self._lapsed.append(run)
                    self._wake_keeper_by(now)
                    continue
                self._start(run, me, now)
                return run
            return None

    def _start(self, run: Run, me: Runner, now: float) -> None:
        run.thread, run.started_at = me, now
        if not run.registration.atomic:
            run.fails_at = now + run.registration.time_limit
        self._running[run] = None
        wake_by = min(run.renew_at, run.fails_at, now + LOOK_FOR_LOSS)
        if self._means.get(run.job.queue, QUICK) < QUICK:
            self._busy_since = now
            if self._idle:
                wake_by = min(wake_by, now + SLOW)
        else:
            self._hand_over()
        if self._results:
            wake_by = min(wake_by, self._results[0].ended_at + LONGEST_UNWRITTEN)
        self._wake_keeper_by(wake_by)

    def count_time_from_now(self, run: Run) -> None:
        """Let the time limit of an atomic handler begin: it has the writer lock, and a lease for as long."""
        with self._lock:
            run.fails_at = run.renew_at = clock.monotonic() + run.registration.time_limit
            self._wake_keeper_by(run.fails_at)

    def finish(self, me: Runner, run: Run, ending: Ending) -> bool:
        """Take in the end of a handler. False if its attempt had failed before, by its time limit."""
        now = clock.monotonic()
        with self._lock:
            if run not in self._running:
                self._overdue.pop(run, None)
                return False
            del self._running[run]
            queue = run.job.queue
            mean = self._means.get(queue, ending.seconds)
            self._means[queue] = max(BATCH_SECONDS / LARGEST_BATCH, mean + (ending.seconds - mean) / 8)
            if ending.outcome is None:
                return True
            self._results.append(Result(run, ending.outcome, ending.seconds, now))
            ring = self._leader_waits and self._leader is not me
            if ring:
                self._leader_waits = False
            elif self._leader is not None and self._leader is not me:
                self._wake_keeper_by(now + LONGEST_UNWRITTEN)
        if ring:
            self._ring_leader()
        return True

    def plan(self, me: Runner) -> Plan | None:
        """What the leader is to write and to claim. None if this thread does not lead."""
        with self._lock:
            if self._leader is not me or self._ended:
                return None
            self._busy_since = None
            results = self._take(self._results)
            free = self.size - len(self._running) - len(self._overdue) - len(self._lapsed)
            renewals = self._to_renew(clock.monotonic())
            if self._stopping or self._waiting or free <= 0:
                return Plan(results, 0, {}, renewals)
            batches = {queue: int(BATCH_SECONDS / mean) for queue, mean in self._means.items() if mean < QUICK}
            return Plan(results, free, batches, renewals)

    def put_back(self, results: list[Result]) -> None:
        """Return results that could not be written."""
        with self._lock:
            self._taken -= len(results)
            self._results[:0] = results

    def note_written(self, count: int) -> None:
        """So many results that were taken out are written."""
        with self._lock:
            self._taken -= count

    def add(self, runs: Iterable[Run]) -> None:
        """Hold jobs that were just claimed."""
        with self._lock:
            self._waiting.extend(runs)

    def mark_busy(self, me: Runner) -> None:
        """The leader is about to call receivers of events, which may take long."""
        now = clock.monotonic()
        with self._lock:
            if self._leader is me:
                self._busy_since = now
                if self._idle:
                    self._wake_keeper_by(now + SLOW)

    def begin_wait(self, me: Runner) -> bool:
        """True if the leader has nothing to do, and may wait. A result then rings it."""
        with self._lock:
            self._leader_waits = self._leader is me and not (self._waiting or self._results or self._ended)
            return self._leader_waits

    def end_wait(self) -> None:
        with self._lock:
            self._leader_waits = False

    def break_down(self, error: BaseException) -> None:
        """A thread has met an error that is no handler's: the keeper ends the worker."""
        with self._lock:
            self._fault = self._fault or error
            self._wake_keeper_by(0.0)

    # For the keeper

    def sleep_until(self, latest: float, now: float) -> float:
        """Until when the keeper may sleep, at most until `latest`. It is rung for whatever becomes due earlier."""
        with self._lock:
            deadlines = [latest]
            for run in self._running:
                deadlines += (run.renew_at, run.fails_at) if run.holds_lease else (run.fails_at,)
            deadlines += (run.renew_at for run in self._waiting)
            if self._running or self._overdue:
                deadlines.append(now + LOOK_FOR_LOSS)
            if self._waiting:
                deadlines.append(self._waiting[0].claimed_at + LONGEST_WAIT_TO_START)
            if self._busy_since is not None and self._idle:
                deadlines.append(self._busy_since + SLOW)
            if self._results:
                deadlines.append(self._results[0].ended_at + LONGEST_UNWRITTEN)
            if self._fault is not None or self._lapsed:
                deadlines.append(now)
            self._keeper_wakes_at = min(deadlines)
            return self._keeper_wakes_at

    def promote(self, now: float) -> None:
        """Let a follower lead if nobody does, or if the leader turns out to be at something slow."""
        with self._lock:
            if self._idle and (self._leader is None or self._leader_is_slow(now)):
                self._hand_over()

    def take_old_results(self, now: float) -> list[Result]:
        """Results that have waited too long for a leader."""
        with self._lock:
            return self._take(self._results) if self._results_are_old(now) else []

    def take_results(self) -> list[Result]:
        """Everything that is to be written."""
        with self._lock:
            return self._take(self._results)

    def to_renew(self, now: float) -> list[Run]:
        """Jobs whose leases are to be renewed."""
        with self._lock:
            return self._to_renew(now)

    def note_renewals(self, renewals: list[tuple[Run, int | None]], began_at: float) -> list[Run]:
        """Take in what became of renewals that began then; the jobs whose leases were found to be lost."""
        lost, ring = [], False
        with self._lock:
            for run, ends in renewals:
                if ends is None:
                    if self._lose(run):
                        lost.append(run)
                    continue
                run.job.lease_expires_us = max(ends, run.job.lease_expires_us)
                run.renew_at = began_at + run.job.visibility_timeout / RENEWALS_PER_LEASE
                if run in self._lapsed:
                    self._lapsed.remove(run)
                    self._waiting.append(run)
                    ring, self._leader_waits = self._leader_waits, False
        if ring:
            self._ring_leader()
        return lost

    def lose(self, run: Run) -> bool:
        """Mark the lease of a job as lost. False if that was known, or no longer matters."""
        with self._lock:
            return self._lose(run)

    def _lose(self, run: Run) -> bool:
        if run in self._lapsed:
            self._lapsed.remove(run)
        elif run in self._waiting:
            self._waiting.remove(run)
        elif run not in self._running or not run.holds_lease:
            return False  # it has ended, and by its own result
        run.lost = True
        return True

    def running(self) -> list[Run]:
        """The jobs whose handlers run, without those past their time limit."""
        with self._lock:
            return list(self._running)

    def running_for(self, seconds: float, now: float) -> list[Run]:
        """Those that hold their lease and have run for so long."""
        with self._lock:
            return [
                run
                for run in self._running
                if run.holds_lease and run.started_at is not None and now - run.started_at >= seconds
            ]

    def overdue(self) -> list[Run]:
        """The jobs past their time limit whose handlers still run."""
        with self._lock:
            return list(self._overdue)

    def fail_at_time_limit(self, now: float) -> list[Result]:
        """Fail the attempts whose time limit is over."""
        with self._lock:
            late = [run for run in self._running if now >= run.fails_at]
            for run in late:
                del self._running[run]
                self._overdue[run] = None
            return self._take(
                [Result(run, TIME_LIMIT, run.registration.time_limit, now) for run in late if run.holds_lease]
            )

    def withdraw_waiting(self, now: float) -> list[Result]:
        """Take back the jobs that no thread has started, if they have waited too long or the worker stops."""
        with self._lock:
            if self._stopping or (self._waiting and now - self._waiting[0].claimed_at >= LONGEST_WAIT_TO_START):
                return self._withdraw(now)
            return []

    def withdraw_all(self, now: float) -> list[Result]:
        """At a hard end: take back all jobs, also those whose handlers run."""
        with self._lock:
            self._stopping = self._ended = True
            running = [run for run in self._running if run.holds_lease]
            self._running.clear()
            return [*self._withdraw(now), *self._take([Result(run, RELEASE, 0.0, now) for run in running])]

    def _withdraw(self, now: float) -> list[Result]:
        withdrawn = [*self._waiting, *self._lapsed]
        self._waiting.clear()
        self._lapsed.clear()
        for run in withdrawn:
            self._means.pop(run.job.queue, None)  # its handler is not as quick as it was
        return self._take([Result(run, RELEASE, 0.0, now) for run in withdrawn if run.holds_lease])

    def count(self, completed: int = 0, failed: int = 0) -> None:
        """Count ended attempts, for the last line of the log."""
        with self._lock:
            self._completed += completed
            self._failed += failed

    def counts(self) -> tuple[int, int]:
        """How many attempts completed, and how many failed."""
        with self._lock:
            return self._completed, self._failed

    def stop(self) -> None:
        """Claim no more."""
        with self._lock:
            self._stopping = True
            ring = self._leader_waits
        if ring:
            self._ring_leader()

    def end(self) -> None:
        """Let every thread end that has no handler."""
        with self._lock:
            self._ended = True
            self._followers.notify_all()
        self._ring_leader()

    @property
    def is_done(self) -> bool:
        """True if nothing is held and nothing is left to be written."""
        with self._lock:
            return not (self._running or self._waiting or self._lapsed or self._results or self._taken)

    @property
    def is_stopping(self) -> bool:
        with self._lock:
            return self._stopping

    @property
    def is_exhausted(self) -> bool:
        """True if every thread is kept by a handler past its time limit, and that is on the rows."""
        with self._lock:
            return len(self._overdue) >= self.size and not (self._results or self._taken)

    @property
    def running_count(self) -> int:
        with self._lock:
            return len(self._running)

    @property
    def fault(self) -> BaseException | None:
        with self._lock:
            return self._fault

    # With the lock held

    def _take(self, results: list[Result]) -> list[Result]:
        """Hand results to a writer, which calls `note_written` or `put_back`."""
        taken = list(results)
        self._taken += len(taken)
        if results is self._results:
            self._results.clear()
        return taken

    def _to_renew(self, now: float) -> list[Run]:
        held = [*self._running, *self._waiting]
        return [*self._lapsed, *(run for run in held if now >= run.renew_at and run.holds_lease)]

    def _results_are_old(self, now: float) -> bool:
        return bool(self._results) and now - self._results[0].ended_at >= LONGEST_UNWRITTEN

    def _leader_is_slow(self, now: float | None = None) -> bool:
        if self._busy_since is None:
            return False
        return (clock.monotonic() if now is None else now) - self._busy_since >= SLOW

    def _hand_over(self) -> None:
        self._leader, self._busy_since = None, None
        if self._idle:
            self._followers.notify()

    def _wake_keeper_by(self, moment: float) -> None:
        if moment < self._keeper_wakes_at - _PUNCTUAL:
            self._keeper_wakes_at = moment
            self._ring_keeper()
