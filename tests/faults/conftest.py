"""A database of a test's own, which it may spoil."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from django.db import connections

from tests.faults.tools import ALIAS, Store
from tests.ledger.tools import database


@pytest.fixture
def store(transactional_db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A migrated file in a folder of its own, under the alias `ALIAS`; its processes are killed at the end."""
    folder = tmp_path / "store"
    folder.mkdir()
    made = Store(folder / "db.sqlite3")
    with closing(sqlite3.connect(database())) as source, closing(sqlite3.connect(made.path)) as copy:
        source.backup(copy)
    connections[ALIAS].close()
    monkeypatch.setitem(connections[ALIAS].settings_dict, "NAME", made.path)
    yield made
    for process in made.started:
        process.end()
    connections[ALIAS].close()
