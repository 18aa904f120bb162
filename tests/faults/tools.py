"""What the tests of faults share: a file that may be spoilt, and processes whose store or clock can be moved."""

import errno
import os
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from django_alkstore.models import Job, Lock, Schedule
from tests.ledger.models import Entry
from tests.processes import Process, start_process, wait_until

ALIAS = "other"
TROUBLE = "database trouble"

# Runs a command. While the file named first exists, each new connection is given the SQL that stands in it.
UNDER = """
import sys
from pathlib import Path
from django.core.management import call_command
from django.db.backends.signals import connection_created
fault = Path(sys.argv[1])

def spoil(connection, **_):
    if fault.exists():
        connection.connection.execute(fault.read_text())

connection_created.connect(spoil)
call_command(*sys.argv[2:])
"""

# The wall clock is off by the seconds that stand in the file named first.
CLOCK = """
import sys
from datetime import timedelta
from pathlib import Path
from django_alkstore import clock
shift = Path(sys.argv[1])

class Shifted(clock.SystemClock):
    def now(self):
        return super().now() + timedelta(seconds=float(shift.read_text()))

clock._clock = Shifted()
"""

# So is the other clock: so much more time has passed.
PASSES = """
Shifted.monotonic = lambda self: clock.SystemClock.monotonic(self) + float(shift.read_text())
"""

COMMAND = """
from django.core.management import call_command
from django_alkstore.runtime import keeper, leadership
leadership.LONGEST_SLEEP = keeper.LONGEST_SLEEP = 1.0  # after that it looks at the clock again; by itself a minute
call_command(*sys.argv[2:])
"""


# Runs Python with these arguments by the permissions of files, which do not bind root otherwise.
BOUND_BY_PERMISSIONS = """
import os, sys
command = [sys.executable, *sys.argv[1:]]
if os.geteuid() == 0:
    without = "-dac_override,-dac_read_search"
    command = ["setpriv", f"--bounding-set={without}", f"--inh-caps={without}", *command]
os.execvp(command[0], command)
"""

# Ends in the middle of its work, so that it leaves the files that a database has beside it while it is open.
LEAVES_FILES = """
import os, sqlite3, sys
raw = sqlite3.connect(sys.argv[1], isolation_level=None)
raw.execute("INSERT INTO ledger_entry (text) VALUES ('left')")
os._exit(0)
"""


class Store:
    """A database file of the test's own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started: list[Process] = []

    def start(self, *arguments: str, **environment: str) -> Process:
        process = start_process(arguments, {"ALKSTORE_TEST_DATABASE": str(self.path), **environment})
        self.started.append(process)
        return process

    def start_bound_by_permissions(self, *arguments: str) -> Process:
        """As `start`; skips the test where root cannot be bound."""
        if os.geteuid() == 0 and shutil.which("setpriv") is None:
            pytest.skip("there is no setpriv command")
        if arguments[0] == "-c":
            return self.start(
                "-c", BOUND_BY_PERMISSIONS, "-c", "import django; django.setup()\n" + arguments[1], *arguments[2:]
            )
        return self.start("-c", BOUND_BY_PERMISSIONS, "-m", "django", *arguments)

    def leave_files(self, mode: int) -> list[Path]:
        """The `-wal` and the `-shm`, of this mode, as a process leaves them that ends in the middle of its work."""
        self.reopen()
        assert self.start("-c", LEAVES_FILES, str(self.path)).wait() == 0
        left = [Path(f"{self.path}{suffix}") for suffix in ("-wal", "-shm")]
        for file in left:
            file.chmod(mode)
        return left

    def raw(self) -> "closing[sqlite3.Connection]":
        return closing(sqlite3.connect(self.path, isolation_level=None, timeout=30))

    def job(self, job_id: int) -> Job:
        return Job.objects.using(ALIAS).get(pk=job_id)

    def wait_for_state(self, wanted: str, *job_ids: int) -> None:
        found = Job.objects.using(ALIAS).filter(pk__in=job_ids, state=wanted)
        wait_until(lambda: found.count() == len(job_ids), f"{wanted}: {job_ids}")

    def reopen(self) -> None:
        """Let the test itself see the file that is now at the path."""
        connections[ALIAS].close()


class SmallDisk:
    """A store, and what fills the disk that it is on."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._filler = store.path.with_name("filler")

    def fill(self, leaving: int = 0) -> None:
        """Leave so many blocks free, and none of what the log has been given before."""
        self.make_room()
        with self.store.raw() as raw:
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        blocks = shutil.disk_usage(self._filler.parent).free // _BLOCK
        try:
            self._filler.write_bytes(bytes(_BLOCK * (blocks - leaving)))
        except OSError as error:
            # A process of the store has taken a block meanwhile: then it is full.
            if leaving or error.errno != errno.ENOSPC:
                raise

    def make_room(self) -> None:
        self._filler.unlink(missing_ok=True)


_BLOCK = 4_096


def everything(using: str = "default") -> list[list[dict[str, Any]]]:
    """Every row of every table that a test writes."""
    models = (Job, Lock, Schedule, Entry)
    return [list(model._default_manager.using(using).order_by("pk").values()) for model in models]


def integrity(path: Path | str) -> str:
    with closing(sqlite3.connect(path)) as raw:
        return str(raw.execute("PRAGMA integrity_check").fetchone()[0])


@contextmanager
def without_room(pages: int = 0, using: str = "default") -> Iterator[None]:
    """The connection's disk is full but for so many pages, those that were freed before being in use."""
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA page_count")
        (count,) = cursor.fetchone()
        cursor.execute("PRAGMA freelist_count")
        assert cursor.fetchone() == (0,)
        cursor.execute(f"PRAGMA max_page_count = {count + pages}")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA max_page_count = 1073741823")


def pauses(process: Process) -> list[float]:
    """The pauses that its lines of trouble announce. The sign of life is left once a minute, and not part of them."""
    lines = [line for line in process.lines if "sign of life" not in line]
    return [float(found[1]) for line in lines if (found := re.search(r"again in ([\d.]+) s", line))]


class Shift:
    """A wall clock that processes read, off by as many seconds as the test says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.to(0)

    def to(self, seconds: float) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(str(seconds))
        fresh.replace(self.path)

    def start(self, start: Callable[..., Process], *command: str) -> Process:
        return start("-c", CLOCK + COMMAND, str(self.path), *command)


class Passage(Shift):
    """Time that passes when the test says so: a lease of many minutes ends at once, and by a stall it does not end."""

    def __init__(self, path: Path) -> None:
        self._passed = 0.0
        super().__init__(path)

    def by(self, seconds: float) -> None:
        self._passed += seconds
        self.to(self._passed)

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self._passed)

    def monotonic(self) -> float:
        return time.monotonic() + self._passed

    def start(self, start: Callable[..., Process], *command: str) -> Process:
        return start("-c", CLOCK + PASSES + COMMAND, str(self.path), *command)

    def run(self, start: Callable[..., Process], code: str, *arguments: str) -> Process:
        return start("-c", CLOCK + PASSES + code, str(self.path), *arguments)

    def outlast_leases(self, length: float, *job_ids: int) -> None:
        """Twice as long as the jobs' leases, which must be renewed on the way, each time before they are over."""

        def ends() -> dict[int, datetime | None]:
            return dict(Job.objects.filter(pk__in=job_ids).values_list("pk", "lease_expires_at"))

        for _ in range(5):
            before = ends()
            self.by(length * 0.4)
            wait_until(
                lambda before=before: all(  # type: ignore[misc]
                    end is None or end > before[job_id] for job_id, end in ends().items()
                ),
                "the leases are renewed",
            )


def limit_file_size(process: Process, size: int) -> None:
    """Let each write of this process past `size` bytes of a file fail; -1: no longer."""
    import resource

    limit = resource.RLIM_INFINITY if size < 0 else size
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def minds_permissions() -> bool:
    """Is a file that may not be written kept from this process? For root it seldom is."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).chmod(0o444)
        return not os.access(file.name, os.W_OK)
