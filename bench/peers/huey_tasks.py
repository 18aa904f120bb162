"""huey's instance and its task, in a module that both the program and the consumer import by the same name."""

import os
import sqlite3
from pathlib import Path

import huey.storage

from bench import notes


class NormalStorage(huey.storage.SqliteStorage):
    """`synchronous=NORMAL`, for which its options have no word: they know FULL and OFF."""

    def _create_connection(self) -> sqlite3.Connection:
        connection = super()._create_connection()
        connection.execute("PRAGMA synchronous=NORMAL")
        return connection


instance = huey.Huey(
    "bench",
    storage_class=NormalStorage,
    filename=str(Path(os.environ["BENCH_FOLDER"]) / "huey.sqlite3"),
    timeout=20,
    results=False,
)


@instance.task()
def noop(payload: object) -> None:
    notes.begun(payload)
