"""Lets a fork wait until no thread of the library holds a lock.

A child begins with a copy of its parent's memory and with one thread, the one that forked. A lock that another thread
held at that moment stays held in the child for ever. That may be a lock of the library, or one that SQLite has in
memory for the file: the child's first query would hang, or find the database locked. So a thread that forks waits
until the library's own threads hold no such lock. It cannot wait for other threads of the project.
"""

import os
import sys
import threading
from weakref import WeakSet

from django_alkstore import clock

LONGEST_WAIT = 1.0
"""Seconds. A thread that holds a guard for longer runs a handler in a transaction, or waits for the forking thread."""

_guards: "WeakSet[threading.RLock]" = WeakSet()
_forking = threading.local()


def guard() -> threading.RLock:
    """A lock that no other thread holds while one forks."""
    lock = threading.RLock()
    _guards.add(lock)
    return lock


def _hold() -> None:
    """Take every guard, or as many as become free within the longest wait."""
    deadline = clock.waiting_from() + LONGEST_WAIT
    while True:
        guards = list(_guards)
        _forking.held = [lock for lock in guards if lock.acquire(blocking=False)]
        missing = [lock for lock in guards if lock not in _forking.held]
        left = deadline - clock.waiting_from()
        if not missing or left <= 0:
            return
        # Hold none meanwhile: the thread that has this one may be waiting for another.
        _release()
        if missing[0].acquire(timeout=left):
            missing[0].release()


def _release() -> None:
    while _forking.held:
        _forking.held.pop().release()


if sys.platform != "win32":
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
