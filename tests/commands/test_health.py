"""`alkstore_health`: what it finds, what it prints and what it ends with."""

import errno
import json
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings

from django_alkstore import clock as clock_module
from django_alkstore.clock import ManualClock
from django_alkstore.dialects import dialect_of
from django_alkstore.dialects.liveness import SUFFIX, Liveness
from django_alkstore.models import Job, Lock, Schedule
from django_alkstore.names import LEADERSHIP_LOCK
from django_alkstore.services import (
    claim_batch,
    enqueue,
    enqueue_many,
    health,
    lock,
    outbox,
    pause_schedule,
    presence,
    schedule,
)
from django_alkstore.services.leader import LEADERSHIP_TTL
from django_alkstore.services.locks import LockHandle
from tests.claimer import claim
from tests.ledger.tools import database, row, variant, wait_for_state, writer_lock
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]
DATABASE_KEYS = {
    "alias", "name", "journal_mode", "transaction_mode", "busy_timeout", "wal_bytes", "free_bytes", "writable",
}  # fmt: skip
SETTINGS = {"journal_mode", "busy_timeout", "transaction_mode"}
"""Warnings that depend on the modes which the suite runs in."""


def run(*arguments: str) -> tuple[int, str]:
    """The exit code and the output."""
    out = StringIO()
    try:
        call_command("alkstore_health", *arguments, stdout=out, no_color=True)
    except SystemExit as left:
        return int(str(left.code)), out.getvalue()
    return 0, out.getvalue()


def checked(*arguments: str) -> dict[str, Any]:
    """The object, whose shape is that of the docstring, and fits the exit code."""
    code, out = run("--json", *arguments)
    found = json.loads(out)
    assert set(found) == {"healthy", "findings", "database"}
    assert found["healthy"] is (code == 0)
    assert set(found["database"]) == DATABASE_KEYS
    for finding in found["findings"]:
        assert set(finding) == {"level", "what", "text", "about"}
        assert finding["level"] in {"error", "warning"}
    assert found["healthy"] is not any(finding["level"] == "error" for finding in found["findings"])
    assert isinstance(found, dict)
    return found


def findings(*arguments: str) -> list[tuple[str, str, str | None]]:
    """Level, kind and object of each finding."""
    found = checked(*arguments)["findings"]
    return [(each["level"], each["what"], each["about"]) for each in found if each["what"] not in SETTINGS]


def text_of(what: str, *arguments: str) -> str:
    """What the only finding of its kind says; it is a line of the output too."""
    (text,) = [each["text"] for each in checked(*arguments)["findings"] if each["what"] == what]
    assert isinstance(text, str)
    assert text in run(*arguments)[1]
    return text


def works_on(*queues: str) -> None:
    presence.leave("default", "host:1:0123456789ab", queues, "a file that nobody has")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the check look at another file, or with other options."""

    def look(name: object = None, **options: Any) -> None:
        settings = connections["default"].settings_dict
        if name is not None:
            monkeypatch.setitem(settings, "NAME", name)
        monkeypatch.setitem(settings, "OPTIONS", {**settings["OPTIONS"], **options})

    return look


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the database, in rollback-journal mode."""
    path = tmp_path / "copy.sqlite3"
    with closing(sqlite3.connect(database())) as source, closing(sqlite3.connect(path)) as target:
        source.backup(target)
        target.execute("PRAGMA journal_mode=DELETE")
        target.execute("VACUUM")  # pages that other tests left free would be room
    return path


# What is printed


def test_an_empty_database_is_healthy(clock: ManualClock) -> None:
    assert findings() == []
    code, out = run()
    assert code == 0
    assert out.splitlines()[0] == "healthy"


def test_what_the_live_connection_says_of_the_database_is_in_the_object() -> None:
    found = checked()["database"]
    with connections["default"].cursor() as cursor:
        journal = cursor.execute("PRAGMA journal_mode").fetchone()[0]
    assert found["journal_mode"] == journal
    assert found["transaction_mode"] == connections["default"].transaction_mode or "DEFERRED"
    assert found["busy_timeout"] == connections["default"].settings_dict["OPTIONS"]["timeout"]
    assert found["alias"] == "default"
    assert found["name"] == database()
    assert found["writable"] is True
    assert found["free_bytes"] > 0
    assert isinstance(found["wal_bytes"], int)


def test_each_finding_is_one_line_below_the_verdict(clock: ManualClock) -> None:
    enqueue("mail", None)
    Schedule.objects.create(
        name="odd\nname\x1b", spec="@every 1s", queue="mail", payload=None, created_at=clock.now(),
        updated_at=clock.now(), next_fire_at=clock.now() + timedelta(days=1),
    )  # fmt: skip
    clock.advance(100)
    code, out = run()
    verdict, *lines = out.splitlines()
    assert (code, verdict) == (1, "unhealthy")
    lines = [line for line in lines if not line.startswith("warning ")]
    assert (
        lines[0] == "error no_worker: queue mail: work has been due for 1 min 40 s, and no live worker is there for it"
    )
    assert lines[1].startswith("error clock: schedule odd name\N{REPLACEMENT CHARACTER} fires in 23 h 58 min only")
    assert len(lines) == 2


def test_it_changes_and_commits_nothing(clock: ManualClock) -> None:
    enqueue("mail", None)
    claim_batch("mail", "me")
    schedule("hourly", "@every 1h", "mail")
    lock("report").acquire()
    clock.advance(3_600)
    tables = (Job, Lock, Schedule)
    before = [list(table.objects.values()) for table in tables]
    change = dialect_of(connections["default"]).change("default")
    try:
        version = change.version()
        run("--thorough")
        assert change.version() == version
    finally:
        change.close()
    assert [list(table.objects.values()) for table in tables] == before


def test_the_caller_s_connection_stays_as_it_was() -> None:
    before = connections["default"]
    with before.cursor() as cursor:
        timeout = cursor.execute("PRAGMA busy_timeout").fetchone()
    run()
    assert connections["default"] is before
    with before.cursor() as cursor:
        assert cursor.execute("PRAGMA busy_timeout").fetchone() == timeout


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_database_names_the_one_that_is_examined(clock: ManualClock) -> None:
    enqueue("mail", None, using="other")
    clock.advance(31)
    assert findings() == []
    assert findings("--database", "other") == [("error", "no_worker", "mail")]


@pytest.mark.parametrize(
    "arguments",
    [("--grace", "-1"), ("--grace", "soon"), ("--max-age", "nan"), ("--max-dead", "-1"), ("--max-wal", "0"),
     ("--queue", "no such"), ("--queue", ""), ("--queue", "__alkstore_outbox:post"), ("--outbox", "no such"),
     ("--database", "nowhere")],
)  # fmt: skip
def test_a_wrong_argument_is_status_2(arguments: tuple[str, str], start: Start) -> None:
    with pytest.raises(CommandError) as caught:
        call_command("alkstore_health", *arguments)
    # The parser's own complaints have their status from `manage.py` alone.
    assert caught.value.returncode == (2 if arguments[0] == "--database" else 1)
    if arguments == ("--grace", "soon"):
        process = start("alkstore_health", *arguments)
        assert process.wait() == 2
        assert "Traceback" not in process.output


# Workers


def test_work_that_is_due_for_longer_than_the_grace_needs_a_live_worker(clock: ManualClock) -> None:
    enqueue("mail", None)
    enqueue("later", None, delay=3_600)
    clock.advance(30)
    assert findings() == []
    clock.advance(1)
    assert findings() == [("error", "no_worker", "mail")]
    assert findings("--grace", "31") == []


def test_a_sign_of_life_that_lasts_is_a_live_worker_for_its_queue_alone(clock: ManualClock) -> None:
    enqueue("mail", None)
    enqueue("post", None)
    clock.advance(31)
    works_on("mail")
    assert findings() == [("error", "no_worker", "post")]
    clock.advance(presence.TTL - 1)
    assert ("error", "no_worker", "mail") not in findings()
    clock.advance(1)
    assert ("error", "no_worker", "mail") in findings()


def test_an_outbox_with_the_longest_name_has_its_worker(clock: ManualClock) -> None:
    letter = outbox("o" * 128).enqueue(None)
    clock.advance(31)
    assert findings() == [("error", "no_worker", letter.queue)]
    assert f"outbox {'o' * 128}: work has been due" in text_of("no_worker")
    works_on(letter.queue)
    assert findings() == []
    Lock.objects.get().full_clean()  # the column holds the name


def test_a_lease_just_taken_or_renewed_is_a_sign_of_life_too(clock: ManualClock) -> None:
    enqueue_many("mail", [None] * 2)
    clock.advance(31)
    (job,) = claim_batch("mail", "a program of the project's own")
    assert findings() == []
    clock.advance(presence.TTL)
    assert findings() == [("error", "no_worker", "mail")]
    assert job.heartbeat()
    assert findings() == []
    clock.advance(10)
    assert job.ack()
    assert findings() == [("error", "no_worker", "mail")]


def test_of_the_named_queues_alone_is_anything_found_that_is_about_a_queue(clock: ManualClock) -> None:
    """As the probe of a worker for one queue asks, which another's absence is not to restart."""
    enqueue("mail", None, visibility_timeout=10)
    claim_batch("mail", "me")
    enqueue("post", None)
    outbox("mail").enqueue(None)
    clock.advance(10 + 90)
    mail = {("error", "no_worker", "mail"), ("error", "lapsed", "mail")}
    post = {("error", "no_worker", "post")}
    letters = {("error", "no_worker", "__alkstore_outbox:mail")}
    assert set(findings()) == mail | post | letters
    assert set(findings("--queue", "mail")) == mail
    assert set(findings("--queue", "post")) == post
    assert set(findings("--outbox", "mail")) == letters
    assert set(findings("--queue", "mail", "--queue", "post", "--queue", "mail")) == mail | post
    assert set(findings("--queue", "post", "--outbox", "mail")) == post | letters
    assert set(findings("--queue", "post", "--max-age", "60")) == {*post, ("error", "overdue", "post")}
    works_on("post")
    assert findings("--queue", "post") == []


def test_a_named_queue_of_which_nothing_is_known_is_told_of(clock: ManualClock) -> None:
    """Its name may be misspelt, and then nothing would ever be found."""
    unknown = [("warning", "no_worker", "unknown"), ("warning", "no_worker", "__alkstore_outbox:unknown")]
    assert findings("--queue", "unknown", "--outbox", "unknown", "--queue", "unknown") == unknown
    assert text_of("no_worker", "--queue", "unknown") == (
        "queue unknown: no job waits in it, and no live worker is there for it"
    )
    works_on("unknown")
    assert findings("--queue", "unknown") == []
    enqueue("mail", None, delay=3_600)
    assert findings("--queue", "mail") == []


def test_what_is_about_no_queue_is_found_whichever_are_named(clock: ManualClock) -> None:
    enqueue("mail", None)
    claim_batch("mail", "me")[0].fail("no")
    schedule("often", "@every 5s", "mail")
    clock.advance(36)
    expected = [("error", "no_leader", None), ("warning", "dead", None)]
    assert findings() == expected
    works_on("post")
    assert findings("--queue", "post") == expected


def test_a_due_job_that_waits_too_long_is_a_finding_though_a_worker_is_there(clock: ManualClock) -> None:
    enqueue("mail", None)
    clock.advance(3_601)
    works_on("mail")
    assert findings() == [("error", "overdue", "mail")]
    assert text_of("overdue") == "queue mail: the oldest due job has waited 1 h, more than 1 h"
    assert findings("--max-age", "3602") == []


def test_a_lapsed_lease_that_nobody_puts_right(clock: ManualClock) -> None:
    enqueue_many("mail", [None] * 3, visibility_timeout=10)
    ids = [job.id for job in claim_batch("mail", "me", 3)]
    clock.advance(10 + 90)
    works_on("mail")
    assert findings() == [("error", "lapsed", "mail")]
    assert f"the lease ran out on job {ids[0]} and 2 more, more than 1 min 30 s ago" in text_of("lapsed")
    assert findings("--grace", "31") == []


def test_a_killed_worker_that_held_the_only_job_is_missed_at_once(start: Start, tmp_path: Path) -> None:
    job = enqueue("wait", str(tmp_path / "never"))
    process = start("run_queue", "wait")
    process.wait_for(f"running {job.pk}")
    wait_until(lambda: presence.signs("default").count() == 1, "it has left its sign of life")
    assert findings() == []
    process.signal(signal.SIGKILL)
    process.wait()
    assert findings("--grace", "100000") == [("error", "no_worker", "wait")]
    assert text_of("no_worker") == "queue wait: it holds work, and all its workers have died"
    other = start("run_queue", "wait")
    other.wait_for(f"running {job.pk}")
    assert findings() == []


def test_without_crash_detection_a_killed_worker_is_missed_when_its_sign_lapses_and_not_before(start: Start) -> None:
    process = start("run_queue", "noop", **variant(ALKSTORE={"LIVENESS": False}))
    wait_until(lambda: presence.signs("default").count() == 1, "it has left its sign of life")
    job = enqueue("noop", None)
    wait_for_state("completed", job.pk)
    process.signal(signal.SIGKILL)
    process.wait()
    ends = presence.signs("default").get().expires_at
    manual = ManualClock(ends - timedelta(seconds=100))
    with clock_module.use(manual):
        enqueue("noop", None)
        manual.advance(99)
        assert findings() == [("warning", "crash_detection", None)]
        assert text_of("crash_detection").endswith("could not set it up; the first lines of its log say why")
        manual.advance(1)
        assert findings() == [("error", "no_worker", "noop")]


def test_a_queue_is_not_deserted_while_one_of_its_workers_lives(clock: ManualClock) -> None:
    enqueue("mail", None, delay=10)
    with Liveness("default") as dead:
        presence.leave("default", dead.holder, ["mail", "post"], dead.file)
    assert findings() == [("error", "no_worker", "mail")]
    with Liveness("default") as living:
        presence.leave("default", living.holder, ["mail"], living.file)
        assert findings() == []
        clock.advance(presence.TTL)  # suspended
        presence.remove_lapsed("default")
        assert findings("--grace", "1000") == []


def test_the_lease_of_a_dead_worker_is_no_sign_of_life(clock: ManualClock) -> None:
    enqueue("mail", None)
    with Liveness("default") as liveness:
        claim(liveness, "mail")
        assert findings() == []
    assert findings() == [("error", "no_worker", "mail")]


def test_as_a_probe_it_is_a_process_that_ends_with_0_or_1(start: Start) -> None:
    probe = start("alkstore_health")
    assert (probe.wait(), probe.lines[0]) == (0, "healthy")
    job = enqueue("noop", None)
    Job.objects.update(run_at=job.run_at - timedelta(seconds=60))
    probe = start("alkstore_health", "--json")
    assert probe.wait() == 1
    assert json.loads(probe.output)["healthy"] is False
    assert row(job.pk).state == "pending"


# Schedules, dead jobs


def leads(clock: ManualClock) -> None:
    Lock.objects.create(
        name="__alkstore_scheduler", owner="x", acquired_at=clock.now(), expires_at=clock.now() + timedelta(seconds=10)
    )


def test_schedules_that_are_due_need_a_leader(clock: ManualClock) -> None:
    schedule("often", "@every 5s", "mail")
    schedule("seldom", "@every 1h", "mail")
    schedule("resting", "@every 5s", "mail")
    pause_schedule("resting")
    clock.advance(35)
    assert findings() == []
    clock.advance(1)
    assert findings() == [("error", "no_leader", None)]
    assert text_of("no_leader") == "1 schedule has been due for up to 31 s, and no scheduler leads"
    leads(clock)
    assert findings() == []
    clock.advance(10)
    assert findings() == [("error", "no_leader", None)]


def test_the_leadership_of_a_dead_process_is_no_leader(clock: ManualClock) -> None:
    schedule("often", "@every 5s", "mail")
    clock.advance(36)
    with Liveness("default") as liveness:
        assert LockHandle(LEADERSHIP_LOCK, LEADERSHIP_TTL, liveness.holder, "default", liveness).acquire()
        assert findings() == []
    assert findings() == [("error", "no_leader", None)]


def test_a_file_that_this_command_cannot_open_says_nothing_of_the_workers(clock: ManualClock) -> None:
    place = Path(f"{Path(database()).resolve()}{SUFFIX}")
    with moved_away(place):
        place.symlink_to("/etc/hostname")  # which is never opened, whoever runs this
        text = text_of("crash_detection")
        place.unlink()
    assert text == (
        f"this command cannot see whether workers live: the file {place} cannot be opened: {os.strerror(errno.ELOOP)}"
    )


@contextmanager
def moved_away(path: Path) -> Iterator[None]:
    """Inside the block the file, which may be absent, has another name."""
    there = path.exists()
    other = path.with_name("moved-away")
    if there:
        path.rename(other)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        if there:
            other.rename(path)


def test_jobs_that_died_in_the_last_hour_are_a_warning_unless_there_may_be_so_many_only(clock: ManualClock) -> None:
    enqueue_many("mail", [None] * 2)
    for job in claim_batch("mail", "me", 2):
        job.fail("no")
    assert findings() == [("warning", "dead", None)]
    assert text_of("dead") == "2 jobs died in the last hour"
    assert findings("--max-dead", "2") == [("warning", "dead", None)]
    assert findings("--max-dead", "1") == [("error", "dead", None)]
    assert findings("--max-dead", "0") == [("error", "dead", None)]
    clock.advance(3_601)
    assert findings("--max-dead", "0") == []


# The clock


def from_the_future(clock: ManualClock) -> dict[str, Callable[[], object]]:
    return {
        "job": lambda: enqueue("mail", None, delay=7_200),
        "lock": lambda: lock("report", ttl=1).acquire(),
        "sign": lambda: works_on("mail"),
        "leader": lambda: leads(clock),
    }


@pytest.mark.parametrize("of", ["job", "lock", "sign", "leader"])
def test_rows_that_were_written_in_the_future_show_that_the_clock_has_gone_back(clock: ManualClock, of: str) -> None:
    from_the_future(clock)[of]()
    clock.step(-10)
    assert findings() == []
    clock.step(-1)
    assert findings() == [("error", "clock", None)]
    clock.step(-3_589)
    assert text_of("clock").endswith("lies 1 h ahead: the clock has gone back, or was ahead")


def test_a_lease_far_past_its_timeout_shows_it_too_and_a_long_heartbeat_does_not(clock: ManualClock) -> None:
    enqueue("mail", None)
    (job,) = claim_batch("mail", "me")
    assert job.heartbeat(extend=86_000)
    assert findings() == []
    Job.objects.update(lease_expires_at=clock.now() + timedelta(days=2))
    assert findings() == [("error", "clock", None)]


def test_a_schedule_that_is_more_than_its_interval_ahead_is_named(clock: ManualClock) -> None:
    schedule("hourly", "@every 1h", "mail")
    assert findings() == []
    Schedule.objects.update(next_fire_at=clock.now() + timedelta(days=365 * 100))
    assert findings() == [("error", "clock", "hourly")]
    assert "fires in 36500 d only, though its spec is @every 1h" in text_of("clock")
    schedule("hourly", "@every 1h", "mail")
    assert findings() == []


# The database


def test_the_modes_in_effect_are_warnings_where_they_are_not_the_recommended_ones(
    copy: Path, elsewhere: Callable[..., None]
) -> None:
    elsewhere(str(copy), init_command="PRAGMA busy_timeout=1500", transaction_mode=None)
    found = checked()
    assert [(each["level"], each["what"]) for each in found["findings"]] == [
        ("warning", "journal_mode"), ("warning", "busy_timeout"), ("warning", "transaction_mode"),
    ]  # fmt: skip
    assert found["healthy"] is True
    database = found["database"]
    assert (database["journal_mode"], database["busy_timeout"], database["transaction_mode"]) == (
        "delete", 1.5, "DEFERRED",
    )  # fmt: skip


def test_who_holds_the_writer_lock_for_longer_than_the_wait_is_found(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    monkeypatch.setattr(health, "LONGEST_WAIT", 0.05)
    enqueue("mail", None)
    clock.advance(31)
    with writer_lock():
        assert ("error", "locked", None) in findings()
        assert checked()["database"]["writable"] is False
    assert findings() == [("error", "no_worker", "mail")]


def test_a_database_that_shuts_out_readers_too_is_one_finding(
    monkeypatch: pytest.MonkeyPatch, copy: Path, elsewhere: Callable[..., None]
) -> None:
    monkeypatch.setattr(health, "LONGEST_WAIT", 0.01)
    elsewhere(str(copy), init_command="SELECT 1")
    with closing(sqlite3.connect(copy, isolation_level=None)) as raw:
        raw.execute("BEGIN EXCLUSIVE")
        assert findings() == [("error", "locked", None)]


def test_a_database_that_cannot_be_written_is_found(copy: Path, elsewhere: Callable[..., None]) -> None:
    elsewhere(f"file:{copy}?mode=ro", init_command="SELECT 1")
    assert findings() == [("error", "read_only", None)]
    assert checked()["database"]["writable"] is False


@pytest.mark.parametrize("uri", [False, True])
def test_a_file_that_is_not_there_is_found_and_not_made(
    tmp_path: Path, elsewhere: Callable[..., None], uri: bool
) -> None:
    path = tmp_path / "no such folder" / "none.sqlite3"
    elsewhere(f"file:{path}" if uri else path)
    assert findings() == [("error", "missing", None)]
    path.parent.mkdir()
    assert findings() == [("error", "missing", None)]
    assert list(path.parent.iterdir()) == []


def test_a_database_without_the_tables_is_told_to_migrate(tmp_path: Path, elsewhere: Callable[..., None]) -> None:
    path = tmp_path / "fresh.sqlite3"
    path.touch()
    elsewhere(path)
    assert findings() == [("error", "tables", None)]
    assert "manage.py migrate" in text_of("tables")


def test_a_file_that_is_no_database_is_found(tmp_path: Path, elsewhere: Callable[..., None]) -> None:
    path = tmp_path / "junk.sqlite3"
    path.write_bytes(b"junk" * 5_000)
    elsewhere(path, init_command="SELECT 1")  # Django does not close what this fails on
    assert findings() == [("error", "corrupt", None)]


def test_a_folder_in_the_file_s_place_is_found(tmp_path: Path, elsewhere: Callable[..., None]) -> None:
    elsewhere(tmp_path)
    assert findings() == [("error", "unreachable", None)]


def root_page(path: Path, name: str) -> tuple[int, int]:
    """Where the root page of a table or an index is in the file, and its size; bytes."""
    with closing(sqlite3.connect(path)) as raw:
        (page,) = raw.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()
        (size,) = raw.execute("PRAGMA page_size").fetchone()
    return (page - 1) * size, size


def spoil(path: Path, name: str) -> None:
    place, size = root_page(path, name)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\xff" * size)


def test_damage_where_the_check_reads_is_found_and_hides_nothing_else(
    request: pytest.FixtureRequest, elsewhere: Callable[..., None], clock: ManualClock
) -> None:
    enqueue("mail", None)
    schedule("often", "@every 1s", "mail")
    clock.advance(31)
    copy = request.getfixturevalue("copy")
    spoil(copy, Schedule._meta.db_table)
    elsewhere(copy, init_command="SELECT 1")
    assert findings() == [("error", "no_worker", "mail"), ("error", "corrupt", None)]
    assert "reading the schedules" in text_of("corrupt")
    assert checked()["database"]["writable"] is True


def test_damage_elsewhere_is_found_where_the_whole_file_is_read(copy: Path, elsewhere: Callable[..., None]) -> None:
    spoil(copy, "ledger_entry")
    elsewhere(copy, init_command="SELECT 1")
    assert findings() == []
    assert findings("--thorough") == [("error", "corrupt", None)]


def test_the_whole_file_of_a_sound_database_is_sound() -> None:
    assert findings("--thorough") == []


def test_a_limit_of_pages_that_is_reached_is_found(copy: Path, elsewhere: Callable[..., None]) -> None:
    elsewhere(copy, init_command="PRAGMA max_page_count=1")  # it is never less than there are
    assert findings() == [("error", "full", None)]
    assert checked()["database"]["writable"] is False


def test_a_disk_that_is_full_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(Path(database()).parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    assert findings() == [("error", "full", None)]


@pytest.fixture
def long_log(elsewhere: Callable[..., None], copy: Path) -> Iterator[sqlite3.Connection]:
    """A database with some MiB in its write-ahead log, and a connection to it."""
    elsewhere(copy)
    with closing(sqlite3.connect(copy, isolation_level=None)) as raw:
        raw.execute("PRAGMA journal_mode=WAL")
        raw.execute("CREATE TABLE bulk (data)")
        raw.execute("PRAGMA wal_autocheckpoint=0")
        yield raw


def test_a_reader_that_holds_up_the_log_is_found_and_a_log_that_is_only_long_is_not(
    long_log: sqlite3.Connection, copy: Path, elsewhere: Callable[..., None]
) -> None:
    elsewhere(init_command="SELECT 1")
    with closing(sqlite3.connect(copy, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM bulk").fetchall()
        long_log.execute("INSERT INTO bulk VALUES (zeroblob(3000000))")
        assert checked()["database"]["wal_bytes"] > 3_000_000
        assert findings() == []
        assert findings("--max-wal", "1") == [("error", "wal", None)]
        assert "a reader that does not end holds up 3 MiB" in text_of("wal", "--max-wal", "1")
        reader.execute("ROLLBACK")
        assert findings("--max-wal", "1") == []
        assert checked()["database"]["wal_bytes"] > 3_000_000


def test_a_database_in_memory_is_an_error(elsewhere: Callable[..., None]) -> None:
    elsewhere(":memory:")
    assert findings() == [("error", "in_memory", None)]


@override_settings(ALKSTORE={"NO_SUCH_KEY": 1})
def test_a_wrong_setting_is_a_finding_and_no_traceback() -> None:
    assert findings() == [("error", "settings", None)]
    assert "NO_SUCH_KEY" in text_of("settings")


def test_whatever_else_goes_wrong_is_a_finding_and_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    enqueue("mail", None)
    clock.advance(31)
    monkeypatch.setattr(health, "parse_spec", lambda *_, **__: 1 / 0)
    schedule("often", "@every 1s", "mail")
    clock.advance(60)
    assert findings() == [("error", "no_worker", "mail"), ("error", "broken", None)]
    assert "reading the schedules failed: ZeroDivisionError" in text_of("broken")


# What it costs


def steps_taken(monkeypatch: pytest.MonkeyPatch) -> int:
    """The steps that SQLite's machine takes for one check."""
    taken = 0

    def tick() -> int:
        nonlocal taken
        taken += 1
        return 0

    make = connections.create_connection

    def counted(alias: str) -> Any:
        wrapper = make(alias)
        connect = wrapper.get_new_connection

        def get_new_connection(params: Any) -> Any:
            raw = connect(params)
            raw.set_progress_handler(tick, 1)
            return raw

        wrapper.get_new_connection = get_new_connection
        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(connections, "create_connection", counted)
        findings()
    assert taken
    return taken


def test_jobs_that_are_finished_or_not_due_cost_a_check_nothing(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    enqueue_many("mail", range(20))
    claim_batch("mail", "me", 5)
    clock.advance(31)
    before = steps_taken(monkeypatch)
    ids = enqueue_many("mail", range(5_000))
    finished = Job.objects.filter(pk__range=(ids[0], ids[-1]))
    finished.update(state="completed", finished_at=clock.now())
    finished.filter(pk__lt=ids[2_000]).update(state="dead", finished_at=clock.now() - timedelta(hours=2))
    enqueue_many("mail", range(5_000), delay=10_000, priority=5)
    assert steps_taken(monkeypatch) < before * 2
