"""What the health check asks an SQLite database. Nothing here writes a row.

Each function takes an open connection, and raises Django's errors.
"""

import shutil
import sqlite3
from pathlib import Path
from typing import NamedTuple

from django.db import DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper

from django_alkstore.clock import SECOND
from django_alkstore.dialects.sqlite import JOB

LEAST_ROOM = 2**20
"""Bytes. With less than this left on the disk the next transactions fail, if not the next one."""


class Settings(NamedTuple):
    """The modes that the connection really has, whatever the settings say."""

    journal_mode: str
    transaction_mode: str


class Log(NamedTuple):
    """The write-ahead log."""

    size: int
    """Bytes of the file, which keeps the size that it once needed."""
    waiting: int
    """Bytes in it that a checkpoint could not move into the database, as a rule because a reader still needs them."""


class Lease(NamedTuple):
    """The lease that one worker has written last in one queue."""

    queue: str
    worker_id: str
    liveness: str | None
    """The liveness file under which it was claimed."""
    written: int
    """When it was written, in microseconds, if it lasts for the job's visibility timeout."""


_KINDS = {
    sqlite3.SQLITE_BUSY: "locked",
    sqlite3.SQLITE_LOCKED: "locked",
    sqlite3.SQLITE_READONLY: "read_only",
    sqlite3.SQLITE_PERM: "read_only",
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_CORRUPT: "corrupt",
    sqlite3.SQLITE_NOTADB: "corrupt",
    sqlite3.SQLITE_CANTOPEN: "unreachable",
    sqlite3.SQLITE_IOERR: "unreachable",
    sqlite3.SQLITE_ERROR: "tables",
}

_LAST_LEASES = f"""
SELECT CAST(queue AS BLOB), CAST(worker_id AS BLOB), liveness,
  max(lease_expires_at - CAST(visibility_timeout * {SECOND} AS INTEGER))
FROM {JOB} WHERE state = 'processing' AND lease_expires_at > %s GROUP BY queue, worker_id, liveness
"""


def kind_of(error: DatabaseError) -> str:
    """The kind of an error, by its code: one of the words above, or `broken`."""
    code = getattr(error.__cause__, "sqlite_errorcode", None)
    return "broken" if code is None else _KINDS.get(code & 0xFF, "broken")


def busy_timeout(connection: BaseDatabaseWrapper) -> float:
    """Seconds that the connection waits for another writer. Does not touch the file."""
    return _ask_number(connection, "PRAGMA busy_timeout") / 1000


def settings(connection: BaseDatabaseWrapper) -> Settings:
    """The modes of the journal, in lower case, and of transactions, in upper case."""
    mode: str | None = connection.transaction_mode  # type: ignore[attr-defined]
    return Settings(_ask(connection, "PRAGMA journal_mode").lower(), mode or "DEFERRED")


def log(connection: BaseDatabaseWrapper, enough: int) -> Log:
    """The write-ahead log. If its file has more than `enough` bytes, a checkpoint shows how much of it is in use."""
    file = Path(f"{_file(connection)}-wal")
    size = file.stat().st_size if file.exists() else 0
    if size <= enough:
        return Log(size, 0)
    with connection.cursor() as cursor:
        # PASSIVE waits for nobody and keeps nobody waiting: what it can move, the next commit would have moved.
        _, frames, moved = cursor.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return Log(size, max(0, frames - moved) * _ask_number(connection, "PRAGMA page_size"))


def room(connection: BaseDatabaseWrapper) -> int:
    """Bytes that can still be written: what the disk has left, or what SQLite's own limit of pages leaves."""
    pages, most, free, size = (
        _ask_number(connection, f"PRAGMA {what}")
        for what in ("page_count", "max_page_count", "freelist_count", "page_size")
    )
    left = (most - pages + free) * size
    return min(left, shutil.disk_usage(Path(_file(connection)).parent).free)


def damage(connection: BaseDatabaseWrapper) -> str | None:
    """The first fault that SQLite finds when it reads the whole file; `None` if it finds none."""
    found = _ask(connection, "PRAGMA quick_check(1)")
    return None if found == "ok" else found


def last_leases(connection: BaseDatabaseWrapper, now: int) -> list[Lease]:
    """For each queue and each worker with a running lease the one written last. Reads the running jobs only."""
    with connection.cursor() as cursor:
        cursor.execute(_LAST_LEASES, (now,))
        return [
            Lease(queue.decode(errors="replace"), worker_id.decode(errors="replace"), liveness, written)
            for queue, worker_id, liveness, written in cursor.fetchall()
        ]


def _file(connection: BaseDatabaseWrapper) -> str:
    # SQLite is asked for the path, since the setting may be a URI.
    with connection.cursor() as cursor:
        return str(cursor.execute("PRAGMA database_list").fetchone()[2])


def _ask(connection: BaseDatabaseWrapper, pragma: str) -> str:
    with connection.cursor() as cursor:
        return str(cursor.execute(pragma).fetchone()[0])


def _ask_number(connection: BaseDatabaseWrapper, pragma: str) -> int:
    return int(_ask(connection, pragma))
