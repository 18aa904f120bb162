"""How a loop goes on after a database error: it says so, waits longer each time, and says when it is over."""

from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_alkstore import clock, signals
from django_alkstore.dialects.transactions import is_contention

FIRST_PAUSE = 0.25
LONGEST_CONTENTION_PAUSE = 1.0
"""Seconds. Another writer may finish at any moment, and the attempt itself has waited already."""
LONGEST_QUIET = 60.0
"""Seconds between two lines about a trouble that stays."""
LONGEST_FAULT_PAUSE = 15.0
"""Seconds. A full disk or a read-only file needs somebody's hand."""


class Patience:
    """The pauses of one loop; `doing` says what it does, for the log."""

    def __init__(self, doing: str, alias: str, connection: BaseDatabaseWrapper | None = None) -> None:
        """`connection`: the one that is closed after a fault. Default: that of the thread."""
        self.doing = doing
        self.alias = alias
        self._connection = connection
        self._pause = 0.0
        self._quiet = 0.0
        self._say_at = 0.0

    def after(self, error: DatabaseError) -> float:
        """Say what happened, give up the connection it happened on, and return the seconds to wait.

        What goes on for long is said less and less often.
        """
        connection = connections[self.alias] if self._connection is None else self._connection
        contention = is_contention(self.alias, error)
        longest = LONGEST_CONTENTION_PAUSE if contention else LONGEST_FAULT_PAUSE
        self._pause = min(max(self._pause * 2, FIRST_PAUSE), longest)
        now = clock.monotonic()
        if not self._quiet or now >= self._say_at:
            signals.emit(signals.database_trouble, doing=self.doing, error=error, pause=self._pause)
            self._quiet = min(max(self._quiet * 2, self._pause), LONGEST_QUIET)
            self._say_at = now + self._quiet
        if not contention and not connection.in_atomic_block:
            connection.close()
        return self._pause

    def reset(self) -> None:
        """It worked."""
        if self._pause:
            self._pause = self._quiet = 0.0
            signals.emit(signals.database_recovered, doing=self.doing)
