"""What a leading scheduler and a standby wait with: for commits, for deaths of processes, for the writer lock."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self, TypeVar

from django.db import OperationalError, connections

from django_alkstore import clock
from django_alkstore.dialects.forks import guard
from django_alkstore.dialects.liveness import Liveness
from django_alkstore.dialects.transactions import is_contention, limited_wait, longest_wait
from django_alkstore.dialects.watch import Watch
from django_alkstore.services.recovery import Recovery

T = TypeVar("T")

SLICE = 0.1
"""Seconds that one try waits for the writer lock. After each the stop event is looked at."""
_BETWEEN_SLICES = 0.005
"""Seconds. SQLite refuses some locks without any wait."""
LONGEST_SLEEP = 60.0
STOP_NOTICED_WITHIN = 0.25
"""Seconds between looks at a stop event that rings no bell."""


class StopRequested(Exception):
    """The stop event was set while another process held the writer lock."""


class StopEvent(threading.Event):
    """A stop event that ends the waits of a `Watch` at once, so that nobody needs to look at it now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._bells: list[Callable[[], None]] = []

    def set(self) -> None:
        super().set()
        for ring in tuple(self._bells):
            ring()

    @contextmanager
    def ringing(self, watch: Watch) -> Iterator[None]:
        """Inside the block, setting it rings the watch's bell."""
        self._bells.append(watch.ring)
        try:
            yield
        finally:
            self._bells.remove(watch.ring)


class Waiter:
    """Everything that one scheduler waits with, for one thread. A context manager.

    It opens the watch first: that fails if the database file is gone, and sees a file that is replaced from then on.
    The liveness lasts until it is closed, so close it after the last write.
    """

    def __init__(self, alias: str, stop: threading.Event) -> None:
        self.alias = alias
        self.stop = stop
        self._reading = guard()
        self._longest_wait = STOP_NOTICED_WITHIN
        with ExitStack() as opened:
            self.watch = opened.enter_context(Watch(alias))
            if isinstance(stop, StopEvent):
                opened.enter_context(stop.ringing(self.watch))
                self._longest_wait = LONGEST_SLEEP
            self.liveness = opened.enter_context(Liveness(alias))
            descriptor = self.liveness.fileno()
            if descriptor is not None:
                self.watch.wake_on(descriptor)
            self._opened = opened.pop_all()
        self.recovery = Recovery(alias, self.liveness)

    def in_slices(self, act: Callable[[], T]) -> T:
        """Call `act`, which may wait for the writer lock as long as the busy timeout, in slices.

        It is called again after each slice, so it must be one transaction or continue where it was interrupted.
        Raises `StopRequested` if the stop event is set after a slice.
        """
        started, patience = clock.waiting_from(), longest_wait(connections[self.alias])
        while True:
            try:
                with limited_wait(self.alias, SLICE):
                    return act()
            except OperationalError as error:
                if not is_contention(self.alias, error):
                    raise
                if self.stop.is_set():
                    raise StopRequested from error
                if clock.waited_since(started) >= patience:
                    raise
            self.stop.wait(_BETWEEN_SLICES)

    def read(self, query: Callable[[], T]) -> T:
        """Run a query while no other thread of this process forks. It may have to wait for a lock too."""

        def ask() -> T:
            with self._reading:
                return query()

        return self.in_slices(ask)

    def wait(self, seen: object, seconds: float) -> bool:
        """Wait at most `seconds` for a commit since the version `seen`; True if there was one.

        Ends early if the stop event is set or a process may have died, and now and then for no reason.
        """
        committed = self.watch.wait(seen, min(seconds, self._longest_wait))
        if self.liveness.take_events():
            self.recovery.note_event()
        return committed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.close()
