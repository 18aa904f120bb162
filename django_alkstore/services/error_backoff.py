"""How a loop continues after a database error: it logs the error, waits longer each time, and logs that it is over."""

import gc
import traceback

from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_alkstore import clock, signals
from django_alkstore.dialects import dialect_of
from django_alkstore.dialects.transactions import is_contention
from django_alkstore.dialects.watch import renew_all

FIRST_PAUSE = 0.25
LONGEST_CONTENTION_PAUSE = 1.0
"""Seconds. Another writer may finish at any moment, and the attempt itself has waited already."""
LONGEST_QUIET = 60.0
"""Seconds between two lines about a trouble that stays."""
LONGEST_FAULT_PAUSE = 15.0
"""Seconds. Somebody has to repair a full disk or a read-only file."""


class ErrorBackoff:
    """The pauses of one loop; `doing` says what the loop does, for the log."""

    def __init__(self, doing: str, alias: str, connection: BaseDatabaseWrapper | None = None) -> None:
        """`connection`: the one that is closed after a fault. Default: that of the thread."""
        self.doing = doing
        self.alias = alias
        self._connection = connection
        self._pause = 0.0
        self._quiet = 0.0
        self._say_at = 0.0

    def after(self, error: DatabaseError) -> float:
        """Log the error and return the seconds to wait. An error that stays is logged less and less often.

        After a fault, which is any error but contention, every connection that the loop knows of is closed, so that the
        next attempt opens the files anew: somebody may have repaired them.
        """
        connection = connections[self.alias] if self._connection is None else self._connection
        contention = is_contention(self.alias, error)
        longest = LONGEST_CONTENTION_PAUSE if contention else LONGEST_FAULT_PAUSE
        self._pause = min(max(self._pause * 2, FIRST_PAUSE), longest)
        now = clock.monotonic()
        if not self._quiet or now >= self._say_at:
            reason = None if contention else dialect_of(connection).write_obstacle(connection)
            signals.emit(signals.database_trouble, doing=self.doing, error=error, pause=self._pause, reason=reason)
            self._quiet = min(max(self._quiet * 2, self._pause), LONGEST_QUIET)
            self._say_at = now + self._quiet
        if not contention and not connection.in_atomic_block:
            _end_statements(error)
            connection.close()
            renew_all(self.alias)
        return self._pause

    def reset(self) -> None:
        """End the pauses, because an attempt has succeeded."""
        if self._pause:
            self._pause = self._quiet = 0.0
            signals.emit(signals.database_recovered, doing=self.doing)


def _end_statements(error: BaseException) -> None:
    """Let go of the cursors that failed. A connection stays open behind the scenes as long as one has a statement."""
    chained: BaseException | None = error
    while chained is not None:
        traceback.clear_frames(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
    gc.collect()  # cursors in the frames of errors that were handled elsewhere; such frames are in reference cycles
