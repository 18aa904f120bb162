"""A database of a test's own, which it may spoil."""

import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from django.db import connections

from tests.faults.tools import ALIAS, SmallDisk, Store
from tests.ledger.tools import database


@contextmanager
def store_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A migrated file there, under the alias `ALIAS`; its processes are killed at the end."""
    made = Store(folder / "db.sqlite3")
    with closing(sqlite3.connect(database(), isolation_level=None)) as source:
        source.execute("VACUUM INTO ?", (str(made.path),))
    connections[ALIAS].close()
    monkeypatch.setitem(connections[ALIAS].settings_dict, "NAME", made.path)
    try:
        yield made
    finally:
        for process in made.started:
            process.end()
        connections[ALIAS].close()


@pytest.fixture
def store(transactional_db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A database in a folder of its own."""
    folder = tmp_path / "store"
    folder.mkdir()
    with store_in(folder, monkeypatch) as made:
        yield made


@pytest.fixture
def small_disk(transactional_db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    """A database on a disk of 2 MB. Skips where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None:
        pytest.skip("there is no mount command")
    mounted = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        reason, *_ = mounted.stderr.splitlines() or ["mount does not say why"]
        pytest.skip(f"no tmpfs can be mounted: {reason}")
    try:
        with store_in(folder, monkeypatch) as made:
            yield SmallDisk(made)
    finally:
        # Lazily: it is taken away also where something still has a file open there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
