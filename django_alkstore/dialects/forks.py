"""What a fork must not fall into.

A child begins with a copy of its parent's memory and with one thread, the one that forked. A lock that another
thread held at that moment, one of ours or one that SQLite has in memory for the file, stays held in the child for
ever: its first query would hang, or find the database locked. So whoever forks, as a handler may, waits until the
library's own threads are at none of that. (What other threads of the project do, it cannot wait for.)
"""

import os
import sys
import threading
from weakref import WeakSet

from django_alkstore import clock

LONGEST_WAIT = 5.0
"""Seconds. Who holds a guard for longer waits for something, it may be for the thread that forks."""

_guards: "WeakSet[threading.RLock]" = WeakSet()
_forking = threading.local()


def guard() -> threading.RLock:
    """A lock that no other thread holds while one forks."""
    lock = threading.RLock()
    _guards.add(lock)
    return lock


def _hold() -> None:
    """Take every guard. One at a time is waited for with none in hand: those who have it may want another."""
    _forking.held = []
    deadline = clock.monotonic() + LONGEST_WAIT
    while (missing := _take_all(_forking.held)) is not None:
        _release()
        left = deadline - clock.monotonic()
        if left <= 0 or not missing.acquire(timeout=left):
            return
        missing.release()


def _take_all(held: list[threading.RLock]) -> "threading.RLock | None":
    """The first that is not to be had at once, or `None` where all are taken."""
    for lock in list(_guards):
        if not lock.acquire(blocking=False):
            return lock
        held.append(lock)
    return None


def _release() -> None:
    while _forking.held:
        _forking.held.pop().release()


if sys.platform != "win32":
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
