"""Stop signals: what they do while a command starts and while it runs, and what a forked child does with them."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from django_alkstore import clock


class StoppedAtStart(BaseException):
    """A signal has told a command to stop before it began to work.

    Not an `Exception`, so that no code which guards against faults catches it on its way.
    """


class StopSignals:
    """Receives SIGTERM and SIGINT for a command, from its start to its end.

    While the command starts, a signal is remembered, and the next `check` raises `StoppedAtStart`. The signal handler
    itself raises only where the command says so: Python drops an exception that a signal handler raises in the middle
    of a destructor or of a callback of the garbage collector.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._stop: Callable[[str], None] | None = None
        self._may_raise = False

    @contextmanager
    def received(self) -> Iterator[None]:
        """Receive the signals inside the block. Outside the main thread there are none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        _handlers_before.update(before)
        try:
            yield
        finally:
            _handlers_before.clear()
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self) -> None:
        """Raise `StoppedAtStart` if a signal has come."""
        if self._names:
            raise StoppedAtStart(self._names[0])

    @contextmanager
    def may_interrupt(self) -> Iterator[None]:
        """Inside the block a signal raises `StoppedAtStart` at once: for sleeps, and for code that is not ours."""
        self.check()
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False
        self.check()

    def sleep(self, seconds: float) -> None:
        """Sleep; a signal ends the sleep by `StoppedAtStart`."""
        with self.may_interrupt():
            clock.sleep(seconds)

    def pass_to(self, stop: Callable[[str], None]) -> None:
        """From now on call `stop` with the signal's name: the command has started."""
        self.check()
        self._stop = stop
        for name in self._names:  # a signal that came between the two lines above
            stop(name)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._stop is not None:
            self._stop(name)
            return
        self._names.append(name)
        if self._may_raise:
            raise StoppedAtStart(name)


_handlers_before: dict[signal.Signals, Any] = {}
"""The signal handlers to which a forked child goes back."""


def _restore_in_child() -> None:
    """A child that a handler forks is no worker: a signal ends it, and rings no bell of its parent."""
    if _handlers_before:
        signal.set_wakeup_fd(-1)
        for number, handler in _handlers_before.items():
            signal.signal(number, handler)


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_restore_in_child)
