"""Waiting for a commit by anybody, for a bell rung in this process, or for a deadline.

The database says whether anything was committed (`Change.version`). Asking it is cheap, but not free. The kernel says
when to ask: inotify watches the folder of the database file, because the journal files come and go. The database file
itself is never opened here, since closing any descriptor of it would drop this process's locks on it.

A file event comes a moment before the commit can be seen. So after one the database is asked a few times, in growing
steps. The longest step is the fallback for an event that never came. Without inotify the database is polled.
"""

import itertools
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

from django.db import connections

from django_alkstore import clock, signals
from django_alkstore.dialects import dialect_of
from django_alkstore.dialects.forks import guard

LONGEST_STEP = 1.0
"""Seconds between two looks at the database if the kernel tells of writes: the price of an event that never came."""
POLL_INTERVAL = 0.015
"""Seconds between two looks if it does not."""
FIRST_STEP = 0.0001
FOREIGN_PAUSE = 0.002
"""Seconds to let further events gather after an event of another file, such as a log in the same folder."""
_SELECTABLE = 0.001
"""Seconds. `epoll` waits in whole milliseconds; shorter steps are slept."""

_CLOSED = -1
"""The file number of a closed socket."""

_sleep = clock.sleep


class Bell:
    """Ends one thread's wait. Any thread and any signal handler may ring it."""

    def __init__(self) -> None:
        self._hears, self._rings = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for end in (self._hears, self._rings):
            end.setblocking(False)
        self._selector.register(self._hears, selectors.EVENT_READ)

    def fileno(self) -> int:
        """The descriptor that can be read from once the bell is rung."""
        return self._hears.fileno()

    def ring(self) -> None:
        """End the current or the next wait at once. After `close` it does nothing."""
        try:
            self._rings.send(b"\0")
        except BlockingIOError:
            return  # the socket is full of rings that nobody has heard yet
        except OSError:
            if self._rings.fileno() != _CLOSED:
                raise

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds. Return True if the bell was rung."""
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
        """Inside the block a signal rings the bell, also if the kernel gives it to another thread.

        Python runs signal handlers in the main thread between two instructions. Without the ring, a handler would wait
        until the main thread's wait has ended.
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
        # The sending end first: a ring at this moment must not find the receiving end gone.
        self._rings.close()
        self._selector.close()
        self._hears.close()


class Watch:
    """Waits for commits to one database.

    One thread waits at a time; another may take over once it has returned. Any thread may ask for the version at any
    time, and any thread and any signal handler may ring the bell.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self._change = dialect_of(connections[using]).change(using)
        # If one part cannot be opened, those that are open are closed again.
        with ExitStack() as opened:
            self._opened = opened
            opened.callback(self._change.close)
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._bell = opened.enter_context(closing(Bell()))
            self._selector.register(self._bell, selectors.EVENT_READ)
            self._name = ""
            self._events: Any = self._watch_files()
            self._reading = guard()
            """Held while the events are read: of two threads that read at once, one would fail."""
            self._opened = opened.pop_all()
        self._longest_step = LONGEST_STEP if self._events else POLL_INTERVAL
        self._step = self._longest_step
        """Seconds until the next look at the database. The waiting thread alone uses it, `forget` aside."""
        with _opening:
            _open_watches.add(self)

    def _watch_files(self) -> Any:
        """Open the kernel's events for the folder of the database. `None`: poll instead."""
        file = self._change.watched_file()
        if file is None or sys.platform != "linux":
            return None
        path = Path(file)
        with ExitStack() as ours:
            try:
                # Imported here because it exists on Linux only, and needs a Python with ctypes.
                from inotify_simple import INotify, flags  # noqa: PLC0415

                events = ours.enter_context(INotify(nonblocking=True))
                events.add_watch(
                    path.parent, flags.MODIFY | flags.CREATE | flags.DELETE | flags.MOVED_TO | flags.CLOSE_WRITE
                )
            except Exception as error:  # noqa: BLE001  whatever the reason is, polling works
                _say_that_it_polls(error)
                return None
            self._opened.push(ours.pop_all())
        self._name = path.name
        self._selector.register(events, selectors.EVENT_READ)
        return events

    def version(self) -> object:
        """The database's version, for `wait`. Ask before you read the database, so that no commit falls in between."""
        return self._change.version()

    def forget(self) -> None:
        """Drop the file events so far, which came from a commit that the caller knows of.

        Events of another commit at the same moment are dropped with them. That commit is seen at the next look.
        """
        if self._events is not None:
            self._read_events()
            self._step = self._longest_step

    def wake_on(self, descriptor: int) -> None:
        """From now on, end a `wait` if this descriptor can be read, too. The caller reads it."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def ring(self) -> None:
        """End the current or the next wait at once."""
        self._bell.ring()

    def rung_by_signals(self) -> AbstractContextManager[None]:
        """Inside the block a signal rings the bell; see `Bell.rung_by_signals`."""
        return self._bell.rung_by_signals()

    def wait_for_bell(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the bell, whatever is committed. Return True if it was rung."""
        # Without the file events: each commit of this very process would interrupt the wait.
        return self._bell.wait(timeout)

    def wait(self, seen: object, timeout: float) -> bool:
        """Wait at most `timeout` seconds for a commit since `seen`, or the bell. Return True if there was a commit."""
        started = clock.waiting_from()
        while True:
            if self._change.version() != seen:
                self._step = FIRST_STEP if self._events is None else self._longest_step
                return True
            left = timeout - clock.waited_since(started)
            if left <= 0 or self._pause(min(left, self._step)):
                return False

    def _pause(self, seconds: float) -> bool:
        """Wait one step, or until the first event. True for the bell and for a descriptor of the caller."""
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
            # The events themselves do not matter: the database is asked.
            if any(not event.name or event.name.startswith(self._name) for event in self._read_events()):
                self._step = FIRST_STEP
            else:
                _sleep(FOREIGN_PAUSE)
        return False

    def _read_events(self) -> list[Any]:
        with self._reading:
            return list(self._events.read(timeout=0))

    def renew(self) -> None:
        """Close the connection. The next look at the database opens another, and takes the database for changed.

        A connection that has met with a fault keeps files open that somebody may have repaired since. SQLite even
        shares some of them among all connections of a process, so after a fault all are closed: see `renew_all`.
        """
        self._change.renew()

    def close(self) -> None:
        with _opening:
            _open_watches.discard(self)
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


_opening = guard()
"""Protects the set of open watches."""
_open_watches: "WeakSet[Watch]" = WeakSet()


def renew_all(using: str) -> None:
    """Call `renew` of every watch that this process has on the database."""
    with _opening:
        watches = [watch for watch in _open_watches if watch.using == using]
    for watch in watches:
        watch.renew()


_times_polling = itertools.count()


def _say_that_it_polls(error: Exception) -> None:
    """Log it once for each process. (Two threads may come here at once; `next` is one step.)"""
    if next(_times_polling) == 0:
        reason = f"{type(error).__name__}: {error}"
        signals.emit(signals.file_events_missing, reason=reason, interval=POLL_INTERVAL)
