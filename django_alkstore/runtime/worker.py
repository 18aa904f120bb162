"""A worker: handler threads, one of which leads, and the keeper. Here it starts and ends; `docs/worker.md` explains it.

Status 0: it was told to stop, and has finished. Status 1: the grace was over, or a second signal came, or it broke.
Status 4: every thread is kept by a handler past its time limit, or a cancelled coroutine does not end. Status 5: the
database file was replaced, or is gone.
"""

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from django.db import DatabaseError, connections

from django_alkstore import clock, signals
from django_alkstore.dialects.base import DatabaseReplaced
from django_alkstore.dialects.liveness import Liveness
from django_alkstore.dialects.transactions import is_contention
from django_alkstore.dialects.watch import Bell, Watch
from django_alkstore.handled import new_queues, takes_every_task
from django_alkstore.registrations import Registration, where
from django_alkstore.runtime import event_loop
from django_alkstore.runtime.event_loop import EventLoopThread
from django_alkstore.runtime.events_thread import EventsThread
from django_alkstore.runtime.handler_threads import HandlerThread
from django_alkstore.runtime.jobs import Run
from django_alkstore.runtime.keeper import Keeper
from django_alkstore.runtime.leadership import Leadership
from django_alkstore.runtime.perform import project_context
from django_alkstore.runtime.shared_state import SharedState
from django_alkstore.runtime.writing import Writer
from django_alkstore.services.error_backoff import ErrorBackoff

EXIT_OK = 0
EXIT_BROKE = 1
EXIT_CUT_SHORT = 1
EXIT_EXHAUSTED = 4
EXIT_REPLACED = 5

SAME_SIGNAL = 1.0
"""Seconds after a signal for which another one counts as the same: a terminal and a process manager both send one."""
LAST_WRITES = 5.0
"""Seconds of waiting for the writer lock at a hard end."""
LAST_EVENTS = 2.0
"""Seconds of waiting for receivers and log handlers at a hard end."""
LAST_WORDS = 0.5
"""Seconds of waiting for the log to say that jobs could not be given back."""
LAST_STEPS = 2.0
"""Seconds that cancelled coroutines may take at a hard end."""
THREADS_END = 1.0
"""Seconds that idle threads may take to end."""


class Worker:
    """Runs the handlers of some queues and outboxes of one database."""

    def __init__(
        self,
        alias: str,
        registrations: Sequence[Registration],
        *,
        concurrency: int = 4,
        async_concurrency: int = 100,
        grace: float = 30.0,
        end_process: Callable[[int], None] = os._exit,
        pause: Callable[[float], None] = clock.sleep,
        every_task: bool = False,
    ) -> None:
        """`grace`: seconds that running handlers may take after the first signal.

        `every_task`: also run the queues of tasks that come while the worker runs, if the setting `TASKS` says so.
        `pause` sleeps for some seconds before another attempt to open a locked database.
        """
        self.alias = alias
        self.grace = grace
        self.at_stop: Callable[[float], object] = _do_nothing
        """Called when the worker begins to stop, with the seconds that it may take."""
        self.end_process = end_process
        """Called with the exit code if the process must end although handlers run."""
        self._bell = Bell()
        self._watch = _open_watch(alias, pause)
        self._liveness = Liveness(alias)
        self._stopping = threading.Event()
        queues = {registration.queue: registration for registration in registrations}
        self._queues = list(queues)
        new = partial(new_queues, alias) if every_task and takes_every_task(alias) else None
        self._runs_coroutines = new is not None or any(one.is_async or one.resolve for one in registrations)
        self._state = SharedState(concurrency, self._watch.ring, self._bell.ring, async_concurrency)
        self._connection = connections[alias]
        self._events = EventsThread()
        self._writer = Writer(self._connection, self._liveness.holder, self._liveness.file, self._events.post)
        self._keeper = Keeper(self._state, self._writer, self._liveness, self._queues, self._bell, self._watch.version)
        leadership = Leadership(self._state, self._writer, self._watch, queues, self._stopping, new)
        context = project_context()
        self._event_loop = EventLoopThread(self._state, context, self._events.post)
        # One more than sync handlers at once: while all of these run, a thread must claim for the event loop.
        self._threads = [
            HandlerThread(number, self._state, leadership, self._event_loop, context)
            for number in range(concurrency + self._runs_coroutines)
        ]
        self._stops: list[str] = []
        """Reasons to stop. Only ever appended to, also by signal handlers, which may take no lock."""
        self._signals: list[float] = []
        """The moments of the signals that count. Appended to like the above."""
        self._grace_ends = inf

    def stop(self, reason: str) -> None:
        """Stop after the running handlers; if it is called again more than a second later, at once.

        Safe in a signal handler.
        """
        now = clock.monotonic()
        if not self._signals or now - self._signals[0] >= SAME_SIGNAL:
            self._signals.append(now)
        self.wind_down(reason)

    def wind_down(self, reason: str) -> None:
        """Stop after the running handlers, however often it is called."""
        self._stops.append(reason)
        self._bell.ring()

    def run(self) -> int:
        """Work until told to stop; the exit code.

        If handlers still run at the end, the process ends here, right after their jobs are given back.
        """
        self._events.start()
        self._connection.close()  # it is opened after the watch, which notices from then on if the file is replaced
        self._connection.inc_thread_sharing()
        with self._events.sends_for_this_thread():
            self._announce_start()
            try:
                with self._bell.rung_by_signals():
                    code = self._work()
            except BaseException as error:
                signals.emit(signals.worker_broke, error=error)
                self.at_stop(THREADS_END)
                self._give_back("the worker broke")
                if not self._let_threads_end():
                    self.end_process(EXIT_BROKE)
                raise
            if code == EXIT_OK:
                self._state.wait_for_announcements(LAST_EVENTS)
                self._keeper.end(clock.waiting_from() + LAST_WRITES)
            if code in (EXIT_OK, EXIT_REPLACED):
                self._announce_end()
                if not self._let_threads_end():
                    self.at_stop(THREADS_END)
                    self.end_process(code)
        self._close()
        return code

    def _announce_start(self) -> None:
        signals.emit(
            signals.worker_started,
            database=str(self._connection.settings_dict["NAME"]),
            queues=self._queues,
            concurrency=self._state.size,
            pid=os.getpid(),
            worker_id=self._liveness.holder,
        )
        if self._liveness.reason is not None:
            signals.emit(signals.crash_detection_off, reason=self._liveness.reason)

    def _work(self) -> int:
        try:
            self._keeper.look_after()  # leaves the sign of life, before a handler may keep the writer lock
            if self._runs_coroutines:
                self._event_loop.start()
            for thread in self._threads:
                thread.start()
            while True:
                code = self._verdict()
                if code is not None:
                    return code
                self._keeper.sleep(self._grace_ends)
                self._keeper.look_after()
        except DatabaseReplaced as error:
            # Running handlers write to a file that nobody looks at any more, and so would this worker.
            signals.emit(signals.database_replaced, error=error)
            self.at_stop(THREADS_END)
            return EXIT_REPLACED

    def _verdict(self) -> int | None:
        """The exit code, as soon as there is one."""
        if self._state.fault is not None:
            raise self._state.fault
        if not self._stops:
            if self._state.is_exhausted:
                return self._give_up()
            stuck = self._state.stuck(clock.monotonic())
            return self._give_up_loop(stuck[0]) if stuck else None
        self._begin_to_stop()
        if self._state.is_done:
            return EXIT_OK
        if len(self._signals) > 1:
            return self._end_at_once(EXIT_CUT_SHORT, "second signal")
        if clock.monotonic() >= self._grace_ends:
            return self._end_at_once(EXIT_CUT_SHORT, "the grace is over")
        return None

    def _give_up(self) -> int:
        signals.emit(signals.worker_exhausted, job_ids=sorted(run.job.id for run in self._state.overdue()))
        self.at_stop(THREADS_END)
        return self._end_at_once(EXIT_EXHAUSTED, "exiting")

    def _give_up_loop(self, stuck: Run) -> int:
        blocks = self._event_loop.current() if self._event_loop.is_blocked(stuck) else None
        run = blocks or stuck
        if blocks is not None:
            # Its attempt must count. Otherwise it would block the next worker, and the one after that.
            self._state.expire(blocks, clock.monotonic())
            self._keeper.look_after()
        signals.emit(
            signals.worker_stuck, job=run.job, handler=where(run.registration.target), blocks_loop=blocks is not None
        )
        self.at_stop(THREADS_END)
        return self._end_at_once(EXIT_EXHAUSTED, "exiting")

    def _begin_to_stop(self) -> None:
        if self._state.is_stopping:
            return
        self._state.stop()
        self._writer.trouble.try_at_once()
        self._stopping.set()
        self._grace_ends = clock.monotonic() + self.grace
        signals.emit(signals.worker_stopping, reason=self._stops[0], running=len(self._state.running()))
        self.at_stop(0.0)
        self._keeper.look_after()  # gives back what has not started

    def _end_at_once(self, code: int, reason: str) -> int:
        """End the process though handlers run. Their jobs are given back as the last thing before the end."""
        self._give_back(reason)
        self.end_process(code)
        return code

    def _give_back(self, reason: str) -> None:
        """Write the results of finished handlers; announce the end; give back everything else."""
        deadline = clock.waiting_from() + LAST_WRITES
        self._state.stop()
        running = self._state.running()
        self._keeper.cut_off(running)  # first: one of them may have the writer lock
        self._state.wait_for_coroutines(LAST_STEPS)
        self._keeper.write_at_the_end(self._state.take_results(), deadline)
        with self._writer.turn():  # no claim is being made
            held = self._state.withdraw_all(clock.monotonic())
        if held:
            signals.emit(signals.worker_gives_back, job_ids=[result.run.job.id for result in held], reason=reason)
        self._announce_end()
        self._keeper.cut_off(running)  # those that have opened a transaction since
        given_back = self._keeper.write_at_the_end([*self._state.take_results(), *held], deadline)
        if not (given_back and self._keeper.end(deadline)):
            self._events.flush(LAST_WORDS)

    def _announce_end(self) -> None:
        completed, failed = self._state.counts()
        signals.emit(signals.worker_stopped, completed=completed, failed=failed)
        self._events.flush(LAST_EVENTS)

    def _let_threads_end(self) -> bool:
        """True if every thread has ended: no handler keeps one."""
        self._state.end()
        deadline = clock.monotonic() + (0.0 if self._state.overdue() or self._state.running() else THREADS_END)
        self._event_loop.end()
        started = [thread for thread in (*self._threads, self._event_loop) if thread.is_alive()]
        for thread in started:
            thread.join(max(0.0, deadline - clock.monotonic()))
        return not any(thread.is_alive() for thread in started) and not event_loop.has_abandoned_threads()

    def _close(self) -> None:
        self._events.finish(LAST_EVENTS)
        self._connection.dec_thread_sharing()
        self._connection.close()
        self._liveness.close()
        self._keeper.close()
        self._watch.close()
        self._bell.close()


def _do_nothing(_: float) -> None:
    """The default of `at_stop`."""


def _open_watch(alias: str, pause: Callable[[float], None]) -> Watch:
    """Open a watch. That other processes lock the database for a while is no reason to end."""
    error_backoff = ErrorBackoff("starting", alias)
    while True:
        try:
            watch = Watch(alias)
        except DatabaseError as error:
            if not is_contention(alias, error):
                raise
            pause(error_backoff.after(error))
        else:
            error_backoff.reset()
            return watch
