"""The file is read-only, gone, another, damaged, locked for good, or pinned by a reader.

What is elsewhere: tests/runtime/test_worker_trouble.py (the writer lock held past the busy timeout, the tables away,
for workers, the scheduler and both), tests/concurrency/test_leaders.py (F009), tests/concurrency/test_queues.py (every
service past the busy timeout).
"""

import itertools
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from django.db import DatabaseError, OperationalError, connection, connections

from django_alkstore import services, signals
from django_alkstore.clock import ManualClock
from django_alkstore.dialects import dialect_of, file_access, sqlite, transactions
from django_alkstore.dialects.base import Change, DatabaseReplaced
from django_alkstore.dialects.watch import Watch
from django_alkstore.models import Job
from django_alkstore.runtime import worker as worker_module
from django_alkstore.runtime.commands import chosen
from django_alkstore.runtime.scheduler import schedule_until
from django_alkstore.runtime.worker import Worker
from django_alkstore.runtime.writing import BETWEEN_SLICES
from django_alkstore.services import waiting
from django_alkstore.services.error_backoff import (
    LONGEST_CONTENTION_PAUSE,
    LONGEST_FAULT_PAUSE,
    LONGEST_QUIET,
    ErrorBackoff,
)
from django_alkstore.services.maintenance import UPKEEP_INTERVAL
from tests.faults.tools import ALIAS, TROUBLE, UNDER, Store, everything, integrity, minds_permissions, pauses
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

Start = Callable[..., Process]

wal_only = pytest.mark.skipif(os.environ.get("ALKSTORE_TEST_JOURNAL", "wal") != "wal", reason="about the WAL")


# Read-only


@contextmanager
def query_only() -> Iterator[None]:
    """As a file that may not be written, for this connection. (As root no file is read-only.)"""
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA query_only = ON")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA query_only = OFF")


def test_every_service_raises_on_a_read_only_file_and_changes_nothing() -> None:
    ids = services.enqueue_many("mail", range(7))
    handles = services.claim_batch("mail", "w", limit=5)
    services.enqueue("more", 1)
    services.schedule("often", "@every 1s", "mail")
    held = services.lock("held")
    assert held.acquire()
    calls: list[Callable[[], object]] = [
        lambda: services.enqueue("mail", 1),
        lambda: services.enqueue("mail", 1, unique_key="k"),
        lambda: services.enqueue_many("mail", [1, 2]),
        lambda: services.get_or_enqueue("mail", "k", 1),
        lambda: services.outbox("mail").enqueue(1),
        lambda: services.claim_batch("more", "w"),
        handles[0].ack,
        lambda: handles[1].retry("x"),
        lambda: handles[2].fail("x"),
        handles[3].heartbeat,
        handles[4].release,
        lambda: services.cancel(ids[6]),
        lambda: services.sweep("mail"),
        services.prune,
        services.tick,
        lambda: services.schedule("new", "@every 1h", "mail"),
        lambda: services.pause_schedule("often"),
        lambda: services.unschedule("often"),
        services.lock("another").acquire,
        held.renew,
        held.release,
    ]
    before = everything()
    with query_only():
        for call in calls:
            with pytest.raises(OperationalError, match="readonly"):
                call()
            assert not connection.in_atomic_block
        assert services.get_job(ids[0]) is not None
    assert everything() == before
    assert handles[0].ack()


@pytest.mark.parametrize("command", [("run_queue", "noop"), ("run_schedules",)], ids=["worker", "scheduler"])
def test_f134_on_a_read_only_file_a_command_says_so_with_growing_pauses_and_goes_on_once_it_is_writable(
    store: Store, tmp_path: Path, command: tuple[str, ...]
) -> None:
    fault = tmp_path / "fault"
    fault.write_text("PRAGMA query_only = ON")
    job = services.enqueue("noop", None, using=ALIAS)
    services.schedule("often", "@every 1s", "noop", using=ALIAS)
    process = store.start("-c", UNDER, str(fault), *command)
    process.wait_for(TROUBLE, 4)
    found = pauses(process)
    assert found == sorted(found)
    assert found[-1] >= 4 * found[0]
    assert "readonly" in process.output
    assert "Traceback" not in process.output
    assert process.popen.poll() is None
    assert store.job(job.pk).state == "pending"
    fault.unlink()
    if command[0] == "run_queue":
        store.wait_for_state("completed", job.pk)
        process.wait_for("database is back")
    else:
        process.wait_for("fired often")


TRIES = """
from django.db import OperationalError
from django_alkstore.services import enqueue
try:
    enqueue("noop", 2)
except OperationalError as error:
    print("refused", error, flush=True)
"""


@pytest.mark.skipif(not minds_permissions(), reason="for root nothing is read-only")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_f134_a_file_or_folder_made_read_only_is_an_error_to_the_caller_and_no_half_written_row(
    store: Store, what: str
) -> None:
    services.enqueue("noop", 1, using=ALIAS)
    before = everything(ALIAS)
    store.reopen()
    spoilt = store.path if what == "file" else store.path.parent
    mode = spoilt.stat().st_mode
    spoilt.chmod(0o555 if what == "folder" else 0o444)
    try:
        caller = store.start("-c", TRIES)
        assert caller.wait() == 0
        caller.wait_for("refused")
    finally:
        spoilt.chmod(mode)
    assert everything(ALIAS) == before


# Files beside the database that cannot be written


COUNTS_LOOKS = """
import sys
import os
from django.core.management import call_command
from django_alkstore import signals
from django_alkstore.dialects.sqlite import DataVersion
looks = 0
version = DataVersion.version

def counted(self):
    global looks
    looks += 1
    return version(self)

def tell(**_):
    os.write(1, b"looks %d\\n" % looks)  # in one write, so that no log line gets in between

DataVersion.version = counted
signals.database_trouble.connect(tell)
call_command(*sys.argv[1:])
"""


@wal_only
@pytest.mark.parametrize("repair", ["another mode", "deleted"])
@pytest.mark.parametrize(
    "command",
    [("run_queue", "noop"), ("run_queue", "record"), ("run_schedules",), ("run_alkstore",)],
    ids=["worker", "idle worker", "scheduler", "all"],
)
def test_a_command_that_can_not_write_the_index_of_the_wal_says_so_rests_and_goes_on_once_it_is_repaired(
    store: Store, command: tuple[str, ...], repair: str
) -> None:
    """As a command leaves them that another user has run: it can be read, and each look finds another version."""
    services.schedule("often", "@every 1s", "noop", using=ALIAS)
    first = services.enqueue("noop", None, using=ALIAS)
    left = store.leave_files(0o444)
    process = store.start_bound_by_permissions("-c", COUNTS_LOOKS, *command)
    process.wait_for(TROUBLE, 4)
    process.wait_for("looks", 4)
    line = next(line for line in process.lines if "cannot write" in line)
    for file in left:
        assert f"{file} (owner {file.owner()}, mode 0444)" in line
    looks = [int(line.split()[1]) for line in process.lines if line.startswith("looks")]
    assert looks[-1] < 500, "it is busy looking"
    assert "database is back" not in process.output
    for file in left:
        if repair == "deleted":
            file.unlink()
        else:
            file.chmod(0o644)
    if command == ("run_schedules",):
        process.wait_for("fired often", 2)
    else:
        process.wait_for("database is back")
        queue = "record" if "record" in command else "noop"
        store.wait_for_state("completed", services.enqueue(queue, "x", using=ALIAS).pk)
    if "noop" in command:
        store.wait_for_state("completed", first.pk)
    assert "Traceback" not in process.output


@wal_only
def test_a_command_that_can_not_write_says_which_file_and_whose_it_is(store: Store) -> None:
    store.reopen()
    store.path.parent.chmod(0o555)
    process = store.start_bound_by_permissions("alkstore_prune")
    try:
        assert process.wait() == 1
    finally:
        store.path.parent.chmod(0o755)
    folder = store.path.parent.resolve()
    assert f"cannot write the folder {folder} (owner {folder.owner()}, mode 0555)" in process.output


@wal_only
@pytest.mark.parametrize("command", ["run_queue", "alkstore_status"])
def test_a_folder_that_can_not_be_written_is_named_instead_of_a_migration(store: Store, command: str) -> None:
    store.reopen()
    store.path.parent.chmod(0o555)
    process = store.start_bound_by_permissions(command)
    try:
        assert process.wait() == 1
    finally:
        store.path.parent.chmod(0o755)
    folder = store.path.parent.resolve()
    obstacle = f"cannot write the folder {folder} (owner {folder.owner()}, mode 0555)"
    (error,) = [line for line in process.lines if line.startswith("CommandError: ")]
    assert obstacle in error
    assert "migrate" not in error
    (warning,) = [line for line in process.lines if "alkstore.W005" in line]
    assert obstacle in warning


def test_what_can_not_be_written_is_named_with_its_owner(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    link = store.path.with_name("link.sqlite3")
    link.symlink_to(store.path)
    assert file_access.write_obstacle(link) is None
    monkeypatch.setattr(file_access, "_is_writable", lambda file: file != store.path)
    found = file_access.write_obstacle(link)
    assert found is not None
    assert f"cannot write {store.path} (owner {store.path.owner()}, mode 0644)" in found
    monkeypatch.setattr(file_access, "_is_writable", lambda file: not file.is_dir())
    assert f"cannot write the folder {store.path.parent} (owner " in str(file_access.write_obstacle(link))


def test_a_renewed_connection_tells_of_what_was_committed_while_there_was_none(store: Store, change: Change) -> None:
    seen = change.version()
    change.renew()
    with store.raw() as raw:
        raw.execute("INSERT INTO ledger_entry (text) VALUES ('meanwhile')")
    renewed = change.version()
    assert renewed != seen
    assert change.version() == renewed
    with store.raw() as raw:
        raw.execute("INSERT INTO ledger_entry (text) VALUES ('later')")
    assert change.version() != renewed


def test_a_renewed_connection_makes_no_file_where_there_is_none_any_more(store: Store, change: Change) -> None:
    change.renew()
    store.reopen()
    for path in store.path.parent.iterdir():
        path.unlink()
    with pytest.raises(DatabaseReplaced, match="is gone"):
        change.version()
    assert not store.path.exists()


def test_a_renewed_connection_notices_that_the_file_is_another(store: Store, change: Change) -> None:
    change.renew()
    put_another_in_its_place(store)
    with pytest.raises(DatabaseReplaced, match="replaced by another"):
        change.version()


def test_a_connection_that_can_not_be_renewed_now_is_renewed_later(
    store: Store, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object) -> None:
        raise OperationalError("unable to open database file")

    change.renew()
    with monkeypatch.context() as patch:
        patch.setattr(type(connections[ALIAS]), "ensure_connection", refuse)
        seen = change.version()
        assert change.version() == seen, "a wait for another version would end at once"
    assert change.version() != seen


def test_a_version_that_differs_at_each_look_is_none_at_all(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count(1_000)
    steady = change.version()
    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "_data_version", lambda raw: next(numbers))
        assert change.version() == change.version() != steady
    assert change.version() == steady


def test_after_a_fault_every_watch_of_the_database_opens_it_anew(store: Store) -> None:
    error = OperationalError("attempt to write a readonly database")
    with Watch(ALIAS) as one, Watch(ALIAS) as another, Watch("default") as elsewhere:
        seen = [watch.version() for watch in (one, another, elsewhere)]
        ErrorBackoff("working", ALIAS).after(error)
        assert connections[ALIAS].connection is None
        assert one.version() != seen[0]
        assert another.version() != seen[1]
        assert elsewhere.version() == seen[2]
        assert one.wait(one.version(), 0) is False


# Gone, or another


def backup(store: Store) -> Path:
    """A copy of the file, in its folder."""
    copied = store.path.with_name("copied")
    with store.raw() as raw, closing(sqlite3.connect(copied)) as copy:
        raw.backup(copy)
    store.reopen()
    return copied


def put_another_in_its_place(store: Store) -> None:
    """As a restore does that does not stop what is running."""
    copied = backup(store)
    for suffix in ("-wal", "-shm"):
        Path(f"{store.path}{suffix}").unlink(missing_ok=True)
    copied.replace(store.path)


@pytest.mark.parametrize("command", [("run_queue", "noop"), ("run_alkstore",)], ids=["worker", "all"])
def test_f075_a_worker_whose_file_is_replaced_ends_with_a_status_of_its_own_and_the_next_works(
    store: Store, command: tuple[str, ...]
) -> None:
    first = services.enqueue("noop", None, using=ALIAS)
    process = store.start(*command)
    # So that it has all the connections that it wants: one that is opened while the files are being moved is spoilt.
    process.wait_for(f"completed job {first.pk} ")
    if command == ("run_alkstore",):
        process.wait_for("scheduler leads")
    put_another_in_its_place(store)
    assert process.wait() == 5
    # Not before: with a rollback journal, both files would have one journal's name between them.
    job = services.enqueue("noop", None, using=ALIAS)
    assert "replaced by another" in process.output
    assert "Traceback" not in process.output
    store.start("run_queue", "noop")
    store.wait_for_state("completed", job.pk)


def test_f075_a_worker_with_a_job_in_hand_notices_it_too(store: Store, tmp_path: Path) -> None:
    """All its threads are busy: it looks at each renewal."""
    job = services.enqueue("wait", str(tmp_path / "never"), visibility_timeout=3, using=ALIAS)
    process = store.start("run_queue", "wait", "--concurrency", "1")
    process.wait_for(f"running {job.pk}")
    put_another_in_its_place(store)
    assert process.wait() == 5


def test_f075_a_scheduler_whose_file_is_replaced_goes_on_with_the_new_one(store: Store) -> None:
    process = store.start("run_schedules")
    process.wait_for("leads")
    put_another_in_its_place(store)
    process.wait_for("replaced by another")
    services.schedule("often", "@every 1s", "mail", using=ALIAS)
    process.wait_for("fired often", 2)
    assert Job.objects.using(ALIAS).filter(schedule="often").exists()
    assert "Traceback" not in process.output


def test_a_worker_whose_file_is_deleted_ends_with_a_status_of_its_own(store: Store) -> None:
    job = services.enqueue("noop", None, using=ALIAS)
    process = store.start("run_queue", "noop")
    # So that it has all the connections that it wants: SQLite makes a new file for one that is opened later.
    process.wait_for(f"completed job {job.pk} ")
    store.reopen()
    for path in store.path.parent.iterdir():
        path.unlink(missing_ok=True)
    assert process.wait() == 5
    assert "is gone" in process.output
    assert "Traceback" not in process.output
    assert TROUBLE not in process.output, "nothing is written where nobody looks"
    assert list(store.path.parent.iterdir()) == []


def test_a_worker_whose_file_is_deleted_makes_no_new_one_though_its_connection_is_closed(store: Store) -> None:
    code = """
from django.core.management import call_command
from django.db import connections
from django_alkstore import signals
signals.database_replaced.connect(lambda **_: connections.close_all(), weak=False)
call_command("run_queue", "noop")
"""
    job = services.enqueue("noop", None, using=ALIAS)
    process = store.start("-c", code)
    process.wait_for(f"completed job {job.pk} ")
    store.reopen()
    for path in store.path.parent.iterdir():
        path.unlink(missing_ok=True)
    assert process.wait() == 5
    assert list(store.path.parent.iterdir()) == []


def test_worker_and_scheduler_in_one_process_make_no_new_file_when_theirs_is_deleted(store: Store) -> None:
    job = services.enqueue("noop", None, using=ALIAS)
    services.schedule("often", "@every 1s", "noop", using=ALIAS)
    process = store.start("run_alkstore")
    process.wait_for(f"completed job {job.pk} ")
    process.wait_for("fired often")
    store.reopen()
    for path in store.path.parent.iterdir():
        path.unlink(missing_ok=True)
    assert process.wait() == 5
    assert list(store.path.parent.iterdir()) == []
    assert "Traceback" not in process.output


def test_a_scheduler_whose_file_is_deleted_says_so_and_goes_on_once_there_is_another(store: Store) -> None:
    services.schedule("often", "@every 1s", "mail", using=ALIAS)
    copied = backup(store).rename(store.path.parent.with_name("copied"))
    process = store.start("run_schedules")
    process.wait_for("fired often")
    for path in store.path.parent.iterdir():
        path.unlink(missing_ok=True)
    process.wait_for("is gone")
    process.wait_for(f"{TROUBLE} while taking the leadership", 3)  # it has tried again, and looked for its file
    assert "no such table" not in process.output
    assert not store.path.exists(), "an empty one would look like a database that was never migrated"
    fired = process.output.count("fired often")
    copied.replace(store.path)
    process.wait_for("fired often", fired + 2)
    assert "Traceback" not in process.output


@pytest.fixture
def change(store: Store) -> Iterator[Change]:
    """What tells a runtime of commits, on the store."""
    found = dialect_of(connections[ALIAS]).change(ALIAS)
    yield found
    found.close()


def test_f075_a_replacement_is_noticed_though_somebody_is_writing_to_the_new_file(store: Store, change: Change) -> None:
    put_another_in_its_place(store)
    with store.raw() as raw:
        raw.execute("BEGIN IMMEDIATE")
        change.version()
        raw.execute("ROLLBACK")
    with pytest.raises(DatabaseReplaced, match="replaced by another"):
        change.version()


@pytest.mark.parametrize("what", ["no database", "a folder"])
def test_f075_what_can_not_be_opened_as_a_database_is_another_file(store: Store, change: Change, what: str) -> None:
    store.path.unlink()
    if what == "a folder":
        store.path.mkdir()
    else:
        store.path.write_bytes(b"this is no database" * 1_000)
    with pytest.raises(DatabaseReplaced, match="replaced by another"):
        change.version()


def test_f075_a_file_that_is_deleted_while_it_is_looked_at_is_gone_and_not_made_anew(
    store: Store, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def too_late(*args: Any, **options: Any) -> sqlite3.Connection:
        store.path.unlink(missing_ok=True)
        return connect(*args, **options)

    put_another_in_its_place(store)
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", too_late)
        with pytest.raises(DatabaseReplaced, match="is gone"):
            change.version()
    assert not store.path.exists()


@pytest.mark.parametrize("name", ["db.sqlite3", "a ?b#c%41&mode=memory.sqlite3"])
def test_a_file_whose_number_alone_has_changed_is_the_same_file(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store.reopen()
    path = store.path.with_name(name)
    store.path.rename(path)
    monkeypatch.setitem(connections[ALIAS].settings_dict, "NAME", path)
    with closing(dialect_of(connections[ALIAS]).change(ALIAS)) as change:
        seen = change.version()
        monkeypatch.setattr(sqlite, "_identity", lambda file: (0, len(file)))
        assert change.version() == seen
        connect = sqlite3.connect
        monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: pytest.fail("it is asked once"))
        assert change.version() == seen
        monkeypatch.setattr(sqlite3, "connect", connect)


def test_a_folder_that_may_not_be_looked_into_for_a_while_replaces_nothing(
    store: Store, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(path)

    seen = change.version()
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        assert change.version() == seen
    assert change.version() == seen


# Damaged


@contextmanager
def damaged(store: Store) -> Iterator[None]:
    """The first page of the jobs' table and of each of its indexes is overwritten for the length of the block."""
    store.reopen()
    with store.raw() as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (size,) = raw.execute("PRAGMA page_size").fetchone()
        pages = [
            root
            for (root,) in raw.execute("SELECT rootpage FROM sqlite_master WHERE tbl_name = 'django_alkstore_job'")
            if root
        ]
        whole = {}
        with store.path.open("r+b", buffering=0) as file:
            for page in pages:
                file.seek((page - 1) * size)
                whole[page] = file.read(size)
                file.seek((page - 1) * size)
                file.write(b"\xff" * size)
            yield
            for page, content in whole.items():
                file.seek((page - 1) * size)
                file.write(content)


def overwrite_header(file: BinaryIO) -> None:
    file.write(b"\xff" * 4_096)


def cut_off(file: BinaryIO) -> None:
    file.truncate(3 * 4_096)


@contextmanager
def spoilt(store: Store, spoil: Callable[[BinaryIO], object]) -> Iterator[None]:
    """The file is spoilt from its beginning on for the length of the block, in rollback-journal mode."""
    with store.raw() as raw, store.path.open("r+b", buffering=0) as file:
        # While nobody is in a transaction, whose commit would write the first page as it was.
        raw.execute("BEGIN EXCLUSIVE")
        whole = file.read()
        file.seek(0)
        spoil(file)
        raw.execute("ROLLBACK")
        yield
        file.seek(0)
        file.write(whole)


def commit(store: Store) -> None:
    """Another's commit, so that all who have the pages in memory read them again."""
    with store.raw() as raw:
        raw.execute("INSERT INTO ledger_entry (text) VALUES ('another')")


@wal_only
def test_a_damaged_page_is_an_error_to_the_caller_and_leaves_nothing(store: Store) -> None:
    job = services.enqueue("noop", 1, using=ALIAS)
    with damaged(store):
        for call in (
            lambda: services.enqueue("noop", 2, using=ALIAS),
            lambda: services.claim_batch("noop", "w", using=ALIAS),
            lambda: services.get_job(job.pk, using=ALIAS),
        ):
            with pytest.raises(DatabaseError, match="malformed"):
                call()
        store.reopen()
    assert Job.objects.using(ALIAS).count() == 1
    assert integrity(store.path) == "ok"


@wal_only
def test_a_worker_on_a_damaged_page_says_so_and_goes_on_where_it_is_mended(store: Store) -> None:
    services.enqueue("noop", None, delay=3_600, using=ALIAS)
    process = store.start("run_queue", "noop")
    process.wait_for("worker started")
    with damaged(store):
        commit(store)
        process.wait_for(TROUBLE, 3)
        assert "malformed" in process.output
        assert process.popen.poll() is None
    commit(store)
    following = services.enqueue("noop", None, using=ALIAS)
    store.wait_for_state("completed", following.pk)
    assert "Traceback" not in process.output
    assert integrity(store.path) == "ok"


@wal_only
def test_a_worker_does_not_start_on_a_damaged_table_and_says_why(store: Store) -> None:
    services.enqueue("noop", None, using=ALIAS)
    with damaged(store):
        process = store.start("run_queue", "noop")
        assert process.wait() == 1
    assert "malformed" in process.output
    assert "Traceback" not in process.output


@pytest.mark.parametrize("command", [("run_queue", "noop"), ("run_schedules",)], ids=["worker", "scheduler"])
@pytest.mark.parametrize(("spoil", "said"), [(overwrite_header, "not a database"), (cut_off, "malformed")])
def test_a_running_command_whose_file_is_spoilt_says_so_and_goes_on_where_it_is_mended(
    store: Store, command: tuple[str, ...], spoil: Callable[[BinaryIO], object], said: str
) -> None:
    """In rollback-journal mode, where each look at the database reads the header anew."""
    services.schedule("often", "@every 1s", "noop", using=ALIAS)
    store.reopen()
    with store.raw() as raw:
        raw.execute("PRAGMA journal_mode = DELETE")
    process = store.start(*command, ALKSTORE_TEST_JOURNAL="delete")
    process.wait_for("fired often" if command == ("run_schedules",) else "worker started")
    with spoilt(store, spoil):
        process.wait_for(TROUBLE, 2)
    process.wait_for("database is back")
    assert said in process.output
    assert "Traceback" not in process.output
    assert process.popen.poll() is None
    assert integrity(store.path) == "ok"


def test_a_file_that_is_no_database_is_an_error_of_the_start(store: Store) -> None:
    store.reopen()
    for suffix in ("-wal", "-shm", "-journal"):
        Path(f"{store.path}{suffix}").unlink(missing_ok=True)
    store.path.write_bytes(b"this is no database" * 1_000)
    process = store.start("run_queue", "noop")
    assert process.wait() == 1
    assert "file is not a database" in process.output
    assert "Traceback" not in process.output


# Locked for good


def test_a_lock_that_stays_is_not_said_at_each_try(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    busy = sqlite3.OperationalError("database is locked")
    busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
    error = OperationalError("database is locked")
    error.__cause__ = busy
    error_backoff = ErrorBackoff("working", "default")
    with caplog.at_level("INFO", "django_alkstore"):
        for _ in range(60):
            clock.advance(error_backoff.after(error))
        tries = len(caplog.records)
        assert 2 <= tries <= 10
        error_backoff.reset()
    assert [record.getMessage() for record in caplog.records[tries:]] == ["database is back: working"]


# How often it is tried


LONG = 600
"""Seconds that a fault lasts."""


class Hurried(threading.Event):
    """Waiting for it takes no time, and the clock says that it did."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.advance(timeout or 0.0)
        return self.is_set()


class Refusals:
    """A wrapper of execution: once it is `on`, each statement fails; after `LONG` seconds `over` is called."""

    def __init__(self, clock: ManualClock, code: int, over: Callable[[], object]) -> None:
        self.count = 0
        self.on = True
        self._clock = clock
        self._over = over
        self._ends = clock.monotonic() + LONG
        self._cause = sqlite3.OperationalError()
        self._cause.sqlite_errorcode = code

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if not self.on:
            return execute(sql, params, many, context)
        self.count += 1
        if self._clock.monotonic() >= self._ends:
            self._over()
        raise OperationalError("refused") from self._cause


@pytest.fixture
def hurried(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Hurried:
    """Lets the runtime's waits take no time, except for handlers. A busy database says so at once."""
    event = Hurried(clock)
    monkeypatch.setattr(Watch, "wait", lambda self, seen, timeout: event.wait(timeout))
    monkeypatch.setattr(Watch, "wait_for_bell", lambda self, timeout: event.wait(timeout))
    for module in (transactions, waiting):
        monkeypatch.setattr(module, "longest_wait", lambda connection: 0.0)
    return event


LASTING = pytest.mark.parametrize(
    ("code", "longest"),
    [(sqlite3.SQLITE_FULL, LONGEST_FAULT_PAUSE), (sqlite3.SQLITE_BUSY, LONGEST_CONTENTION_PAUSE)],
    ids=["a full disk", "a locked file"],
)
"""What may last, and the longest pause between two tries. The pauses before it are half as long each."""
GROWING = 10
"""Tries, and lines, before the pauses have grown to their longest."""


def lines_of_trouble(caplog: pytest.LogCaptureFixture) -> int:
    return sum(TROUBLE in record.getMessage() for record in caplog.records)


@LASTING
def test_while_a_fault_lasts_a_worker_tries_as_often_as_the_pauses_say_and_says_so_once_a_minute(
    clock: ManualClock,
    hurried: Hurried,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    longest: float,
) -> None:
    monkeypatch.setattr(worker_module, "LAST_WRITES", 0.0)
    # Where a thread is slow to end, a worker ends its process, and here that is the suite's.
    worker = Worker("default", chosen("default", ["noop"], outboxes=False), end_process=lambda code: None)
    refusals = Refusals(clock, code, over=lambda: worker.wind_down("that was long enough"))
    with connection.execute_wrapper(refusals), caplog.at_level("WARNING", "django_alkstore"):
        assert worker.run() == 0
    # For the length of the busy timeout it stands in line, as any writer does.
    in_line = transactions.busy_timeout("default") / BETWEEN_SLICES if code == sqlite3.SQLITE_BUSY else 0
    signs = LONG / UPKEEP_INTERVAL  # a sign of life that cannot be left is no reason for a pause
    assert LONG / longest <= refusals.count <= in_line + LONG / longest + signs + GROWING
    assert lines_of_trouble(caplog) <= LONG / LONGEST_QUIET + signs + GROWING


@LASTING
@pytest.mark.parametrize("leads", [True, False], ids=["a leader", "one that would lead"])
def test_while_a_fault_lasts_a_scheduler_tries_as_often_as_the_pauses_say_and_says_so_once_a_minute(
    clock: ManualClock, hurried: Hurried, caplog: pytest.LogCaptureFixture, code: int, longest: float, leads: bool
) -> None:
    refusals = Refusals(clock, code, over=hurried.set)
    refusals.on = not leads

    def begin(**_: object) -> None:
        refusals.on = True

    signals.leader_elected.connect(begin)
    try:
        with connection.execute_wrapper(refusals), caplog.at_level("WARNING", "django_alkstore"):
            assert schedule_until(hurried, "default") == 0
    finally:
        signals.leader_elected.disconnect(begin)
    assert LONG / longest <= refusals.count <= LONG / longest + GROWING
    assert lines_of_trouble(caplog) <= LONG / LONGEST_QUIET + GROWING


# A reader that pins the WAL


@wal_only
def test_a_reader_that_stays_in_its_snapshot_holds_up_nobody_and_the_wal_shrinks_after_it(store: Store) -> None:
    first = services.enqueue("noop", None, using=ALIAS)
    process = store.start("run_alkstore", "-v", "0")
    store.wait_for_state("completed", first.pk)
    wal = Path(f"{store.path}-wal")
    with store.raw() as reader:
        reader.execute("BEGIN")
        seen = reader.execute("SELECT count(*) FROM django_alkstore_job").fetchone()
        for _ in range(20):
            ids = services.enqueue_many("noop", ["x" * 2_000] * 100, using=ALIAS)
            store.wait_for_state("completed", *ids)
        pinned = wal.stat().st_size
        assert pinned > 4_000_000, "the WAL did not grow: nothing was pinned"
        assert reader.execute("SELECT count(*) FROM django_alkstore_job").fetchone() == seen
        reader.execute("COMMIT")

    def emptied() -> bool:
        with store.raw() as raw:
            return bool(raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)

    wait_until(emptied, "the WAL is emptied")
    assert wal.stat().st_size < pinned
    assert process.popen.poll() is None
    assert TROUBLE not in process.output
