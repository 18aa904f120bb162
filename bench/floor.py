"""The floor: plain `sqlite3` from the standard library, on a table like ours with nothing of ours around it.

The table is made by the very statements that made the library's `Job` table in a migrated database (columns, CHECKs
and all indexes), read from that database. The connection is in WAL with `synchronous=NORMAL` and in autocommit
(`isolation_level=None`), with Python's busy timeout at 20 seconds as in our settings. Every statement is one text,
which the driver prepares once. Payloads are made before: nothing is validated, encoded or returned.

- A single enqueue is one INSERT with its commit. Many are one `executemany` between BEGIN IMMEDIATE and COMMIT.
- A claim is one UPDATE ... RETURNING that finds its row by the claim's index, with its commit. An ack is one UPDATE by
  the row's id, or one DELETE where ours deletes, with its commit.
- A batch is one such claim of many and one `executemany` of acks, each with its commit.
- Its worker claims and acks one by one, and sleeps a millisecond where there is nothing.

There is no fence, lease, expiry, priority of others nor retry: whoever adds those pays more.
"""

import json
import os
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import notes
from bench.program import PAYLOAD, Program, main

TABLE = "django_alkstore_job"
QUEUE = "noop"
DATABASE = "bench.sqlite3"
MODEL = "BENCH_MODEL"
"""The environment's name of the migrated database whose table is copied."""
KEEP = "BENCH_KEEP"
"""`0`: done jobs are deleted."""
SECOND = 1_000_000
DAY = 86_400 * SECOND


def connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=20, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    return connection


def now_us() -> int:
    return time.time_ns() // 1_000


def row(payload: str = "null", **columns: Any) -> dict[str, Any]:
    """A pending job as the library stores one, by column; moments in microseconds."""
    now = now_us()
    return {
        "queue": QUEUE,
        "payload": payload,
        "state": "pending",
        "priority": 0,
        "run_at": now,
        "attempts": 0,
        "max_attempts": 3,
        "visibility_timeout": 300.0,
        "backoff_base": 5.0,
        "expires_at": None,
        "fence": 0,
        "worker_id": None,
        "lease_expires_at": None,
        "liveness": None,
        "unique_key": None,
        "schedule": None,
        "fire_at": None,
        "errors": "[]",
        "last_error": None,
        "created_at": now,
        "finished_at": None,
        "started_at": None,
        "last_attempted_at": None,
        "task": "",
        "result": None,
        "worker_ids": "[]",
        "lock_errors": 0,
        **columns,
    }


COLUMNS = list(row())
INSERT = f"INSERT INTO {TABLE} ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
CLAIM = f"""
UPDATE {TABLE} SET state = 'processing', attempts = attempts + 1, fence = fence + 1, worker_id = ?, lease_expires_at = ?
WHERE id IN (
  SELECT id FROM {TABLE} WHERE queue = ? AND state = 'pending' AND run_at <= ?
  ORDER BY priority DESC, run_at LIMIT ?
) RETURNING id, payload
"""
ACK = (
    f"UPDATE {TABLE} SET state = 'completed', worker_id = NULL, lease_expires_at = NULL, finished_at = :now"
    " WHERE id = :id"
)
DELETE = f"DELETE FROM {TABLE} WHERE id = :id"
LEFT = f"SELECT count(*) FROM {TABLE} WHERE state IN ('pending', 'processing')"


def fill(connection: sqlite3.Connection, count: int, **expressions: str) -> None:
    """Store many rows in one statement. Columns may be SQL expressions over `n`, which counts from 0."""
    values = {column: expressions.get(column, _literal(value)) for column, value in row().items()}
    connection.execute(f"""
        INSERT INTO {TABLE} ({", ".join(values)})
        WITH RECURSIVE number(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM number WHERE n + 1 < {count})
        SELECT {", ".join(values.values())} FROM number
    """)


def _literal(value: object) -> str:
    if value is None:
        return "NULL"
    return f"'{value}'" if isinstance(value, str) else str(value)


class Floor(Program):
    """Plain `sqlite3`."""

    def open(self) -> None:
        self.path = self.folder / DATABASE
        self.connection = connect(self.path)
        self._insert = [value for column, value in row().items()]
        self._at = {column: COLUMNS.index(column) for column in ("payload", "run_at", "created_at", "priority")}
        self._ack = DELETE if os.environ.get(KEEP) == "0" else ACK

    def prepare(self) -> None:
        model = sqlite3.connect(os.environ[MODEL])
        for (text,) in model.execute("SELECT sql FROM sqlite_master WHERE tbl_name = ? AND sql IS NOT NULL", (TABLE,)):
            self.connection.execute(text)
        model.close()

    def _row(self, text: str, priority: int = 0) -> list[Any]:
        values = self._insert.copy()
        values[self._at["payload"]] = text
        values[self._at["run_at"]] = values[self._at["created_at"]] = now_us()
        values[self._at["priority"]] = priority
        return values

    def enqueue(self, payload: object, *, priority: int = 0) -> object:
        return self.connection.execute(INSERT, self._row(_text(payload), priority))

    def enqueue_many(self, payloads: Sequence[object]) -> object:
        rows = [self._row(_text(payload)) for payload in payloads]
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.executemany(INSERT, rows)
        return self.connection.execute("COMMIT")

    def claim(self, limit: int = 1) -> list[tuple[int, str]]:
        now = now_us()
        claimed = self.connection.execute(CLAIM, ("worker", now + 300 * SECOND, QUEUE, now, limit))
        return claimed.fetchall()

    def claim_and_ack(self) -> bool:
        claimed = self.claim()
        for job_id, _ in claimed:
            self.connection.execute(self._ack, {"id": job_id, "now": now_us()})
        return bool(claimed)

    def claim_and_ack_batch(self, size: int) -> int:
        claimed = self.claim(size)
        now = now_us()
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.executemany(self._ack, [{"id": job_id, "now": now} for job_id, _ in claimed])
        self.connection.execute("COMMIT")
        return len(claimed)

    def left(self) -> int:
        return int(self.connection.execute(LEFT).fetchone()[0])

    def role_stock_behind(self, count: int) -> None:
        """Due jobs that go after those that a case adds: for its throughput beside a full table."""
        fill(self.connection, count, priority="-5")

    def worker(self) -> Sequence[str]:
        return [sys.executable, "-m", "bench.floor", "consume", str(self.folder)]

    def role_consume(self) -> None:
        print("worker started", flush=True)
        while True:
            claimed = self.claim()
            if not claimed:
                time.sleep(0.001)
            for job_id, payload in claimed:
                notes.begun(json.loads(payload))
                self.connection.execute(self._ack, {"id": job_id, "now": now_us()})


_PAYLOAD_TEXT = json.dumps(PAYLOAD)


def _text(payload: object) -> str:
    """Its JSON; what is only stored is not encoded again each time."""
    if payload is None:
        return "null"
    return _PAYLOAD_TEXT if payload is PAYLOAD else json.dumps(payload)


if __name__ == "__main__":
    main(Floor)
