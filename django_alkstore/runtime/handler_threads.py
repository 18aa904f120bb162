"""The threads that run handlers. At most one of them leads.

A thread that leads claims a batch and runs it itself, so quick jobs need no switch between threads. Before a handler
that is not quick it gives up the leadership to a follower. `docs/worker.md` has the states.
"""

import threading
from contextvars import Context
from functools import partial

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_alkstore import clock, signals
from django_alkstore.dialects import dialect_of
from django_alkstore.dialects.transactions import is_left_open, take_turn_away
from django_alkstore.runtime.announcing import announce_settled
from django_alkstore.runtime.event_loop import EventLoopThread
from django_alkstore.runtime.jobs import SLOW, Run, is_suspected
from django_alkstore.runtime.leadership import Leadership
from django_alkstore.runtime.perform import Ending, perform, tidy_connections
from django_alkstore.runtime.shared_state import SharedState
from django_alkstore.services.outcomes import retry


class HandlerThread(threading.Thread):
    """Runs one handler at a time, and leads if no other thread does."""

    def __init__(
        self,
        number: int,
        state: SharedState,
        leadership: Leadership,
        event_loop: EventLoopThread,
        context: Context,
    ) -> None:
        """`context`: that of the command. Each handler runs in a fresh copy of it."""
        super().__init__(name=f"alkstore-handler-{number}", daemon=True)
        self._state = state
        self._leadership = leadership
        self._event_loop = event_loop
        self._project_context = context
        self._cutting = threading.Lock()
        """Protects the next three attributes, which the keeper uses too."""
        self._run: Run | None = None
        """The job whose handler runs in this thread."""
        self._connection: BaseDatabaseWrapper | None = None
        """The connection of this thread to the database of that job, while its handler runs."""
        self._cut_off: object | None = None
        """The database's own connection that was cut off. A handler can close it and open another."""

    def run(self) -> None:
        try:
            while self._state.lead(self):
                self._lead()
        except BaseException as error:  # noqa: BLE001  the keeper ends the worker for it
            self._state.break_down(error)

    def _lead(self) -> None:
        while True:
            run = self._state.start_next(self, clock.monotonic(), clock.now_us())
            if run is None:
                if not self._leadership.round(self):
                    return
            elif run.in_loop:
                self._hand_over(run)
            else:
                self._perform(run)

    def _hand_over(self, run: Run) -> None:
        """Let a coroutine begin in the event loop."""
        signals.emit(signals.job_started, job=run.job)  # here: receivers must not keep the loop from turning
        self._event_loop.begin(run)
        if is_suspected(run.job):
            # Beside a job that may end the process, nothing is claimed until it has run for a while.
            self._state.wait_for_end(run, SLOW)

    def _perform(self, run: Run) -> None:
        started = clock.monotonic()
        try:
            ending = self._run_handler(run)
        except BaseException as error:  # noqa: BLE001
            # An error of the worker itself. Fail the attempt, so that the job does not stay leased.
            signals.emit(signals.job_mishandled, job=run.job, error=error)
            ending = Ending(retry(error), clock.monotonic() - started)
        if not self._state.finish(self, run, ending):
            if ending.outcome is not None:
                ending.outcome.take_exception()  # nobody announces it
            return
        if ending.outcome is None:
            try:
                announce_settled(run.job, ending.seconds)
            finally:
                self._state.end_announcing()

    def _run_handler(self, run: Run) -> Ending:
        job = run.job
        with self._cutting:
            self._run, self._connection = run, connections[job._using]
        signals.emit(signals.job_started, job=job)
        on_writer_lock = partial(self._state.start_time_limit, run)
        ending = self._project_context.copy().run(perform, run.registration, job, on_writer_lock)
        with self._cutting:
            connection, self._run, self._connection = self._connection, None, None
            was_cut_off, self._cut_off = self._cut_off is not None, None
        if was_cut_off:
            connection.close()
        if tidy_connections(job._using, afresh=ending.by_database):
            return ending.with_transaction_left_open()
        return ending

    def cancel(self, run: Run) -> None:
        """Do nothing: Python cannot end a thread."""

    def cut_off(self, run: Run) -> None:
        """Roll back the open transaction of a handler that is out of time, and refuse its later writes.

        Blocks until the handler's current statement has ended. The handler keeps this thread.
        """
        with self._cutting:
            # The thread may have gone on to another job since the keeper has looked.
            if self._run is run and self._connection is not None and self._connection.connection is not self._cut_off:
                self._cut_off = self._connection.connection
                dialect_of(self._connection).cut_off(self._connection)
                if run.registration.atomic:
                    take_turn_away(run.job._using)  # which an atomic handler has for as long as it runs

    def has_open_transaction(self, run: Run) -> bool:
        """True if its handler has a transaction open that was not cut off."""
        # No lock: a cutter may hold it for as long as a statement takes.
        connection = self._connection
        if connection is None or self._run is not run or connection.connection is self._cut_off:
            return False
        return is_left_open(connection)
