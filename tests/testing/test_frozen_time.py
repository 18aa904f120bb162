"""freezegun, time-machine and the library's own clock: what follows a frozen time, and what takes real seconds."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import freezegun
import pytest
import time_machine
from django.db import OperationalError, connection

from django_alkstore import clock, services
from django_alkstore.clock import ManualClock
from django_alkstore.dialects import forks
from django_alkstore.dialects.transactions import limited_wait
from django_alkstore.models import Job, Schedule
from django_alkstore.registry import handler
from django_alkstore.testing import frozen_clock, isolated_registry, run_pending
from tests.processes import Process

pytestmark = pytest.mark.django_db(transaction=True)

MOMENT = datetime(2027, 5, 1, 12, 0, tzinfo=UTC)
REAL_WAIT = 0.3
"""Seconds that a test waits for a writer lock which nobody frees."""

Move = Callable[[timedelta], object]


@contextmanager
def _freezegun() -> Iterator[Move]:
    with freezegun.freeze_time(MOMENT) as frozen:
        yield frozen.tick


@contextmanager
def _time_machine() -> Iterator[Move]:
    with time_machine.travel(MOMENT, tick=False) as traveller:
        yield traveller.shift


@contextmanager
def _manual_clock() -> Iterator[Move]:
    with frozen_clock(ManualClock(MOMENT)) as manual:
        yield lambda passed: manual.advance(passed.total_seconds())


TOOLS = {"freezegun": _freezegun, "time-machine": _time_machine, "ManualClock": _manual_clock}


@pytest.fixture(params=TOOLS)
def move(request: pytest.FixtureRequest) -> Iterator[Move]:
    """Time is frozen at MOMENT. The fixture's value moves it on."""
    frozen: AbstractContextManager[Move] = TOOLS[request.param]()
    with frozen as move_on:
        yield move_on


@contextmanager
def writer_lock_held() -> Iterator[None]:
    """Another thread holds the writer lock."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN IMMEDIATE")
                taken.set()
                done.wait(60)
                cursor.execute("ROLLBACK")
        finally:
            connection.close()

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_delayed_job_becomes_due_by_the_frozen_time(move: Move) -> None:
    with isolated_registry():
        handler("q")(lambda job: None)
        job = services.enqueue("q", None, delay=3_600)
        assert job.created_at == MOMENT
        assert job.run_at == MOMENT + timedelta(hours=1)
        assert run_pending() == []
        move(timedelta(minutes=59))
        assert run_pending() == []
        move(timedelta(minutes=1))
        assert [ran.id for ran in run_pending()] == [job.pk]
        assert Job.objects.get().finished_at == MOMENT + timedelta(hours=1)


def test_leases_and_expiries_follow_the_frozen_time(move: Move) -> None:
    leased, expiring = services.enqueue("q", None, visibility_timeout=60), services.enqueue("r", None, expires_in=60)
    (handle,) = services.claim_batch("q", "w")
    assert handle.lease_expires_at == MOMENT + timedelta(seconds=60)
    move(timedelta(seconds=61))
    assert services.sweep() == 2
    assert Job.objects.get(pk=leased.pk).state == "pending"
    assert Job.objects.get(pk=expiring.pk).state == "dead"
    assert not handle.ack()


def test_a_schedule_fires_by_the_frozen_time(move: Move) -> None:
    services.schedule("often", "@every 1h", "q")
    assert services.tick() == []
    move(timedelta(hours=2))
    assert [fire.fire_at for fire in services.tick()] == [MOMENT + timedelta(hours=1), MOMENT + timedelta(hours=2)]
    assert Schedule.objects.get().next_fire_at == MOMENT + timedelta(hours=3)


def test_a_lock_lapses_by_the_frozen_time(move: Move) -> None:
    first, second = services.lock("report", ttl=60), services.lock("report", ttl=60)
    assert first.acquire()
    assert not second.acquire()
    move(timedelta(seconds=61))
    assert second.acquire()


CALLS: dict[str, Callable[[], object]] = {
    "enqueue": lambda: services.enqueue("q", None),
    "enqueue_many": lambda: services.enqueue_many("q", [1, 2]),
    "get_or_enqueue": lambda: services.get_or_enqueue("q", "key", None),
    "claim_batch": lambda: services.claim_batch("q", "w"),
    "lock": lambda: services.lock("report").acquire(),
    "schedule": lambda: services.schedule("often", "@every 1h", "q"),
    "tick": services.tick,
    "sweep": services.sweep,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_call_beside_a_held_writer_lock_gives_up_although_time_is_frozen(
    move: Move, call: Callable[[], object]
) -> None:
    with writer_lock_held(), limited_wait("default", REAL_WAIT), pytest.raises(OperationalError, match="locked"):
        call()
    assert call() is not None  # nobody holds it any more


def test_real_time_passes_while_time_is_frozen(move: Move) -> None:
    began = clock.waiting_from()
    clock.sleep(0.01)
    assert clock.waited_since(began) >= 0.01


def test_a_fork_waits_for_a_lock_in_real_seconds(monkeypatch: pytest.MonkeyPatch, move: Move) -> None:
    """On the library's clock, which a ManualClock stops, the fork would wait for ever."""
    monkeypatch.setattr(forks, "LONGEST_WAIT", 0.05)
    guard, taken, done = forks.guard(), threading.Event(), threading.Event()

    def hold() -> None:
        with guard:
            taken.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(60)
    try:
        forks._hold()  # what a fork does first
        forks._release()
        assert thread.is_alive()
    finally:
        done.set()
        thread.join()


FROZEN_WORKER = """
from django.core.management import execute_from_command_line
import freezegun, sys
with freezegun.freeze_time(sys.argv[1]):
    execute_from_command_line(["manage.py", "run_queue", *sys.argv[2:]])
"""


def test_the_time_limit_of_a_worker_takes_real_seconds_although_time_is_frozen(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    """A worker in a process whose time is frozen: its limit of a second ends all the same."""
    job = services.enqueue("stubborn", str(tmp_path / "open"), max_attempts=1)
    process = start("-c", FROZEN_WORKER, (datetime.now(UTC) + timedelta(hours=1)).isoformat(), "stubborn")
    process.wait_for(f"dead: job {job.pk}")
    assert "time limit" in process.output


def test_the_library_s_own_references_to_the_real_clock_are_not_replaced() -> None:
    """freezegun replaces names of modules that refer to `time.monotonic`. If it does so here, real waits never end."""
    with freezegun.freeze_time(MOMENT):
        frozen: Any = time.monotonic
        assert frozen() == frozen()
        first = clock.real_monotonic()
        clock.sleep(0.001)
        assert clock.real_monotonic() > first
    with ExitStack() as stack:
        stack.enter_context(time_machine.travel(MOMENT, tick=False))
        first = clock.real_monotonic()
        clock.sleep(0.001)
        assert clock.real_monotonic() > first
