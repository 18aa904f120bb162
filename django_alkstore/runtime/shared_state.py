"""What a worker's threads share: the jobs that it holds, and which thread leads.

One lock protects every attribute of `SharedState`. No method calls foreign code or the database, so the lock is held
for microseconds. `docs/worker.md` has the states of a thread and of a job.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from math import inf

from django_alkstore import clock
from django_alkstore.runtime.jobs import (
    BATCH_SECONDS,
    CANCEL_TIMEOUT,
    LARGEST_BATCH,
    LONGEST_UNWRITTEN,
    LONGEST_WAIT_TO_START,
    LOOK_FOR_LOSS,
    OVERSLEPT,
    QUICK,
    SLOW,
    Plan,
    Result,
    Run,
    Runner,
    is_suspected,
    renewal_after,
)
from django_alkstore.runtime.perform import Ending
from django_alkstore.runtime.results import Results
from django_alkstore.services.outcomes import RELEASE, TIME_LIMIT

_TOLERANCE = 0.001
"""Seconds. The keeper is not rung to wake less than this earlier."""


class SharedState:
    """Every attribute is read and changed with `_lock` held."""

    def __init__(
        self,
        size: int,
        ring_leader: Callable[[], None],
        ring_keeper: Callable[[], None],
        coroutines: int = 0,
    ) -> None:
        """The two functions end the wait of the leader and of the keeper.

        `size`: how many sync handlers may run at once. `coroutines`: how many coroutines may run at once.
        """
        self.size = size
        self.coroutines = coroutines
        self._ring_leader = ring_leader
        self._ring_keeper = ring_keeper
        self._lock = threading.Lock()
        self._followers = threading.Condition(self._lock)
        self._announced = threading.Condition(self._lock)
        self._coroutine_has_ended = threading.Condition(self._lock)
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
        """Past their time limit: the attempt has failed, and its handler keeps its thread or is being cancelled."""
        self._in_loop = 0
        """How many of the running and the overdue jobs are coroutines."""
        self._room_has_grown = False
        """True if a handler has ended without a result since the last plan."""
        self._is_carrying_out = False
        """True while the leader carries out a plan: it may be claiming jobs that are not held yet."""
        self._results = Results()
        self._means: dict[str, float] = {}
        """By queue: how long its handler takes on average, in seconds."""
        self._keeper_wakes_at = inf
        self._stopping = False
        self._ended = False
        self._fault: BaseException | None = None

    # For handler threads

    def lead(self, me: Runner) -> bool:
        """Wait as a follower until this thread leads. False at the end of the worker."""
        with self._lock:
            while not self._ended:
                if self._leader is None or self._leader_is_slow(clock.monotonic()):
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
            return self._leader is me and not self._ended

    def start_next(self, me: Runner, now: float, now_us: int) -> Run | None:
        """Take the next job to start. None if this thread does not lead, or should write first, or if no job waits.

        Before a handler that is not quick the thread gives up the leadership.
        """
        with self._lock:
            if self._leader is not me or self._stopping or self._results.are_old(now):
                return None
            while (run := self._next()) is not None:
                self._waiting.remove(run)
                if run.job._lease_expires_us > now_us:
                    self._start(run, me, now)
                    return run
                self._lapsed.append(run)
                self._wake_keeper_by(now)
            return None

    def _next(self) -> Run | None:
        """The next job for which there is a place: most often the first in the line."""
        for run in self._waiting:
            if self._in_loop < self.coroutines if run.in_loop else self._busy_threads() < self.size:
                return run
        return None

    def _busy_threads(self) -> int:
        return len(self._running) + len(self._overdue) - self._in_loop

    def _start(self, run: Run, me: Runner, now: float) -> None:
        run.thread, run.started_at = me, now
        self._in_loop += run.in_loop
        if not run.registration.atomic:
            run.fails_at = now + run.registration.time_limit
        self._running[run] = None
        wake_by = min(run.renew_at, run.fails_at, now + LOOK_FOR_LOSS, self._results.write_by or inf)
        if run.in_loop or self._means.get(run.job.queue, QUICK) < QUICK or is_suspected(run.job):
            # Beside a job that may end the process, no other thread claims more until it has run for a while.
            self._busy_since = now
            if self._idle:
                wake_by = min(wake_by, now + SLOW)
        else:
            self._give_up_leadership()
        self._wake_keeper_by(wake_by)

    def start_time_limit(self, run: Run) -> None:
        """Let the time limit of an atomic handler begin: it has the writer lock, and a lease for as long."""
        with self._lock:
            run.fails_at = run.renew_at = clock.monotonic() + run.registration.time_limit
            self._wake_keeper_by(run.fails_at)

    def finish(self, me: Runner, run: Run, ending: Ending) -> bool:
        """Record the end of a handler. False if the attempt had failed at its time limit, or was given back.

        If the handler has settled the job itself, its thread announces that, and calls `end_announcing`. For a
        coroutine the events thread announces it.
        """
        now = clock.monotonic()
        with self._lock:
            held = run in self._running
            if held:
                del self._running[run]
                self._note_end(me, run, ending, now)
            else:
                self._overdue.pop(run, None)
            if run.in_loop:
                self._in_loop -= 1
                self._coroutine_has_ended.notify_all()
                if self._stopping and self._is_done():
                    self._wake_keeper_by(0.0)
            self._room_has_grown = True
            ring = self._leader_waits and self._leader is not me
            if ring:
                self._leader_waits = False
            elif self._results.any_waiting() and self._leader is not None and self._leader is not me:
                self._wake_keeper_by(now + LONGEST_UNWRITTEN)
        if ring:
            self._ring_leader()
        return held

    def _note_end(self, me: Runner, run: Run, ending: Ending, now: float) -> None:
        if not run.in_loop:
            queue = run.job.queue
            mean = self._means.get(queue, ending.seconds)
            self._means[queue] = max(BATCH_SECONDS / LARGEST_BATCH, mean + (ending.seconds - mean) / 8)
        if ending.outcome is not None:
            self._results.add(Result(run, ending.outcome, ending.seconds, now))
            return
        self._results.count(run.job)
        if not run.in_loop:
            self._begin_announcing(me, now)

    def wait_for_end(self, run: Run, timeout: float) -> None:
        """Wait until a coroutine has ended, at most `timeout` seconds."""
        with self._lock:
            self._coroutine_has_ended.wait_for(lambda: run not in self._running, timeout)

    def plan(self, me: Runner, now: float, now_us: int) -> Plan | None:
        """What the leader is to write and to claim. None if this thread does not lead.

        The leader calls `end_plan` when it has carried out the plan.

        The renewals include every lease that is over by `now_us`: a claim may sweep what has lapsed by then.
        """
        with self._lock:
            if self._leader is not me or self._ended:
                return None
            self._busy_since = None
            self._room_has_grown = False
            self._is_carrying_out = True
            results = self._results.take()
            renewals = self._to_renew(now, now_us)
            if self._stopping:
                return Plan(results, 0, 0, {}, renewals)
            lapsed = len(self._lapsed)
            waiting_for_loop = sum(run.in_loop for run in self._waiting)
            coroutines = max(0, self.coroutines - self._in_loop - lapsed - waiting_for_loop)
            busy = self._busy_threads() + lapsed + self._results.announcers
            if len(self._waiting) > waiting_for_loop or busy >= self.size:
                return Plan(results, 0, coroutines, {}, renewals)
            batches = {queue: int(BATCH_SECONDS / mean) for queue, mean in self._means.items() if mean < QUICK}
            return Plan(results, self.size - busy, coroutines, batches, renewals)

    def end_plan(self) -> None:
        """The plan is carried out, or has failed: what was claimed is held."""
        with self._lock:
            self._is_carrying_out = False
            if self._stopping:
                self._wake_keeper_by(0.0)  # to give back what was claimed, or to end

    def put_back(self, results: list[Result]) -> None:
        """Return results that could not be written."""
        with self._lock:
            self._results.put_back(results)

    def note_written(self, count: int, completed: int, failed: int, me: Runner | None = None) -> None:
        """So many results are written. `me`: the handler thread that announces them, and calls `end_announcing`."""
        with self._lock:
            self._results.written(count, completed, failed)
            if me is not None:
                self._begin_announcing(me, clock.monotonic())
            elif self._is_done():
                self._wake_keeper_by(0.0)

    def _begin_announcing(self, me: Runner, now: float) -> None:
        self._results.begin_announcing()
        if self._leader is me:
            self._busy_since = now
            if self._idle:
                self._wake_keeper_by(now + SLOW)

    def end_announcing(self) -> None:
        """A handler thread has sent its events."""
        with self._lock:
            self._results.end_announcing()
            self._announced.notify_all()
            if self._stopping and self._is_done():
                self._wake_keeper_by(0.0)

    def add(self, runs: Iterable[Run]) -> None:
        """Hold jobs that were just claimed."""
        with self._lock:
            self._add(list(runs))

    def _add(self, runs: list[Run]) -> None:
        # There is a place for each job of the event loop, but a job of a batch may have to wait for a thread.
        self._waiting.extendleft(run for run in reversed(runs) if run.in_loop)
        self._waiting.extend(run for run in runs if not run.in_loop)

    def begin_wait(self, me: Runner) -> bool:
        """True if the leader has nothing to do, and may wait. A result then rings it."""
        with self._lock:
            ready = (
                self._results.any_waiting() or self._room_has_grown or (not self._stopping and self._next() is not None)
            )
            self._leader_waits = self._leader is me and not (ready or self._ended)
            return self._leader_waits

    def end_wait(self) -> None:
        """The leader has something to do."""
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
            deadlines = [latest, self._results.write_by or inf]
            for run in self._running:
                deadlines += (run.renew_at, run.fails_at) if run.holds_lease else (run.fails_at,)
            deadlines += (run.renew_at for run in self._waiting)
            if not self._stopping:
                deadlines += (run.ends_by for run in self._overdue)
            if self._waiting:
                deadlines.append(now if self._stopping else self._waiting[0].claimed_at + LONGEST_WAIT_TO_START)
            if self._busy_since is not None and self._idle:
                deadlines.append(self._busy_since + SLOW)
            if self._fault is not None or self._lapsed:
                deadlines.append(now)
            self._keeper_wakes_at = min(deadlines)
            return self._keeper_wakes_at

    def promote(self, now: float) -> None:
        """Let a follower lead if nobody does, or if the leader turns out to be at something slow."""
        with self._lock:
            if self._idle and (self._leader is None or self._leader_is_slow(now)):
                self._give_up_leadership()

    def take_results(self) -> list[Result]:
        """Everything that is to be written."""
        with self._lock:
            return self._results.take()

    def take_old_results(self, now: float) -> list[Result]:
        """Everything that is to be written, if a result has waited too long for a leader."""
        with self._lock:
            return self._results.take() if self._results.are_old(now) else []

    def to_renew(self, now: float, lapsed_by: int | None = None) -> list[Run]:
        """Jobs whose leases are to be renewed; with `lapsed_by` also those whose leases are over by that moment."""
        with self._lock:
            return self._to_renew(now, lapsed_by)

    def _to_renew(self, now: float, lapsed_by: int | None) -> list[Run]:
        def is_due(run: Run) -> bool:
            return now >= run.renew_at or (lapsed_by is not None and run.job._lease_expires_us <= lapsed_by)

        held = (*self._running, *self._waiting)
        return [*self._lapsed, *(run for run in held if is_due(run) and run.holds_lease)]

    def note_renewals(self, renewals: list[tuple[Run, int | None]], began_at: float) -> None:
        """Record the outcome of renewals: the end of each lease in microseconds, or None if it was not renewed.

        `began_at`: when their transaction began. A running job whose lease was not renewed may have been settled by its
        handler a moment ago; the look for lost leases decides.
        """
        ring = False
        with self._lock:
            for run, ends in renewals:
                if ends is not None:
                    run.job._lease_expires_us = max(ends, run.job._lease_expires_us)
                    run.renew_at = renewal_after(began_at, run.job)
                else:
                    run.renew_at = began_at + LOOK_FOR_LOSS
                    if run in self._waiting:
                        self._waiting.remove(run)
                if run in self._lapsed:
                    self._lapsed.remove(run)
                    ring = True
                    if ends is not None:
                        run.claimed_at = began_at
                        self._add([run])
            ring = ring and self._leader_waits
            self._leader_waits = self._leader_waits and not ring
        if ring:
            self._ring_leader()

    def lose(self, run: Run) -> bool:
        """Mark the lease of a running job as lost. False if it has ended: its result says what became of it."""
        with self._lock:
            if run not in self._running or not run.holds_lease:
                return False
            run.lost = True
            return True

    def running(self) -> list[Run]:
        """The jobs whose handlers run, without those past their time limit."""
        with self._lock:
            return list(self._running)

    def overdue(self) -> list[Run]:
        """The jobs past their time limit whose handlers still run."""
        with self._lock:
            return list(self._overdue)

    def note_cancelled(self, run: Run) -> bool:
        """A coroutine is cancelled, and must end in time. False if it has ended, or was cancelled before."""
        with self._lock:
            if run.ends_by < inf or not (run in self._running or run in self._overdue):
                return False
            run.ends_by = clock.monotonic() + CANCEL_TIMEOUT
            self._wake_keeper_by(run.ends_by)
            return True

    def stuck(self, now: float) -> list[Run]:
        """The coroutines past their time limit that have not ended, although they were cancelled long enough ago."""
        with self._lock:
            stuck = []
            for run in self._overdue:
                if now - run.ends_by > OVERSLEPT:
                    run.ends_by = now + OVERSLEPT  # it had no time to end
                elif now >= run.ends_by:
                    stuck.append(run)
            return stuck

    def expire(self, run: Run, now: float) -> None:
        """Let the time limit of a running job be over."""
        with self._lock:
            run.fails_at = min(run.fails_at, now)

    def wait_for_coroutines(self, timeout: float) -> None:
        """Wait until no coroutine runs, at most `timeout` seconds."""
        with self._lock:
            self._coroutine_has_ended.wait_for(lambda: not self._in_loop, timeout)

    def fail_at_time_limit(self, now: float) -> list[Result]:
        """Fail the attempts whose time limit is over."""
        with self._lock:
            late = [run for run in self._running if now >= run.fails_at]
            for run in late:
                del self._running[run]
                self._overdue[run] = None
            return self._results.hand_out(
                [Result(run, TIME_LIMIT, run.registration.time_limit, now) for run in late if run.holds_lease]
            )

    def withdraw_waiting(self, now: float) -> list[Result]:
        """Take back the jobs that no thread has started, if they have waited too long or the worker stops."""
        with self._lock:
            if self._stopping or (self._waiting and now - self._waiting[0].claimed_at >= LONGEST_WAIT_TO_START):
                return self._results.hand_out(self._withdraw(now))
            return []

    def withdraw_all(self, now: float) -> list[Result]:
        """At a hard end: take back all jobs, also those whose handlers run."""
        with self._lock:
            self._stopping = self._ended = True
            running = [Result(run, RELEASE, 0.0, now) for run in self._running if run.holds_lease]
            self._running.clear()
            return self._results.hand_out([*self._withdraw(now), *running])

    def _withdraw(self, now: float) -> list[Result]:
        withdrawn = [*self._waiting, *self._lapsed]
        self._waiting.clear()
        self._lapsed.clear()
        for run in withdrawn:
            # They waited too long, so the average is forgotten: the next claim takes one job for each thread.
            self._means.pop(run.job.queue, None)
        return [Result(run, RELEASE, 0.0, now) for run in withdrawn if run.holds_lease]

    def stop(self) -> None:
        """Claim and start no more."""
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

    def wait_for_announcements(self, timeout: float) -> None:
        """Wait until every handler thread has sent its events, at most `timeout` seconds."""
        with self._lock:
            self._announced.wait_for(lambda: not self._results.announcers, timeout)

    def counts(self) -> tuple[int, int]:
        """How many attempts completed, and how many failed."""
        with self._lock:
            return self._results.completed, self._results.failed

    @property
    def is_done(self) -> bool:
        """True if nothing is held and nothing is left to be written."""
        with self._lock:
            return self._is_done()

    @property
    def is_stopping(self) -> bool:
        with self._lock:
            return self._stopping

    @property
    def is_exhausted(self) -> bool:
        """True if every place for a sync handler is kept by one past its time limit, and that is on the rows."""
        with self._lock:
            kept = sum(not run.in_loop for run in self._overdue)
            return kept >= self.size and self._results.are_written

    @property
    def fault(self) -> BaseException | None:
        """The error that `break_down` was called with."""
        with self._lock:
            return self._fault

    # With the lock held

    def _is_done(self) -> bool:
        held = self._running or self._waiting or self._lapsed
        return self._results.are_written and not (held or self._is_carrying_out)

    def _leader_is_slow(self, now: float) -> bool:
        return self._busy_since is not None and now - self._busy_since >= SLOW

    def _give_up_leadership(self) -> None:
        self._leader, self._busy_since = None, None
        if self._idle:
            self._followers.notify()

    def _wake_keeper_by(self, moment: float) -> None:
        if moment < self._keeper_wakes_at - _TOLERANCE:
            self._keeper_wakes_at = moment
            self._ring_keeper()
