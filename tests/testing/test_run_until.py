"""`run_until` moves time through every due job and boundary. `frozen_clock` and `ManualClock` are what it moves."""

from datetime import UTC, datetime, timedelta

import pytest

from django_alkstore import clock
from django_alkstore.clock import ManualClock
from django_alkstore.exceptions import InvalidOption
from django_alkstore.registry import handler
from django_alkstore.services import JobHandle, claim_batch, enqueue, get_job, schedule
from django_alkstore.testing import frozen_clock, isolated_registry, run_pending, run_until

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("isolated")]

NOON = datetime(2027, 5, 1, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.fixture
def isolated() -> object:
    with isolated_registry():
        yield


@pytest.fixture
def moments() -> list[tuple[object, float]]:
    """What the handler of the queue `q` was given, and the hours since noon at which it ran."""
    ran: list[tuple[object, float]] = []
    handler("q")(lambda job: ran.append((job.payload, (clock.now() - NOON) / HOUR)))
    return ran


def test_each_job_and_each_boundary_runs_at_its_own_moment(moments: list[tuple[object, float]]) -> None:
    with frozen_clock(NOON) as hands:
        schedule("often", "@every 2h", "q", "fired")
        enqueue("q", "now")
        enqueue("q", "delayed", delay=3 * 3_600)
        enqueue("q", "too late", delay=5 * 3_600)
        ran = run_until(NOON + 4 * HOUR)
        assert hands.now() == NOON + 4 * HOUR
    assert moments == [("now", 0), ("fired", 2), ("delayed", 3), ("fired", 4)]
    assert [job.payload for job in ran] == ["now", "fired", "delayed", "fired"]


def test_retries_run_on_their_curve() -> None:
    hours: list[float] = []

    @handler("q")
    def run(job: JobHandle) -> None:
        hours.append((clock.now() - NOON) / HOUR)
        raise ValueError("no")

    with frozen_clock(NOON):
        job = enqueue("q", None, backoff_base=600, max_attempts=4)
        run_until(NOON + 24 * HOUR)
    assert hours == pytest.approx([0, 1 / 6, 1 / 2, 1 + 1 / 6])
    found = get_job(job.pk)
    assert found is not None
    assert found.state == "dead"


def test_a_job_that_a_handler_delays_runs_too(moments: list[tuple[object, float]]) -> None:
    @handler("first")
    def first(job: JobHandle) -> None:
        enqueue("q", "second", delay=3_600)

    with frozen_clock(NOON):
        enqueue("first", None, delay=3_600)
        run_until(NOON + 2 * HOUR)
    assert moments == [("second", 2)]


def test_a_lapsed_lease_is_taken_over_when_it_ends(moments: list[tuple[object, float]]) -> None:
    with frozen_clock(NOON):
        enqueue("q", "claimed by hand", visibility_timeout=3_600)
        claim_batch("q", "me")
        run_until(NOON + 2 * HOUR)
    assert moments == [("claimed by hand", 1)]


def test_without_a_manual_clock_time_moves_for_the_length_of_the_call(moments: list[tuple[object, float]]) -> None:
    before = clock.installed()
    enqueue("q", "tomorrow", delay=timedelta(days=1))
    assert [job.payload for job in run_until(clock.now() + timedelta(days=2))] == ["tomorrow"]
    assert clock.installed() is before
    assert clock.now() < datetime.now(UTC) + timedelta(hours=1)


def test_jobs_without_a_handler_and_their_schedules_do_not_stop_it(moments: list[tuple[object, float]]) -> None:
    with frozen_clock(NOON) as hands:
        enqueue("unknown", None, delay=60)
        schedule("often", "@every 1h", "unknown")
        enqueue("q", "known", delay=7_200)
        run_until(NOON + 3 * HOUR)
        assert hands.now() == NOON + 3 * HOUR
    assert moments == [("known", 2)]


def test_with_nothing_to_do_the_clock_moves_all_the_same() -> None:
    with frozen_clock(NOON) as hands:
        assert run_until(NOON + HOUR) == []
        assert hands.now() == NOON + HOUR
        assert run_until(NOON + HOUR) == []


def test_it_does_not_go_back_and_needs_an_aware_datetime() -> None:
    with frozen_clock(NOON) as hands:
        with pytest.raises(InvalidOption, match="before now"):
            run_until(NOON - HOUR)
        with pytest.raises(InvalidOption, match="aware"):
            run_until(datetime(2027, 6, 1))
        assert hands.now() == NOON


def test_a_limit_and_the_errors_are_those_of_run_pending() -> None:
    @handler("q")
    def run(job: JobHandle) -> None:
        if job.payload == "fails":
            raise ValueError("no")
        enqueue("q", None, delay=1)

    with frozen_clock(NOON):
        enqueue("q", None)
        with pytest.raises(AssertionError, match="again and again"):
            run_until(NOON + HOUR, limit=20)
    with frozen_clock(NOON):
        enqueue("q", "fails", delay=1)
        with pytest.raises(ValueError, match="no"):
            run_until(NOON + HOUR, raise_errors=True, limit=10_000)


def test_frozen_clock_takes_a_clock_a_moment_or_nothing() -> None:
    mine = ManualClock(NOON)
    with frozen_clock(mine) as hands:
        assert hands is mine
        assert clock.now() == NOON
    with frozen_clock(NOON) as hands:
        assert clock.now() == NOON
        hands.advance_to(NOON + HOUR)
        assert (clock.now(), clock.monotonic()) == (NOON + HOUR, 3_600)
    before = datetime.now(UTC)
    with frozen_clock():
        assert before <= clock.now() <= datetime.now(UTC)
        assert clock.now() == clock.now()
    with pytest.raises(ValueError, match="aware"):
        ManualClock(datetime(2027, 1, 1))


def test_a_job_is_due_once_the_clock_was_moved(moments: list[tuple[object, float]]) -> None:
    with frozen_clock(NOON) as hands:
        enqueue("q", "later", delay=3_600)
        assert run_pending() == []
        hands.advance(3_600)
        run_pending()
    assert moments == [("later", 1)]
