"""Waiting to be told: of a commit by anybody, of a bell rung in this process, or of a deadline.

The database is asked whether anything was committed (`Change.version`), which is cheap but not free. *When* to
ask is told by the kernel where it can (inotify, on the file's directory, since the journal files come and go;
the database file itself is never opened here: closing any descriptor of it would drop this process's locks on
it). The event comes a moment before the commit can be seen, so the answer is asked for a few times in growing
steps; the longest step is the fallback for an event that never came, and the whole method where there is no
inotify.
"""

import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from django.db import connections

from django_alkstore import clock
from django_alkstore.dialects import dialect_of

TOLD = 1.0
"""Seconds between looks where the kernel tells of writes: the price of a missed event."""
POLLED = 0.015
"""Seconds between looks where it does not."""
FIRST_STEP = 0.0001
FOREIGN_PAUSE = 0.002
"""Seconds to let further events gather after one of another file, such as a log in the same directory."""
_SELECTABLE = 0.001
"""Seconds. `epoll` waits in whole milliseconds; shorter steps are slept."""

_CLOSED = -1
"""The number of a closed socket's file."""

_sleep = time.sleep


class Bell:
    """Ends one thread's wait; any thread, and any signal handler, may ring it."""

    def __init__(self) -> None:
        self._hears, self._rings = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for end in (self._hears, self._rings):
            end.setblocking(False)
        self._selector.register(self._hears, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Can be read from once the bell is rung."""
        return self._hears.fileno()

    def ring(self) -> None:
        """End the current or the next wait at once. Once it is closed, nobody waits."""
        try:
            self._rings.send(b"\0")
        except BlockingIOError:
            return  # so many rings wait already that this one is heard with them
        except OSError:
            if self._rings.fileno() != _CLOSED:
                raise

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds; was it rung?"""
        rung = bool(self._selector.select(timeout))
        if rung:
            self.hear()
        return rung

    def hear(self) -> None:
        """Take in every ring so far."""
        try:
            while self._hears.recv(4096):
                continue
        except BlockingIOError:
            return

    @contextmanager
    def rung_by_signals(self) -> Iterator[None]:
        """Inside, a signal ends a wait of the main thread also where the kernel has given it to another thread.

        Python's own handlers run in the main thread, once that does anything: without this, not before its wait ends.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.set_wakeup_fd(self._rings.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)

    def close(self) -> None:
        # This end first: it may be rung at any moment, and a ring must not meet with an end that is gone.
        self._rings.close()
        self._selector.close()
        self._hears.close()


class Watch:
    """Waits for one thread; any thread may ask it for the version, and any signal handler, too, may ring its bell."""

    def __init__(self, using: str) -> None:
        self._change = dialect_of(connections[using]).change(using)
        # What is open is closed again also where the rest cannot be opened.
        with ExitStack() as opened:
            self._opened = opened
            opened.callback(self._change.close)
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._bell = opened.enter_context(closing(Bell()))
            self._selector.register(self._bell, selectors.EVENT_READ)
            self._name = ""
            self._events: Any = self._watch_files()
            self._opened = opened.pop_all()
        self._longest_step = TOLD if self._events else POLLED
        self._step = self._longest_step

    def _watch_files(self) -> Any:
        """The kernel's events for the database's directory, or `None` where there are none to be had."""
        file = self._change.watched_file()
        if file is None or sys.platform != "linux":
            return None
        from inotify_simple import INotify, flags  # noqa: PLC0415  there is none elsewhere

        path = Path(file)
        with ExitStack() as ours:
            try:
                events = ours.enter_context(INotify(nonblocking=True))
                events.add_watch(
                    path.parent, flags.MODIFY | flags.CREATE | flags.DELETE | flags.MOVED_TO | flags.CLOSE_WRITE
                )
            except OSError:  # the kernel's limit of watches is reached: poll
                return None
            self._opened.push(ours.pop_all())
        self._name = path.name
        self._selector.register(events, selectors.EVENT_READ)
        return events

    def version(self) -> object:
        """Pass it to `wait`: read it before looking at the database, so that nothing falls in between."""
        return self._change.version()

    def forget(self) -> None:
        """Take in what the kernel has told so far, of a commit that the caller knows of.

        Another's that is just being made may be told of with it: that one is seen with the next look.
        """
        if self._events is not None:
            self._events.read(timeout=0)
            self._step = self._longest_step

    def wake_on(self, descriptor: int) -> None:
        """From now on, end a `wait` if this descriptor can be read, too. The caller reads it."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def ring(self) -> None:
        """End the current or the next `wait` at once."""
        self._bell.ring()

    def rung_by_signals(self) -> AbstractContextManager[None]:
        return self._bell.rung_by_signals()

    def wait_for_bell(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the bell, whatever is committed; was it rung?"""
        # Not by way of the events: each commit of this very process would end the wait, to be taken up again.
        return self._bell.wait(timeout)

    def wait(self, seen: object, timeout: float) -> bool:
        """Wait at most `timeout` seconds for a commit since `seen`, or the bell; was there a commit?"""
        started = clock.waiting_from()
        while True:
            if self._change.version() != seen:
                self._step = FIRST_STEP if self._events is None else self._longest_step
                return True
            left = timeout - clock.waited_since(started)
            if left <= 0 or self._pause(min(left, self._step)):
                return False

    def _pause(self, seconds: float) -> bool:
        """Wait one step, or for the first event; was it the bell, or a descriptor of the caller's?"""
        self._step = min(self._step * 2, self._longest_step)
        if seconds < _SELECTABLE:
            _sleep(seconds)
            seconds = 0
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._bell:
                self._bell.hear()
                return True
            if key.fileobj is not self._events:
                return True
            if self._told_of_our_file():
                self._step = FIRST_STEP
            else:
                _sleep(FOREIGN_PAUSE)
        return False

    def _told_of_our_file(self) -> bool:
        # The events' order and kind say nothing that the database itself does not say better.
        return any(not event.name or event.name.startswith(self._name) for event in self._events.read(timeout=0))

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
