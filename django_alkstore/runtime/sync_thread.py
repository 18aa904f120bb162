"""The thread in which the sync functions of coroutines run, one coroutine after the other."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import TypeVar, TypeVarTuple

from asgiref.sync import ThreadSensitiveContext
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_alkstore.dialects import dialect_of
from django_alkstore.dialects.transactions import is_left_open
from django_alkstore.internals import executor_of
from django_alkstore.runtime.jobs import Run
from django_alkstore.runtime.perform import Ending, tidy_connections

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SyncThread:
    """The thread for the sync functions of one coroutine after the other. asgiref starts it when it is needed."""

    def __init__(self) -> None:
        self.context = ThreadSensitiveContext()
        self.run: Run | None = None
        self._is_used = False
        """True if anything has run in it since it was last tidied."""
        self._cutting = threading.Lock()
        """Protects the next two attributes and the end of `run`."""
        self._connection: BaseDatabaseWrapper | None = None
        """Its connection to the database of the job."""
        self._cut_off: object | None = None
        """The database's own connection that was cut off. A handler can close it and open another."""

    @property
    def executor(self) -> Executor | None:
        return executor_of(self.context)

    def note_use(self) -> None:
        self._is_used = True

    def call(self, func: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function of the coroutine, in this thread."""
        if self._connection is None and self.run is not None:
            self._connection = connections[self.run.job._using]
        return func(*args)

    def begin_to_tidy(self, ending: Ending) -> "Future[bool] | None":
        """Let the thread leave its connections fit for the next job. None if there is nothing to do.

        The future is True if the handler has left a transaction open.
        """
        if not self._is_used or self.executor is None or self.run is None:
            return None
        self._is_used = False
        try:
            return self.executor.submit(self._tidy, self.run.job._using, ending.by_database)
        except RuntimeError:  # the process may start no more threads, so nothing has run in this one
            return None

    def _tidy(self, own: str, afresh: bool) -> bool:
        with self._cutting:
            connection, self.run, self._connection = self._connection, None, None
            was_cut_off, self._cut_off = self._cut_off is not None, None
        if was_cut_off and connection is not None:
            connection.close()
        return tidy_connections(own, afresh=afresh)

    def cut_off(self, run: Run) -> None:
        with self._cutting:
            # The thread may have gone on to another job since the keeper has looked.
            if self.run is run and self._connection is not None and self._connection.connection is not self._cut_off:
                self._cut_off = self._connection.connection
                dialect_of(self._connection).cut_off(self._connection)

    def has_open_transaction(self, run: Run) -> bool:
        # No lock: a cutter may hold it for as long as a statement takes.
        connection = self._connection
        if connection is None or self.run is not run or connection.connection is self._cut_off:
            return False
        return is_left_open(connection)

    def close(self) -> None:
        """Close the connections. The thread ends when nothing refers to it any more."""
        if self.executor is not None:
            with suppress(RuntimeError):  # as above
                self.executor.submit(connections.close_all)
