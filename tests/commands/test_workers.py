"""Section 8: the commands that run handlers, as somebody at a terminal meets them."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from django_alkstore.models import Job, Lock
from django_alkstore.services import enqueue, enqueue_many, outbox, presence, schedule
from tests.ledger.models import Entry
from tests.ledger.tools import database, row, variant, wait_for_state
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]


def stopped(process: Process) -> str:
    """The whole output, after a clean stop."""
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    return process.output


# What is run


def test_the_start_line_names_the_database_file_the_queues_the_concurrency_and_the_pid(start: Start) -> None:
    process = start("run_queue", "noop", "record", "--concurrency", "3")
    process.wait_for("worker started")
    (line,) = [line for line in process.lines if "worker started" in line]
    assert database() in line
    assert re.search(r"\bnoop\b.*\brecord\b", line)
    assert re.search(r"concurrency\W+3\b", line)
    assert re.search(rf"pid\W+{process.pid}\b", line)


def test_without_names_run_queue_takes_every_queue_and_no_outbox(start: Start) -> None:
    letter = outbox("mail").enqueue("letter")
    process = start("run_queue")
    jobs = enqueue("noop", None), enqueue("record", "a"), enqueue("async", "b"), enqueue("tell", None)
    wait_for_state("completed", *(job.pk for job in jobs))
    assert (row(letter.pk).state, row(letter.pk).attempts) == ("pending", 0)
    process.wait_for("worker started")
    (line,) = [line for line in process.lines if "worker started" in line]
    assert "outbox" not in line


def test_without_names_run_outbox_takes_every_outbox_and_no_queue(start: Start) -> None:
    job = enqueue("noop", None)
    start("run_outbox")
    letters = outbox("mail").enqueue("a"), outbox("exact").enqueue("b")
    wait_for_state("completed", *(letter.pk for letter in letters))
    assert sorted(Entry.objects.values_list("text", flat=True)) == ["a", "b"]
    assert (row(job.pk).state, row(job.pk).attempts) == ("pending", 0)


def test_run_outbox_takes_the_outboxes_that_it_is_told(start: Start) -> None:
    other = outbox("exact").enqueue("a")
    start("run_outbox", "mail")
    letter = outbox("mail").enqueue("b")
    wait_for_state("completed", letter.pk)
    assert (row(other.pk).state, row(other.pk).attempts) == ("pending", 0)


def test_a_delivery_that_fails_is_tried_again_with_each_error_kept(start: Start) -> None:
    letter = outbox("flaky").enqueue("at last", backoff_base=0)
    start("run_outbox", "flaky")
    wait_for_state("completed", letter.pk)
    assert [entry["error"] for entry in row(letter.pk).errors] == [
        "ConnectionError: refused 1",
        "ConnectionError: refused 2",
    ]
    assert list(Entry.objects.values_list("text", "job_id")) == [("at last", letter.pk)]


def test_run_alkstore_does_everything_in_one_process(start: Start) -> None:
    schedule("often", "@every 1s", "record", "fired")
    job, letter = enqueue("async", "queued"), outbox("mail").enqueue("mailed")
    process = start("run_alkstore")
    wait_for_state("completed", job.pk, letter.pk)
    wait_until(lambda: Job.objects.filter(schedule="often", state="completed").count() >= 2, "two are fired and run")
    (lock,) = presence.locks("default")
    assert lock.name == "__alkstore_scheduler"
    stopped(process)
    assert not Lock.objects.exists()
    fired = Job.objects.filter(schedule="often").values_list("fire_at", flat=True)
    assert len(set(fired)) == len(fired)
    assert set(Entry.objects.values_list("text", flat=True)) == {"queued", "mailed", "fired"}


def test_run_alkstore_says_so_where_nothing_is_registered_and_fires_schedules_all_the_same(start: Start) -> None:
    schedule("often", "@every 1s", "nobody")
    code = """
from django.core.management import call_command
from django_alkstore.testing import isolated_registry
with isolated_registry():
    call_command("run_alkstore")
"""
    process = start("-c", code)
    process.wait_for("no handler is registered in an alkstore.py")
    process.wait_for("fired often")
    stopped(process)


def test_run_alkstore_runs_jobs_while_another_process_leads_and_takes_over_from_it(start: Start) -> None:
    leader = start("run_schedules")
    leader.wait_for("leads")
    process = start("run_alkstore")
    process.wait_for("stands by")
    job = enqueue("noop", None)
    wait_for_state("completed", job.pk)
    stopped(leader)
    process.wait_for("scheduler leads")
    stopped(process)


@pytest.mark.parametrize(
    ("command", "name", "listed"),
    [("run_queue", "nope", "record"), ("run_outbox", "nope", "mail"), ("run_queue", "mail", "noop"),
     ("run_outbox", "noop", "mail"), ("run_queue", "__alkstore_outbox:mail", "noop"), ("run_queue", "no pe", "noop")],
)  # fmt: skip
def test_naming_what_is_not_registered_is_status_2_and_lists_what_is(
    start: Start, command: str, name: str, listed: str
) -> None:
    process = start(command, name)
    assert process.wait() == 2
    assert name in process.output
    assert re.search(rf"\b{listed}\b", process.output)
    assert "Traceback" not in process.output
    assert "worker started" not in process.output


@pytest.mark.parametrize(
    ("command", "name", "said"),
    [("run_queue", "mail", "'mail' is an outbox: run_outbox mail"),
     ("run_outbox", "noop", "'noop' is a queue: run_queue noop"),
     ("run_queue", "nope", "no handler is registered for the queue 'nope'")],
)  # fmt: skip
def test_a_name_of_the_other_kind_is_told_from_one_that_nobody_registers(
    start: Start, command: str, name: str, said: str
) -> None:
    process = start(command, name, *(["nope"] if name != "nope" else []))
    assert process.wait() == 2
    assert said in process.output
    assert "registered for the" in process.output


@pytest.mark.parametrize("command", ["run_queue", "run_outbox", "run_alkstore"])
def test_due_jobs_that_nobody_is_registered_for_are_named_at_the_start(start: Start, command: str) -> None:
    enqueue_many("mail-old", [None] * 3)
    outbox("gone").enqueue(None)
    enqueue("later", None, delay=3_600)
    enqueue("noop", None)
    outbox("mail").enqueue("a")
    process = start(command)
    process.wait_for("worker started")
    (line,) = [line for line in process.lines if " WARNING " in line]
    assert "1 due in outbox gone, 3 due in queue mail-old, and no handler is registered for them" in line


def test_where_nothing_waits_for_a_handler_the_start_says_nothing_of_it(start: Start) -> None:
    enqueue("record", None)
    enqueue("later", None, delay=3_600)
    process = start("run_queue", "noop")
    process.wait_for("worker started")
    assert " WARNING " not in process.output


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("--concurrency", "0", "'0' is not a whole number of at least 1"),
     ("--concurrency", "x", "'x' is not a whole number of at least 1"),
     ("--concurrency", "1001", "'1001' is more than 1000: start several workers instead"),
     ("--grace", "-1", "'-1' is not a number of seconds"),
     ("--grace", "soon", "'soon' is not a number of seconds")],
)  # fmt: skip
def test_a_wrong_option_is_status_2_and_says_what_is_right(start: Start, option: str, value: str, said: str) -> None:
    process = start("run_queue", f"{option}={value}")
    assert process.wait() == 2
    assert said in process.output


FEW_FILES = """
import resource, sys
from django.core.management import execute_from_command_line
from django_alkstore.runtime import commands

def with_few_files(*args, **options):
    # Imports and the checks have used theirs: this is about what the worker itself opens.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return opened(*args, **options)

name = "Worker" if sys.argv[1] != "run_schedules" else "Bell"
opened = getattr(commands, name)
setattr(commands, name, with_few_files)
execute_from_command_line(["manage.py", *sys.argv[1:]])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="about a limit of POSIX")
@pytest.mark.parametrize("command", ["run_queue", "run_schedules"])
def test_too_few_file_descriptors_at_the_start_are_one_line_and_status_1(start: Start, command: str) -> None:
    process = start("-c", FEW_FILES, command)
    assert process.wait() == 1
    assert "CommandError: this process has reached its limit of 3 for open files. Raise the limit" in process.output
    assert "Traceback" not in process.output


def test_one_wrong_name_among_right_ones_starts_nothing(start: Start) -> None:
    job = enqueue("noop", None)
    assert start("run_queue", "noop", "nope").wait() == 2
    assert (row(job.pk).state, row(job.pk).attempts) == ("pending", 0)


@pytest.mark.parametrize(
    "arguments",
    [("--concurrency", "0"), ("--concurrency", "-1"), ("--concurrency", "many"), ("--grace", "-1"), ("--grace", "nan"),
     ("--database", "nowhere")],
)  # fmt: skip
def test_an_argument_that_makes_no_sense_is_a_usage_error(start: Start, arguments: tuple[str, str]) -> None:
    process = start("run_queue", "noop", *arguments)
    assert process.wait() == 2
    assert arguments[1] in process.output
    assert "Traceback" not in process.output


def test_the_worker_prunes_at_its_start(start: Start) -> None:
    ids = enqueue_many("noop", [None] * 3)
    Job.objects.filter(pk__in=ids[:2]).update(state="completed", finished_at="2020-01-01T00:00:00+00:00")
    start("run_queue", "record")
    wait_until(lambda: Job.objects.count() == 1, "the old ones are pruned")


# The database


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_database_names_the_one_whose_jobs_are_run(start: Start) -> None:
    from django.db import connections

    there, here = enqueue("noop", None, using="other"), enqueue("noop", None)
    path = str(connections["other"].settings_dict["NAME"])
    process = start("run_queue", "noop", "--database", "other", **variant(OTHER_DATABASE=path))
    wait_until(lambda: Job.objects.using("other").get(pk=there.pk).state == "completed", "the other's job is done")
    process.wait_for(path)
    assert (row(here.pk).state, row(here.pk).attempts) == ("pending", 0)


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_the_setting_names_the_database_where_the_command_does_not(start: Start) -> None:
    from django.db import connections

    there = enqueue("noop", None, using="other")
    path = str(connections["other"].settings_dict["NAME"])
    start("run_queue", "noop", **variant(OTHER_DATABASE=path, ALKSTORE={"DATABASE": "other"}))
    wait_until(lambda: Job.objects.using("other").get(pk=there.pk).state == "completed", "the other's job is done")


COMMANDS = ["run_queue", "run_outbox", "run_alkstore", "run_schedules"]
EVERY_COMMAND = [*COMMANDS, "alkstore_status", "alkstore_prune", "alkstore_health"]


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_before_migrate_every_command_says_so(start: Start, tmp_path: Path, command: str) -> None:
    process = start(command, ALKSTORE_TEST_DATABASE=str(tmp_path / "fresh.sqlite3"))
    assert process.wait() not in {0, None}
    assert "migrate" in process.output
    assert "Traceback" not in process.output


@pytest.mark.parametrize("command", COMMANDS)
def test_f120_on_a_database_in_memory_every_worker_says_so_and_ends(start: Start, command: str) -> None:
    process = start(command, ALKSTORE_TEST_DATABASE=":memory:", ALKSTORE_TEST_JOURNAL="memory")
    assert process.wait() != 0
    assert "in memory" in process.output
    assert "Traceback" not in process.output


def test_f120_the_same_inside_a_test_with_a_migrated_database_in_memory(start: Start) -> None:
    code = """
from django.core.management import CommandError, call_command
call_command("migrate", verbosity=0)
for command in ("run_queue", "run_outbox", "run_alkstore", "run_schedules"):
    try:
        call_command(command)
    except CommandError as error:
        print(command, error)
"""
    process = start("-c", code, ALKSTORE_TEST_DATABASE=":memory:", ALKSTORE_TEST_JOURNAL="memory")
    assert process.wait() == 0, process.output
    for line, command in zip(process.lines[-4:], COMMANDS, strict=True):
        assert line.startswith(command)
        assert "memory" in line


# Broken modules


@pytest.mark.parametrize("command", ["run_queue", "run_outbox", "run_alkstore"])
def test_f051_a_worker_with_a_module_that_cannot_be_imported_ends_with_status_2(start: Start, command: str) -> None:
    good = enqueue("noop", None)
    process = start(command, **variant(FIRST_APPS=["tests.ledger.broken"]))
    assert process.wait() == 2
    assert process.output.count("Traceback (most recent call last)") == 1
    assert "CommandError: cannot be imported: tests.ledger.broken.alkstore; the log" in process.output
    assert "worker started" not in process.output
    assert (row(good.pk).state, row(good.pk).attempts) == ("pending", 0)


@pytest.mark.parametrize("breakage", ["error", "exit"])
def test_f051_a_module_that_cannot_be_imported_stops_no_tolerant_worker(start: Start, breakage: str) -> None:
    half, good = enqueue("half", None), enqueue("noop", None)
    apps = variant(FIRST_APPS=["tests.ledger.broken"])
    process = start("run_queue", "--tolerant", ALKSTORE_TEST_BREAKAGE=breakage, **apps)
    wait_for_state("completed", good.pk)
    process.wait_for(f"completed job {good.pk} ")
    assert (row(half.pk).state, row(half.pk).attempts) == ("pending", 0)
    assert "half a module ran" not in process.output
    assert process.output.count("Traceback (most recent call last)") == 1
    assert "tests.ledger.broken.alkstore" in process.output


def test_a_half_registered_queue_is_as_good_as_not_registered(start: Start) -> None:
    process = start("run_queue", "half", "--tolerant", **variant(EXTRA_APPS=["tests.ledger.broken"]))
    assert process.wait() == 2
    assert "no handler is registered for the queue 'half'" in process.output


def test_a_broken_module_that_imports_a_good_one_takes_nothing_from_it(start: Start) -> None:
    start("run_queue", "--tolerant", **variant(FIRST_APPS=["tests.ledger.importer"]))
    good = enqueue("noop", None)
    wait_for_state("completed", good.pk)


# The log


def lines_with(process: Process, text: str) -> int:
    return sum(text in line for line in process.lines)


def run_one_of_each(start: Start, *arguments: str, **settings: Any) -> tuple[Process, int, int]:
    """A worker that completes one job, fails another, and stops; and the ids of the two."""
    good = enqueue("noop", None)
    bad = enqueue("fail", "x", max_attempts=1)
    process = start("run_queue", "noop", "fail", *arguments, **variant(**settings))
    wait_for_state("completed", good.pk)
    wait_for_state("dead", bad.pk)
    stopped(process)
    return process, good.pk, bad.pk


def check_each_line_is_there_once(process: Process, good: int, bad: int) -> None:
    assert lines_with(process, "worker started") == 1
    assert lines_with(process, f"completed job {good} ") == 1
    assert lines_with(process, f"dead: job {bad} ") == 1
    assert lines_with(process, "Traceback (most recent call last)") == 1
    assert lines_with(process, "worker stopped") == 1


@pytest.mark.parametrize("verbosity", ["1", "2"])
def test_f153_with_default_logging_start_done_failed_and_stop_are_seen(start: Start, verbosity: str) -> None:
    process, good, bad = run_one_of_each(start, "-v", verbosity)
    check_each_line_is_there_once(process, good, bad)
    assert lines_with(process, f"started job {good} ") == (1 if verbosity == "2" else 0)


def test_verbosity_0_shows_what_went_wrong_alone(start: Start) -> None:
    process, good, bad = run_one_of_each(start, "-v", "0")
    assert lines_with(process, "worker started") == lines_with(process, f"job {good} ") == 0
    assert lines_with(process, f"dead: job {bad} ") == 1


def test_what_a_handler_asks_for_by_retry_or_discard_is_one_line_and_its_traceback_is_kept(start: Start) -> None:
    discarded, retried = enqueue("hostile", "discard"), enqueue("hostile", "retry")
    failed = enqueue("fail", "x", backoff_base=3_600)
    process = start("run_queue", "hostile", "fail")
    process.wait_for(f"dead: job {discarded.pk} ")
    process.wait_for(f"failed job {retried.pk} ")
    process.wait_for(f"failed job {failed.pk} ")
    stopped(process)
    assert lines_with(process, "Traceback (most recent call last)") == 1  # of the one that failed
    for job, error in ((discarded, "Discard: no use"), (retried, "Retry: later")):
        assert lines_with(process, f": {error}") == 1
        (attempt,) = row(job.pk).errors
        assert attempt["error"] == error
        assert "Traceback (most recent call last)" in attempt["traceback"]


CONSOLE = {"version": 1, "disable_existing_loggers": False, "handlers": {"c": {"class": "logging.StreamHandler"}}}


@pytest.mark.parametrize(
    "logging",
    [
        {**CONSOLE, "loggers": {"django_alkstore": {"handlers": ["c"], "level": "INFO"}}},
        {**CONSOLE, "loggers": {"django_alkstore": {"handlers": ["c"], "level": "INFO", "propagate": False}}},
        {**CONSOLE, "loggers": {"django_alkstore": {"handlers": ["c"]}}},
        {**CONSOLE, "loggers": {"django_alkstore": {"level": "INFO"}}},
        {**CONSOLE, "root": {"handlers": ["c"], "level": "INFO"}},
        {**CONSOLE, "root": {"handlers": ["c"], "level": "WARNING"}},
        {**CONSOLE, "disable_existing_loggers": True, "root": {"handlers": ["c"], "level": "INFO"}},
        {**CONSOLE, "disable_existing_loggers": True},
    ],
    ids=[
        "own",
        "own-no-propagation",
        "own-no-level",
        "level-alone",
        "root",
        "root-warning",
        "root-disabling",
        "disabling",
    ],
)
def test_f153_no_line_is_doubled_or_lost_whatever_logging_the_project_configures(
    start: Start, logging: dict[str, Any]
) -> None:
    check_each_line_is_there_once(*run_one_of_each(start, LOGGING=logging))


def test_a_level_that_the_project_has_set_stands(start: Start) -> None:
    logging = {**CONSOLE, "loggers": {"django_alkstore": {"handlers": ["c"], "level": "ERROR"}}}
    process, good, bad = run_one_of_each(start, LOGGING=logging)
    assert lines_with(process, "worker started") == lines_with(process, f"job {good} ") == 0
    assert lines_with(process, f"dead: job {bad} ") == 1


def test_f153_the_scheduler_and_the_outbox_worker_are_seen_as_well(start: Start) -> None:
    schedule("often", "@every 1s", "noop")
    scheduler, worker = start("run_schedules"), start("run_outbox", "mail")
    scheduler.wait_for("fired often")
    letter = outbox("mail").enqueue("a")
    wait_for_state("completed", letter.pk)
    stopped(scheduler)
    stopped(worker)
    (line,) = [line for line in scheduler.lines if "scheduler leads" in line]
    assert database() in line
    assert str(scheduler.pid) in line
    assert lines_with(worker, f"completed job {letter.pk} ") == 1


def test_workers_write_their_log_and_nothing_to_standard_output(tmp_path: Path) -> None:
    """So that a pipe behind a handler's own output stays clean. (The fixture joins the two streams.)"""
    import subprocess

    out = tmp_path / "out"
    with out.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "django", "run_queue", "noop"],
            stdout=stream,
            stderr=subprocess.PIPE,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "ALKSTORE_TEST_DATABASE": database()},
        )
        try:
            assert process.stderr is not None
            assert any(b"worker started" in line for line in process.stderr)
        finally:
            process.kill()
            process.communicate()
    assert out.read_bytes() == b""


# Loading


def test_f074_loading_the_app_starts_no_thread_and_asks_the_database_nothing(start: Start, tmp_path: Path) -> None:
    code = """
import sys, threading
from django.db import connections
import django_alkstore.registry, django_alkstore.services, django_alkstore.testing, django_alkstore.management.base
print("threads", threading.active_count())
print("connected", [c.alias for c in connections.all() if c.connection is not None])
print("discovered", "tests.ledger.alkstore" in sys.modules)
"""
    process = start("-c", code, ALKSTORE_TEST_DATABASE=str(tmp_path / "none.sqlite3"))
    assert process.wait() == 0
    assert process.lines == ["threads 1", "connected []", "discovered False"]
    assert not (tmp_path / "none.sqlite3").exists()


def test_a_command_called_from_code_runs_the_same_way_and_returns(start: Start) -> None:
    """Also outside the main thread, where there are no signals to wait for."""
    code = """
import threading
from django.core.management import call_command
from django_alkstore import services
threading.Timer(0.1, lambda: None)
try:
    call_command("run_queue", "nope")
except Exception as error:
    print(type(error).__name__, error.returncode)
"""
    process = start("-c", code)
    assert process.wait() == 0
    assert process.lines[-1] == "CommandError 2"


def test_the_help_of_each_command_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    for command in EVERY_COMMAND:
        with pytest.raises(SystemExit):
            call_command(command, "--help")
        shown = capsys.readouterr().out
        assert "--database" in shown
        assert ("--concurrency" in shown) == (command in {"run_queue", "run_outbox", "run_alkstore"})
