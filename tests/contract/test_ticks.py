"""Section 6: `tick`, which turns due boundaries into jobs."""

import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, OperationalError, connection, transaction

from django_alkstore import signals
from django_alkstore.clock import LAST_MOMENT, LAST_US, ManualClock, to_us
from django_alkstore.exceptions import InvalidOption
from django_alkstore.models import Job, Schedule
from django_alkstore.services import (
    Fire,
    claim_batch,
    enqueue,
    get_job,
    pause_schedule,
    resume_schedule,
    schedule,
    soonest,
    tick,
    ticks,
)

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)


def row(name: str) -> Schedule:
    return Schedule.objects.get(name=name)


def raw(sql: str, *params: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql.replace("SCHEDULE", Schedule._meta.db_table).replace("JOB", Job._meta.db_table), params)


def fire_ats(name: str = "report") -> list[datetime]:
    return list(Job.objects.filter(schedule=name).order_by("id").values_list("fire_at", flat=True))


# What is fired


def test_nothing_is_due_before_the_boundary_and_its_job_is_there_at_its_very_moment(clock: ManualClock) -> None:
    boundary = schedule("report", "@every 1h", "mail", {"n": [1]}).next_fire_at
    assert tick() == []
    clock.advance(3_599.999999)
    assert tick() == []
    assert Job.objects.count() == 0
    clock.advance(0.000001)
    (fire,) = tick()
    assert isinstance(fire, Fire)
    assert fire == Fire(name="report", queue="mail", fire_at=boundary, job_id=Job.objects.get().pk)
    assert fire.fire_at.utcoffset() == timedelta(0)
    assert tick() == []
    assert row("report").last_fire_at == boundary
    assert row("report").next_fire_at == boundary + HOUR


def test_the_jobs_moments_count_from_the_tick_and_its_fire_at_is_the_boundary(clock: ManualClock) -> None:
    boundary = schedule("report", "@every 1h", "mail", expires_in=90).next_fire_at
    clock.advance(3_600 + 1_000)
    (fire,) = tick()
    job = get_job(fire.job_id)
    assert job is not None
    assert (job.schedule, job.fire_at) == ("report", boundary)
    assert job.run_at == job.created_at == clock.now()
    assert job.expires_at == clock.now() + timedelta(seconds=90)


def test_a_fired_job_is_claimed_by_the_ordinary_queue_functions(clock: ManualClock) -> None:
    boundary = schedule("report", "@every 1h", "mail", {"n": [1]}).next_fire_at
    clock.advance(3_600)
    (fire,) = tick()
    (job,) = claim_batch("mail", "w")
    assert (job.id, job.queue, job.payload, job.attempt) == (fire.job_id, "mail", {"n": [1]}, 1)
    assert (job.schedule, job.fire_at) == ("report", boundary)
    assert job.ack()


def test_a_job_that_was_not_fired_names_no_schedule(clock: ManualClock) -> None:
    job = enqueue("mail", 1)
    assert (job.schedule, job.fire_at) == (None, None)


DEFAULTS = {"priority": 0, "max_attempts": 3, "visibility_timeout": 300.0, "backoff_base": 5.0, "expires_in": None}
GIVEN = {"priority": 7, "max_attempts": 1, "visibility_timeout": 30.0, "backoff_base": 0.0, "expires_in": 60.0}
OF_QUEUE = {"max_attempts": 8, "visibility_timeout": 80.0, "backoff_base": 8.0, "expires_in": 800.0}


def options_of(job_id: int, now: datetime) -> dict[str, Any]:
    job = get_job(job_id)
    assert job is not None
    return {
        "priority": job.priority,
        "max_attempts": job.max_attempts,
        "visibility_timeout": job.visibility_timeout,
        "backoff_base": job.backoff_base,
        "expires_in": None if job.expires_at is None else (job.expires_at - now).total_seconds(),
    }


@pytest.mark.parametrize("given", [[], ["priority"], ["max_attempts"], ["visibility_timeout"], ["backoff_base"],
                                   ["expires_in"], list(GIVEN)], ids=str)  # fmt: skip
@pytest.mark.parametrize("queue_has_defaults", [False, True])
def test_a_fired_job_carries_the_queues_defaults_with_the_schedules_options_over_them(
    clock: ManualClock, settings: Any, given: list[str], queue_has_defaults: bool
) -> None:
    settings.ALKSTORE = {"QUEUES": {"mail": OF_QUEUE, "post": {"max_attempts": 99}} if queue_has_defaults else {}}
    options: dict[str, Any] = {key: GIVEN[key] for key in given}
    schedule("report", "@every 1h", "mail", **options)
    clock.advance(3_700)
    (fire,) = tick()
    expected = {**DEFAULTS, **(OF_QUEUE if queue_has_defaults else {}), **options}
    assert options_of(fire.job_id, clock.now()) == expected


def test_the_defaults_are_those_of_the_tick_and_not_of_the_declaration(clock: ManualClock, settings: Any) -> None:
    schedule("report", "@every 1h", "mail")
    settings.ALKSTORE = {"QUEUES": {"mail": {"max_attempts": 8}}}
    clock.advance(3_600)
    (fire,) = tick()
    assert options_of(fire.job_id, clock.now())["max_attempts"] == 8


def test_several_schedules_fire_each_its_own_boundaries(clock: ManualClock) -> None:
    start = clock.now()
    schedule("a", "@every 10m", "mail", "a")
    schedule("b", "@every 15m", "post", "b")
    schedule("c", "@every 1d", "mail", "c")
    schedule("d", "@every 10m", "mail", "d")
    pause_schedule("d")
    clock.advance(1_800)
    fires = tick()
    assert sorted((fire.name, fire.queue, (fire.fire_at - start) // timedelta(minutes=1)) for fire in fires) == [
        ("a", "mail", 10),
        ("a", "mail", 20),
        ("a", "mail", 30),
        ("b", "post", 15),
        ("b", "post", 30),
    ]
    for fire in fires:
        job = Job.objects.get(pk=fire.job_id)
        assert (job.schedule, job.queue, job.payload, job.fire_at) == (fire.name, fire.queue, fire.name, fire.fire_at)
    assert soonest() == start + timedelta(minutes=40)


# Backlogs: 64, then on


@pytest.mark.parametrize("offset", [0, 1, 3_599])
def test_f076_a_backlog_of_two_hundred_boundaries_fires_the_64_earliest_and_goes_on_after_now(
    clock: ManualClock, offset: int
) -> None:
    first = schedule("report", "@every 1h", "mail").next_fire_at
    clock.advance(200 * 3_600 + offset)  # 200 boundaries are due
    fires = tick()
    assert [fire.fire_at for fire in fires] == [first + HOUR * n for n in range(64)]
    assert fire_ats() == [fire.fire_at for fire in fires]
    assert len({fire.job_id for fire in fires}) == 64
    after = row("report")
    assert after.last_fire_at == first + HOUR * 63
    assert after.next_fire_at == first + HOUR * 200 > clock.now()
    assert tick() == []
    clock.advance(3_600 - offset - 1)
    assert tick() == [], "nothing more in that window"
    clock.advance(1)
    assert [fire.fire_at for fire in tick()] == [first + HOUR * 200]
    assert Job.objects.count() == 65


@pytest.mark.parametrize(("due", "fired"), [(1, 1), (63, 63), (64, 64), (65, 64), (128, 64), (1_000_000, 64)])
def test_one_tick_fires_64_boundaries_of_a_schedule_at_most(clock: ManualClock, due: int, fired: int) -> None:
    first = schedule("report", "@every 1s", "mail").next_fire_at
    clock.advance(due)
    assert [fire.fire_at for fire in tick()] == [first + timedelta(seconds=n) for n in range(fired)]
    assert row("report").next_fire_at == clock.now() + timedelta(seconds=1)
    assert tick() == []


def test_the_limit_is_each_schedules_own(clock: ManualClock) -> None:
    for name in ("a", "b", "c"):
        schedule(name, "@every 1s", "mail")
    clock.advance(100)
    fires = tick()
    assert {name: sum(fire.name == name for fire in fires) for name in "abc"} == {"a": 64, "b": 64, "c": 64}


def test_one_backlog_more_after_the_first_is_another_outage(clock: ManualClock) -> None:
    schedule("report", "@every 1h", "mail")
    clock.advance(3_600 * 100)
    assert len(tick()) == 64
    clock.advance(3_600 * 70)
    assert len(tick()) == 64


# The clock, and the `now` that a caller gives


def test_tick_goes_by_the_moment_that_it_is_given(clock: ManualClock) -> None:
    boundary = schedule("report", "@every 1h", "mail", expires_in=10).next_fire_at
    assert tick(boundary - timedelta(microseconds=1)) == []
    elsewhere = (boundary + timedelta(seconds=5)).astimezone(timezone(timedelta(hours=-7)))
    (fire,) = tick(elsewhere)
    job = Job.objects.get(pk=fire.job_id)
    assert job.run_at == elsewhere
    assert job.expires_at == elsewhere + timedelta(seconds=10)
    assert fire.fire_at == boundary


@pytest.mark.parametrize("moment", [datetime(2026, 3, 2), 0, 1e9, "2026-03-02T00:00:00Z"], ids=repr)
def test_a_moment_that_is_naive_or_none_at_all_is_refused(clock: ManualClock, moment: Any) -> None:
    schedule("report", "@every 1s", "mail")
    clock.advance(10)
    with pytest.raises(InvalidOption):
        tick(moment)
    assert Job.objects.count() == 0


@pytest.mark.parametrize("back", [1, 3_600, 7_200, 86_400 * 400])
def test_f078_a_clock_that_steps_back_fires_nothing_twice(clock: ManualClock, back: int) -> None:
    first = schedule("report", "@every 1h", "mail").next_fire_at
    clock.advance(3 * 3_600)
    assert len(tick()) == 3
    clock.step(-back)
    assert tick() == []
    for _ in range(2):
        clock.advance(back / 2)
        tick()
    clock.advance(3_600)
    tick()
    assert fire_ats() == [first + HOUR * n for n in range(4)]


def test_a_clock_that_steps_forward_is_an_outage_like_any_other(clock: ManualClock) -> None:
    first = schedule("report", "@every 1h", "mail").next_fire_at
    clock.step(3_600 * 1_000)
    assert [fire.fire_at for fire in tick()] == [first + HOUR * n for n in range(64)]
    assert row("report").next_fire_at == clock.now() + HOUR


@pytest.mark.parametrize("use_tz", [True, False])
@pytest.mark.parametrize("zone", ["Europe/Paris", "America/New_York", "Asia/Shanghai"])
@pytest.mark.parametrize("night", ["2026-03-28T23:00", "2026-10-24T23:00", "2026-03-08T05:00", "2026-11-01T04:00"])
def test_f079_f082_the_grid_runs_through_the_nights_of_both_clock_changes(
    clock: ManualClock, settings: Any, use_tz: bool, zone: str, night: str
) -> None:
    settings.USE_TZ, settings.TIME_ZONE = use_tz, zone
    clock.step((datetime.fromisoformat(night).replace(tzinfo=UTC) - clock.now()).total_seconds())
    first = schedule("report", "@every 10m", "mail", expires_in=30).next_fire_at
    for count in range(1, 31):
        clock.advance(600)
        (fire,) = tick()
        assert fire.fire_at == first + timedelta(minutes=10) * (count - 1) == clock.now()
        job = get_job(fire.job_id)
        assert job is not None
        assert job.run_at == clock.now()
        assert job.expires_at == clock.now() + timedelta(seconds=30)
        assert tick() == []
        (claimed,) = claim_batch("mail", "w")
        assert claimed.fire_at == fire.fire_at
        assert claimed.lease_expires_at == clock.now() + timedelta(seconds=300)
        assert claimed.ack()
    assert fire_ats() == [first + timedelta(minutes=10) * n for n in range(30)]


def test_f072_a_boundary_that_passed_while_nobody_ticked_fires_once_and_late(clock: ManualClock) -> None:
    boundary = schedule("report", "@every 1h", "mail").next_fire_at
    clock.advance(3_599)
    assert tick() == []
    clock.advance(11)
    assert [fire.fire_at for fire in tick()] == [boundary]
    assert tick() == []


# One job per boundary


def test_one_job_per_boundary_is_held_by_the_schema(clock: ManualClock) -> None:
    schedule("report", "@every 1h", "mail")
    clock.advance(3_600)
    (fire,) = tick()
    copy = Job.objects.get(pk=fire.job_id)
    copy.pk = None
    copy.queue = "elsewhere"
    with pytest.raises(IntegrityError), transaction.atomic():
        copy.save(force_insert=True)
    copy.schedule = "another"
    copy.save(force_insert=True)


@pytest.mark.parametrize("state", ["pending", "processing", "completed", "dead"])
def test_a_rogue_ticker_that_puts_the_schedule_back_fires_nothing_twice_whatever_became_of_the_job(
    clock: ManualClock, state: str
) -> None:
    first = schedule("report", "@every 1h", "mail").next_fire_at
    clock.advance(3_600)
    tick()
    if state != "pending":
        (job,) = claim_batch("mail", "w")
        if state == "completed":
            job.ack()
        elif state == "dead":
            job.fail("no")
    clock.advance(7_200)
    tick()
    Schedule.objects.update(next_fire_at=first)
    assert tick() == []
    assert fire_ats() == [first, first + HOUR, first + HOUR * 2]
    assert row("report").next_fire_at == first + HOUR * 3
    clock.advance(3_600)
    assert [fire.fire_at for fire in tick()] == [first + HOUR * 3]


def test_a_boundary_that_has_its_job_already_does_not_keep_the_next_from_firing(clock: ManualClock) -> None:
    first = schedule("report", "@every 1h", "mail").next_fire_at
    clock.advance(3_600)
    tick()
    Schedule.objects.update(next_fire_at=first)
    clock.advance(3_600)
    assert [fire.fire_at for fire in tick()] == [first + HOUR]


# Steps


def transactions_of(run: Callable[[], object]) -> list[int]:
    """How many jobs each transaction that `run` made has enqueued; those without any are left out."""
    jobs: list[int] = []

    def count(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        if sql.startswith("BEGIN"):
            jobs.append(0)
        elif sql.lstrip().startswith("INSERT") and Job._meta.db_table in sql:
            jobs[-1] += 1
        return result

    with connection.execute_wrapper(count):
        run()
    return [number for number in jobs if number]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticks, "JOBS_IN_STEP", 10)
    monkeypatch.setattr(ticks, "PAUSE", 0.001)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("given", [True, False])
def test_a_tick_with_much_to_fire_is_several_short_transactions(clock: ManualClock, given: bool) -> None:
    firsts = {f"s{n}": schedule(f"s{n}", "@every 1s", "mail").next_fire_at for n in range(5)}
    firsts["late"] = schedule("late", "@every 13s", "mail").next_fire_at
    clock.advance(13)
    fires: list[Fire] = []
    steps = transactions_of(lambda: fires.extend(tick(clock.now()) if given else tick()))
    assert sum(steps) == len(fires) == 5 * 13 + 1
    assert max(steps) == 10
    assert len(steps) == 7
    for name, first in firsts.items():
        moments = [fire.fire_at for fire in fires if fire.name == name]
        assert moments == [first + timedelta(seconds=n) for n in range(len(moments))]
        assert fire_ats(name) == moments
        assert row(name).last_fire_at == moments[-1]
    assert [fire.name for fire in fires].index("late") == 65, "the earliest boundary goes first"
    assert Job.objects.exclude(run_at=clock.now()).count() == 0
    assert tick() == []


@pytest.mark.usefixtures("small_steps")
def test_f076_a_schedule_whose_backlog_takes_several_steps_still_fires_its_64_earliest(clock: ManualClock) -> None:
    firsts = {name: schedule(name, "@every 1h", "mail").next_fire_at for name in ("a", "b")}
    clock.advance(200 * 3_600 + 1)
    steps = transactions_of(tick)
    assert sum(steps) == 128
    assert max(steps) == 10
    for name, first in firsts.items():
        assert fire_ats(name) == [first + HOUR * n for n in range(64)]
        assert row(name).last_fire_at == first + HOUR * 63
        assert row(name).next_fire_at == first + HOUR * 200
    assert tick() == []
    clock.advance(64 * 3_600)
    assert len(tick()) == 128, "the next backlog has its own 64"


def test_a_step_ends_by_the_time_that_it_has_taken(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """By real time: the clock that the test holds stands still meanwhile."""
    monkeypatch.setattr(ticks, "LONGEST_STEP", 0.0)
    first = schedule("report", "@every 1s", "mail").next_fire_at
    clock.advance(5)
    assert transactions_of(tick) == [1] * 5
    assert fire_ats() == [first + timedelta(seconds=n) for n in range(5)]


@pytest.mark.usefixtures("small_steps")
def test_other_writers_get_in_between_two_steps_and_each_step_is_announced_before_the_next(clock: ManualClock) -> None:
    schedule("report", "@every 1s", "mail")
    clock.advance(35)
    announced: list[int] = []
    committed: list[int] = []

    def listen(*, fire: Fire, **_: object) -> None:
        with closing(sqlite3.connect(connection.settings_dict["NAME"], timeout=0, isolation_level=None)) as raw:
            raw.execute("BEGIN IMMEDIATE")
            committed.append(raw.execute(f"SELECT count(*) FROM {Job._meta.db_table}").fetchone()[0])
            raw.execute("COMMIT")
        announced.append(fire.job_id)

    signals.schedule_fired.connect(listen)
    try:
        fires = tick()
    finally:
        signals.schedule_fired.disconnect(listen)
    assert announced == [fire.job_id for fire in fires]
    assert committed == [10] * 10 + [20] * 10 + [30] * 10 + [35] * 5


@pytest.mark.usefixtures("small_steps")
def test_a_tick_that_is_interrupted_keeps_its_progress(clock: ManualClock) -> None:
    firsts = {name: schedule(name, "@every 1s", "mail").next_fire_at for name in ("a", "b")}
    clock.advance(18)
    inserts: list[str] = []

    def fail(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.lstrip().startswith("INSERT") and Job._meta.db_table in sql:
            inserts.append(sql)
            if len(inserts) == 25:
                raise OperationalError("disk I/O error")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(fail), pytest.raises(OperationalError):
        tick()
    assert Job.objects.count() == 20
    for name in firsts:
        moments = fire_ats(name)
        assert moments
        assert row(name).last_fire_at == moments[-1]
        assert row(name).next_fire_at == moments[-1] + timedelta(seconds=1)
    assert len(tick()) == 16
    for name, first in firsts.items():
        assert fire_ats(name) == [first + timedelta(seconds=n) for n in range(18)]


@pytest.mark.usefixtures("small_steps")
def test_in_a_callers_transaction_a_tick_is_one_step_and_fails_as_a_whole(clock: ManualClock) -> None:
    schedule("report", "@every 1s", "mail")
    clock.advance(35)
    with transaction.atomic():
        with pytest.raises(OperationalError):
            refuse_the_second_insert(tick)
        assert Job.objects.count() == 0
    assert transactions_of(transaction.atomic()(tick)) == [35]
    assert Job.objects.count() == 35


@pytest.mark.usefixtures("small_steps")
def test_rows_that_cannot_be_read_are_paused_in_the_step_that_meets_them(clock: ManualClock) -> None:
    for n in range(25):
        schedule(f"s{n}", "@every 1h", "mail")
    raw("UPDATE SCHEDULE SET spec = 'hourly' WHERE name IN ('s0', 's9', 's10', 's24')")
    clock.advance(3_600)
    assert sum(transactions_of(tick)) == 21
    assert Schedule.objects.filter(enabled=False).count() == 4
    assert tick() == []


# All or nothing


def refuse_jobs_of_queue_bad(run: Callable[[], object]) -> None:
    """A database that fails in the middle of a tick, by its own doing."""
    raw(
        "CREATE TEMP TRIGGER full_disk BEFORE INSERT ON main.JOB WHEN NEW.queue = 'bad' "
        "BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
    )
    try:
        run()
    finally:
        raw("DROP TRIGGER full_disk")


def refuse_the_second_insert(run: Callable[[], object]) -> None:
    inserts = []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.lstrip().startswith("INSERT") and Job._meta.db_table in sql:
            inserts.append(sql)
            if len(inserts) == 2:
                raise OperationalError("disk I/O error") from sqlite3.OperationalError("disk I/O error")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        run()


def refuse_to_move_the_last(run: Callable[[], object]) -> None:
    moves = []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.lstrip().startswith("UPDATE") and Schedule._meta.db_table in sql:
            moves.append(sql)
            if len(moves) == 3:
                raise DatabaseError("database disk image is malformed")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        run()


@pytest.mark.parametrize("fault", [refuse_jobs_of_queue_bad, refuse_the_second_insert, refuse_to_move_the_last])
def test_a_database_error_rolls_the_whole_tick_back_and_pauses_nothing(
    clock: ManualClock, fault: Callable[[Callable[[], object]], None]
) -> None:
    schedule("a", "@every 10m", "good")
    schedule("b", "@every 20m", "bad")
    schedule("c", "@every 30m", "good")
    clock.advance(3_600)
    before = list(Schedule.objects.order_by("pk").values())
    with pytest.raises(DatabaseError):
        fault(tick)
    assert Job.objects.count() == 0
    assert list(Schedule.objects.order_by("pk").values()) == before
    assert len(tick()) == 6 + 3 + 2, "and it is tried again"


def test_a_tick_in_a_callers_transaction_is_part_of_it(clock: ManualClock) -> None:
    schedule("report", "@every 1h", "mail")
    clock.advance(3_600)

    class Boom(Exception):
        pass

    with pytest.raises(Boom), transaction.atomic():  # noqa: PT012
        assert len(tick()) == 1
        raise Boom
    assert Job.objects.count() == 0
    with transaction.atomic():
        assert len(tick()) == 1
    assert Job.objects.count() == 1


# Rows that cannot be read

BROKEN: dict[str, str] = {
    "spec outside the grammar": "spec = 'hourly'",
    "spec empty": "spec = ''",
    "spec with a zero": "spec = '@every 0s'",
    "spec that no date can hold": "spec = '@every " + "9" * 5_000 + "s'",
    "spec a number": "spec = 5",
    "spec a blob": "spec = X'ff00'",
    "spec not UTF-8": "spec = CAST(X'ff' AS TEXT)",
    "spec with NUL": "spec = '@every 1h' || char(0)",
    "payload not JSON": "payload = 'not json'",
    "payload empty": "payload = ''",
    "payload cut off": "payload = '{\"a\": '",
    "payload NaN": "payload = 'NaN'",
    "payload infinite": "payload = '[Infinity]'",
    "payload a blob": "payload = X'ff00'",
    "payload not UTF-8": "payload = CAST(X'22ff22' AS TEXT)",
    "payload too deep": "payload = '" + "[" * 100_000 + "]" * 100_000 + "'",
    "queue reserved": "queue = '__alkstore_outbox:mail'",
    "queue outside the rule": "queue = 'a b'",
    "queue empty": "queue = ''",
    "queue not UTF-8": "queue = CAST(X'ff' AS TEXT)",
    "priority too large": "priority = 2147483648",
    "priority a text": "priority = 'high'",
    "no attempts": "max_attempts = 0",
    "attempts a fraction": "max_attempts = 1.5",
    "attempts too many": "max_attempts = 2147483648",
    "no timeout": "visibility_timeout = 0",
    "timeout infinite": "visibility_timeout = 9e999",
    "timeout past every date": "visibility_timeout = 1e300",
    "timeout a text": "visibility_timeout = 'long'",
    "backoff negative": "backoff_base = -1",
    "backoff infinite": "backoff_base = 9e999",
    "expiry at once": "expires_in = 0",
    "expiry past every date": "expires_in = 253402300799",
    "next boundary before the year 1": "next_fire_at = -1000000000000000000",
    "next boundary at the first integer": "next_fire_at = -9223372036854775808",
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN.keys())
def test_f084_a_row_that_cannot_be_read_is_paused_with_its_error_and_stops_no_other(
    clock: ManualClock, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    schedule("a-good", "@every 20m", "mail")
    schedule("bad", "@every 10m", "mail")
    schedule("z-good", "@every 30m", "mail")
    try:
        raw(f"UPDATE SCHEDULE SET {change} WHERE name = 'bad'")
    except IntegrityError:
        return  # the schema does not let it in at all
    clock.advance(1_800)
    with caplog.at_level(logging.INFO, "django_alkstore"):
        fires = tick()
    assert [fire.name for fire in fires if fire.name != "bad"] == ["a-good", "z-good"]
    assert not [fire for fire in fires if fire.name == "bad"]
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT enabled, last_error FROM {Schedule._meta.db_table} WHERE name = 'bad'")
        enabled, last_error = cursor.fetchone()
    assert not enabled
    assert last_error
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "bad" in errors[0].getMessage()
    assert Schedule.objects.filter(enabled=True).count() == 2
    clock.advance(1_800)
    assert sorted(fire.name for fire in tick()) == ["a-good", "a-good", "z-good"]
    assert Job.objects.filter(schedule="bad").count() == 0


@pytest.mark.parametrize(
    "name", ["'a b'", "''", "'__alkstore_x'", "CAST(X'ff' AS TEXT)", "X'ff'", "'" + "x" * 129 + "'"]
)
def test_a_row_whose_name_breaks_the_rule_stops_no_other(clock: ManualClock, name: str) -> None:
    schedule("bad", "@every 10m", "mail")
    schedule("good", "@every 10m", "mail")
    raw(f"UPDATE SCHEDULE SET name = {name} WHERE name = 'bad'")
    clock.advance(600)
    assert [fire.name for fire in tick() if fire.name == "good"] == ["good"]
    clock.advance(600)
    assert [fire.name for fire in tick() if fire.name == "good"] == ["good"]


def test_the_error_of_a_bad_row_can_be_mended_and_the_schedule_goes_on(clock: ManualClock) -> None:
    schedule("bad", "@every 10m", "mail")
    raw("UPDATE SCHEDULE SET max_attempts = 0")
    clock.advance(600)
    assert tick() == []
    assert "max_attempts" in str(row("bad").last_error)
    raw("UPDATE SCHEDULE SET max_attempts = 2")
    assert resume_schedule("bad")
    assert tick() == []
    clock.advance(600)
    assert len(tick()) == 1


# The end of time


def test_a_schedule_whose_next_boundary_no_date_can_hold_fires_its_last_and_is_paused(clock: ManualClock) -> None:
    last = schedule("report", "@every 1000000d", "mail").next_fire_at
    schedule("good", "@every 1d", "mail")
    left = (LAST_MOMENT - last) // timedelta(days=1)
    assert left < 1_000_000 * 2
    clock.step((last - clock.now()).total_seconds())
    Schedule.objects.filter(name="good").update(next_fire_at=clock.now())
    raw("UPDATE SCHEDULE SET spec = '@every 3000000d' WHERE name = 'report'")
    fires = tick()
    assert sorted((fire.name, fire.fire_at) for fire in fires) == [("good", last), ("report", last)]
    after = row("report")
    assert after.enabled is False
    assert after.last_fire_at == last
    assert after.last_error
    assert row("good").enabled
    clock.advance(86_400)
    assert [fire.name for fire in tick()] == ["good"]
    assert soonest() == clock.now() + timedelta(days=1)


def test_the_last_boundary_that_a_date_can_hold_is_fired(clock: ManualClock) -> None:
    schedule("report", "@every 1s", "mail")
    clock.step((LAST_MOMENT - clock.now()).total_seconds() - 0.5)
    raw("UPDATE SCHEDULE SET next_fire_at = %s", LAST_US)
    moment = LAST_MOMENT
    assert to_us(moment) == LAST_US
    assert [fire.fire_at for fire in tick(moment)] == [moment]
    assert row("report").enabled is False
    assert tick(moment) == []


# The log


def test_each_fire_is_logged_and_announced_once(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Fire] = []

    def listen(*, fire: Fire, **_: object) -> None:
        heard.append(fire)

    signals.schedule_fired.connect(listen)
    try:
        schedule("report", "@every 1h", "mail")
        clock.advance(7_200)
        with caplog.at_level(logging.INFO, "django_alkstore"):
            fires = tick()
    finally:
        signals.schedule_fired.disconnect(listen)
    assert heard == fires
    assert len([record for record in caplog.records if "report" in record.getMessage()]) == 2


@pytest.fixture(autouse=True)
def _no_trigger_is_left() -> Iterator[None]:
    yield
    connection.close()
