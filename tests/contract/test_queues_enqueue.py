"""Contract, section 4: jobs in. Options and their bounds, defaults, the returned job, unique keys, many at once."""

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_alkstore.clock import ManualClock, use
from django_alkstore.exceptions import DuplicateJob, InvalidOption, InvalidPayload
from django_alkstore.models import Job
from django_alkstore.services import (
    cancel,
    claim_batch,
    enqueue,
    enqueue_many,
    enqueue_tx,
    get_job,
    get_or_enqueue,
    outbox,
    sweep,
)

pytestmark = pytest.mark.django_db

WAYS_IN: dict[str, Callable[..., Job]] = {
    "enqueue": lambda **options: enqueue("mail", {"n": 1}, **options),
    "enqueue_tx": lambda **options: enqueue_tx("mail", {"n": 1}, **options),
    "enqueue_many": lambda **options: get_job(enqueue_many("mail", [{"n": 1}], **options)[0]),
    "get_or_enqueue": lambda **options: get_or_enqueue("mail", "key", {"n": 1}, **options)[0],
    "outbox": lambda **options: outbox("mail").enqueue({"n": 1}, **options),
}
way_in = pytest.mark.parametrize("add", WAYS_IN.values(), ids=WAYS_IN.keys())


def fields_of(job: Job) -> dict[str, Any]:
    return {field.attname: getattr(job, field.attname) for field in Job._meta.concrete_fields}


def reload(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


# Defaults


@pytest.mark.parametrize("name", ["enqueue", "enqueue_tx", "enqueue_many", "get_or_enqueue"])
def test_the_defaults_are_stamped_on_each_job(name: str, clock: ManualClock) -> None:
    job = reload(WAYS_IN[name]())
    assert (job.visibility_timeout, job.max_attempts, job.backoff_base, job.expires_at) == (300.0, 3, 5.0, None)
    assert (job.state, job.priority, job.attempts, job.errors, job.last_error) == ("pending", 0, 0, [], None)
    assert (job.run_at, job.created_at) == (clock.now(), clock.now())
    assert (job.worker_id, job.lease_expires_at, job.schedule, job.fire_at, job.finished_at) == (None,) * 5


@override_settings(
    ALKSTORE={
        "QUEUES": {
            "mail": {
                "visibility_timeout": 10,
                "max_attempts": 7,
                "backoff_base": timedelta(seconds=2),
                "expires_in": 60,
            },
            "slow": {"visibility_timeout": timedelta(hours=1)},
        }
    }
)
def test_a_queues_own_defaults_come_from_the_settings_and_the_calls_options_win(clock: ManualClock) -> None:
    def stamped(job: Job) -> tuple[Any, ...]:
        expires_in = None if job.expires_at is None else (job.expires_at - job.run_at).total_seconds()
        return (job.visibility_timeout, job.max_attempts, job.backoff_base, expires_in)

    assert stamped(enqueue("mail", None)) == (10.0, 7, 2.0, 60.0)
    assert stamped(get_job(enqueue_many("mail", [1])[0])) == (10.0, 7, 2.0, 60.0)
    assert stamped(enqueue("mail", None, priority=1)) == (10.0, 7, 2.0, 60.0)
    assert stamped(enqueue("mail", None, max_attempts=1, expires_in=5)) == (10.0, 1, 2.0, 5.0)
    assert stamped(enqueue("mail", None, backoff_base=0, visibility_timeout=1)) == (1.0, 7, 0.0, 60.0)
    assert stamped(enqueue("slow", None)) == (3600.0, 3, 5.0, None)
    assert stamped(enqueue("other", None)) == (300.0, 3, 5.0, None)
    delayed = enqueue("mail", None, delay=100)
    assert delayed.expires_at == clock.now() + timedelta(seconds=160)


def test_a_change_of_the_setting_takes_effect_at_once() -> None:
    for attempts in (4, 9):
        with override_settings(ALKSTORE={"QUEUES": {"mail": {"max_attempts": attempts}}}):
            assert enqueue("mail", None).max_attempts == attempts
    assert enqueue("mail", None).max_attempts == 3


# The returned job


def test_the_returned_job_is_complete_without_a_second_query(
    django_assert_num_queries: Any, clock: ManualClock
) -> None:
    options: dict[str, Any] = {
        "delay": 1.5,
        "priority": -4,
        "max_attempts": 2,
        "visibility_timeout": timedelta(milliseconds=1500),
        "backoff_base": 0,
        "expires_in": 10,
    }
    for extra in ({}, options):
        with django_assert_num_queries(1):
            job = enqueue("mail", {"a": (1, 2), "é": "\x00"}, **extra)
            before = fields_of(job)
        assert job.get_deferred_fields() == set()
        assert job._state.adding is False
        assert job._state.db == "default"
        stored = get_job(job.id)
        assert stored == job
        assert fields_of(stored) == before
        assert {name: type(value) for name, value in fields_of(stored).items()} == {
            name: type(value) for name, value in before.items()
        }


@pytest.mark.parametrize("add", [enqueue, lambda q, p, **o: get_or_enqueue(q, "key", p)[0]])
def test_a_job_with_a_unique_key_is_complete_without_a_second_query_too(add: Any) -> None:
    with CaptureQueriesContext(connection) as queries:
        job = add("mail", {"a": 1}, unique_key="key")
        before = fields_of(job)
    assert [query["sql"] for query in queries if query["sql"].lstrip().startswith("SELECT")] == []
    assert fields_of(get_job(job.id)) == before
    assert before["unique_key"] == "key"


def test_get_job_asks_once_and_knows_every_state(django_assert_num_queries: Any) -> None:
    job = enqueue("mail", None)
    with django_assert_num_queries(1):
        assert get_job(job.id).state == "pending"
    [handle] = claim_batch("mail", "w")
    assert get_job(job.id).state == "processing"
    assert get_job(job.id).worker_id == "w"
    handle.ack()
    assert get_job(job.id).state == "completed"


# Options


@way_in
def test_every_option_is_on_the_job(add: Callable[..., Job], clock: ManualClock) -> None:
    job = reload(
        add(
            delay=90,
            priority=7,
            max_attempts=4,
            visibility_timeout=1.5,
            backoff_base=2.25,
            expires_in=timedelta(minutes=1),
        )
    )
    assert job.run_at == clock.now() + timedelta(seconds=90)
    assert job.expires_at == clock.now() + timedelta(seconds=150)
    assert (job.priority, job.max_attempts, job.visibility_timeout, job.backoff_base) == (7, 4, 1.5, 2.25)


@pytest.mark.parametrize("duration", [2, 2.0, timedelta(seconds=2)])
def test_durations_are_seconds_or_timedeltas_and_read_back_as_float_seconds(duration: Any, clock: ManualClock) -> None:
    job = enqueue("mail", None, visibility_timeout=duration, backoff_base=duration, delay=duration, expires_in=duration)
    for read in (job, reload(job)):
        assert (read.visibility_timeout, read.backoff_base) == (2.0, 2.0)
        assert (type(read.visibility_timeout), type(read.backoff_base)) == (float, float)
        assert read.run_at == clock.now() + timedelta(seconds=2)
        assert read.expires_at == clock.now() + timedelta(seconds=4)


HUGE = 10**5000
DURATIONS_OUT_OF_RANGE = [
    -1,
    -0.001,
    timedelta(seconds=-1),
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    "5",
    b"5",
    Decimal(5),
    1j,
    [],
    datetime(2026, 1, 1, tzinfo=UTC),
    1e18,
    10**18,
    10**400,
    HUGE,
    -HUGE,
    timedelta.max,
    timedelta.min,
]
NUMBERS_OUT_OF_RANGE = [True, False, 1.0, 1.5, "1", Decimal(1), math.nan, [], timedelta(1), HUGE, -HUGE]
RUN_AT_OUT_OF_RANGE = [
    datetime(2030, 1, 1),
    datetime(2030, 1, 1).date(),
    "2030-01-01T00:00:00Z",
    1_900_000_000,
    timedelta(1),
    True,
    datetime.max.replace(tzinfo=timezone(-timedelta(hours=12))),
]
OUT_OF_RANGE: list[tuple[str, Any]] = [
    *[("delay", value) for value in DURATIONS_OUT_OF_RANGE],
    *[("visibility_timeout", value) for value in [0, 0.0, timedelta(0), *DURATIONS_OUT_OF_RANGE]],
    *[("expires_in", value) for value in [0, 0.0, timedelta(0), *DURATIONS_OUT_OF_RANGE]],
    *[("backoff_base", value) for value in DURATIONS_OUT_OF_RANGE],
    *[("max_attempts", value) for value in [0, -1, 2**31, 2**63, *NUMBERS_OUT_OF_RANGE]],
    *[("priority", value) for value in [2**31, -(2**31) - 1, 2**63, *NUMBERS_OUT_OF_RANGE]],
    *[("run_at", value) for value in RUN_AT_OUT_OF_RANGE],
]
TEXT_OUT_OF_RANGE = [1, True, b"key", ["key"], "", "x" * 256, "a\x00b", "\ud800", "\U0001f600" * 256]


def named(value: Any) -> str:
    return f"{type(value).__name__}" if isinstance(value, int) and abs(value) > 10**30 else ascii(value)[:40]


@pytest.mark.parametrize(("option", "value"), OUT_OF_RANGE, ids=named)
def test_f043_f046_an_option_out_of_range_is_refused_by_name_and_nothing_is_written(option: str, value: Any) -> None:
    for add in WAYS_IN.values():
        with pytest.raises(InvalidOption, match=option) as raised:
            add(**{option: value})
        assert isinstance(raised.value, ValueError)
    assert not Job.objects.exists()


@pytest.mark.parametrize("key", TEXT_OUT_OF_RANGE, ids=named)
def test_f103_a_unique_key_that_not_every_database_can_hold_is_refused(key: Any) -> None:
    for add in (lambda: enqueue("mail", None, unique_key=key), lambda: get_or_enqueue("mail", key, None)):
        with pytest.raises(InvalidOption, match="unique_key"):
            add()
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    "key", ["k", "x" * 255, "\U0001f600" * 255, " ", "a b/c%s ? '\"\n"], ids=lambda key: ascii(key)[:30]
)
def test_f103_a_unique_key_is_any_other_text_of_up_to_255_characters(key: str) -> None:
    assert reload(enqueue("mail", None, unique_key=key)).unique_key == key


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("priority", 2**31 - 1),
        ("priority", -(2**31)),
        ("max_attempts", 1),
        ("max_attempts", 2**31 - 1),
        ("delay", 0),
        ("delay", timedelta(0)),
        ("backoff_base", 0),
        ("visibility_timeout", 0.001),
        ("expires_in", 0.001),
    ],
)
@way_in
def test_the_bounds_themselves_are_in_range(add: Callable[..., Job], option: str, value: Any) -> None:
    reload(add(**{option: value}))


@way_in
def test_delay_and_run_at_together_are_refused(add: Callable[..., Job], clock: ManualClock) -> None:
    for delay in (0, 5):
        with pytest.raises(InvalidOption):
            add(delay=delay, run_at=clock.now())
    assert not Job.objects.exists()


@way_in
def test_a_run_at_in_the_past_means_now(add: Callable[..., Job], clock: ManualClock) -> None:
    job = add(run_at=clock.now() - timedelta(days=1), expires_in=60)
    assert reload(job).run_at == clock.now()
    assert reload(job).expires_at == clock.now() + timedelta(seconds=60)


def test_a_run_at_of_long_ago_means_now(clock: ManualClock) -> None:
    assert (
        enqueue("mail", None, run_at=datetime.min.replace(tzinfo=timezone(timedelta(hours=14)))).run_at == clock.now()
    )


@pytest.mark.parametrize(
    "zone", [UTC, timezone(timedelta(hours=1)), ZoneInfo("Europe/Paris"), ZoneInfo("Asia/Kolkata")]
)
def test_f083_one_instant_is_stored_the_same_in_whatever_zone_it_was_written(zone: Any, clock: ManualClock) -> None:
    instant = datetime(2026, 7, 1, 10, 30, 0, 123456, tzinfo=UTC)
    job = enqueue("mail", None, run_at=instant.astimezone(zone))
    assert reload(job).run_at == job.run_at == instant
    assert reload(job).run_at.utcoffset() == timedelta(0)


def test_f079_both_hours_of_a_night_that_has_one_twice_can_be_asked_for(clock: ManualClock) -> None:
    paris = ZoneInfo("Europe/Paris")
    first, second = (datetime(2026, 10, 25, 2, 30, fold=fold, tzinfo=paris) for fold in (0, 1))
    assert enqueue("mail", None, run_at=second).run_at - enqueue("mail", None, run_at=first).run_at == timedelta(
        hours=1
    )


@pytest.mark.parametrize("zone", ["UTC", "Asia/Shanghai", "America/New_York"])
@pytest.mark.parametrize("use_tz", [True, False])
def test_f082_times_are_right_whatever_the_projects_time_zone_settings(use_tz: bool, zone: str) -> None:
    # An hour before the clocks go back in New York.
    night = ManualClock(datetime(2026, 11, 1, 5, 0, tzinfo=UTC))
    with override_settings(USE_TZ=use_tz, TIME_ZONE=zone), use(night):
        job = enqueue("mail", None, delay=3600, visibility_timeout=3600)
        assert reload(job).run_at == datetime(2026, 11, 1, 6, 0, tzinfo=UTC)
        night.advance(3599)
        assert claim_batch("mail", "w") == []
        night.advance(1)
        [handle] = claim_batch("mail", "w")
        assert handle.lease_expires_at == datetime(2026, 11, 1, 7, 0, tzinfo=UTC)
        night.advance(3599)
        assert claim_batch("mail", "w") == []
        assert handle.ack()


@pytest.mark.parametrize("unknown", ["bogus", "schedule", "fire_at", "state", "attempts", "ttl", "Priority"])
@way_in
def test_an_unknown_option_is_a_type_error(add: Callable[..., Job], unknown: str) -> None:
    for value in (None, 1):
        with pytest.raises(TypeError, match=unknown):
            add(**{unknown: value})
    assert not Job.objects.exists()


# Many


def test_enqueue_many_returns_the_ids_in_the_payloads_order() -> None:
    enqueue("mail", "before")
    ids = enqueue_many("mail", range(250), priority=3, delay=5)
    assert ids == sorted(ids)
    assert [get_job(job_id).payload for job_id in ids] == list(range(250))
    assert set(Job.objects.filter(pk__in=ids).values_list("queue", "priority")) == {("mail", 3)}
    assert enqueue("mail", "after").id > ids[-1]


def test_enqueue_many_takes_a_generator_and_none_at_all() -> None:
    assert [get_job(i).payload for i in enqueue_many("mail", (n * n for n in range(3)))] == [0, 1, 4]
    assert enqueue_many("mail", iter(())) == []
    assert enqueue_many("mail", []) == []


@pytest.mark.parametrize("payloads", ["abc", b"abc", {"a": 1}, ""])
def test_enqueue_many_takes_no_single_payload_for_many(payloads: Any) -> None:
    with pytest.raises(InvalidPayload, match=f"not a {type(payloads).__name__}"):
        enqueue_many("mail", payloads)
    assert not Job.objects.exists()


def test_f114_enqueue_many_takes_more_than_a_statement_has_variables() -> None:
    assert len(enqueue_many("mail", range(40_000))) == 40_000
    assert Job.objects.count() == 40_000


@pytest.mark.parametrize("bad", [Decimal(1), math.nan, "\ud800"], ids=["type", "nan", "surrogate"])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_enqueue_many_with_one_bad_payload_writes_none(bad: Any, place: int) -> None:
    payloads: list[Any] = [0, 1, 2, 3, 4]
    payloads[place] = bad
    with pytest.raises(TypeError):
        enqueue_many("mail", payloads)
    assert not Job.objects.exists()


def test_enqueue_many_from_a_generator_that_raises_writes_none() -> None:
    def payloads() -> Any:
        yield 1
        raise LookupError("no more")

    with pytest.raises(LookupError):
        enqueue_many("mail", payloads())
    assert not Job.objects.exists()


def test_enqueue_many_takes_a_moment_for_each_payload(clock: ManualClock) -> None:
    now = clock.now()
    moments = [now + timedelta(hours=1), now - timedelta(days=1), now, now + timedelta(microseconds=1)]
    elsewhere = [moment.astimezone(ZoneInfo("America/New_York")) for moment in moments]
    ids = enqueue_many("mail", ["a", "b", "c", "d"], run_ats=iter(elsewhere), priority=2, expires_in=60)
    jobs = [get_job(job_id) for job_id in ids]
    assert [job.payload for job in jobs] == ["a", "b", "c", "d"]
    assert [job.run_at for job in jobs] == [moments[0], now, now, moments[3]]  # the past means now
    assert [job.expires_at - job.run_at for job in jobs] == [timedelta(seconds=60)] * 4
    assert {(job.priority, job.max_attempts, job.visibility_timeout, job.created_at) for job in jobs} == {
        (2, 3, 300.0, now)
    }


@override_settings(ALKSTORE={"QUEUES": {"mail": {"expires_in": 60, "max_attempts": 7}}})
def test_enqueue_many_with_moments_uses_the_queue_s_defaults(clock: ManualClock) -> None:
    later = clock.now() + timedelta(days=2)
    [job_id] = enqueue_many("mail", [1], run_ats=[later])
    job = get_job(job_id)
    assert (job.max_attempts, job.expires_at) == (7, later + timedelta(seconds=60))


LATER = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run_ats": [LATER]}, "one moment for each payload: 1 for 2 payloads"),
        ({"run_ats": []}, "one moment for each payload: 0 for 2 payloads"),
        ({"run_ats": [LATER] * 3}, "one moment for each payload: 3 for 2 payloads"),
        ({"run_ats": [LATER, LATER.replace(tzinfo=None)]}, r"run_ats\[1\] must be an aware datetime; .* no time zone"),
        ({"run_ats": [LATER, None]}, r"run_ats\[1\] must be an aware datetime, not NoneType"),
        ({"run_ats": [LATER.date(), LATER]}, r"run_ats\[0\] must be an aware datetime, not date"),
        ({"run_ats": [LATER, 5.0]}, r"run_ats\[1\] must be an aware datetime, not float"),
        ({"run_ats": LATER}, "run_ats must be a list .* not a datetime"),
        ({"run_ats": "ab"}, "run_ats must be a list .* not a str"),
        ({"run_ats": {LATER: 1, "b": 2}}, "run_ats must be a list .* not a dict"),
        ({"run_ats": [LATER] * 2, "delay": 0}, "run_ats, or delay or run_at, not both"),
        ({"run_ats": [LATER] * 2, "run_at": LATER}, "run_ats, or delay or run_at, not both"),
        ({"run_ats": [], "delay": 5}, "run_ats, or delay or run_at, not both"),
        ({"run_ats": [LATER] * 2, "expires_in": 0}, "expires_in"),
        ({"run_ats": [LATER, datetime.max.replace(tzinfo=UTC)], "expires_in": 1}, "expires_in .* past the year 9999"),
        ({"run_ats": [LATER] * 2, "unique_key": "k"}, "unique_key"),
    ],
)
def test_enqueue_many_refuses_moments_that_do_not_fit_before_it_writes(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        enqueue_many("mail", ["a", "b"], **options)
    assert not Job.objects.exists()


def test_enqueue_many_with_moments_and_no_payload_writes_nothing() -> None:
    assert enqueue_many("mail", [], run_ats=[]) == []
    with pytest.raises(InvalidOption, match="1 for 0 payloads"):
        enqueue_many("mail", [], run_ats=[LATER])


@pytest.mark.parametrize("add", [enqueue, enqueue_tx])
def test_run_ats_is_an_option_of_enqueue_many_alone(add: Callable[..., Job]) -> None:
    with pytest.raises(TypeError, match="unknown option 'run_ats'"):
        add("mail", None, run_ats=[LATER])


def test_many_reminders_each_at_its_own_moment_cost_little_more_than_at_one_moment() -> None:
    """Both in processor time of this thread, and the better of two tries: others use the machine, too."""
    count = 30_000
    moments = [LATER + timedelta(seconds=n) for n in range(count)]

    def seconds(**options: Any) -> float:
        started = time.thread_time()
        assert len(enqueue_many("reminders", range(count), **options)) == count
        return time.thread_time() - started

    each = min(seconds(run_ats=moments) for _ in range(2))
    stored = Job.objects.order_by("id").values_list("run_at", flat=True)
    assert list(stored) == moments * 2
    assert each < 2 * min(seconds(run_at=LATER) for _ in range(2))


@pytest.mark.django_db(transaction=True)
def test_enqueue_many_that_fails_half_way_in_the_database_leaves_none() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON django_alkstore_job WHEN NEW.payload = '3' "
            "BEGIN SELECT RAISE(ABORT, 'refused'); END"
        )
    try:
        with pytest.raises(Exception, match="refused"):
            enqueue_many("mail", range(5))
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TRIGGER refuse")
    assert not Job.objects.exists()


# Unique keys


def finish(job: Job, how: str) -> None:
    """Bring a pending job of the queue to its end in one of the ways there are."""
    if how == "cancelled":
        assert cancel(job.id)
    elif how == "deleted":
        job.delete()
    else:
        [handle] = claim_batch(job.queue, "w")
        assert handle.ack() if how == "completed" else handle.fail("broken")


def test_a_taken_key_raises_duplicate_job_with_its_holder() -> None:
    job = enqueue("mail", 1, unique_key="k")
    with pytest.raises(DuplicateJob) as raised:
        enqueue("mail", 2, unique_key="k")
    assert raised.value.job_id == job.id
    assert Job.objects.count() == 1


def test_get_or_enqueue_returns_the_live_job_and_false() -> None:
    job, created = get_or_enqueue("mail", "k", {"n": 1}, priority=5)
    again, created_again = get_or_enqueue("mail", "k", {"n": 2}, priority=6)
    assert (created, created_again) == (True, False)
    assert again == job
    assert fields_of(again) == fields_of(job)
    assert Job.objects.count() == 1


def test_a_key_is_one_queues_own() -> None:
    a, b = enqueue("a", None, unique_key="k"), enqueue("b", None, unique_key="k")
    c = outbox("a").enqueue(None, unique_key="k")
    assert len({a.id, b.id, c.id}) == 3
    with pytest.raises(DuplicateJob):
        outbox("a").enqueue(None, unique_key="k")


def test_f017_without_a_key_equal_jobs_are_two_jobs() -> None:
    first, second = enqueue("mail", {"a": 1}), enqueue("mail", {"a": 1})
    handles = claim_batch("mail", "w", limit=2)
    assert handles[0].fail("no")
    assert handles[1].ack()
    assert (reload(first).state, reload(second).state) == ("dead", "completed")


@pytest.mark.parametrize("how", ["completed", "dead", "cancelled", "deleted"])
def test_f034_a_key_is_free_again_once_its_job_is_finished(how: str) -> None:
    job = enqueue("mail", None, unique_key="k")
    finish(job, how)
    again, created = get_or_enqueue("mail", "k", None)
    assert created
    assert again.id != job.id
    with pytest.raises(DuplicateJob) as raised:
        enqueue("mail", None, unique_key="k")
    assert raised.value.job_id == again.id


@override_settings(ALKSTORE={"KEEP_COMPLETED": 0})
def test_a_key_is_free_again_when_its_job_is_deleted_on_ack() -> None:
    finish(enqueue("mail", None, unique_key="k"), "completed")
    assert get_or_enqueue("mail", "k", None)[1]


def test_a_key_is_held_through_every_live_state(clock: ManualClock) -> None:
    job = enqueue("mail", None, unique_key="k", delay=10, max_attempts=9)

    def held() -> bool:
        return get_or_enqueue("mail", "k", None) == (job, False)

    assert held()  # delayed
    clock.advance(10)
    assert held()  # due
    [handle] = claim_batch("mail", "w")
    assert held()  # processing
    handle.retry("again", delay=0)
    assert held()  # retried
    [handle] = claim_batch("mail", "w")
    handle.release()
    assert held()  # given back
    claim_batch("mail", "w")
    clock.advance(300)
    assert held()  # lapsed
    assert sweep("mail") == 1
    assert held()  # reopened


def test_a_key_is_free_again_once_its_job_has_expired(clock: ManualClock) -> None:
    job = enqueue("mail", None, unique_key="k", expires_in=5)
    clock.advance(6)
    assert sweep("mail") == 1
    assert reload(job).state == "dead"
    assert get_or_enqueue("mail", "k", None)[1]


def test_the_key_is_held_by_the_database() -> None:
    job = enqueue("mail", None, unique_key="k")
    values = fields_of(job) | {"id": None}
    with pytest.raises(IntegrityError, match="UNIQUE"), transaction.atomic():
        Job.objects.create(**values)


def test_enqueue_many_takes_no_unique_key() -> None:
    with pytest.raises(InvalidOption, match="unique_key"):
        enqueue_many("mail", [1, 2], unique_key="k")
    assert not Job.objects.exists()


def test_an_id_that_was_deleted_never_comes_back() -> None:
    first = enqueue("mail", None).id
    Job.objects.all().delete()
    ids = enqueue_many("mail", [1, 2])
    assert min(ids) > first
    Job.objects.all().delete()
    assert enqueue("mail", None).id > max(ids)
