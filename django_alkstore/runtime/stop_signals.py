"""Stop signals: what they call while a command starts and while it runs, and what a forked child does with them."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def stopped_by_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """Call `stop` with the signal's name at SIGTERM and SIGINT. Outside the main thread there are no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def receive(number: int, frame: FrameType | None) -> None:
        stop(signal.Signals(number).name)

    before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    _handlers_before.update(before)
    try:
        yield
    finally:
        _handlers_before.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


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


class StoppedAtStart(BaseException):
    """A signal has told a command to stop before it began to work.

    Not an `Exception`, so that no code which guards against faults catches it on its way.
    """


class Starting:
    """What a stop signal does while a command starts: it raises `StoppedAtStart`, also out of a sleep."""

    def __init__(self) -> None:
        self.stop: Callable[[str], None] = self._leave
        """Called with the signal's name. Whoever has started sets its own way to stop."""

    @staticmethod
    def _leave(name: str) -> None:
        raise StoppedAtStart(name)

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        with stopped_by_signals(self._receive):
            yield

    def _receive(self, name: str) -> None:
        self.stop(name)
