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

LONGEST_WAIT = 1.0
"""Seconds. Who holds a guard for longer runs a handler in its transaction, or waits, it may be for who forks."""

_guards: "WeakSet[threading.RLock]" = WeakSet()
_forking = threading.local()


def guard() -> threading.RLock:
    """A lock that no other thread holds while one forks."""
    lock = threading.RLock()
    _guards.add(lock)
    return lock


def _hold() -> None:
    """Take every guard, or those that are to be had by the end of the longest wait."""
    deadline = clock.monotonic() + LONGEST_WAIT
    while True:
        guards = list(_guards)
        _forking.held = [lock for lock in guards if lock.acquire(blocking=False)]
        missing = [lock for lock in guards if lock not in _forking.held]
        left = deadline - clock.monotonic()
        if not missing or left <= 0:
            return
        # With none in hand: those who have it may want another.
        _release()
        if missing[0].acquire(timeout=left):
            missing[0].release()


def _release() -> None:
    while _forking.held:
        _forking.held.pop().release()


if sys.platform != "win32":
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
