"""dialects/watch.py: waiting to be told of a commit, of a bell, or of a deadline."""

import gc
import itertools
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_alkstore.dialects import watch as watch_module
from django_alkstore.dialects.watch import Watch
from django_alkstore.services import enqueue, schedule
from django_alkstore.services.waiting import StopEvent
from tests.ledger.models import Entry
from tests.processes import PATIENCE, Process

WRITE = """
import sys
from tests.ledger.models import Entry
from django.db import connection
connection.ensure_connection()
print("ready", flush=True)
for number, line in enumerate(sys.stdin):
    Entry.objects.create(text=str(number))
    print("written", flush=True)
"""


@pytest.fixture
def watch(transactional_db: None) -> Iterator[Watch]:
    with Watch("default") as found:
        yield found


@contextmanager
def another() -> Iterator[sqlite3.Connection]:
    raw = sqlite3.connect(connection.settings_dict["NAME"], timeout=20, isolation_level=None)
    try:
        yield raw
    finally:
        raw.close()


def write(text: str = "x") -> None:
    Entry.objects.create(text=text)


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def refuse_inotify(monkeypatch: pytest.MonkeyPatch, error: Exception, where: str) -> None:
    """Let it raise there, and let nobody have said so before."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(f"inotify_simple.{where}", refuse)
    monkeypatch.setattr(watch_module, "_times_polling", itertools.count())


# Commits


def test_without_a_commit_the_version_stays_and_a_wait_ends_with_its_time(watch: Watch) -> None:
    seen = watch.version()
    assert watch.version() == seen
    assert watch.wait(seen, 0.05) is False
    assert watch.wait(seen, 0) is False


def test_the_version_may_be_asked_for_by_a_thread_while_another_waits(watch: Watch) -> None:
    """As a worker's loop and a handler's thread that runs its round do."""
    enough = 30_000
    seen = watch.version()
    asked = []

    def ask() -> None:
        asked.append({watch.version() for _ in range(enough)})

    others = [in_thread(ask), in_thread(ask)]
    for other in others:
        other.join()
    assert asked == [{seen}, {seen}]


def test_a_commit_of_this_thread_is_seen(watch: Watch) -> None:
    seen = watch.version()
    write()
    assert watch.version() != seen
    assert watch.wait(seen, PATIENCE) is True


def test_a_commit_between_version_and_wait_is_not_missed(watch: Watch) -> None:
    for _ in range(20):
        seen = watch.version()
        write()
        assert watch.wait(seen, PATIENCE) is True
        assert watch.wait(watch.version(), 0) is False


def test_a_commit_is_seen_as_long_as_the_version_is_not_read_again(watch: Watch) -> None:
    seen = watch.version()
    write()
    assert watch.wait(seen, 0) is True
    assert watch.wait(seen, 0) is True


def test_reading_is_no_commit(watch: Watch) -> None:
    seen = watch.version()
    assert Entry.objects.count() == 0
    assert watch.wait(seen, 0.05) is False


def test_a_commit_of_another_thread_ends_the_wait(watch: Watch) -> None:
    waiting = threading.Event()

    def work() -> None:
        assert waiting.wait(PATIENCE)
        write()

    thread = in_thread(work)
    seen = watch.version()
    waiting.set()
    assert watch.wait(seen, PATIENCE) is True
    thread.join(PATIENCE)
    assert Entry.objects.count() == 1


def test_each_commit_of_another_process_ends_a_wait(watch: Watch, start: Callable[..., Process]) -> None:
    writer = start("-c", WRITE)
    writer.wait_for("ready")
    for number in range(1, 11):
        seen = watch.version()
        writer.tell("write")
        assert watch.wait(seen, PATIENCE) is True
        writer.wait_for("written", times=number)
        assert Entry.objects.count() == number


def test_two_watches_see_the_same_commit(watch: Watch) -> None:
    with Watch("default") as second:
        seen, seen_too = watch.version(), second.version()
        write()
        assert watch.wait(seen, PATIENCE) is True
        assert second.wait(seen_too, PATIENCE) is True


def test_a_commit_is_seen_also_where_the_kernel_tells_nothing(
    transactional_db: None, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Process]
) -> None:
    monkeypatch.setattr(Watch, "_watch_files", lambda self: None)
    with Watch("default") as watch:
        writer = start("-c", WRITE)
        writer.wait_for("ready")
        for number in range(1, 4):
            seen = watch.version()
            writer.tell("write")
            assert watch.wait(seen, PATIENCE) is True
            writer.wait_for("written", times=number)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        AttributeError("inotify_init1"),
        ImportError("no _ctypes"),
        ValueError("x"),
    ],
    ids=["no watches left", "no such function", "no ctypes", "anything"],
)
@pytest.mark.parametrize("where", ["INotify", "INotify.add_watch"])
def test_a_commit_is_seen_whatever_is_wrong_with_inotify_and_one_line_says_that_it_polls(
    transactional_db: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    where: str,
) -> None:
    pytest.importorskip("inotify_simple")
    refuse_inotify(monkeypatch, error, where)
    with Watch("default") as watch, Watch("default"):
        seen = watch.version()
        write()
        assert watch.wait(seen, PATIENCE) is True
    (line,) = [record.getMessage() for record in caplog.records if "file events" in record.getMessage()]
    assert str(error) in line


def test_a_worker_and_a_scheduler_run_without_ctypes_and_say_once_that_they_poll(start: Callable[..., Process]) -> None:
    code = """
import sys
from django.core.management import call_command
sys.modules["_ctypes"] = None
call_command("run_alkstore")
"""
    schedule("often", "@every 1s", "noop")
    process = start("-c", code)
    process.wait_for("scheduler leads")
    process.wait_for("completed job", 2)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert process.output.count("file events cannot be used (ModuleNotFoundError: ") == 1
    assert "Traceback" not in process.output


def test_threads_may_wait_one_after_the_other(watch: Watch) -> None:
    """As the thread that leads a worker changes."""
    found = []

    def see_a_commit() -> None:
        seen = watch.version()
        write()
        found.append(watch.wait(seen, PATIENCE))

    for _ in range(5):
        in_thread(see_a_commit).join(PATIENCE)
    assert found == [True] * 5


@pytest.mark.skipif(sys.platform != "linux", reason="there are file events on Linux only")
def test_the_events_may_be_read_by_a_thread_while_another_waits(watch: Watch) -> None:
    """Of two that read at once, one finds nothing where the kernel has just told that there is something."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def forget() -> None:
        try:
            while not stop.is_set():
                watch.forget()
        except BaseException as error:
            errors.append(error)

    others = [in_thread(forget), in_thread(forget)]
    neighbour = Path(connection.settings_dict["NAME"]).with_name("neighbour")
    try:
        for _ in range(1_000):
            neighbour.write_text("x")
    finally:
        stop.set()
        for other in others:
            other.join(PATIENCE)
        neighbour.unlink()
    assert errors == []


# Writes that are not committed


@pytest.mark.parametrize("mode", ["DEFERRED", "IMMEDIATE", "EXCLUSIVE"])
def test_an_uncommitted_write_does_not_wake_for_ever_and_its_commit_does_wake(watch: Watch, mode: str) -> None:
    with another() as raw:
        raw.execute(f"BEGIN {mode}")
        raw.execute(f"INSERT INTO {Entry._meta.db_table} (text) VALUES ('x')")
        # It may say once that somebody is writing, and not again and again while they do.
        woken = 0
        while woken < 20 and watch.wait(watch.version(), 0.01):
            woken += 1
        assert woken < 20, "a loop on this watch would spin until the other's commit"
        seen = watch.version()
        raw.execute("COMMIT")
        assert watch.wait(seen, PATIENCE) is True


@pytest.mark.parametrize("mode", ["IMMEDIATE", "EXCLUSIVE"])
def test_a_write_that_is_rolled_back_leaves_the_watch_quiet(watch: Watch, mode: str) -> None:
    with another() as raw:
        raw.execute(f"BEGIN {mode}")
        raw.execute(f"INSERT INTO {Entry._meta.db_table} (text) VALUES ('x')")
        raw.execute("ROLLBACK")
    assert watch.wait(watch.version(), 0.05) is False


def test_a_watch_keeps_no_writer_waiting(watch: Watch) -> None:
    """It holds no lock between its looks, in any journal mode."""
    watch.version()
    with another() as raw:
        raw.execute("PRAGMA busy_timeout = 0")
        for _ in range(5):
            raw.execute("BEGIN EXCLUSIVE")
            raw.execute(f"INSERT INTO {Entry._meta.db_table} (text) VALUES ('x')")
            raw.execute("COMMIT")
            watch.version()
    assert Entry.objects.count() == 5


# The bell


def test_the_bell_ends_the_next_wait_and_only_that(watch: Watch) -> None:
    seen = watch.version()
    watch.ring()
    assert watch.wait(seen, PATIENCE) is False
    assert watch.wait(seen, 0.02) is False


def test_many_rings_are_heard_as_one_and_none_of_them_blocks(watch: Watch) -> None:
    seen = watch.version()
    for _ in range(100_000):
        watch.ring()
    assert watch.wait(seen, PATIENCE) is False
    write()
    assert watch.wait(seen, PATIENCE) is True


def test_another_thread_rings_the_bell_during_the_wait(watch: Watch) -> None:
    waiting = threading.Event()

    def work() -> None:
        assert waiting.wait(PATIENCE)
        watch.ring()

    thread = in_thread(work)
    seen = watch.version()
    waiting.set()
    assert watch.wait(seen, PATIENCE * 10) is False
    thread.join(PATIENCE)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_signal_handler_rings_the_bell(watch: Watch, when: str) -> None:
    assert threading.current_thread() is threading.main_thread()
    rung = []

    def handler(number: int, frame: object) -> None:
        rung.append(number)
        watch.ring()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        seen = watch.version()
        if when == "before":
            signal.raise_signal(signal.SIGUSR1)
            assert watch.wait(seen, PATIENCE * 10) is False
        else:
            main = threading.main_thread().ident
            assert main is not None
            thread = in_thread(lambda: signal.pthread_kill(main, signal.SIGUSR1))
            assert watch.wait(seen, PATIENCE * 10) is False
            thread.join(PATIENCE)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert rung == [signal.SIGUSR1]


def test_a_bell_may_be_rung_once_nobody_waits_any_more(watch: Watch) -> None:
    """A signal, or the end of something else, comes when it comes."""
    stop = StopEvent()
    with stop.ringing(watch):
        watch.close()
        watch.ring()
        stop.set()
    assert stop.is_set()


def test_a_commit_is_news_also_when_the_bell_rang(watch: Watch) -> None:
    seen = watch.version()
    write()
    watch.ring()
    assert watch.wait(seen, PATIENCE) is True
    # The ring is still to be heard, and nothing else.
    assert watch.wait(watch.version(), PATIENCE * 10) is False


# Other databases and files


Database = Callable[[str], BaseDatabaseWrapper]


@pytest.fixture
def database(django_db_blocker: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """One more alias, "extra", on whatever it is named for, with a table of its own."""

    def make(name: str) -> BaseDatabaseWrapper:
        entry = {**connections.settings["default"], "NAME": name, "OPTIONS": {"timeout": 20}}
        monkeypatch.setitem(connections.settings, "extra", entry)
        with connections["extra"].cursor() as cursor:
            cursor.execute("CREATE TABLE t (x)")
        return connections["extra"]

    with django_db_blocker.unblock():
        yield make
        extra = connections["extra"]
        extra.close()
        if extra.connection is not None:  # Django keeps an in-memory database open
            extra.connection.close()
        del connections["extra"]


@pytest.mark.parametrize("name", ["file:alkstore-watch?mode=memory&cache=shared", ":memory:"])
def test_a_database_in_memory_is_polled(database: Database, name: str) -> None:
    extra = database(name)
    with Watch("extra") as watch:
        assert watch._change.watched_file() is None
        seen = watch.version()
        assert watch.wait(seen, 0.05) is False
        with extra.cursor() as cursor:
            cursor.execute("INSERT INTO t VALUES (1)")
        # Nobody but its own connection sees a private database: there is nothing to be told of.
        assert watch.wait(seen, PATIENCE if "shared" in name else 0.05) is ("shared" in name)
        watch.ring()
        assert watch.wait(watch.version(), PATIENCE * 10) is False


@pytest.mark.parametrize("journal", ["wal", "delete", "truncate", "persist", "memory"])
@pytest.mark.parametrize("kind", ["plain", "symlink", "uri", "odd name", "prefix of another"])
def test_every_journal_mode_and_way_to_name_the_file_is_watched(
    database: Database, tmp_path: Path, journal: str, kind: str
) -> None:
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / ("a b%20c#é.sqlite3" if kind == "odd name" else "db.sqlite3")
    name = str(real)
    if kind == "symlink":
        (tmp_path / "link.sqlite3").symlink_to(real)
        name = str(tmp_path / "link.sqlite3")
    elif kind == "uri":
        name = f"file:{real}?cache=private"
    elif kind == "prefix of another":
        (real.parent / "db.sqlite3.backup").write_text("not ours")
    extra = database(name)
    with Watch("extra") as watch:
        with extra.cursor() as cursor:
            cursor.execute(f"PRAGMA journal_mode={journal}")
        for number in range(3):
            seen = watch.version()
            with extra.cursor() as cursor:
                cursor.execute("INSERT INTO t VALUES (1)")
            assert watch.wait(seen, PATIENCE) is True, number
        assert watch.wait(watch.version(), 0.02) is False


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_commit_in_another_database_is_none_in_this_one() -> None:
    with Watch("default") as here, Watch("other") as there:
        seen, seen_there = here.version(), there.version()
        Entry.objects.using("other").create(text="x")
        assert there.wait(seen_there, PATIENCE) is True
        assert here.wait(seen, 0.05) is False


# Its end


def open_files() -> int:
    gc.collect()  # what earlier tests have left must not be closed between two looks
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors as Linux lists them")
@pytest.mark.parametrize("kind", ["file", "memory", "file without inotify", "no watches left"])
def test_a_closed_watch_leaves_no_file_open(
    database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    database("file:alkstore-files?mode=memory&cache=shared" if kind == "memory" else str(tmp_path / "db.sqlite3"))
    if kind == "file without inotify":
        monkeypatch.setattr(Watch, "_watch_files", lambda self: None)
    elif kind == "no watches left":
        pytest.importorskip("inotify_simple")
        refuse_inotify(monkeypatch, OSError(28, "No space left on device"), "INotify.add_watch")
    with Watch("extra"):
        pass
    before = open_files()
    for _ in range(10):
        with Watch("extra") as watch:
            watch.wait(watch.version(), 0)
    assert open_files() == before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors as Linux lists them")
def test_a_watch_that_cannot_be_opened_leaves_no_file_open(
    django_db_blocker: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = {**connections.settings["default"], "NAME": str(tmp_path / "none" / "db.sqlite3")}
    monkeypatch.setitem(connections.settings, "extra", entry)
    with django_db_blocker.unblock():
        before = open_files()
        try:
            for _ in range(5):
                with pytest.raises(OperationalError):
                    Watch("extra")
        finally:
            del connections["extra"]
        assert open_files() == before


def test_closing_a_watch_drops_no_lock_of_this_process(transactional_db: None) -> None:
    """POSIX locks are the process's: closing any descriptor of the file would drop those of all its connections."""
    with another() as raw:
        raw.execute("PRAGMA busy_timeout = 0")
        watch = Watch("default")
        with transaction.atomic():
            write()
            watch.version()
            watch.close()
            with pytest.raises(sqlite3.OperationalError):
                raw.execute("BEGIN IMMEDIATE")
    assert Entry.objects.count() == 1


def test_the_watch_sees_jobs_that_are_enqueued(watch: Watch) -> None:
    seen = watch.version()
    thread = in_thread(lambda: enqueue("mail", 1))
    assert watch.wait(seen, PATIENCE) is True
    thread.join(PATIENCE)
