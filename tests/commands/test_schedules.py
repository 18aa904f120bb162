"""Section 8: the scheduler command leads, stands by, and takes over."""

import signal
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from django.db import connection, transaction

from django_alkstore import clock
from django_alkstore.models import Job, Lock
from django_alkstore.services import enqueue, force_release, schedule, unschedule
from tests.ledger.tools import variant, wait_for_state
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]
LEADERSHIP = "__alkstore_scheduler"


# Told of nothing, it would stand by until the end of a lease that nobody waits for.
PATIENT = """
import sys
from django.core.management import call_command
from django_alkstore.runtime import scheduler
from django_alkstore.services import leader
leader.LEADERSHIP_TTL = scheduler.LEADERSHIP_TTL = 3_600.0
call_command(*sys.argv[1:])
"""


def take_leadership() -> None:
    """For so long that whoever has lost it has the time to see who has it."""
    taken = Lock.objects.filter(name=LEADERSHIP)
    assert taken.update(owner="a thief", expires_at=clock.now() + timedelta(seconds=600)) == 1


def leaders() -> list[tuple[str, str]]:
    return list(Lock.objects.values_list("name", "owner"))


def test_it_fires_what_is_due_into_the_queue_while_it_leads(start: Start) -> None:
    schedule("often", "@every 1s", "record", {"a": 1})
    process = start("run_schedules")
    process.wait_for("leads")
    wait_until(lambda: Job.objects.filter(schedule="often").count() >= 2, "two boundaries are fired")
    assert [name for name, _ in leaders()] == [LEADERSHIP]
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert leaders() == []
    jobs = list(Job.objects.filter(schedule="often").order_by("fire_at"))
    assert {(job.queue, job.state, job.attempts) for job in jobs} == {("record", "pending", 0)}
    boundaries = [job.fire_at for job in jobs if job.fire_at]
    assert {(b - a).total_seconds() for a, b in pairwise(boundaries)} == {1.0}


def test_a_second_stands_by_and_takes_over_at_once_after_a_clean_stop(start: Start) -> None:
    first = start("-c", PATIENT, "run_schedules")
    first.wait_for("leads")
    second = start("-c", PATIENT, "run_schedules")
    second.wait_for("stands by")
    assert "leads:" not in second.output
    (before,) = Lock.objects.all()
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    second.wait_for("scheduler leads")
    (after,) = Lock.objects.all()
    assert after.acquired_at < before.expires_at  # told of the release: it did not wait for the lease's end
    assert after.token > before.token


def test_no_standby_is_status_3_while_another_leads(start: Start) -> None:
    schedule("often", "@every 1s", "noop")
    first = start("run_schedules")
    first.wait_for("leads")
    second = start("run_schedules", "--no-standby")
    assert second.wait() == 3
    assert "Traceback" not in second.output
    assert "fired" not in second.output
    assert first.popen.poll() is None


def test_no_standby_leads_where_nobody_does_and_is_status_3_once_it_is_replaced(start: Start) -> None:
    process = start("run_schedules", "--no-standby")
    process.wait_for("leads")
    take_leadership()
    assert process.wait() == 3
    assert leaders() == [(LEADERSHIP, "a thief")]


def test_a_leader_that_was_replaced_stands_by_and_leads_again(start: Start) -> None:
    process = start("run_schedules")
    process.wait_for("leads")
    take_leadership()
    process.wait_for("stands by")
    assert force_release(LEADERSHIP) is True
    process.wait_for("scheduler leads", 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_standby_stops_at_a_signal_with_status_0(start: Start, number: signal.Signals) -> None:
    first = start("run_schedules")
    first.wait_for("leads")
    second = start("run_schedules")
    second.wait_for("stands by")
    second.signal(number)
    assert second.wait() == 0
    assert "scheduler stopped: it stood by" in second.lines[-1]
    assert len(leaders()) == 1


@pytest.mark.parametrize("command", ["run_schedules", "run_alkstore"])
def test_a_second_signal_within_a_second_is_ignored(start: Start, command: str) -> None:
    """A terminal and a process manager may each send one."""
    process = start(command)
    process.wait_for("scheduler leads")
    if command == "run_alkstore":
        process.wait_for("worker started")
    process.signal(signal.SIGINT)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert "cut off" not in process.output
    assert leaders() == []


STUCK = """
import sys, time
from django.core.management import call_command
from django_alkstore import signals

def block(**_):
    print("blocked", flush=True)
    time.sleep(3600)

signals.leader_stood_down.connect(block)
call_command(*sys.argv[1:])
"""


def test_a_later_second_signal_ends_a_scheduler_that_cannot_stop_with_status_1(start: Start) -> None:
    process = start("-c", STUCK, "run_schedules")
    process.wait_for("scheduler leads")
    process.signal(signal.SIGTERM)
    process.wait_for("blocked")

    def has_ended() -> bool:
        process.signal(signal.SIGTERM)
        return process.popen.poll() is not None

    wait_until(has_ended, "one of the signals that follow ends it")
    assert process.wait() == 1
    process.wait_for("cut off at a second signal")
    assert "Traceback" not in process.output
    assert leaders() == []  # it was freed before foreign code was called


def test_a_later_second_signal_ends_run_alkstore_too_if_only_its_scheduler_is_left(start: Start) -> None:
    process = start("-c", STUCK, "run_alkstore")
    process.wait_for("scheduler leads")
    wait_for_state("completed", enqueue("noop", None).pk)  # so the worker works
    process.signal(signal.SIGTERM)
    process.wait_for("blocked")
    process.wait_for("worker stopped")

    def has_ended() -> bool:
        process.signal(signal.SIGTERM)
        return process.popen.poll() is not None

    wait_until(has_ended, "one of the signals that follow ends it")
    assert process.wait() == 1
    process.wait_for("cut off at a second signal")


def test_a_scheduler_that_stops_while_another_process_holds_the_writer_lock_lets_the_leadership_lapse(
    start: Start,
) -> None:
    process = start("run_schedules", ALKSTORE_TEST_TIMEOUT="1000")  # a busy timeout that no test waits for
    process.wait_for("scheduler leads")
    with transaction.atomic():
        connection.cursor().execute("UPDATE django_alkstore_lock SET token = token")  # nobody else can write
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    process.wait_for("database trouble while freeing the leadership, which lapses within 10 s")
    assert [name for name, _ in leaders()] == [LEADERSHIP]


def test_a_second_signal_to_a_standby_ends_it(start: Start) -> None:
    first = start("run_schedules")
    first.wait_for("leads")
    second = start("run_schedules")
    second.wait_for("stands by")
    second.signal(signal.SIGTERM)
    second.signal(signal.SIGINT)
    assert second.wait() in (0, 1)  # it may have ended before the second came
    assert len(leaders()) == 1


def test_a_schedule_that_is_declared_while_it_leads_is_fired_and_one_that_is_removed_is_not(start: Start) -> None:
    process = start("run_alkstore")
    process.wait_for("scheduler leads")
    process.wait_for("worker started")
    schedule("new", "@every 1s", "noop")
    process.wait_for("fired new", 2)
    assert unschedule("new") is True
    count = Job.objects.filter(schedule="new").count()
    schedule("other", "@every 1s", "noop")
    process.wait_for("fired other", 2)
    assert Job.objects.filter(schedule="new").count() == count
    wait_for_state("completed", *Job.objects.filter(schedule="new").values_list("pk", flat=True))


BREAKING = """
import sys
from pathlib import Path
from django.core.management import call_command
from django_alkstore.services import leader

def tick_step(*arguments, whole=leader.tick_step):
    if Path(sys.argv[2]).exists():
        raise ZeroDivisionError("no error of the database's")
    return whole(*arguments)

leader.tick_step = tick_step
call_command(sys.argv[1])
"""


@pytest.mark.parametrize("command", ["run_schedules", "run_alkstore"])
def test_a_scheduler_that_breaks_ends_its_process_with_status_1_after_what_runs(
    start: Start, tmp_path: Path, command: str
) -> None:
    broken, open_end = tmp_path / "broken", tmp_path / "open"
    schedule("often", "@every 1s", "noop")
    process = start("-c", BREAKING, command, str(broken))
    process.wait_for("fired often")
    job = enqueue("wait", str(open_end))
    if command == "run_alkstore":
        process.wait_for(f"running {job.pk}")
    broken.touch()
    process.wait_for("the scheduler broke, and the process ends for it")
    open_end.touch()
    assert process.wait() == 1
    assert "ZeroDivisionError: no error of the database's" in process.output
    assert leaders() == []
    if command == "run_alkstore":
        wait_for_state("completed", job.pk)


@pytest.mark.parametrize("command", ["run_schedules", "run_alkstore"])
def test_without_crash_detection_a_command_says_so_in_one_line(start: Start, command: str) -> None:
    process = start(command, **variant(ALKSTORE={"LIVENESS": False}))
    process.wait_for("scheduler leads")
    if command == "run_alkstore":
        process.wait_for("worker started")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert len([line for line in process.lines if "crash detection is off" in line]) == 1
