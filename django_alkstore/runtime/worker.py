"""The worker: a loop, and threads that run handlers.

All that a worker writes is written in rounds (`Rounds`), by one thread at a time: the one that has the baton. That
is the loop, or a handler's thread that has just ended a job (while handlers are quick, once nothing is left to
start): to wake the loop, and to be woken by it, costs more than a short handler does. While a handler runs, no
transaction of the library is open (`atomic=True` aside).

What the loop waits for, in one place (`Watch`): a commit by anybody, a signal or a handler's thread that needs it
(the bell), and its own deadlines: a job's due moment, a lease to renew, a time limit, the grace's end.
"""

import os
import time
from collections.abc import Callable, Sequence

from django.db import DatabaseError, connections

from django_alkstore import clock, signals
from django_alkstore.dialects.base import DatabaseReplaced
from django_alkstore.dialects.forks import guard
from django_alkstore.dialects.transactions import is_contention
from django_alkstore.dialects.watch import Watch
from django_alkstore.registry import Registration
from django_alkstore.runtime.rounds import INSTANT, Rounds
from django_alkstore.runtime.threads import Threads
from django_alkstore.services.locks import unique_owner
from django_alkstore.services.patience import Patience

SOON = 0.001
"""Seconds that the loop may wake later than it should."""

EXIT_OK = 0
EXIT_BROKE = 1
EXIT_GRACE_OVER = 1
EXIT_EXHAUSTED = 4
EXIT_REPLACED = 5


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
        self.grace = grace
        self.at_stop: Callable[[float], object] = float
        """Called when the worker begins to stop, with the seconds that it may take."""
        self._end_process = end_process
        self._watch = _open_watch(alias)
        self._threads = Threads(concurrency, self._relieve, self._watch.ring)
        by_queue = {registration.queue: registration for registration in registrations}
        self._rounds = Rounds(alias, by_queue, unique_owner(), self._threads, self._watch.version)
        self._baton = guard()
        """Whoever has it, and nobody else, may use the rounds, and the connection that they are written on."""
        self._connection = connections[alias]
        self._fault: BaseException | None = None
        """What a round broke with in a handler's thread, for the loop to raise."""
        self._wakes_at = 0.0
        """When the loop, where it sleeps, wakes by itself."""
        self._listening = False
        """Does it wake when somebody commits?"""
        self._attentive = False
        """Does it look up every moment, to see that what waits for a thread gets on?"""
        self._stops: list[str] = []
        self._signals = 0
        self._grace_ends = 0.0
        self._stop_announced = False

    def stop(self, reason: str) -> None:
        """Stop: after the running handlers the first time, at once the second. Safe in a signal handler."""
        self._signals += 1
        self.wind_down(reason)

    def wind_down(self, reason: str) -> None:
        """Stop after the running handlers, however often it is said."""
        self._stops.append(reason)
        self._rounds.stopping = True
        self._watch.ring()

    def run(self) -> int:
        """Work until told to stop; the exit code.

        Where handlers are still running at the end, the process is ended here, as the last thing after their
        leases are given back.
        """
        signals.emit(
            signals.worker_started,
            database=str(self._connection.settings_dict["NAME"]),
            queues=list(self._rounds.registrations),
            concurrency=self._threads.count,
            pid=os.getpid(),
            worker_id=self._rounds.worker_id,
        )
        # To be opened after the watch, which sees a file that is replaced from its own opening on.
        self._connection.close()
        self._connection.inc_thread_sharing()
        self._threads.start()
        try:
            with self._watch.rung_by_signals():
                code = self._work()
        except BaseException:
            if not self._let_threads_end():
                # Python would wait for those that coroutines use, while nobody renews a lease.
                signals.logger.exception("the worker broke, and the process ends for it")
                self.at_stop(1.0)
                signals.flush()
                self._end_process(EXIT_BROKE)
            raise
        if code != EXIT_REPLACED:  # there, a connection to write it on might make a new and empty file
            self._rounds.end()
        if code != EXIT_EXHAUSTED:
            self._say_stopped()
        if not self._let_threads_end():
            self._end_process(code)
        self._connection.dec_thread_sharing()
        self._watch.close()
        return code

    def _say_stopped(self) -> None:
        """Before jobs are given back whose handlers still run: who listens may take long, and others claim them."""
        signals.emit(signals.worker_stopped, completed=self._rounds.completed, failed=self._rounds.failed)

    def _let_threads_end(self) -> bool:
        """`False` where a handler still holds one."""
        return self._threads.finish(patience=0.0 if self._rounds.stuck or self._rounds.runs else 1.0)

    def _work(self) -> int:
        self._baton.acquire()  # and kept at the end: after that nobody runs a round
        try:
            while True:
                self._rounds.run()
                code = self._verdict()
                if code is not None:
                    return code
                self._wait()
        except DatabaseReplaced as error:
            # What is running writes to where nobody looks any more, and so would this loop.
            signals.emit(signals.database_replaced, error=error)
            self.at_stop(1.0)
            return EXIT_REPLACED

    # In a handler's thread

    def _relieve(self) -> bool:
        """Run a round in the loop's place, where that is possible; else, or where the loop is needed, `False`."""
        if not self._baton.acquire(blocking=False):
            return False
        try:
            if self._stops or self._fault is not None or self._rounds.stuck or self._rounds.is_paused:
                return False
            own = connections[self.alias]
            connections[self.alias] = self._connection
            try:
                self._rounds.run(call=False)
            finally:
                connections[self.alias] = own
            return not self._sleeps_wrongly()
        except BaseException as error:  # noqa: BLE001  the loop raises it
            self._fault = error
            return False
        finally:
            self._baton.release()

    def _sleeps_wrongly(self) -> bool:
        """Must the loop be woken, to wait for something else or for less long?"""
        if self._rounds.wants_more() and not self._listening:
            return True
        if self._must_look_up() and not self._attentive:
            return True
        return clock.monotonic() + self._due_in() < self._wakes_at - SOON

    # Waiting

    def _wait(self) -> None:
        timeout = self._due_in()
        self._wakes_at = clock.monotonic() + timeout
        self._listening = self._rounds.wants_more()
        self._attentive = self._must_look_up()
        self._threads.quiet = True
        if not self._threads.any_ended() and timeout > 0:
            self._baton.release()
            try:
                is_news = self._sleep(timeout)
            finally:
                self._baton.acquire()
            if is_news:
                self._rounds.prospects.take_news()
        self._threads.quiet = False
        if self._fault is not None:
            raise self._fault
        if not self._threads.any_ended():
            self._threads.call_next()

    def _due_in(self) -> float:
        """Seconds until there is something to do, though nobody tells."""
        due_in = self._rounds.due_in()
        return max(0.0, min(due_in, self._grace_ends - clock.monotonic())) if self._stops else due_in

    def _must_look_up(self) -> bool:
        """Does something wait for a thread, of which none is woken unless those at work turn out to be slow?"""
        return self._threads.one_by_one and self._threads.any_waiting()

    def _sleep(self, timeout: float) -> bool:
        """Until the bell is rung, or somebody commits where the loop listens; was it that?"""
        if self._attentive:
            self._look_up(timeout)
        elif not self._listening:
            self._watch.wait_for_bell(timeout)
        else:
            pause = max(0.0, self._rounds.prospects.pause())
            if not pause or not self._watch.wait_for_bell(min(pause, timeout)):
                return self._watch.wait(self._rounds.prospects.seen, max(0.0, timeout - pause))
        return False

    def _look_up(self, timeout: float) -> None:
        """Until the bell is rung, or nothing waits any more: call a thread when none has started anything lately.

        Then also take in what has ended: who has ended it is at something longer, and tells nobody before its end.
        """
        while timeout > 0:
            started = self._threads.started
            if self._watch.wait_for_bell(min(timeout, INSTANT)):
                return
            if started == self._threads.started:
                self._threads.call_next()
                if self._threads.any_ended() or not self._threads.any_waiting():
                    return
            timeout = self._wakes_at - clock.monotonic()

    # The end

    def _verdict(self) -> int | None:
        """The exit code, once there is one."""
        rounds = self._rounds
        if len(rounds.stuck) >= self._threads.count and not rounds.unwritten:
            return self._give_up()
        if not self._stops:
            return None
        if not self._stop_announced:
            self._stop_announced = True
            self._grace_ends = clock.monotonic() + self.grace
            signals.emit(signals.worker_stopping, reason=self._stops[0], running=len(rounds.runs))
            self.at_stop(0.0)
        if not rounds.runs and not rounds.unwritten and not self._threads.any_ended():
            return EXIT_OK
        if self._signals > 1 or clock.monotonic() >= self._grace_ends:
            return self._leave_at_once()
        return None

    def _give_up(self) -> int:
        """No thread will ever be free: let the supervisor start the process afresh."""
        signals.emit(signals.worker_exhausted, job_ids=sorted(run.job.id for run in self._rounds.stuck))
        self.at_stop(1.0)
        self._rounds.take_back("exiting")
        self._say_stopped()
        self._rounds.give_back_all("exiting")
        return EXIT_EXHAUSTED

    def _leave_at_once(self) -> int:
        self._say_stopped()
        self._rounds.give_back_all("second signal" if self._signals > 1 else "the grace is over")
        self._end_process(EXIT_GRACE_OVER)
        return EXIT_GRACE_OVER


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
