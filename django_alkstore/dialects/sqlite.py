"""The operations on SQLite. If SQLite is the reason why a statement is as it is, a comment says so.

Every writing text begins with INSERT, UPDATE or DELETE and not with WITH: Python's driver opens the implicit
transaction of `set_autocommit(False)` before those only.
"""

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_alkstore.clock import LAST_US
from django_alkstore.dialects.base import (
    AbandonedJob,
    BoundaryCounts,
    Change,
    Claim,
    ClaimedJob,
    DatabaseReplaced,
    Dialect,
    EndedJob,
    LapsedJob,
    NewJob,
    Operations,
    QueueCounts,
    StoredSchedule,
    SweptJob,
)
from django_alkstore.dialects.cursors import Cursor, DirectCursor, open_cursor
from django_alkstore.dialects.file_access import write_obstacle
from django_alkstore.dialects.forks import guard
from django_alkstore.models import Job, Lock, Schedule

MINIMUM_VERSION = (3, 35)
"""The first with RETURNING."""
ENOUGH_TIMEOUT = 5.0
"""Seconds. With a shorter busy timeout, writers give up although the others take no longer than they should."""

JOB = f'"{Job._meta.db_table}"'
LOCK = f'"{Lock._meta.db_table}"'
SCHEDULE = f'"{Schedule._meta.db_table}"'


def _columns(names: Sequence[str], *as_bytes: str) -> str:
    """Column names, some of them read as bytes: a text that is not UTF-8 would fail the whole statement."""
    return ", ".join(f"CAST({name} AS BLOB)" if name in as_bytes else name for name in names)


# Also a statement that changes nothing takes the writer lock before it reads, and waits for it for the busy timeout.
# If a transaction reads first and writes later, SQLite may refuse the write without any wait.
TAKE_WRITER_LOCK = f"UPDATE {LOCK} SET owner = owner WHERE 0"

# DO NOTHING without a target covers each unique index, and no other constraint.
INSERT_JOB = f"""
INSERT INTO {JOB} ({", ".join(NewJob._fields)}, state, attempts, fence, errors, worker_ids, lock_errors)
VALUES ({", ".join(["%s"] * len(NewJob._fields))}, 'pending', 0, 0, '[]', '[]', 0)
ON CONFLICT DO NOTHING
"""

# The states are part of the text: with parameters instead, SQLite would not know that the partial index can be used.
LIVE_JOB = f"""
SELECT id FROM {JOB} WHERE queue = %s AND unique_key = %s AND state IN ('pending', 'processing')
"""

MAX_WORKER_IDS = 20

# A JSON list with one more text, `joined`. Short lists grow as text: SQLite's JSON functions cost more, and fail the
# whole statement if another program has damaged the list.
WORKER_IDS = f"""CASE
    WHEN attempts = 0 THEN '[' || %(joined)s
    WHEN attempts < {MAX_WORKER_IDS} AND worker_ids <> '[]' THEN rtrim(worker_ids, ']') || ',' || %(joined)s
    WHEN NOT json_valid(worker_ids) OR worker_ids = '[]' THEN '[' || %(joined)s
    WHEN json_array_length(worker_ids) < {MAX_WORKER_IDS} THEN rtrim(worker_ids, ']') || ',' || %(joined)s
    ELSE rtrim(json_remove(worker_ids, '$[0]'), ']') || ',' || %(joined)s
  END"""

# One walk along the claim index. It goes down the distinct priorities to the first that has a due job. So the delayed
# jobs of a higher priority cost one step in all, and not one step each.
CLAIM = f"""
UPDATE {JOB} SET
  state = 'processing', attempts = attempts + 1, fence = fence + 1, worker_id = %(worker_id)s,
  liveness = %(liveness)s, last_attempted_at = %(now)s,
  started_at = CASE WHEN attempts = 0 THEN %(now)s ELSE started_at END,
  worker_ids = {WORKER_IDS},
  lease_expires_at = min(%(now)s + CAST(round(visibility_timeout * 1000000) AS INTEGER), {LAST_US})
WHERE id IN (
  SELECT id FROM {JOB}
  WHERE queue = %(queue)s AND state = 'pending' AND run_at <= %(now)s AND priority = (
    WITH RECURSIVE level(priority) AS (
      SELECT max(priority) FROM {JOB} WHERE queue = %(queue)s AND state = 'pending'
      UNION ALL
      SELECT (
        SELECT max(priority) FROM {JOB}
        WHERE queue = %(queue)s AND state = 'pending' AND priority < level.priority
      ) FROM level
      WHERE level.priority IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM {JOB}
        WHERE queue = %(queue)s AND state = 'pending' AND priority = level.priority AND run_at <= %(now)s
      )
    )
    SELECT min(priority) FROM level
  )
  AND NOT EXISTS (
    SELECT 1 FROM {JOB} WHERE queue = %(queue)s AND state = 'processing' AND lease_expires_at <= %(now)s
  )
  AND NOT EXISTS (
    SELECT 1 FROM {JOB} WHERE queue = %(queue)s AND state = 'pending' AND expires_at <= %(now)s
  )
  ORDER BY run_at, id LIMIT %(limit)s
)
RETURNING {_columns(ClaimedJob._fields, "payload", "errors", "last_error", "schedule", "task", "worker_ids")}
"""

HELD = "id = %s AND fence = %s AND state = 'processing' AND lease_expires_at > %s"
LET_GO = "worker_id = NULL, lease_expires_at = NULL"

ACK = f"UPDATE {JOB} SET state = 'completed', {LET_GO}, finished_at = %s WHERE {HELD}"
COMPLETE = f"UPDATE {JOB} SET state = 'completed', {LET_GO}, finished_at = %s, result = %s WHERE {HELD}"
RETRY = f"""
UPDATE {JOB} SET state = 'pending', {LET_GO}, run_at = %s, errors = %s, last_error = %s, lock_errors = 0 WHERE {HELD}
"""
BURY = f"""
UPDATE {JOB} SET state = 'dead', {LET_GO}, errors = %s, last_error = %s, finished_at = %s WHERE {HELD}
"""
GIVE_BACK = f"""
UPDATE {JOB} SET state = 'pending', {LET_GO}, attempts = attempts - 1, run_at = coalesce(%s, run_at),
  lock_errors = coalesce(%s, lock_errors),
  started_at = CASE WHEN attempts > 1 THEN started_at END,
  last_attempted_at = CASE WHEN attempts > 1 THEN last_attempted_at END,
  worker_ids = CASE WHEN attempts > 1 AND json_valid(worker_ids) THEN json_remove(worker_ids, '$[#-1]') ELSE '[]' END
WHERE {HELD}
"""
RENEW = f"UPDATE {JOB} SET lease_expires_at = %s WHERE {HELD}"

LAPSED = f"""
SELECT id, fence, attempts, max_attempts, CAST(errors AS BLOB) FROM {JOB}
WHERE queue = %s AND state = 'processing' AND lease_expires_at <= %s ORDER BY lease_expires_at LIMIT %s
"""
# The index is named because it holds processing jobs only. The planner does not know that these are few.
CLAIMING_WORKERS = f"""
SELECT DISTINCT CAST(worker_id AS BLOB) FROM {JOB} INDEXED BY alkstore_job_lease
WHERE state = 'processing' AND liveness = %s
"""
ABANDONED = f"""
SELECT id, fence, CAST(queue AS BLOB), attempts, max_attempts, run_at, backoff_base, CAST(errors AS BLOB),
  CAST(last_error AS BLOB)
FROM {JOB} INDEXED BY alkstore_job_lease
WHERE state = 'processing' AND worker_id = %s AND liveness = %s LIMIT %s
"""
EXPIRED = f"""
SELECT id, fence, attempts, CAST(errors AS BLOB) FROM {JOB}
WHERE queue = %s AND state = 'pending' AND expires_at <= %s ORDER BY expires_at LIMIT %s
"""
REOPEN = f"""
UPDATE {JOB} SET state = 'pending', {LET_GO}, errors = %s, last_error = %s, lock_errors = 0
WHERE id = %s AND fence = %s AND state = 'processing' AND lease_expires_at <= %s
"""
CLOSE = f"""
UPDATE {JOB} SET state = 'dead', {LET_GO}, errors = %s, last_error = %s, finished_at = %s
WHERE id = %s AND fence = %s
  AND (state = 'processing' AND lease_expires_at <= %s OR state = 'pending' AND expires_at <= %s)
"""
CANCEL_PENDING = f"UPDATE {JOB} SET state = 'cancelled', finished_at = %s WHERE id = %s AND state = 'pending'"
RUNNING = f"SELECT id, fence, attempts, CAST(errors AS BLOB) FROM {JOB} WHERE id = %s AND state = 'processing'"
CANCEL_RUNNING = f"""
UPDATE {JOB} SET state = 'cancelled', {LET_GO}, errors = %s, last_error = %s, finished_at = %s
WHERE id = %s AND fence = %s AND state = 'processing'
"""
# OR IGNORE: if the unique key is taken, the row stays as it is and the transaction goes on.
REQUEUE = f"""
UPDATE OR IGNORE {JOB} SET state = 'pending', run_at = %s, attempts = 0, expires_at = NULL, finished_at = NULL,
  worker_ids = '[]', lock_errors = 0
WHERE id = %s AND state IN ('dead', 'cancelled')
"""
RUN_NOW = f"UPDATE {JOB} SET run_at = %s WHERE id = %s AND state = 'pending' AND run_at > %s"
# A retry may have put the job off past its expiry: an expiry that lies before `run_at` stays where it is.
RESCHEDULE = f"""
UPDATE {JOB} SET
  run_at = %(run_at)s,
  expires_at = CASE WHEN expires_at > run_at THEN min(expires_at + %(run_at)s - run_at, {LAST_US}) ELSE expires_at END
WHERE id = %(id)s AND state = 'pending' AND (expires_at IS NULL OR expires_at > %(now)s)
"""
PRUNE = f"""
DELETE FROM {JOB} WHERE id IN (
  SELECT id FROM {JOB} WHERE finished_at IS NOT NULL AND state = %s AND finished_at <= %s
  ORDER BY finished_at LIMIT %s
)
"""

# SELECT DISTINCT would read a whole index. This takes one step for each queue.
# As bytes: a name that is not UTF-8, which something else wrote, would fail the whole statement.
LIVE_QUEUES = " UNION ".join(
    f"""
SELECT CAST(queue AS BLOB) FROM (
  WITH RECURSIVE step(queue) AS (
    SELECT min(queue) FROM {JOB} WHERE state = '{state}'
    UNION ALL
    SELECT (SELECT min(queue) FROM {JOB} WHERE state = '{state}' AND queue > step.queue)
    FROM step WHERE step.queue IS NOT NULL
  )
  SELECT queue FROM step WHERE queue IS NOT NULL
)"""
    for state in ("pending", "processing")
)

# One step for each pair of a queue and a task.
_TASKS = f"{JOB} INDEXED BY alkstore_job_task WHERE state IN ('pending', 'processing') AND task > ''"
LIVE_TASKS = f"""
WITH RECURSIVE step(id) AS (
  SELECT (SELECT id FROM {_TASKS} ORDER BY queue, task LIMIT 1)
  UNION ALL
  SELECT (
    SELECT id FROM {_TASKS} AND (queue, task) > (SELECT queue, task FROM {JOB} WHERE id = step.id)
    ORDER BY queue, task LIMIT 1
  ) FROM step WHERE step.id IS NOT NULL
)
SELECT CAST(queue AS BLOB), CAST(task AS BLOB) FROM step JOIN {JOB} USING (id)
"""

NEXT_CLAIM_AT = f"""
  SELECT min(moment) FROM (
    SELECT (
      WITH RECURSIVE level(priority) AS (
        SELECT max(priority) FROM {JOB} WHERE queue = asked.queue AND state = 'pending'
        UNION ALL
        SELECT (
          SELECT max(priority) FROM {JOB}
          WHERE queue = asked.queue AND state = 'pending' AND priority < level.priority
        ) FROM level WHERE level.priority IS NOT NULL
      )
      SELECT min((
        SELECT min(run_at) FROM {JOB}
        WHERE queue = asked.queue AND state = 'pending' AND priority = level.priority
      )) FROM level
    ) AS moment
    UNION ALL
    SELECT min(lease_expires_at) FROM {JOB} WHERE queue = asked.queue AND state = 'processing'
  )
"""


@lru_cache(maxsize=256)
def _next_claims_text(count: int) -> str:
    """One statement for `count` queues. With a statement for each queue, an idle worker with many would be busy."""
    asked = f"SELECT %s AS queue{' UNION ALL SELECT %s' * (count - 1)}"
    return f"SELECT queue, ({NEXT_CLAIM_AT}) FROM ({asked}) AS asked"


# One partial index answers each branch. A count over the table would read every payload.
COUNT_QUEUES = f"""
SELECT CAST(queue AS BLOB), sum(pending), sum(processing), sum(completed), sum(dead), sum(cancelled), sum(due),
  min(oldest_due)
FROM (
  SELECT queue, count(*) AS pending, 0 AS processing, 0 AS completed, 0 AS dead, 0 AS cancelled,
    sum(run_at <= %(now)s) AS due, min(CASE WHEN run_at <= %(now)s THEN run_at END) AS oldest_due
  FROM {JOB} WHERE state = 'pending' GROUP BY queue
  UNION ALL
  SELECT queue, 0, count(*), 0, 0, 0, 0, NULL FROM {JOB} WHERE state = 'processing' GROUP BY queue
  UNION ALL
  SELECT queue, 0, 0, sum(state = 'completed'), sum(state = 'dead'), sum(state = 'cancelled'), 0, NULL
  FROM {JOB} WHERE finished_at IS NOT NULL GROUP BY queue
) GROUP BY queue ORDER BY queue
"""

FREE_LAPSED_LOCK = f"DELETE FROM {LOCK} WHERE name = %s AND expires_at <= %s"
INSERT_LOCK = f"""
INSERT INTO {LOCK} (token, name, owner, acquired_at, expires_at, liveness)
VALUES (
  max(%s, 1 + coalesce((SELECT seq FROM sqlite_sequence WHERE name = '{Lock._meta.db_table}'), 0)), %s, %s, %s, %s, %s
) ON CONFLICT DO NOTHING
"""

RENEW_LOCK = f"UPDATE {LOCK} SET expires_at = %s WHERE name = %s AND token = %s AND owner = %s"

DUE_SCHEDULES = f"""
SELECT {_columns(StoredSchedule._fields, "name", "spec", "queue", "payload", "timezone", "task", "catch_up", "overlap")}
FROM {SCHEDULE}
WHERE enabled AND undeclared_at IS NULL AND next_fire_at <= %s ORDER BY next_fire_at LIMIT %s
"""
NEXT_BOUNDARY = f"""
SELECT next_fire_at FROM {SCHEDULE} WHERE enabled AND undeclared_at IS NULL AND next_fire_at IS NOT NULL
ORDER BY next_fire_at LIMIT 1
"""
MOVE_SCHEDULE = f"""
UPDATE {SCHEDULE} SET next_fire_at = %s, last_fire_at = coalesce(%s, last_fire_at), updated_at = %s, fired = fired + %s,
  coalesced = coalesced + %s, too_late = too_late + %s, overlapped = overlapped + %s
WHERE id = %s AND next_fire_at = %s
"""
HAS_LIVE_FIRE = f"""
SELECT 1 FROM {JOB} WHERE schedule = %s AND fire_at IS NOT NULL AND state IN ('pending', 'processing') LIMIT 1
"""
PAUSE_BROKEN = f"""
UPDATE {SCHEDULE} SET enabled = 0, last_error = %s, updated_at = %s WHERE id = %s AND next_fire_at = %s
"""


@lru_cache(maxsize=256)
def _ack_text(count: int, *, delete: bool) -> str:
    """The statement that finishes `count` claims. With row values and a VALUES list, SQLite would scan the table."""
    held = f"({HELD})"
    action = f"DELETE FROM {JOB}" if delete else f"UPDATE {JOB} SET state = 'completed', {LET_GO}, finished_at = %s"
    return f"{action} WHERE {' OR '.join([held] * count)} RETURNING id, fence"


@lru_cache(maxsize=64)
def _joined(worker_id: str) -> str:
    """The id as the last element of a JSON list."""
    return json.dumps(worker_id) + "]"


@lru_cache(maxsize=256)
def _held_text(count: int) -> str:
    claims = " OR ".join(["(id = %s AND fence = %s)"] * count)
    return f"SELECT id, fence FROM {JOB} WHERE state = 'processing' AND ({claims})"


_MAX_ACKS = 100
"""Claims in one statement. Each has three variables, and older versions of SQLite allow 999."""


_MAX_QUEUES = 100
"""Queues in one statement. SQLite allows 500 terms in a compound SELECT."""


_HELD_BY_ANOTHER = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


BUSY = "busy"
"""The version while another process holds an exclusive lock. It equals no number, so its end counts as a change."""


def _identity(file: str | None) -> tuple[int, int] | None:
    """Device and inode of the file, which tell it from another file of the same name; `None` if there is no file."""
    if file is None:
        return None
    try:
        found = os.stat(file)  # not opened: to close it would drop this process's locks on it
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _keeps_out(holder: sqlite3.Connection, another: sqlite3.Connection) -> bool | None:
    """True if `another` cannot take the writer lock while `holder` has it. `None` if `holder` did not get it."""
    if not _takes_writer_lock(holder):
        return None
    try:
        if not _takes_writer_lock(another):
            return True
        another.execute("ROLLBACK")
        return False
    finally:
        holder.execute("ROLLBACK")


def _takes_writer_lock(raw: sqlite3.Connection) -> bool:
    try:
        raw.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in _HELD_BY_ANOTHER:
            raise
        return False
    return True


def database_path(connection: BaseDatabaseWrapper) -> Path | None:
    """The file that the settings name, which need not exist; `None` for a database in memory. Does not connect."""
    if connection.is_in_memory_db():  # type: ignore[attr-defined]
        return None
    name = str(connection.settings_dict["NAME"])
    return Path(unquote(urlsplit(name).path) if name.startswith("file:") else name)


def is_missing(connection: BaseDatabaseWrapper) -> bool:
    """True if the file is missing. Ask before you connect, since that creates one. False for a database in memory."""
    path = database_path(connection)
    if path is None:
        return False
    try:
        return not path.exists()
    except OSError:
        return False  # it cannot be known; connecting says why


_LOOKS = 3
"""How often the version is read again if it differs from the one before, as it does if others commit in between."""


def _data_version(raw: sqlite3.Connection) -> int:
    return int(raw.execute("PRAGMA data_version").fetchone()[0])


class DataVersion:
    """`PRAGMA data_version` on a connection of its own: it changes when any other connection has committed."""

    def __init__(self, using: str) -> None:
        # Not the thread's own connection, which does not see its own commits. This one stays open as long as the
        # runtime, so no other connection is the last one to be closed: closing the last one makes a checkpoint.
        self._wrapper = connections.create_connection(using)
        self._wrapper.inc_thread_sharing()
        self._asking = guard()
        """Protects every attribute. Two threads that ask at once would also share the driver's prepared statement."""
        self._raw: sqlite3.Connection | None = None
        """None after `renew`, until the next look."""
        self._base = 0
        """Added to the numbers of the present connection: those of two connections cannot be compared."""
        self._last = 0
        try:
            self._raw = self._open()
            self._file: str | None = self._raw.execute("PRAGMA database_list").fetchone()[2] or None
            self._identity = _identity(self._file)
        except BaseException:
            self._wrapper.close()
            raise

    def _open(self) -> sqlite3.Connection:
        if is_missing(self._wrapper):
            # SQLite would create an empty file, which looks like a database that has never been migrated.
            raise DatabaseReplaced(f"the database file {self._wrapper.settings_dict['NAME']} is gone")
        self._wrapper.ensure_connection()
        raw: sqlite3.Connection = self._wrapper.connection
        # Without a wait: if somebody is writing, that is all there is to know.
        raw.execute("PRAGMA busy_timeout = 0")
        return raw

    def renew(self) -> None:
        with self._asking:
            if self._file is not None:  # closing one in memory would end the database
                self._raw = None
                self._wrapper.close()

    def version(self) -> object:
        with self._asking:
            with suppress(OSError):  # it cannot be looked at for now; what is open goes on
                if _identity(self._file) != self._identity:
                    self._refuse_another_file()
            try:
                if self._raw is None:
                    self._raw = self._open()
                    self._base += 2**32
                return self._number(self._raw)
            except DatabaseReplaced:
                raise
            except (sqlite3.DatabaseError, DatabaseError):  # also if the file is damaged: the next read says how
                return BUSY

    def _number(self, raw: sqlite3.Connection) -> object:
        """The version; `BUSY` if it differs each time, as it does if this user may not write the index of the WAL."""
        number = _data_version(raw)
        if number != self._last:
            for _ in range(_LOOKS):
                before, number = number, _data_version(raw)
                if number == before:
                    break
            else:
                return BUSY
            self._last = number
        return self._base + number

    def _refuse_another_file(self) -> None:
        """`DatabaseReplaced`, unless it is the same file whose number has changed, as some file systems do."""
        file, now = self._file, _identity(self._file)
        # One answer alone may be the result of what others did in between.
        answers = {False} if file is None or now is None else {self._is_the_same(file) for _ in range(5)}
        if False in answers:
            what = "is gone" if _identity(file) is None else "has been replaced by another"
            raise DatabaseReplaced(f"the database file {file} {what}")
        if None not in answers:
            self._identity = now

    def _is_the_same(self, file: str) -> bool | None:
        """True if this and a new connection to the file each keep the writer lock from the other: it is the same file.

        Each, since what keeps a new connection from another file may be somebody who is writing there. `None` where
        others write meanwhile: it is asked again.
        """
        uri = f"{Path(file).as_uri()}?mode=rw"  # not to make one where there is none any more
        try:
            # Closing it drops no lock of this process: SQLite waits with that while a connection to the file holds one.
            with closing(sqlite3.connect(uri, uri=True, timeout=0, isolation_level=None)) as other:
                raw = self._raw
                return raw is not None and _keeps_out(raw, other) and _keeps_out(other, raw)
        except sqlite3.DatabaseError:  # not there by now, not ours to open, or no database: not what we have open
            return False

    def watched_file(self) -> str | None:
        # SQLite is asked for the path, since the setting may be a URI. `None` for a database in memory.
        return self._file

    def close(self) -> None:
        self._wrapper.close()
        if self._raw is not None:
            self._raw.close()  # Django keeps a connection to a database in memory open


class SQLiteOperations(Operations):
    """The operations in SQLite's SQL."""

    def insert_job(self, job: NewJob) -> int | None:
        self.cursor.execute(INSERT_JOB, tuple(job))  # the driver is slower with a named one
        return self.cursor.lastrowid if self.cursor.rowcount == 1 else None

    def insert_jobs(self, jobs: Sequence[tuple[Any, ...]]) -> list[int]:
        self.cursor.executemany(INSERT_JOB, jobs)
        # With the writer lock held, AUTOINCREMENT counts up by one: the last id tells all of them.
        last = self.cursor.execute("SELECT last_insert_rowid()").fetchone()[0]
        return list(range(last - len(jobs) + 1, last + 1))

    def live_job(self, queue: str, unique_key: str) -> int | None:
        self.cursor.execute(LIVE_JOB, (queue, unique_key))
        row = self.cursor.fetchone()
        return None if row is None else row[0]

    def claim(self, queue: str, worker_id: str, limit: int, now: int, liveness: str | None = None) -> list[ClaimedJob]:
        params = {
            "queue": queue,
            "worker_id": worker_id,
            "joined": _joined(worker_id),
            "limit": limit,
            "now": now,
            "liveness": liveness,
        }
        self.cursor.execute(CLAIM, params)
        claimed = [ClaimedJob._make(row) for row in self.cursor.fetchall()]
        if len(claimed) > 1:  # RETURNING promises no order
            claimed.sort(key=lambda job: (job.run_at, job.id))
        return claimed

    def ack(self, claims: Sequence[Claim], now: int, *, delete: bool) -> set[tuple[int, int]]:
        if len(claims) == 1 and not delete:
            return {claims[0][:2]} if self._took_effect(ACK, (now, *claims[0])) else set()
        acked: set[tuple[int, int]] = set()
        for start in range(0, len(claims), _MAX_ACKS):
            some = claims[start : start + _MAX_ACKS]
            params: list[int] = [] if delete else [now]
            for claim in some:
                params += claim
            self.cursor.execute(_ack_text(len(some), delete=delete), params)
            acked.update(self.cursor.fetchall())
        return acked

    def complete(self, claim: Claim, now: int, result: str) -> bool:
        return self._took_effect(COMPLETE, (now, result, *claim))

    def retry(self, claim: Claim, run_at: int, errors: str, last_error: str) -> bool:
        return self._took_effect(RETRY, (run_at, errors, last_error, *claim))

    def bury(self, claim: Claim, now: int, errors: str, last_error: str) -> bool:
        return self._took_effect(BURY, (errors, last_error, now, *claim))

    def give_back(self, claim: Claim, run_at: int | None, lock_errors: int | None = None) -> bool:
        return self._took_effect(GIVE_BACK, (run_at, lock_errors, *claim))

    def renew(self, claim: Claim, lease_expires_at: int) -> bool:
        return self._took_effect(RENEW, (lease_expires_at, *claim))

    def held(self, claims: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
        found: set[tuple[int, int]] = set()
        for start in range(0, len(claims), _MAX_ACKS):
            some = claims[start : start + _MAX_ACKS]
            self.cursor.execute(_held_text(len(some)), [value for claim in some for value in claim])
            found.update(self.cursor.fetchall())
        return found

    def lapsed(self, queue: str, now: int, limit: int) -> list[LapsedJob]:
        self.cursor.execute(LAPSED, (queue, now, limit))
        return [LapsedJob._make(row) for row in self.cursor.fetchall()]

    def claiming_workers(self, liveness: str) -> list[str]:
        self.cursor.execute(CLAIMING_WORKERS, (liveness,))
        return [row[0].decode(errors="replace") for row in self.cursor.fetchall()]

    def abandoned(self, worker_id: str, liveness: str, limit: int) -> list[AbandonedJob]:
        self.cursor.execute(ABANDONED, (worker_id, liveness, limit))
        found = [AbandonedJob._make(row) for row in self.cursor.fetchall()]
        return [job._replace(queue=job.queue.decode(errors="replace")) for job in found]  # type: ignore[attr-defined]

    def expired(self, queue: str, now: int, limit: int) -> list[EndedJob]:
        self.cursor.execute(EXPIRED, (queue, now, limit))
        return [EndedJob._make(row) for row in self.cursor.fetchall()]

    def reopen(self, now: int, jobs: Iterable[SweptJob]) -> list[int]:
        return [job.id for job in jobs if self._took_effect(REOPEN, (*job, now))]

    def close(self, now: int, jobs: Iterable[SweptJob]) -> list[int]:
        return [
            job.id
            for job in jobs
            if self._took_effect(CLOSE, (job.errors, job.last_error, now, job.id, job.fence, now, now))
        ]

    def cancel_pending(self, job_id: int, now: int) -> bool:
        return self._took_effect(CANCEL_PENDING, (now, job_id))

    def running(self, job_id: int) -> EndedJob | None:
        self.cursor.execute(RUNNING, (job_id,))
        row = self.cursor.fetchone()
        return None if row is None else EndedJob._make(row)

    def cancel_running(self, now: int, job: SweptJob) -> bool:
        return self._took_effect(CANCEL_RUNNING, (job.errors, job.last_error, now, job.id, job.fence))

    def requeue(self, job_id: int, now: int) -> bool:
        return self._took_effect(REQUEUE, (now, job_id))

    def run_now(self, job_id: int, now: int) -> bool:
        return self._took_effect(RUN_NOW, (now, job_id, now))

    def reschedule(self, job_id: int, run_at: int, now: int) -> bool:
        self.cursor.execute(RESCHEDULE, {"id": job_id, "run_at": run_at, "now": now})
        return self.cursor.rowcount == 1

    def prune(self, state: str, before: int, limit: int) -> int:
        self.cursor.execute(PRUNE, (state, before, limit))
        return int(self.cursor.rowcount)

    def live_queues(self) -> list[str]:
        self.cursor.execute(LIVE_QUEUES)
        return [row[0].decode(errors="replace") for row in self.cursor.fetchall()]

    def live_tasks(self) -> list[tuple[str, str]]:
        self.cursor.execute(LIVE_TASKS)
        return [
            (queue.decode(errors="replace"), task.decode(errors="replace")) for queue, task in self.cursor.fetchall()
        ]

    def next_claims(self, queues: Sequence[str]) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for start in range(0, len(queues), _MAX_QUEUES):
            some = queues[start : start + _MAX_QUEUES]
            self.cursor.execute(_next_claims_text(len(some)), some)
            found.update(self.cursor.fetchall())
        return found

    def count_queues(self, now: int) -> list[QueueCounts]:
        self.cursor.execute(COUNT_QUEUES, {"now": now})
        return [QueueCounts(queue.decode(errors="replace"), *counts) for queue, *counts in self.cursor.fetchall()]

    def acquire_lock(
        self, name: str, owner: str, now: int, expires_at: int, token: int, liveness: str | None = None
    ) -> int | None:
        self.cursor.execute(FREE_LAPSED_LOCK, (name, now))
        self.cursor.execute(INSERT_LOCK, (token, name, owner, now, expires_at, liveness))
        return self.cursor.lastrowid if self.cursor.rowcount == 1 else None

    def renew_lock(self, name: str, token: int, owner: str, expires_at: int) -> bool:
        return self._took_effect(RENEW_LOCK, (expires_at, name, token, owner))

    def due_schedules(self, now: int, limit: int) -> list[StoredSchedule]:
        self.cursor.execute(DUE_SCHEDULES, (now, limit))
        return [StoredSchedule._make(row) for row in self.cursor.fetchall()]

    def next_boundary(self) -> int | None:
        row = self.cursor.execute(NEXT_BOUNDARY).fetchone()
        return None if row is None else row[0]

    def move_schedule(
        self,
        schedule_id: int,
        boundary: int,
        now: int,
        next_fire_at: int | None,
        last_fire_at: int | None,
        counts: BoundaryCounts,
    ) -> bool:
        return self._took_effect(MOVE_SCHEDULE, (next_fire_at, last_fire_at, now, *counts, schedule_id, boundary))

    def has_live_fire(self, schedule: str) -> bool:
        self.cursor.execute(HAS_LIVE_FIRE, (schedule,))
        return self.cursor.fetchone() is not None

    def pause_broken(self, schedule_id: int, boundary: int, now: int, error: str) -> bool:
        return self._took_effect(PAUSE_BROKEN, (error, now, schedule_id, boundary))

    def _took_effect(self, text: str, params: tuple[Any, ...]) -> bool:
        self.cursor.execute(text, params)
        return self.cursor.rowcount == 1


class SQLite(Dialect):
    """SQLite 3.35 or newer: one writer, a lock for the whole file, a snapshot for each reader."""

    operations = staticmethod(SQLiteOperations)
    open_cursor = staticmethod(open_cursor)

    def take_writer_lock(self, connection: BaseDatabaseWrapper, cursor: Cursor, *, fresh: bool) -> None:
        # BEGIN IMMEDIATE and BEGIN EXCLUSIVE have taken the lock. A deferred BEGIN has not.
        if not (fresh and connection.transaction_mode in ("IMMEDIATE", "EXCLUSIVE")):  # type: ignore[attr-defined]
            cursor.execute(TAKE_WRITER_LOCK)

    def begin(self, connection: BaseDatabaseWrapper, cursor: Cursor) -> AbstractContextManager[object]:
        if isinstance(cursor, DirectCursor):
            exclusive = connection.transaction_mode == "EXCLUSIVE"  # type: ignore[attr-defined]
            return cursor.transaction("BEGIN EXCLUSIVE" if exclusive else "BEGIN IMMEDIATE")
        return self._begin_watched(connection, cursor)

    @contextmanager
    def _begin_watched(self, connection: BaseDatabaseWrapper, cursor: Cursor) -> Iterator[None]:
        own = connections[connection.alias]
        connections[connection.alias] = connection  # `atomic` takes that of the thread
        try:
            with transaction.atomic(using=connection.alias):
                self.take_writer_lock(connection, cursor, fresh=True)
                yield
        finally:
            connections[connection.alias] = own

    def is_contention(self, error: OperationalError) -> bool:
        code = getattr(error.__cause__, "sqlite_errorcode", None)
        return code is not None and code & 0xFF in _HELD_BY_ANOTHER

    def busy_timeout(self, connection: BaseDatabaseWrapper) -> float:
        return float(connection.settings_dict["OPTIONS"].get("timeout", 5.0))

    def limit_wait(self, connection: BaseDatabaseWrapper, seconds: float) -> None:
        connection.connection.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")

    def is_at_rest(self, connection: BaseDatabaseWrapper) -> bool:
        raw: sqlite3.Connection | None = connection.connection
        if raw is None:
            return True
        # The driver does not say it. But SQLite refuses a VACUUM while a statement runs, and checks that before it
        # looks at the target, which is invalid here. Any other error counts as "no", and costs a new connection.
        try:
            raw.execute("VACUUM INTO NULL")
        except sqlite3.Error as error:
            return str(error) == "non-text filename"
        return False

    def cut_off(self, connection: BaseDatabaseWrapper) -> None:
        raw: sqlite3.Connection | None = connection.connection
        if raw is None:
            return
        with suppress(sqlite3.Error):  # its own thread may have closed it just now
            # Writing is refused first, also to prepared statements: after the rollback, each further statement of the
            # other thread would commit by itself. Closing the connection would crash under a running statement.
            # Interrupting it would let SQLite end the transaction before writing is refused.
            raw.execute("PRAGMA query_only = 1")
            raw.rollback()

    def change(self, using: str) -> Change:
        return DataVersion(using)

    def write_obstacle(self, connection: BaseDatabaseWrapper) -> str | None:
        path = database_path(connection)
        return None if path is None else write_obstacle(path)
