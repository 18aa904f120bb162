"""Section 8: `alkstore_status` and `alkstore_prune`."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from dataclasses import asdict
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError
from django.test import override_settings

from django_alkstore.clock import ManualClock
from django_alkstore.dialects.liveness import Liveness
from django_alkstore.models import Job, Lock, Schedule
from django_alkstore.services import (
    cancel,
    claim_batch,
    enqueue,
    enqueue_many,
    lock,
    outbox,
    pause_schedule,
    presence,
    queue_stats,
    schedule,
)
from tests.ledger.tools import database

pytestmark = pytest.mark.django_db(transaction=True)

KEYS = {"database", "queues", "schedules", "locks", "leader", "workers"}


def run(command: str, *arguments: str, **options: Any) -> str:
    out = StringIO()
    call_command(command, *arguments, stdout=out, no_color=True, **options)
    return out.getvalue()


def status() -> dict[str, Any]:
    found = json.loads(run("alkstore_status", "--json"))
    assert isinstance(found, dict)
    return found


def some_of_everything() -> None:
    enqueue_many("alpha", [None] * 3)
    enqueue("alpha", None, delay=60)
    (claimed,) = claim_batch("alpha", "me")
    claimed.ack()
    claim_batch("alpha", "me")
    enqueue("beta", None, max_attempts=1)
    claim_batch("beta", "me")[0].fail("no")
    cancel(enqueue("beta", None).pk)
    outbox("letters").enqueue(None)
    schedule("hourly", "@every 1h", "alpha")
    schedule("resting", "@every 1d", "beta")
    pause_schedule("resting")
    assert lock("report", owner="me").acquire()


def leads(clock: ManualClock, seconds: float) -> None:
    Lock.objects.create(
        name="__alkstore_scheduler",
        owner="the-leader",
        acquired_at=clock.now(),
        expires_at=clock.now() + timedelta(seconds=seconds),
    )


def test_the_object_has_exactly_the_keys_of_the_contract(clock: ManualClock) -> None:
    nothing = {"queues": [], "schedules": [], "locks": [], "leader": None, "workers": []}
    assert status() == {"database": database(), **nothing}
    some_of_everything()
    assert set(status()) == KEYS


def test_the_queues_are_queue_stats(clock: ManualClock) -> None:
    some_of_everything()
    clock.advance(5)
    found = status()["queues"]
    assert found == [asdict(stats) for stats in queue_stats()]
    assert set(found[0]) == {
        "queue", "pending", "processing", "completed", "dead", "cancelled", "due", "oldest_due_age",
    }  # fmt: skip
    alpha = next(queue for queue in found if queue["queue"] == "alpha")
    assert alpha == {
        "queue": "alpha", "pending": 2, "processing": 1, "completed": 1, "dead": 0, "cancelled": 0,
        "due": 1, "oldest_due_age": 5.0,
    }  # fmt: skip


def test_schedules_and_locks_are_all_there(clock: ManualClock) -> None:
    some_of_everything()
    found = status()
    assert [(each["name"], each["queue"], each["enabled"]) for each in found["schedules"]] == [
        ("hourly", "alpha", True),
        ("resting", "beta", False),
    ]
    assert [(each["name"], each["owner"]) for each in found["locks"]] == [("report", "me")]


def test_the_leader_is_whoever_holds_the_leadership_now(clock: ManualClock) -> None:
    leads(clock, 10)
    leader = status()["leader"]
    assert leader is not None
    assert "the-leader" in json.dumps(leader)
    clock.advance(11)
    assert status()["leader"] is None


def test_the_table_shows_the_database_each_queue_with_its_numbers_schedules_locks_and_leader(
    clock: ManualClock,
) -> None:
    some_of_everything()
    leads(clock, 10)
    shown = run("alkstore_status")
    for text in (database(), "the-leader", "letters", "hourly", "@every 1h", "resting", "paused", "report"):
        assert text in shown
    assert max(map(len, shown.splitlines())) < 300


def rows(shown: str, title: str) -> list[list[str]]:
    """The cells of a table, line by line. They are two spaces apart at least."""
    table = next(part for part in shown.split("\n\n") if part.startswith(title))
    return [re.split(r" {2,}", line.strip()) for line in table.strip().splitlines()]


def test_the_table_tells_what_is_due_from_what_is_not_due_yet(clock: ManualClock) -> None:
    some_of_everything()
    clock.advance(200)
    claim_batch("alpha", "me")
    enqueue("alpha", None, delay=60)
    header, *found = rows(run("alkstore_status"), "Queues")
    assert header == [
        "Queues", "due", "not due yet", "processing", "completed", "dead", "cancelled", "oldest due",
    ]  # fmt: skip
    assert found == [
        ["outbox letters", "1", "0", "0", "0", "0", "0", "3 min 20 s"],
        ["queue alpha", "1", "1", "2", "1", "0", "0", "2 min 20 s"],
        ["queue beta", "0", "0", "0", "0", "1", "1", "-"],
    ]


def test_the_tables_of_schedules_and_locks(clock: ManualClock) -> None:
    some_of_everything()
    schedule("torn", "@every 1h", "alpha")
    Schedule.objects.filter(name="torn").update(last_error="InvalidSpec: what\nmore", enabled=False)
    clock.advance(200)
    shown = run("alkstore_status")
    assert rows(shown, "Schedules") == [
        ["Schedules", "spec", "fires into", "state", "next fire", "last fire"],
        ["hourly", "@every 1h", "alpha", "on", "in 56 min 40 s", "-"],
        ["resting", "@every 1d", "beta", "paused", "-", "-"],
        ["torn", "@every 1h", "alpha", "broken", "-", "-"],
    ]
    clock.advance(3_600)
    assert rows(run("alkstore_status"), "Schedules")[1][4] == "due 3 min 20 s ago"
    assert "torn was paused for an error: InvalidSpec: what\nDeclare it again" in shown
    [_, [*held]] = rows(shown, "Locks")
    assert held[0] == "report"
    assert held[-1] == "lapsed 2 min 20 s ago"


def test_a_long_name_moves_no_other_row_s_columns(clock: ManualClock) -> None:
    enqueue("short", None)
    before = [line for line in run("alkstore_status").splitlines() if "short" in line]
    long = "x" * 128
    enqueue(long, None)
    after = run("alkstore_status").splitlines()
    assert [len(line) for line in after if "short" in line and "due in" not in line] == [len(before[0])]
    (place,) = [number for number, line in enumerate(after) if line == f"queue {long}"]
    assert after[place + 1].split()[0] == "1"


def test_due_jobs_that_nobody_is_registered_for_are_named(clock: ManualClock) -> None:
    enqueue_many("mail-old", [None] * 3)
    outbox("gone").enqueue(None)
    outbox("mail").enqueue(None)
    enqueue("noop", None)
    enqueue("later", None, delay=60)
    shown = run("alkstore_status")
    (line,) = [line for line in shown.splitlines() if "no handler is registered" in line]
    assert line.startswith("1 due in outbox gone, 3 due in queue mail-old, and no handler is registered for them")
    assert set(status()) == KEYS
    Job.objects.exclude(queue="mail-old").delete()
    assert "3 due in queue mail-old, and no handler is registered for it" in run("alkstore_status")
    Job.objects.filter(queue="mail-old").delete()
    enqueue("noop", None)
    assert "no handler" not in run("alkstore_status")


def test_due_jobs_whose_handler_no_running_worker_knows_are_named(clock: ManualClock) -> None:
    enqueue_many("noop", [None] * 2)
    outbox("mail").enqueue(None)
    enqueue("record", None)
    enqueue("async", None, delay=60)
    assert "no running worker" not in run("alkstore_status")  # no worker runs: health says so
    with Liveness("default") as liveness:
        presence.leave("default", liveness.holder, ["record"], liveness.file)
        (line,) = [line for line in run("alkstore_status").splitlines() if "no running worker" in line]
        assert line == (
            "1 due in outbox mail, 2 due in queue noop: they have handlers, but no running worker knows them; "
            "restart the workers, or start one for them."
        )
        presence.leave("default", liveness.holder, ["record", "noop", "__alkstore_outbox:mail"], liveness.file)
        assert "no running worker" not in run("alkstore_status")
    assert "no running worker" not in run("alkstore_status")


def test_a_worker_that_is_suspended_knows_its_queue(clock: ManualClock) -> None:
    with Liveness("default") as suspended, Liveness("default") as alive:
        presence.leave("default", suspended.holder, ["noop"], suspended.file)
        clock.advance(presence.TTL + 1)
        presence.leave("default", alive.holder, ["record"], alive.file)
        enqueue("noop", None)
        assert "no running worker" not in run("alkstore_status")


@pytest.mark.parametrize("command", ["alkstore_status", "alkstore_prune", "alkstore_health"])
def test_a_reader_that_closes_the_pipe_ends_the_command_quietly(command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environment = {"DJANGO_SETTINGS_MODULE": "tests.settings", "ALKSTORE_TEST_DATABASE": database()}
    ended = subprocess.run(
        [sys.executable, "-m", "django", command],
        stdout=writing, stderr=subprocess.PIPE, env={**os.environ, **environment}, check=False, text=True,
    )  # fmt: skip
    os.close(writing)
    assert "BrokenPipeError" not in ended.stderr
    assert ended.returncode == 141


def test_two_hundred_queues_that_nobody_is_registered_for_make_one_line(clock: ManualClock) -> None:
    for number in range(200):
        enqueue(f"tenant-{number:03}", None)
    shown = run("alkstore_status")
    assert len(rows(shown, "Queues")) == 201
    (line,) = [line for line in shown.splitlines() if "no handler is registered" in line]
    assert "1 due in queue tenant-009, 190 due in 190 more, and no handler" in line


def test_the_table_of_an_empty_database_says_that_there_is_nothing(clock: ManualClock) -> None:
    shown = run("alkstore_status")
    assert database() in shown
    assert shown.count("none") >= 3


def test_odd_text_in_a_schedule_s_error_breaks_no_line_of_the_table(clock: ManualClock) -> None:
    schedule("hourly", "@every 1h", "alpha")
    Schedule.objects.update(last_error="first\nsecond\x1b[31m", enabled=False)
    lines = run("alkstore_status").splitlines()
    assert not any(line.startswith("second") for line in lines)


def test_status_changes_nothing(clock: ManualClock) -> None:
    some_of_everything()
    before = list(Job.objects.order_by("pk").values())
    clock.advance(3_600)  # leases have run out, but it is not for a status to put that right
    run("alkstore_status")
    status()
    assert list(Job.objects.order_by("pk").values()) == before


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_database_names_the_one_that_is_shown_and_pruned(clock: ManualClock) -> None:
    enqueue("there", None, using="other")
    found = json.loads(run("alkstore_status", "--json", "--database", "other"))
    assert [queue["queue"] for queue in found["queues"]] == ["there"]
    assert found["database"] != database()
    with override_settings(ALKSTORE={"DATABASE": "other"}):
        assert [queue["queue"] for queue in status()["queues"]] == ["there"]


@pytest.mark.parametrize("command", ["alkstore_status", "alkstore_prune"])
def test_a_database_that_is_not_there_is_status_2(command: str) -> None:
    with pytest.raises(CommandError) as caught:
        run(command, "--database", "nowhere")
    assert caught.value.returncode == 2
    assert "nowhere" in str(caught.value)


# Pruning


def finished(clock: ManualClock) -> None:
    """Two completed, one dead, one cancelled, one live."""
    enqueue_many("alpha", [None] * 4)
    for job in claim_batch("alpha", "me", 3):
        job.ack() if job.id % 3 else job.fail("no")
    Job.objects.filter(state="pending").update(queue="live")
    cancel(enqueue("alpha", None).pk)


def states() -> list[str]:
    return sorted(Job.objects.values_list("state", flat=True))


def test_prune_removes_what_is_older_than_the_settings_keep_it_and_says_how_many(clock: ManualClock) -> None:
    finished(clock)
    everything = states()
    run("alkstore_prune")
    clock.advance(86_399)
    run("alkstore_prune")
    assert states() == everything
    clock.advance(2)
    shown = run("alkstore_prune")
    assert states() == [state for state in everything if state != "completed"]
    assert str(everything.count("completed")) in shown


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        ({"KEEP_COMPLETED": None}, {"pending", "completed", "dead", "cancelled"}),
        ({"KEEP_COMPLETED": None, "KEEP_DEAD": 100}, {"pending", "completed"}),
        ({"KEEP_COMPLETED": 100, "KEEP_DEAD": 100}, {"pending"}),
        ({"KEEP_COMPLETED": 100_000}, {"pending", "completed", "dead", "cancelled"}),
    ],
)
def test_prune_keeps_what_the_settings_keep(clock: ManualClock, setting: dict[str, Any], left: set[str]) -> None:
    finished(clock)
    assert set(states()) == {"pending", "completed", "dead", "cancelled"}
    clock.advance(90_000)
    with override_settings(ALKSTORE=setting):
        run("alkstore_prune")
    assert set(states()) == left


def test_prune_works_through_thousands(clock: ManualClock) -> None:
    enqueue_many("alpha", [None] * 2_500)
    for job in claim_batch("alpha", "me", 2_500):
        job.ack()
    clock.advance(90_000)
    run("alkstore_prune")
    assert not Job.objects.exists()


def test_an_unreadable_database_is_a_command_error_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> bool:
        raise OperationalError("disk I/O error")

    monkeypatch.setattr("django.db.models.query.QuerySet.exists", refuse)
    with pytest.raises(CommandError, match="disk I/O error"):
        run("alkstore_status")


def test_a_database_that_is_busy_for_too_long_is_a_command_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        busy = sqlite3.OperationalError("database is locked")
        busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
        raise OperationalError("database is locked") from busy

    monkeypatch.setattr("django_alkstore.management.commands.alkstore_prune.prune", refuse)
    with pytest.raises(CommandError, match=r"'default' was busy .* \(database is locked\); try again"):
        run("alkstore_prune")
