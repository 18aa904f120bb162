"""Schedules and leaders between real processes on the real file."""

import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import groupby

import pytest
from django.db import connection

from django_alkstore import clock, names
from django_alkstore.models import Job, Lock, Schedule
from django_alkstore.services import enqueue, schedule, soonest
from django_alkstore.services.locks import LockHandle
from tests.ledger.tools import freeze, state, variant, wait_for_state, wait_past
from tests.processes import Process, wait_until

Start = Callable[..., Process]

# One term; the arguments are the lease's length and the pause between renewals.
RUN = """
import logging, signal, sys, threading
from django_alkstore.exceptions import LeadershipLost
from django_alkstore.services import leader, run_schedules
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
leader.LEADERSHIP_TTL, leader.RENEW_EVERY = float(sys.argv[1]), float(sys.argv[2])
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
try:
    print("RESULT", run_schedules(stop), flush=True)
except LeadershipLost as lost:
    print("RESULT LeadershipLost", lost, flush=True)
"""

# Term after term, standing by in between.
RUN_ON = """
import logging, signal, sys, threading
from django_alkstore.exceptions import LeadershipLost
from django_alkstore.services import leader, run_schedules
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
leader.LEADERSHIP_TTL, leader.RENEW_EVERY = float(sys.argv[1]), float(sys.argv[2])
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
print("STARTED", flush=True)
while not stop.is_set():
    try:
        run_schedules(stop)
    except LeadershipLost:
        stop.wait(0.05)
print("STOPPED", flush=True)
"""

DECLARE = """
import sys
from django.db import connection
from django_alkstore.services import schedule
connection.ensure_connection()
print("ready", flush=True)
sys.stdin.readline()
declared = schedule("report", "@every 1h", "mail", {"by": sys.argv[1]})
print("declared", declared.pk, declared.next_fire_at.isoformat(), flush=True)
"""

TICK = """
import sys
from datetime import datetime
from django.db import connection
from django_alkstore.services import tick
connection.ensure_connection()
print("ready", flush=True)
sys.stdin.readline()
fires = [fire for _ in range(10) for fire in tick(datetime.fromisoformat(sys.argv[1]))]
print("fired", len(fires), flush=True)
"""

CALM = ("10", "2")
"""The contract's own lease and renewals."""


def fired(name: str) -> int:
    return Job.objects.filter(schedule=name).count()


def due_now(name: str) -> datetime:
    """Move the schedule's next boundary to now, as its time passing would."""
    moment = clock.now()
    Schedule.objects.filter(name=name).update(next_fire_at=moment)
    return moment


def leader_row() -> Lock | None:
    return Lock.objects.filter(name=names.LEADERSHIP_LOCK).first()


def led_by(process: Process) -> bool:
    row = leader_row()
    return row is not None and f":{process.pid}:" in row.owner


@contextmanager
def writer_lock(mode: str) -> Iterator[None]:
    """Another writer, who takes its time."""
    raw = sqlite3.connect(connection.settings_dict["NAME"], timeout=20, isolation_level=None)
    try:
        raw.execute(f"BEGIN {mode}")
        yield
        raw.execute("ROLLBACK")
    finally:
        raw.close()


# Declaring


def test_f092_eight_processes_that_declare_the_same_schedule_at_once_make_one_row_and_none_raises(
    start: Start,
) -> None:
    processes = [start("-c", DECLARE, str(number)) for number in range(8)]
    for process in processes:
        process.wait_for("ready")
    for process in processes:
        process.tell("go")
    assert [process.wait() for process in processes] == [0] * 8, "\n".join(p.output for p in processes)
    row = Schedule.objects.get()
    assert {process.lines[1] for process in processes} == {f"declared {row.pk} {row.next_fire_at.isoformat()}"}


# Leading


def test_a_second_process_is_refused_and_fires_nothing_while_the_first_leads(start: Start) -> None:
    schedule("report", "@every 1h", "mail")
    first = start("-c", RUN, *CALM)
    wait_until(lambda: led_by(first), "the first leads")
    row = leader_row()
    second = start("-c", RUN, *CALM)
    assert second.wait() == 0
    second.wait_for("RESULT LeadershipLost")
    assert "fired" not in second.output
    after = leader_row()
    assert row is not None
    assert after is not None
    assert (after.token, after.owner) == (row.token, row.owner)
    due_now("report")
    first.wait_for("fired report")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    first.wait_for("RESULT None")
    assert leader_row() is None
    assert fired("report") == 1


def test_f087_a_schedule_added_and_changed_here_wakes_a_leader_that_sleeps_in_another_process(start: Start) -> None:
    leading = start("-c", RUN, *CALM)
    leading.wait_for("scheduler leads")
    schedule("report", "@every 1h", "mail")
    due_now("report")
    leading.wait_for("fired report", times=1)
    due_now("report")
    leading.wait_for("fired report", times=2)
    schedule("seconds", "@every 1s", "mail")
    leading.wait_for("fired seconds", times=2)
    assert fired("report") == 2


def test_f070_a_leader_stopped_past_its_lease_fires_nothing_after_another_has_taken_over(start: Start) -> None:
    schedule("first", "@every 1h", "mail")
    schedule("then", "@every 1h", "mail")
    due_now("first")
    old = start("-c", RUN, "1", "0.2")
    old.wait_for("fired first")
    freeze(old)
    new = LockHandle(names.LEADERSHIP_LOCK, 600.0, "the new leader", "default")
    wait_until(new.acquire, "the stopped leader's lease is over")
    due_now("then")
    old.signal(signal.SIGCONT)
    assert old.wait() == 0
    old.wait_for("RESULT LeadershipLost")
    assert fired("then") == 0
    row = leader_row()
    assert row is not None
    assert (row.token, row.owner) == (new.token, "the new leader")
    # Later elections are like any other.
    assert new.release()
    later = start("-c", RUN, *CALM)
    later.wait_for("fired then")
    assert fired("then") == 1


def test_f070_a_leader_stopped_past_its_lease_steps_down_where_the_new_one_has_come_and_gone(start: Start) -> None:
    schedule("first", "@every 1h", "mail")
    schedule("then", "@every 1h", "mail")
    due_now("first")
    old = start("-c", RUN, "1", "0.2")
    old.wait_for("fired first")
    freeze(old)
    new = LockHandle(names.LEADERSHIP_LOCK, 600.0, "the new leader", "default")
    wait_until(new.acquire, "the stopped leader's lease is over")
    assert new.release()
    due_now("then")
    old.signal(signal.SIGCONT)
    assert old.wait() == 0
    old.wait_for("RESULT LeadershipLost")
    assert fired("then") == 0


def test_f072_the_boundary_of_a_killed_leader_fires_once_and_late_under_the_next(start: Start) -> None:
    schedule("first", "@every 1h", "mail")
    schedule("report", "@every 1h", "mail")
    due_now("first")
    old = start("-c", RUN, "1", "0.2")
    old.wait_for("fired first")
    old.signal(signal.SIGKILL)
    old.wait()
    boundary = due_now("report")
    new = start("-c", RUN_ON, "1", "0.2")
    new.wait_for("fired report")
    new.signal(signal.SIGTERM)
    assert new.wait() == 0
    (job,) = Job.objects.filter(schedule="report")
    assert job.fire_at == boundary
    assert job.run_at > boundary
    row = Schedule.objects.get(name="report")
    assert row.next_fire_at == boundary + timedelta(hours=1), "the grid did not move"


@pytest.mark.parametrize("mode", ["IMMEDIATE", "EXCLUSIVE"])
def test_f009_a_writer_lock_held_past_the_busy_timeout_is_lived_through_and_the_boundary_fires_once(
    start: Start, mode: str
) -> None:
    schedule("first", "@every 1h", "mail")
    due_now("first")
    leading = start("-c", RUN, *CALM, ALKSTORE_TEST_TIMEOUT="0.2")
    leading.wait_for("fired first")
    boundary = schedule("report", "@every 2s", "mail").next_fire_at
    with writer_lock(mode):
        # At least three attempts have waited the whole busy timeout each.
        leading.wait_for("database trouble", times=3)
        wait_until(lambda: clock.now() > boundary, "the boundary has passed")
        assert leading.popen.poll() is None
    leading.wait_for("fired report", times=2)
    leading.signal(signal.SIGTERM)
    assert leading.wait() == 0
    leading.wait_for("RESULT None")
    moments = list(Job.objects.filter(schedule="report").order_by("id").values_list("fire_at", flat=True))
    assert moments == [boundary + timedelta(seconds=2 * number) for number in range(len(moments))]


@pytest.mark.parametrize("mode", ["IMMEDIATE", "EXCLUSIVE"])
def test_f009_a_writer_lock_held_past_the_busy_timeout_in_the_sleep_does_not_end_the_leader(
    start: Start, mode: str
) -> None:
    """Nothing is due: it renews, and looks whether the schedules have changed, and neither can be done now."""
    schedule("first", "@every 1h", "mail")
    schedule("report", "@every 1h", "mail")
    due_now("first")
    leading = start("-c", RUN, "1", "0.2", ALKSTORE_TEST_TIMEOUT="0.1")
    leading.wait_for("fired first")
    with writer_lock(mode):
        leading.wait_for("database trouble", times=3)
        assert leading.popen.poll() is None
    due_now("report")
    leading.wait_for("fired report")
    leading.signal(signal.SIGTERM)
    assert leading.wait() == 0
    leading.wait_for("RESULT None")
    assert leader_row() is None


# Many


def boundaries_of(name: str) -> list[datetime]:
    return list(Job.objects.filter(schedule=name).order_by("fire_at").values_list("fire_at", flat=True))  # type: ignore[arg-type]


def test_f068_three_runners_whose_leaders_are_killed_again_and_again_fire_each_boundary_once_and_miss_none(
    start: Start,
) -> None:
    firsts = {f"s{number}": schedule(f"s{number}", "@every 1s", "mail").next_fire_at for number in range(8)}
    runners = [start("-c", RUN_ON, "1", "0.2") for _ in range(3)]
    killed = 0
    terms: set[int] = set()
    while killed < 5:
        wait_until(lambda: any(led_by(runner) for runner in runners), "one of them leads")
        row = leader_row()
        if row is None or row.token in terms:
            continue
        before = Job.objects.count()
        wait_until(lambda before=before: Job.objects.count() > before, "it fires")  # type: ignore[misc]
        leading = [runner for runner in runners if led_by(runner)]
        if not leading:
            continue
        terms.add(row.token)
        leading[0].signal(signal.SIGKILL)
        leading[0].wait()
        runners.remove(leading[0])
        runners.append(start("-c", RUN_ON, "1", "0.2"))
        killed += 1
    before = Job.objects.count()
    wait_until(lambda: Job.objects.count() >= before + 8, "the last leader has caught up")
    for runner in runners:
        runner.wait_for("STARTED")
        runner.signal(signal.SIGTERM)
    assert [runner.wait() for runner in runners] == [0] * 3
    assert leader_row() is None
    assert len(terms) == 5
    for name, first in firsts.items():
        row_after = Schedule.objects.get(name=name)
        moments = boundaries_of(name)
        assert moments == [first + timedelta(seconds=number) for number in range(len(moments))]
        assert moments[-1] == row_after.last_fire_at
        assert row_after.next_fire_at == moments[-1] + timedelta(seconds=1)
        assert row_after.enabled


def test_rogue_tickers_at_once_fire_each_boundary_once(start: Start) -> None:
    """No leader among them: the schema, and the writer lock, are what keeps them apart."""
    firsts = {f"s{number}": schedule(f"s{number}", "@every 1h", "mail").next_fire_at for number in range(5)}
    moment = max(firsts.values()) + timedelta(hours=29)
    tickers = [start("-c", TICK, moment.isoformat()) for _ in range(6)]
    for ticker in tickers:
        ticker.wait_for("ready")
    for ticker in tickers:
        ticker.tell("go")
    assert [ticker.wait() for ticker in tickers] == [0] * 6, "\n".join(t.output for t in tickers)
    assert sum(int(ticker.lines[1].split()[1]) for ticker in tickers) == 5 * 30
    for name, first in firsts.items():
        assert boundaries_of(name) == [first + timedelta(hours=number) for number in range(30)]
    assert soonest() == min(firsts.values()) + timedelta(hours=30)


def test_the_lease_of_a_stopped_leader_is_taken_at_its_end_and_not_before(start: Start) -> None:
    old = start("-c", RUN, "3", "0.2")
    wait_until(lambda: led_by(old), "it leads")
    freeze(old)
    row = leader_row()
    assert row is not None
    new = start("-c", RUN_ON, *CALM)
    new.wait_for("scheduler leads")
    after = leader_row()
    assert after is not None
    assert after.token > row.token
    assert after.acquired_at >= row.expires_at


# The writer lock is held by another process

HURRIED = """
import sys
from django.core.management import call_command
from django_alkstore.runtime import scheduler
from django_alkstore.services import leader
leader.LEADERSHIP_TTL = scheduler.LEADERSHIP_TTL = 2.0
leader.RENEW_EVERY = 0.4
call_command(*sys.argv[1:])
"""
"""Runs a command with a lease of two seconds."""

FOR_EVER = {"ALKSTORE_TEST_TIMEOUT": "1000"}
"""A busy timeout that no test waits for."""


def test_a_leader_with_something_to_fire_stops_while_another_process_holds_the_writer_lock(start: Start) -> None:
    leading = start("run_schedules", **FOR_EVER)
    leading.wait_for("scheduler leads")
    boundary = schedule("report", "@every 1s", "mail").next_fire_at
    with writer_lock("IMMEDIATE"):
        wait_past(boundary + timedelta(seconds=0.5))
        leading.signal(signal.SIGTERM)
        assert leading.wait() == 0
    leading.wait_for("scheduler stood down: stopped")
    assert "database trouble while freeing the leadership" in leading.output, "it lapses"


def test_a_standby_that_would_take_over_stops_while_another_process_holds_the_writer_lock(start: Start) -> None:
    leading = start("-c", HURRIED, "run_schedules")
    leading.wait_for("scheduler leads")
    standby = start("-c", HURRIED, "run_schedules", **FOR_EVER)
    standby.wait_for("stands by")
    freeze(leading)
    row = leader_row()
    assert row is not None
    with writer_lock("IMMEDIATE"):
        wait_past(row.expires_at + timedelta(seconds=0.5))
        standby.signal(signal.SIGTERM)
        assert standby.wait() == 0
    assert "scheduler leads" not in standby.output


def test_a_leader_whose_lease_runs_out_while_another_process_holds_the_writer_lock_keeps_leading(start: Start) -> None:
    leading = start("-c", HURRIED, "run_schedules")
    leading.wait_for("scheduler leads")
    standby = start("-c", HURRIED, "run_schedules")
    standby.wait_for("stands by")
    first = leader_row()
    assert first is not None
    for _ in range(2):
        with writer_lock("IMMEDIATE"):
            row = leader_row()
            assert row is not None
            wait_past(row.expires_at + timedelta(seconds=0.5))

        def is_renewed() -> bool:
            now = leader_row()
            return now is not None and now.expires_at > clock.now()

        wait_until(is_renewed, "the lease is renewed")
        after = leader_row()
        assert after is not None
        assert (after.token, after.owner) == (first.token, first.owner)
    assert "scheduler leads" not in standby.output


# A backlog

WRITE = """
import sys
from django_alkstore.services import enqueue
print("ready", flush=True)
while True:
    enqueue("foreign", None)
"""


def test_a_backlog_of_thousands_keeps_no_other_writer_out_and_costs_no_leadership(start: Start) -> None:
    """The ids of the jobs say in which order they were committed, and so how many of the leader's came at once."""
    leading = start("-c", HURRIED, "run_schedules")
    leading.wait_for("scheduler leads")
    standby = start("-c", HURRIED, "run_schedules")
    standby.wait_for("stands by")
    writer = start("-c", WRITE)
    writer.wait_for("ready")
    first = leader_row()
    now = clock.now()
    fields = {"spec": "@every 1h", "queue": "mail", "payload": None, "created_at": now, "updated_at": now}
    missed = now - timedelta(hours=70)
    Schedule.objects.bulk_create(Schedule(name=f"s{n}", next_fire_at=missed, **fields) for n in range(400))
    wait_until(lambda: Job.objects.filter(queue="mail").count() == 400 * 64, "all are fired")
    writer.end()
    queues = Job.objects.order_by("id").values_list("queue", flat=True)
    runs = [len(list(group)) for queue, group in groupby(queues) if queue == "mail"]
    assert sum(runs) == 400 * 64
    # A step has 1,000 jobs at most, and the other writer comes in after almost each.
    assert max(runs) <= 5_000
    after = leader_row()
    assert first is not None
    assert after is not None
    assert after.token == first.token
    assert "scheduler leads" not in standby.output


# A leader that dies


def test_a_killed_leaders_successor_fires_the_next_boundary_in_time(start: Start) -> None:
    """By the lease alone it would be ten seconds late."""
    schedule("often", "@every 1s", "mail")
    leading = start("run_schedules")
    leading.wait_for("fired often", 2)
    for _ in range(3):
        standby = start("run_schedules")
        standby.wait_for("stands by")
        before = leader_row()
        assert before is not None
        count = fired("often")
        leading.signal(signal.SIGKILL)
        leading.wait()
        standby.wait_for("scheduler leads")
        after = leader_row()
        assert after is not None
        assert after.token > before.token
        assert after.acquired_at < before.expires_at
        wait_until(lambda count=count: fired("often") >= count + 2, "it fires on")  # type: ignore[misc]
        leading = standby
    late = [job.run_at - job.fire_at for job in Job.objects.all() if job.fire_at]
    assert max(late) < timedelta(seconds=3)
    moments = boundaries_of("often")
    assert moments == [moments[0] + timedelta(seconds=n) for n in range(len(moments))], "none is missed"


def test_a_leader_that_ends_by_os_exit_is_replaced_at_once_by_a_standby_and_by_one_that_starts(start: Start) -> None:
    code = RUN.replace("stop = ", "signal.signal(signal.SIGUSR1, lambda *_: __import__('os')._exit(7))\nstop = ")
    leading = start("-c", code, *CALM)
    leading.wait_for("scheduler leads")
    before = leader_row()
    assert before is not None
    leading.signal(signal.SIGUSR1)
    assert leading.wait() == 7
    later = start("-c", code, *CALM)
    later.wait_for("scheduler leads")
    after = leader_row()
    assert after is not None
    assert after.token > before.token
    assert after.acquired_at < before.expires_at


def test_without_crash_detection_the_leadership_of_a_killed_process_lasts_as_long_as_its_lease(start: Start) -> None:
    off = variant(ALKSTORE={"LIVENESS": False})
    leading = start("-c", HURRIED, "run_schedules", **off)
    leading.wait_for("scheduler leads")
    standby = start("-c", HURRIED, "run_schedules")
    standby.wait_for("stands by")
    leading.signal(signal.SIGKILL)
    leading.wait()
    before = leader_row()
    assert before is not None
    standby.wait_for("scheduler leads")
    after = leader_row()
    assert after is not None
    assert after.acquired_at >= before.expires_at
    assert "crash detection is off" in leading.output
    assert "crash detection is off" not in standby.output


CLAIM = """
import sys, time
from django_alkstore.dialects.liveness import Liveness
from django_alkstore.dialects.transactions import write_statement
from django_alkstore.clock import now_us
liveness = Liveness("default")
claimed = write_statement("default", lambda db: db.claim("mail", liveness.holder, 10, now_us(), liveness.file))
print("claimed", len(claimed), flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("role", ["leader", "standby"])
def test_a_scheduler_makes_the_jobs_of_a_dead_worker_claimable(start: Start, role: str) -> None:
    leading = start("-c", RUN, *CALM)
    leading.wait_for("scheduler leads")
    if role == "standby":
        standby = start("run_schedules")
        standby.wait_for("stands by")
        freeze(leading)
    jobs = [enqueue("mail", number) for number in range(3)]
    worker = start("-c", CLAIM)
    worker.wait_for("claimed 3")
    worker.signal(signal.SIGKILL)
    worker.wait()
    wait_for_state("pending", *(job.pk for job in jobs))
    assert {job.errors[0]["error"] for job in Job.objects.all()} == {"worker died"}


def test_a_scheduler_that_starts_makes_the_jobs_of_a_dead_worker_claimable(start: Start) -> None:
    job = enqueue("mail", None)
    worker = start("-c", CLAIM)
    worker.wait_for("claimed 1")
    worker.signal(signal.SIGKILL)
    worker.wait()
    assert state(job.pk) == "processing"
    start("run_schedules")
    wait_for_state("pending", job.pk)
