"""The wall clock is set back and forward, by hours and centuries, while leases, locks, jobs and schedules are live.

What is elsewhere: in tests/contract, each service on a clock that is moved (F078) and the nights of both changes of
daylight saving (F079, F082); in tests/concurrency and tests/runtime/test_worker_leases.py, processes that are stopped
past their lease (F021, F070, F139).
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from signal import SIGTERM

import pytest

from django_alkstore import clock as clocks
from django_alkstore import services
from django_alkstore.clock import ManualClock
from django_alkstore.models import Job, Schedule
from tests.faults.tools import TROUBLE, Shift
from tests.ledger.models import Entry
from tests.ledger.tools import row, wait_for_state
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]

HOURS = 3 * 3_600
YEARS = {
    "1970": (datetime(1970, 1, 1, 1, tzinfo=UTC) - datetime(2026, 1, 1, tzinfo=UTC)).total_seconds(),
    "hours back": -HOURS,
    "hours forward": HOURS,
    "2200": (datetime(2200, 1, 1, tzinfo=UTC) - datetime(2026, 1, 1, tzinfo=UTC)).total_seconds(),
}
STEPS = pytest.mark.parametrize("step", YEARS.values(), ids=YEARS.keys())


@pytest.fixture
def shift(tmp_path: Path) -> Shift:
    return Shift(tmp_path / "shift")


def starts() -> int:
    return Entry.objects.filter(text__startswith="started").count()


def stop(process: Process) -> None:
    process.signal(SIGTERM)
    assert process.wait() == 0, process.output
    assert "Traceback" not in process.output
    assert TROUBLE not in process.output


@STEPS
def test_a_running_job_ends_once_whatever_the_clock_does_meanwhile(
    start: Start, shift: Shift, tmp_path: Path, step: float
) -> None:
    """Set forward, its lease may be over before it can be renewed, and the idle worker may have it: once more."""
    open_end = tmp_path / "open"
    job = services.enqueue("wait", str(open_end), visibility_timeout=600, max_attempts=9)
    first = shift.start(start, "run_queue", "wait", "noop")
    first.wait_for(f"running {job.pk}")
    second = shift.start(start, "run_queue", "wait")
    second.wait_for("worker started")
    shift.to(step)
    # Both have seen a commit, and so the clock, since it was moved.
    poke = services.enqueue("noop", None)
    Job.objects.filter(pk=poke.pk).update(run_at=datetime(1970, 1, 1, tzinfo=UTC))
    wait_for_state("completed", poke.pk)
    if step < 0:
        assert (row(job.pk).state, row(job.pk).attempts, row(job.pk).errors) == ("processing", 1, [])
    open_end.touch()
    wait_for_state("completed", job.pk)
    done = row(job.pk)
    assert starts() == done.attempts == 1 + len(done.errors)
    assert done.attempts == 1 or step > 0
    assert {entry["error"] for entry in done.errors} <= {"lease expired"}
    stop(first)
    stop(second)


@pytest.mark.parametrize("step", [HOURS, YEARS["2200"]], ids=["hours forward", "2200"])
def test_a_delayed_job_is_run_once_its_time_has_come_by_a_clock_that_was_set_forward(
    start: Start, shift: Shift, step: float
) -> None:
    process = shift.start(start, "run_queue", "noop")
    process.wait_for("worker started")
    job = services.enqueue("noop", None, delay=HOURS - 60)
    shift.to(step)
    wait_for_state("completed", job.pk)
    assert row(job.pk).attempts == 1
    stop(process)


@pytest.mark.parametrize("step", [-HOURS, YEARS["1970"]], ids=["hours back", "1970"])
def test_a_job_of_before_the_clock_was_set_back_waits_and_is_neither_lost_nor_run_twice(
    start: Start, shift: Shift, step: float
) -> None:
    """Its moment is in the future again. What is enqueued by the new time runs at once."""
    process = shift.start(start, "run_queue", "noop")
    process.wait_for("worker started")
    shift.to(step)
    early = services.enqueue("noop", None)
    late = services.enqueue("noop", None)
    Job.objects.filter(pk=late.pk).update(run_at=datetime(1970, 1, 1, tzinfo=UTC))
    wait_for_state("completed", late.pk)
    assert (row(early.pk).state, row(early.pk).attempts) == ("pending", 0)
    shift.to(0)
    wait_for_state("completed", early.pk)
    assert (row(early.pk).attempts, row(late.pk).attempts) == (1, 1)
    stop(process)


@STEPS
def test_f078_no_boundary_fires_twice_and_the_schedule_goes_on_after_the_clock_is_right_again(
    start: Start, shift: Shift, step: float
) -> None:
    services.schedule("often", "@every 1s", "mail")
    process = shift.start(start, "run_schedules")
    process.wait_for("fired often", 2)
    fired = Job.objects.count()
    shift.to(step)
    if step > 0:
        wait_until(lambda: Job.objects.count() >= fired + 64, "the backlog's first boundaries are fired")
        ahead = Schedule.objects.get().next_fire_at
        assert ahead > clocks.now() + timedelta(seconds=step / 2)
    shift.to(0)
    # Where the clock had run ahead, declaring puts the schedule back on its grid.
    services.schedule("often", "@every 1s", "mail")
    before = clocks.now()
    wait_until(lambda: Job.objects.filter(fire_at__gt=before).count() >= 2, "it fires on")
    boundaries = list(Job.objects.values_list("fire_at", flat=True))
    assert len(set(boundaries)) == len(boundaries)
    assert {moment.microsecond for moment in boundaries} == {boundaries[0].microsecond}, "all on one grid"
    stop(process)


@pytest.mark.parametrize("step", [YEARS["1970"], YEARS["2200"]], ids=["1970", "2200"])
def test_a_standby_takes_over_though_the_clock_was_moved(start: Start, shift: Shift, step: float) -> None:
    first = shift.start(start, "run_schedules")
    first.wait_for("leads")
    second = shift.start(start, "run_schedules")
    second.wait_for("stands by")
    shift.to(step)
    stop(first)
    second.wait_for("scheduler leads")
    stop(second)


@STEPS
def test_a_lock_has_one_holder_whatever_the_clock_does(clock: ManualClock, step: float) -> None:
    held = services.lock("report", ttl=600)
    assert held.acquire()
    clock.step(step)
    other = services.lock("report", ttl=600)
    if step < 0:
        assert not other.acquire()
        assert held.renew()
        assert held.release()
        assert other.acquire()
    else:
        assert other.acquire()
        assert not held.renew()
        assert not held.release()
    clock.step(-step)
    if step < 0:
        # Its end was written by a clock that was behind.
        assert services.lock("report").acquire()
        assert not other.release()
    else:
        assert not services.lock("report").acquire()
        assert other.renew()
        assert other.release()


@STEPS
def test_a_handle_s_calls_stay_fenced_whatever_the_clock_does(clock: ManualClock, step: float) -> None:
    job = services.enqueue("mail", None, visibility_timeout=600)
    [late] = services.claim_batch("mail", "w")
    clock.step(step)
    heirs = services.claim_batch("mail", "heir")
    assert [heir.id for heir in heirs] == ([job.pk] if step > 0 else [])
    if heirs:
        assert not late.ack()
        assert not late.heartbeat()
        assert heirs[0].ack()
    else:
        assert late.heartbeat()
        assert late.ack()
    assert row(job.pk).state == "completed"
    clock.step(-step)
    assert services.claim_batch("mail", "w") == []
    assert services.sweep() == 0
    assert row(job.pk).state == "completed"
