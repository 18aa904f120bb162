"""The worker: one loop that owns all of the queue's writes, and threads that run handlers.

Each round of the loop is one transaction, if there is anything to write: it finishes what has ended, renews the
leases that need it and claims what the free threads can start. With many short jobs a round finishes and claims
many at once; a lone job is claimed and finished at once, waiting for nobody. While a handler runs, no transaction
of the library is open (`atomic=True` aside). A crash between a handler's end and the commit of its round means a
redelivery, as a crash before the handler's end does.

What the loop waits for, in one place (`Watch`): a commit by anybody, a handler's end (the bell), a signal (the
bell), and its own deadlines: a job's due moment, a lease to renew, a time limit, the grace's end.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from django.db import DatabaseError, connections

from django_alkstore import clock, failures, signals
from django_alkstore.clock import LAST_US, SECOND
from django_alkstore.dialects import Operations
from django_alkstore.dialects.base import UNTAKEN, ClaimedJob, DatabaseReplaced
from django_alkstore.dialects.transactions import (
    busy_timeout,
    is_contention,
    limit_wait,
    read,
    write_operations,
    write_statement,
)
from django_alkstore.dialects.watch import Watch
from django_alkstore.registry import Registration
from django_alkstore.runtime.lines import gathered
from django_alkstore.runtime.perform import Ending
from django_alkstore.runtime.threads import Run, Threads
from django_alkstore.services import JobHandle, outcomes
from django_alkstore.services.claims import Swept, bury_unreadable, handles_of, sweep_batch
from django_alkstore.services.locks import unique_owner
from django_alkstore.services.maintenance import Upkeep
from django_alkstore.services.outcomes import RELEASE, Kind, Outcome
from django_alkstore.services.patience import Patience

LONGEST_SLEEP = 60.0
LONGEST_PREFETCH = 1.0
"""Seconds that a claimed job may wait for a free thread before it is given back."""
QUICK = 0.1
"""Seconds. Only while handlers take less than this on average is anything claimed ahead."""
INSTANT = 0.002
"""Seconds. Handlers that take less on average have one thread called after the other, this far apart."""
RENEWALS_PER_LEASE = 3
LONGEST_WAIT = 0.1
"""Seconds that a round waits in line for the writer lock, before signals and time limits are looked after again."""
FILE_INTERVAL = 1.0
"""Seconds."""
SETTLE = 0.025
"""Seconds after a look for work that found none, while others commit, until the next; at least."""
LOOKING_SHARE = 25
"""And at least so many times as long as the look took, however many queues there are."""

EXIT_OK = 0
EXIT_GRACE_OVER = 1
EXIT_EXHAUSTED = 4
EXIT_REPLACED = 5


@dataclass(slots=True)
class Work:
    """What one round is to write."""

    acks: list[Run] = field(default_factory=list)
    endings: list[tuple[Run, Outcome]] = field(default_factory=list)
    renewals: list[Run] = field(default_factory=list)
    queues: list[str] = field(default_factory=list)
    wanted: int = 0

    def __bool__(self) -> bool:
        return bool(self.acks or self.endings or self.renewals or (self.queues and self.wanted))


@dataclass(slots=True)
class Written:
    """What one round has written, for once it is committed."""

    acked: set[int] = field(default_factory=set)
    endings: list[bool] = field(default_factory=list)
    renewals: list[int | None] = field(default_factory=list)
    """Where each lease ends now; `None`: it was lost."""
    claimed: list[JobHandle] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    """Queues that had less than was asked for."""
    broken: list[tuple[ClaimedJob, Exception]] = field(default_factory=list)
    """Claimed, and not to be read."""
    swept: list[Swept] = field(default_factory=list)


class Worker:
    """Runs the handlers of some queues and outboxes of one database."""

    def __init__(
        self,
        alias: str,
        registrations: Sequence[Registration],
        *,
        concurrency: int = 4,
        grace: float = 30.0,
        end_process: Callable[[int], None] = os._exit,
    ) -> None:
        self.alias = alias
        self.registrations = {registration.queue: registration for registration in registrations}
        self.concurrency = concurrency
        self.grace = grace
        self.worker_id = unique_owner()
        self.at_stop: Callable[[float], object] = float
        """Called when the worker begins to stop, with the seconds that it may take."""
        self._end_process = end_process
        self._watch = _open_watch(alias)
        self._threads = Threads(concurrency, self._relieve, self._watch.ring)
        self._baton = threading.Lock()
        """Held by whoever runs a round and may touch what is below: the loop, or a handler's thread in its place."""
        self._relieved = False
        """Is it a handler's thread?"""
        self._wakes_at = 0.0
        """When the loop, which sleeps, will wake by itself."""
        self._listening = False
        """Does it sleep until somebody commits?"""
        self._attentive = False
        """Does it look up every moment, to see whether what waits for a thread gets on?"""
        self._fault: BaseException | None = None
        """What went wrong in a handler's thread that ran a round; for the loop to raise."""
        self._runs: dict[Run, None] = {}
        """Claimed and not ended: those that wait for a thread, and those that have one."""
        self._stuck: set[Run] = set()
        """Past their time limit: the attempt has been failed, the thread is still held."""
        self._unwritten: list[tuple[Run, Outcome]] = []
        """Ended, and not on the row yet."""
        self._due: dict[str, int | None] = dict.fromkeys(self.registrations, 0)
        """When there may be something to claim, by queue, in microseconds; `None`: not known, ask."""
        self._seen = self._watch.version()
        """The database's version before anything was learnt that `_due` still says."""
        self._look_again_at = 0.0
        """Not before this moment are queues that were found empty looked at again."""
        self._file_due_at = 0.0
        self._has_written = False
        self._news_of_others = False
        """Has somebody committed, and not this loop itself, since the last look for work?"""
        self._rotation = 0
        self._mean_seconds = LONGEST_PREFETCH
        self._upkeep = Upkeep(alias, self.registrations, self.worker_id)
        self._patience = Patience("working", alias)
        self._paused_until = 0.0
        self._in_line_since: float | None = None
        """Since when others have kept the writer lock from this loop."""
        self._stops: list[str] = []
        self._signals = 0
        self._grace_ends = 0.0
        self._stop_announced = False
        self._completed = 0
        self._failed = 0

    def stop(self, reason: str) -> None:
        """Stop: after the running handlers the first time, at once the second. Safe in a signal handler."""
        self._signals += 1
        self.wind_down(reason)

    def wind_down(self, reason: str) -> None:
        """Stop after the running handlers, however often it is said."""
        self._stops.append(reason)
        self._watch.ring()

    def run(self) -> int:
        """Work until told to stop; the exit code.

        Where handlers are still running at the end, the process is ended here, as the last thing after their
        leases are given back.
        """
        database = str(connections[self.alias].settings_dict["NAME"])
        signals.emit(
            signals.worker_started,
            database=database,
            queues=list(self.registrations),
            concurrency=self.concurrency,
            pid=os.getpid(),
            worker_id=self.worker_id,
        )
        # To be opened after the watch, which sees a file that is replaced from its own opening on.
        self._connection = connections[self.alias]
        self._connection.close()
        self._connection.inc_thread_sharing()
        self._threads.start()
        with self._watch.rung_by_signals():
            code = self._work()
        self._upkeep.end()
        signals.emit(signals.worker_stopped, completed=self._completed, failed=self._failed)
        if not self._threads.finish(patience=0.0 if self._stuck or self._runs else 1.0):
            self._end_process(code)
        self._watch.close()
        return code

    def _work(self) -> int:
        self._baton.acquire()  # and kept at the end: then nobody runs a round any more
        try:
            while True:
                self._round()
                code = self._verdict()
                if code is not None:
                    return code
                self._wait()
        except DatabaseReplaced as error:
            # What is running writes to where nobody looks any more, and so would this loop.
            signals.emit(signals.database_replaced, error=error)
            self.at_stop(1.0)
            return EXIT_REPLACED

    # One round

    def _relieve(self) -> bool:
        """In a handler's thread that has just ended a job: run the loop's round in its place.

        To wake the loop, and to be woken by it, costs more than a short handler does. `False`: the loop is to be
        rung.
        """
        if not self._baton.acquire(blocking=False):
            return False
        try:
            if self._stops or self._stuck or clock.monotonic() < self._paused_until:
                return False
            self._relieved = True
            own = connections[self.alias]
            connections[self.alias] = self._connection
            try:
                self._round()
            finally:
                connections[self.alias] = own
                self._relieved = False
            return not self._is_wanted()
        except BaseException as error:
            self._fault = error
            return False
        finally:
            self._baton.release()

    def _is_wanted(self) -> bool:
        """Must the loop, which sleeps, be woken to sleep otherwise?"""
        if self._wants_more() and not self._listening:
            return True
        if self._threads.one_by_one and self._threads.any_waiting() and not self._attentive:
            return True
        return clock.monotonic() + self._next_deadline() < self._wakes_at - 0.001

    def _round(self) -> None:
        with gathered():
            self._do_round()

    def _do_round(self) -> None:
        self._collect()
        if clock.monotonic() < self._paused_until:
            return
        try:
            limit_wait(self.alias, LONGEST_WAIT)
            work = self._plan()
            if work:
                written = write_operations(self.alias, partial(self._write, work))
                self._unwritten.clear()
                self._has_written = True
                self._in_line_since = None
                self._follow_up(work, written)
            # After what has ended is on its row and what runs is renewed: it sweeps.
            self._upkeep.step()
            self._look_ahead()
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
                return SETTLE
        return self._patience.after(error)

    def _collect(self) -> None:
        """Take in what has ended, what is over its time, and what has waited too long for a thread."""
        for run, ending in self._threads.endings():
            if run in self._stuck:
                self._stuck.discard(run)
                continue  # it was failed at its time limit; its thread is free again
            del self._runs[run]
            run.seconds = ending.seconds
            self._mean_seconds += (ending.seconds - self._mean_seconds) / 8
            if ending.outcome is None:
                self._note_settled(run, ending)
            else:
                self._unwritten.append((run, ending.outcome))
        self._threads.one_by_one = self._mean_seconds < INSTANT
        now = clock.monotonic()
        for run in list(self._runs):
            if run.started_at is not None and now - run.started_at >= run.registration.time_limit:
                self._fail_at_time_limit(run)
        if self._stops or self._waited_too_long(now):
            self._take_back("stopping" if self._stops else "no thread became free")

    def _waited_too_long(self, now: float) -> bool:
        oldest = next((run for run in self._runs if run.started_at is None), None)
        return oldest is not None and now - oldest.claimed_at >= LONGEST_PREFETCH

    def _fail_at_time_limit(self, run: Run) -> None:
        run.seconds = run.registration.time_limit
        del self._runs[run]
        self._stuck.add(run)
        self._unwritten.append((run, outcomes.retry(failures.TIME_LIMIT)))
        self._threads.cut_off(run)
        run.job.lease_lost.set()

    def _take_back(self, reason: str) -> None:
        """Give back what no thread has started; nothing is claimed ahead until handlers are quick again."""
        withdrawn = self._threads.withdraw()
        for run in withdrawn:
            del self._runs[run]
            self._unwritten.append((run, RELEASE))
        if withdrawn:
            self._mean_seconds = LONGEST_PREFETCH
            signals.emit(signals.worker_gave_back, job_ids=[run.job.id for run in withdrawn], reason=reason)

    def _plan(self) -> Work:
        now = clock.monotonic()
        work = Work(renewals=[run for run in self._runs if now >= run.renew_at and run.holds_lease])
        for run, outcome in self._unwritten:
            if outcome.kind is Kind.ACK:
                work.acks.append(run)
            else:
                work.endings.append((run, outcome))
        if not self._stops and (wanted := self._capacity()):
            work.wanted = wanted
            work.queues = self._due_queues()
        return work

    def _capacity(self) -> int:
        """How many jobs to claim: what the free threads can start, and as many again while handlers are quick."""
        held = len(self._runs) + len(self._stuck)
        prefetch = self.concurrency if self._mean_seconds < QUICK and not self._stuck else 0
        return max(0, self.concurrency + prefetch - held)

    def _due_queues(self) -> list[str]:
        """The queues that may have something to claim, a different one first each time."""
        now = clock.now_us()
        due = [queue for queue, moment in self._due.items() if moment is not None and moment <= now]
        if len(due) > 1:
            self._rotation = (self._rotation + 1) % len(due)
            due = due[self._rotation :] + due[: self._rotation]
        return due

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
        return now if run.job.is_lost and run not in self._stuck else UNTAKEN

    def _claim(self, db: Operations, work: Work, written: Written) -> None:
        """Claim what is wanted; a queue with nothing to claim is swept instead, and asked again next round."""
        left = work.wanted
        for queue in work.queues:
            while left > 0 and (rows := db.claim(queue, self.worker_id, left, clock.now_us())):
                claimed, broken = handles_of(self.alias, rows)
                written.claimed += claimed
                written.broken += broken
                left -= len(rows)
            if left <= 0:
                return
            swept = sweep_batch(queue, db)
            written.swept.append(swept)
            if not swept:
                written.drained.append(queue)

    # After its commit

    def _follow_up(self, work: Work, written: Written) -> None:
        now = clock.monotonic()
        claimed = [Run(job, self.registrations[job.queue], claimed_at=now) for job in written.claimed]
        for run in claimed:
            self._set_renewal(run, now)
            self._runs[run] = None
        self._threads.give(claimed)
        if not self._relieved:
            self._threads.call_next()
        for queue in written.drained:
            self._due[queue] = None
        for run, ends in zip(work.renewals, written.renewals, strict=True):
            if ends is not None:
                run.job.lease_expires_us = ends
                self._set_renewal(run, now)
            elif run.holds_lease and not run.registration.atomic:
                self._note_lost(run, "renewal")
        for run in work.acks:
            self._note_ack(run, took_effect=run.job.id in written.acked)
        for (run, outcome), took_effect in zip(work.endings, written.endings, strict=True):
            self._note_ending(run, outcome, took_effect=took_effect)
        for swept in written.swept:
            swept.announce()
        # Last, since each is a statement of its own that may fail: then the lease lapses, and it is tried again.
        for row, error in written.broken:
            write_statement(self.alias, partial(bury_unreadable, row, error))

    def _set_renewal(self, run: Run, now: float) -> None:
        run.renew_at = now + run.job.visibility_timeout / RENEWALS_PER_LEASE

    def _note_settled(self, run: Run, ending: Ending) -> None:
        self._completed += 1
        event = signals.job_completed if run.registration.atomic else signals.job_settled
        signals.emit(event, job=run.job, seconds=ending.seconds)

    def _note_ack(self, run: Run, *, took_effect: bool) -> None:
        if took_effect:
            self._completed += 1
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
        self._failed += 1
        wait = outcomes.wait_before_retry(run.job, outcome)
        said = {
            "seconds": run.seconds,
            "error": outcome.error,
            "traceback": outcome.traceback,
            "asked_for": outcome.asked_for,
        }
        if wait is None:
            signals.emit(signals.job_died, job=run.job, **said)
        else:
            signals.emit(signals.job_retried, job=run.job, retry_in=wait, **said)

    def _note_lost(self, run: Run, what: str, traceback: str = "") -> None:
        run.lost = True
        run.job.lease_lost.set()
        signals.emit(signals.lease_lost, job=run.job, what=what, traceback=traceback)

    def _look_ahead(self) -> None:
        """For each queue that was found empty: when is its next job due? Costs a read, only after news."""
        unknown = [queue for queue, moment in self._due.items() if moment is None]
        if not unknown:
            return
        started = clock.monotonic()
        for queue, moment in read(self.alias, lambda db: db.next_claims(unknown)).items():
            self._due[queue] = _NEVER if moment is None else moment
        now = clock.monotonic()
        if self._news_of_others and min(moment for moment in self._due.values() if moment is not None) > clock.now_us():
            self._look_again_at = now + max(SETTLE, (now - started) * LOOKING_SHARE)
        self._news_of_others = False

    # Waiting

    def _wait(self) -> None:
        timeout = self._next_deadline()
        self._wakes_at = clock.monotonic() + timeout
        self._listening = self._wants_more()
        self._attentive = self._threads.one_by_one and self._threads.any_waiting()
        self._threads.quiet = True
        if not self._threads.any_ended() and timeout > 0:
            self._baton.release()
            try:
                news = self._sleep(timeout)
            finally:
                self._baton.acquire()
            if news:
                self._take_news()
            if not self._listening:
                self._look_at_the_file()
        self._threads.quiet = False
        if self._fault is not None:
            raise self._fault
        if not self._threads.any_ended():
            self._threads.call_next()

    def _sleep(self, timeout: float) -> bool:
        """Until the bell is rung or somebody commits what we listen for, without the baton; was it that?"""
        started = self._threads.started
        left = timeout
        while left > 0:
            step = min(left, INSTANT) if self._attentive else left
            if self._listening:
                news, rung = self._listen(step)
                if news: return True
            else:
                rung = self._watch.wait_for_bell(step)
            if rung or not self._attentive:
                return False
            if started == self._threads.started:
                if not self._threads.any_waiting():
                    return False
                self._threads.call_next()
            started = self._threads.started
            left = self._wakes_at - clock.monotonic()
        return False

    def _listen(self, timeout: float) -> tuple[bool, bool]:
        # While others keep committing what is no work of ours, it is looked for now and then only.
        pause = self._look_again_at - clock.monotonic()
        if pause > 0 and self._watch.wait_for_bell(min(pause, timeout)):
            return False, True
        news = self._watch.wait(self._seen, max(0.0, timeout - max(0.0, pause)))
        return news, not news

    def _take_news(self) -> None:
        # Somebody has committed: what was known about empty queues is out of date.
        self._seen = self._watch.version()
        self._news_of_others, self._has_written = not self._has_written, False
        self._forget_the_empty()

    def _look_at_the_file(self) -> None:
        """Is it still there? One that waits for news looks anyway; this is for a loop that has its hands full."""
        now = clock.monotonic()
        if now >= self._file_due_at:
            self._file_due_at = now + FILE_INTERVAL
            self._watch.version()

    def _forget_the_empty(self) -> None:
        now = clock.now_us()
        for queue, moment in self._due.items():
            if moment is not None and moment > now:
                self._due[queue] = None

    def _wants_more(self) -> bool:
        return not self._stops and self._capacity() > 0

    def _next_deadline(self) -> float:
        """Seconds until there is something to do, though nobody tells."""
        now = clock.monotonic()
        if now < self._paused_until:
            return self._paused_until - now
        moments = [now + LONGEST_SLEEP, now + self._upkeep.due_in()]
        if self._stops:
            moments.append(self._grace_ends)
        elif self._wants_more():
            soonest = min((m for m in self._due.values() if m is not None), default=_NEVER)
            moments.append(now + (soonest - clock.now_us()) / SECOND)
        for run in self._runs:
            if run.holds_lease:
                moments.append(run.renew_at)
            # A thread may be about to start it: then its time limit is counted from about now.
            started_at = run.claimed_at if run.started_at is None else run.started_at
            moments.append(started_at + run.registration.time_limit)
            if run.started_at is None:
                moments.append(run.claimed_at + LONGEST_PREFETCH)
        return max(0.0, min(moments) - now)

    # The end

    def _verdict(self) -> int | None:
        """The exit code, once there is one."""
        if len(self._stuck) >= self.concurrency and not self._unwritten:
            return self._give_up()
        if not self._stops:
            return None
        if not self._stop_announced:
            self._stop_announced = True
            self._grace_ends = clock.monotonic() + self.grace
            signals.emit(signals.worker_stopping, reason=self._stops[0], running=len(self._runs))
            self.at_stop(0.0)
        if not self._runs and not self._unwritten and not self._threads.any_ended():
            return EXIT_OK
        if self._signals > 1 or clock.monotonic() >= self._grace_ends:
            return self._leave_at_once()
        return None

    def _give_up(self) -> int:
        """No thread will ever be free: let the supervisor start the process afresh."""
        signals.emit(signals.worker_exhausted, job_ids=sorted(run.job.id for run in self._stuck))
        self.at_stop(1.0)
        self._take_back("exiting")
        self._give_back_all("exiting")
        return EXIT_EXHAUSTED

    def _leave_at_once(self) -> int:
        self._give_back_all("second signal" if self._signals > 1 else "the grace is over")
        self._end_process(EXIT_GRACE_OVER)
        return EXIT_GRACE_OVER

    def _give_back_all(self, reason: str) -> None:
        """Write what has ended, and give back the rest, attempts refunded. The process ends right after."""
        self._collect()
        held = list(self._runs)
        if held:
            signals.emit(signals.worker_gave_back, job_ids=[run.job.id for run in held], reason=reason)
            for run in held:
                self._threads.cut_off(run)
        self._upkeep.end()
        signals.flush()
        work = Work(endings=[*self._unwritten, *((run, RELEASE) for run in held)])
        if not work:
            return
        try:
            write_operations(self.alias, partial(self._write, work))
        except DatabaseError as error:
            # The leases lapse by themselves; there is nobody left here to try again.
            signals.emit(signals.database_trouble, doing="giving jobs back", error=error, pause=0.0)


def _open_watch(alias: str) -> Watch:
    """A watch, as soon as it can be had: that others shut everybody out for a while is no reason to end."""
    patience = Patience("starting", alias)
    while True:
        try:
            watch = Watch(alias)
        except DatabaseError as error:
            if not is_contention(alias, error):
                raise
            _sleep(patience.after(error))
        else:
            patience.reset()
            return watch


_sleep = time.sleep
_NEVER = 2**63 - 1
