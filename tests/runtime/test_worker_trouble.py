"""Section 8 where the database will not have it: locked, broken for a while, or slow to be free."""

import gc
import re
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from django.db import connections

from django_alkstore import clock
from django_alkstore.models import Job
from django_alkstore.services import enqueue, schedule, sweep
from tests.ledger.models import Entry
from tests.ledger.tools import database, freeze, row, wait_for_state, wait_past, writer_lock
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]
IMPATIENT = {"ALKSTORE_TEST_TIMEOUT": "0.2"}
"""With handlers that write nothing: where the machine is busy, a round of their own worker's may last for so long."""
TROUBLE = "database trouble"


@contextmanager
def broken_database() -> Iterator[None]:
    """A fault that no waiting ends: the tables are away. (As root, as in containers, no file is read-only.)"""

    def rename(old: str, new: str) -> None:
        with closing(sqlite3.connect(database(), isolation_level=None, timeout=30)) as raw:
            raw.execute(f"ALTER TABLE {old} RENAME TO {new}")

    rename("django_alkstore_job", "put_away")
    try:
        yield
    finally:
        rename("put_away", "django_alkstore_job")


def pauses(process: Process) -> list[float]:
    """The pauses that its lines of trouble announce."""
    return [float(found[1]) for line in process.lines if (found := re.search(r"again in ([\d.]+) s", line))]


def test_f007_an_ack_that_finds_the_database_locked_is_written_later_and_the_job_is_not_run_again(
    start: Start, tmp_path: Path
) -> None:
    open_end = tmp_path / "open"
    job = enqueue("mix", str(open_end), visibility_timeout=600)
    process = start("run_queue", "mix", **IMPATIENT)
    process.wait_for(f"running {job.pk}")
    with writer_lock():
        open_end.touch()
        process.wait_for(f"done {job.pk}")
        process.wait_for(TROUBLE, 2)
        assert row(job.pk).state == "processing"
    wait_for_state("completed", job.pk)
    assert (row(job.pk).attempts, row(job.pk).errors) == (1, [])
    assert process.output.count(f"running {job.pk}") == 1


def test_f007_a_failure_that_finds_the_database_locked_is_recorded_later(start: Start, tmp_path: Path) -> None:
    open_end = tmp_path / "open"
    job = enqueue("late-failure", str(open_end), max_attempts=1)
    process = start("run_queue", "late-failure", **IMPATIENT)
    process.wait_for(f"running {job.pk}")
    with writer_lock():
        open_end.touch()
        process.wait_for(f"done {job.pk}")
        process.wait_for(TROUBLE)
    wait_for_state("dead", job.pk)
    assert [entry["error"] for entry in row(job.pk).errors] == ["ValueError: after the wait"]


def test_an_ack_that_had_to_wait_past_its_lease_still_counts_where_nobody_has_taken_the_job(
    start: Start, tmp_path: Path
) -> None:
    open_end = tmp_path / "open"
    job = enqueue("mix", str(open_end), visibility_timeout=1, max_attempts=1)
    process = start("run_queue", "mix", **IMPATIENT)
    process.wait_for(f"running {job.pk}")
    with writer_lock():
        open_end.touch()
        process.wait_for(f"done {job.pk}")
        ends = row(job.pk).lease_expires_at
        wait_past(ends)
    wait_for_state("completed", job.pk)
    assert (row(job.pk).attempts, row(job.pk).errors) == (1, [])


def test_an_ack_that_comes_after_another_has_put_the_lapse_right_changes_nothing(start: Start, tmp_path: Path) -> None:
    open_end = tmp_path / "open"
    job = enqueue("mix", str(open_end), visibility_timeout=3, max_attempts=1)
    process = start("run_queue", "mix", **IMPATIENT)
    process.wait_for(f"running {job.pk}")
    freeze(process)  # which takes some tries on a busy machine
    wait_past(row(job.pk).lease_expires_at)
    assert sweep() == 1
    open_end.touch()
    process.signal(signal.SIGCONT)
    process.wait_for("lost the lease")
    assert (row(job.pk).state, row(job.pk).last_error) == ("dead", "lease expired")


def test_f026_a_job_that_is_due_while_the_database_is_locked_is_run_once_it_is_free(start: Start) -> None:
    process = start("run_queue", "noop", **IMPATIENT)
    process.wait_for("worker started")
    job = enqueue("noop", None, delay=1)
    with writer_lock():
        wait_past(job.run_at)
        process.wait_for(TROUBLE)
    wait_for_state("completed", job.pk)


def test_a_worker_that_starts_on_a_locked_database_waits_for_it(start: Start) -> None:
    job = enqueue("noop", None)
    with writer_lock():
        process = start("run_queue", "noop", **IMPATIENT)
        process.wait_for(TROUBLE)
    wait_for_state("completed", job.pk)
    assert row(job.pk).attempts == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", [("run_queue", "noop"), ("run_alkstore",), ("run_schedules",)], ids=lambda c: c[0])
def test_a_command_that_is_stopped_while_it_waits_for_a_locked_database_ends_with_status_0(
    start: Start, command: tuple[str, ...], number: signal.Signals
) -> None:
    with exclusive_lock():
        process = start(*command)
        process.wait_for(TROUBLE)
        process.signal(number)
        assert process.wait() == 0
    assert "Traceback" not in process.output
    assert "worker started" not in process.output


SLOW_WATCH = """
import sys
from django.core.management import call_command
from django.db import OperationalError
from django_alkstore.runtime import worker
class Watch:
    def __init__(self, alias):
        print("locked", flush=True)
        raise OperationalError("database is locked")
worker.Watch = Watch
worker.is_contention = lambda *_: True
call_command(*sys.argv[1:])
"""
"""Runs a command whose worker finds the database locked, though it was free a moment before."""


@pytest.mark.parametrize("command", ["run_queue", "run_outbox", "run_alkstore"])
def test_a_worker_that_is_stopped_before_it_could_open_the_database_ends_with_status_0(
    start: Start, command: str
) -> None:
    process = start("-c", SLOW_WATCH, command)
    process.wait_for("locked", 2)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert "stopped while starting (SIGTERM)" in process.output
    assert "Traceback" not in process.output


@contextmanager
def exclusive_lock() -> Iterator[None]:
    """Inside the block nobody else can even read."""
    connections["default"].close()  # it would keep a shared lock
    gc.collect()  # so would one whose failed statement is in a reference cycle of an earlier test's exception
    with closing(sqlite3.connect(database(), isolation_level=None, timeout=30)) as raw:
        raw.execute("PRAGMA locking_mode = EXCLUSIVE")
        raw.execute("BEGIN EXCLUSIVE")
        yield
        raw.execute("ROLLBACK")


def test_f134_a_worker_survives_a_broken_database_with_growing_pauses_and_goes_on_by_itself(start: Start) -> None:
    process = start("run_queue", "noop")
    process.wait_for("worker started")
    with broken_database():
        process.wait_for(TROUBLE, 4)
        found = pauses(process)
        assert found == sorted(found)
        assert found[-1] >= 4 * found[0]
        assert process.popen.poll() is None
    job = enqueue("noop", None)
    wait_for_state("completed", job.pk)
    assert process.output.count(TROUBLE) <= 10
    assert "Traceback" not in process.output
    process.wait_for("database is back")


def test_f134_the_scheduler_survives_a_broken_database_and_goes_on_by_itself(start: Start) -> None:
    schedule("often", "@every 1s", "noop")
    process = start("run_schedules")
    process.wait_for("fired often")
    with broken_database():
        process.wait_for(TROUBLE, 3)
        assert process.popen.poll() is None
    count = process.output.count("fired often")
    process.wait_for("fired often", count + 2)
    boundaries = list(Job.objects.values_list("fire_at", flat=True))
    assert len(set(boundaries)) == len(boundaries)


def test_run_alkstore_survives_a_broken_database_whole(start: Start) -> None:
    schedule("often", "@every 1s", "noop")
    process = start("run_alkstore")
    process.wait_for("fired often")
    with broken_database():
        process.wait_for(f"{TROUBLE} while working", 2)
        process.wait_for(f"{TROUBLE} while ticking", 2)
    before = clock.now()
    wait_until(
        lambda: Job.objects.filter(schedule="often", state="completed", finished_at__gt=before).exists(),
        "a job is fired and run after the trouble",
    )


def test_a_handler_that_runs_through_the_trouble_is_acked_after_it(start: Start, tmp_path: Path) -> None:
    open_end = tmp_path / "open"
    job = enqueue("wait", str(open_end), visibility_timeout=30)
    process = start("run_queue", "wait")
    process.wait_for(f"running {job.pk}")
    with broken_database():
        open_end.touch()
        process.wait_for(f"done {job.pk}")
        process.wait_for(TROUBLE)
    wait_for_state("completed", job.pk)
    assert list(Entry.objects.values_list("text", flat=True)) == ["started 1"]


def test_a_handler_that_finds_the_database_locked_fails_like_any_other(start: Start) -> None:
    """Its own `OperationalError` is its attempt's, and no trouble of the worker's."""
    process = start("run_queue", "locked", **IMPATIENT)
    process.wait_for("worker started")
    job = enqueue("locked", database(), max_attempts=1)
    wait_for_state("dead", job.pk)
    assert "database is locked" in (row(job.pk).last_error or "")
