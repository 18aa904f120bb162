"""Section 6: declaring, pausing and removing schedules. What they fire is in test_ticks.py."""

import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_alkstore.clock import LAST_MOMENT, ManualClock
from django_alkstore.exceptions import InvalidName, InvalidOption, InvalidPayload, InvalidSpec, ReservedName
from django_alkstore.models import Job, Schedule
from django_alkstore.services import (
    pause_schedule,
    resume_schedule,
    schedule,
    soonest,
    tick,
    unschedule,
)
from tests.ledger.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)

FIELDS = [
    "name",
    "spec",
    "queue",
    "payload",
    "priority",
    "max_attempts",
    "visibility_timeout",
    "backoff_base",
    "expires_in",
    "enabled",
    "next_fire_at",
    "last_fire_at",
    "last_error",
    "created_at",
    "updated_at",
]


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def stored(name: str = "report") -> dict[str, Any]:
    return Schedule.objects.values(*FIELDS).get(name=name)


def raw(sql: str, *params: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql.replace("SCHEDULE", Schedule._meta.db_table), params)


class Boom(Exception):
    pass


@pytest.fixture
def other_writer() -> Iterator[Any]:
    """A second connection to the file, for taking the writer lock; the library waits for it a moment only."""
    options = connection.settings_dict["OPTIONS"]
    before = options["timeout"]
    connection.close()
    options["timeout"] = 0.05
    second = connections.create_connection("default")
    second.connect()
    yield second
    second.close()
    connection.close()
    options["timeout"] = before


# Declaring


def test_a_schedule_is_declared_with_its_first_boundary_one_interval_from_now(clock: ManualClock) -> None:
    declared = schedule("report", "@every 1h", "mail")
    assert isinstance(declared, Schedule)
    assert stored() == {
        "name": "report",
        "spec": "@every 1h",
        "queue": "mail",
        "payload": None,
        "priority": 0,
        "max_attempts": None,
        "visibility_timeout": None,
        "backoff_base": None,
        "expires_in": None,
        "enabled": True,
        "next_fire_at": clock.now() + seconds(3_600),
        "last_fire_at": None,
        "last_error": None,
        "created_at": clock.now(),
        "updated_at": clock.now(),
    }


@pytest.mark.parametrize("spec", ["  @every   1h ", "\t@every\n60m\r\n"])
def test_the_spec_is_kept_as_it_was_written(clock: ManualClock, spec: str) -> None:
    assert schedule("report", spec, "mail").next_fire_at == clock.now() + seconds(3_600)
    assert tick() == []
    clock.advance(3_600)
    assert len(tick()) == 1


OPTIONS: dict[str, Any] = {
    "priority": -7,
    "max_attempts": 9,
    "visibility_timeout": timedelta(minutes=2),
    "backoff_base": 0,
    "expires_in": 90,
}


@pytest.mark.parametrize("again", [False, True])
def test_the_returned_schedule_is_what_was_stored_and_needs_no_further_query(clock: ManualClock, again: bool) -> None:
    if again:
        schedule("report", "@every 5m", "other", [1], max_attempts=2)
        clock.advance(7)
    declared = schedule("report", "@every 1h", "mail", {"to": ("a", "b"), "n": 1.5}, **OPTIONS)
    with CaptureQueriesContext(connection) as queries:
        read = {name: getattr(declared, name) for name in FIELDS}
        assert declared.pk is not None
        assert str(declared)
    assert len(queries) == 0
    assert declared.get_deferred_fields() == set()
    assert read == stored()
    assert read["payload"] == {"to": ["a", "b"], "n": 1.5}
    for name in ("visibility_timeout", "backoff_base", "expires_in"):
        assert type(read[name]) is float
    assert (read["visibility_timeout"], read["backoff_base"], read["expires_in"]) == (120.0, 0.0, 90.0)
    for name in ("next_fire_at", "created_at", "updated_at"):
        assert read[name].utcoffset() == timedelta(0)
    assert read["created_at"] == clock.now() - (seconds(7) if again else seconds(0))
    assert read["updated_at"] == clock.now()


@pytest.mark.parametrize(
    "payload",
    [None, True, 0, -1.5, "", "text with \x00 and \U0001f600", 2**63, 2**200, [], {}, [[[]]], {"ключ": {"": None}}],
    ids=repr,
)
def test_any_json_value_is_a_payload(clock: ManualClock, payload: Any) -> None:
    assert schedule("report", "@every 1h", "mail", payload).payload == payload
    assert stored()["payload"] == payload
    clock.advance(3_600)
    (fire,) = tick()
    assert Job.objects.get(pk=fire.job_id).payload == payload


@pytest.mark.parametrize("depth", [10, 400, 900, 1_500, 5_000, 50_000])
def test_a_deeply_nested_payload_is_stored_whole_or_is_an_invalid_payload(clock: ManualClock, depth: int) -> None:
    payload: list[Any] = []
    for _ in range(depth):
        payload = [payload]
    try:
        declared = schedule("report", "@every 1h", "mail", payload)
    except InvalidPayload:
        assert Schedule.objects.count() == 0
        return
    seen, found = declared.payload, 0
    while seen:
        seen, found = seen[0], found + 1
    assert found == depth
    clock.advance(3_600)
    assert len(tick()) == 1


# Validation, before anything is stored

NAMES_OUTSIDE_THE_RULE = ["", "x" * 129, "a b", "-a", "a\n", "é", "a\u0661", None, 5, b"a"]
RESERVED = ["__alkstore_scheduler", "__alkstore_", "__alkstore_outbox:mail"]


def refusals() -> Iterator[Any]:
    good: dict[str, Any] = {"name": "report", "spec": "@every 1h", "queue": "mail", "payload": {"a": 1}}

    def case(error: type[Exception], label: str, **changed: Any) -> Any:
        return pytest.param(error, {**good, **changed}, id=label)

    for kind in ("name", "queue"):
        for name in NAMES_OUTSIDE_THE_RULE:
            yield case(InvalidName, f"{kind} {str(name)[:12]!a}", **{kind: name})
        for name in RESERVED:
            yield case(ReservedName, f"{kind} {name}", **{kind: name})
    for spec in ("", "@every 0s", "@every 05s", "@every 1.5h", "@every 1w", "@every 5", "@every5s", "@every \u0665s"):
        yield case(InvalidSpec, f"spec {spec!a}", spec=spec)
    for spec in (None, 5, b"@every 5s", "@every 9999999999999d", f"@every {'9' * 5_000}s", "@every 5s\ud800"):
        yield case(InvalidSpec, f"spec {str(spec)[:30]!a}", spec=spec)
    for label, payload in {
        "datetime": datetime.now(UTC),
        "Decimal": {"order": {"total": Decimal(1)}},
        "NaN": [math.nan],
        "infinity": math.inf,
        "set": {1},
        "bytes": b"x",
        "key": {1: 2},
        "surrogate": "\ud800",
        "too large": "x" * 1_048_577,
        "object": object(),
    }.items():
        yield case(InvalidPayload, f"payload {label}", payload=payload)
    for option, values in {
        "priority": [2**31, -(2**31) - 1, 1.5, "1", True],
        "max_attempts": [0, -1, 1.5, "3", True, 2**31],
        "visibility_timeout": [0, -1, math.nan, math.inf, "5", timedelta(0), 1e300],
        "backoff_base": [-1, -0.001, math.nan, math.inf, "5", timedelta(seconds=-1)],
        "expires_in": [0, -1, math.nan, math.inf, "5", timedelta(0), timedelta.max],
    }.items():
        for value in values:
            yield case(InvalidOption, f"{option} {value!r}", **{option: value})


@pytest.mark.parametrize("declared_before", [False, True])
@pytest.mark.parametrize(("error", "call"), list(refusals()))
def test_what_is_invalid_is_refused_before_anything_is_stored(
    clock: ManualClock, error: type[Exception], call: dict[str, Any], declared_before: bool
) -> None:
    if declared_before:
        schedule("report", "@every 5m", "before", [1], priority=1)
    before = list(Schedule.objects.values())
    clock.advance(1)
    arguments = dict(call)
    positional = [arguments.pop(key) for key in ("name", "spec", "queue", "payload")]
    with CaptureQueriesContext(connection) as queries, pytest.raises(error) as caught:
        schedule(*positional, **arguments)
    assert isinstance(caught.value, TypeError if error is InvalidPayload else ValueError)
    if error is InvalidName:
        assert not isinstance(caught.value, ReservedName)
    assert [query["sql"] for query in queries] == []
    assert list(Schedule.objects.values()) == before


@pytest.mark.parametrize("option", ["delay", "run_at", "unique_key", "enabled", "ttl"])
def test_an_option_that_schedules_do_not_have_is_refused(option: str) -> None:
    with pytest.raises((TypeError, InvalidOption)):
        schedule("report", "@every 1h", "mail", None, **{option: None})  # type: ignore[arg-type]
    assert Schedule.objects.count() == 0


def test_the_interval_may_be_as_long_as_a_date_can_hold_and_no_longer(clock: ManualClock) -> None:
    left = (LAST_MOMENT - clock.now()) // seconds(1)
    with pytest.raises(InvalidSpec):
        schedule("report", f"@every {left + 1}s", "mail")
    assert Schedule.objects.count() == 0
    declared = schedule("report", f"@every {left}s", "mail")
    assert declared.next_fire_at == clock.now() + seconds(left)
    clock.advance(10)
    with pytest.raises(InvalidSpec):
        schedule("another", f"@every {left}s", "mail")


# Declaring again


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("@every 60s", "@every 1m"),
        ("@every 1d", " @every\t24h "),
        ("@every 5m", "@every 5m"),
        ("@every 90m", "@every 5400s"),
    ],
)
def test_the_same_interval_in_any_words_keeps_its_place_on_the_grid(
    clock: ManualClock, first: str, second: str
) -> None:
    place = schedule("report", first, "mail").next_fire_at
    clock.advance(17)
    again = schedule("report", second, "mail")
    assert again.next_fire_at == place == stored()["next_fire_at"]
    assert again.spec == stored()["spec"] == second
    assert Schedule.objects.count() == 1


def test_deploys_do_not_postpone_a_schedule(clock: ManualClock) -> None:
    first = schedule("report", "@every 1h", "mail").next_fire_at
    fired = []
    for _ in range(30):
        clock.advance(600)
        schedule("report", "@every 1h", "mail", {"version": 2})
        fired += tick()
    assert [fire.fire_at for fire in fired] == [first + seconds(3_600 * n) for n in range(5)]


def test_declaring_again_keeps_what_is_overdue(clock: ManualClock) -> None:
    place = schedule("report", "@every 1h", "mail").next_fire_at
    clock.advance(3 * 3_600)
    schedule("report", "@every 1h", "mail")
    assert [fire.fire_at for fire in tick()] == [place, place + seconds(3_600), place + seconds(7_200)]


def test_another_interval_starts_a_new_grid_from_now(clock: ManualClock) -> None:
    schedule("report", "@every 1h", "mail")
    clock.advance(1_000)
    assert schedule("report", "@every 2h", "mail").next_fire_at == clock.now() + seconds(7_200)
    clock.advance(10)
    assert schedule("report", "@every 1h", "mail").next_fire_at == clock.now() + seconds(3_600)


def test_declaring_again_keeps_the_history_of_the_row(clock: ManualClock) -> None:
    created = schedule("report", "@every 1h", "mail").created_at
    clock.advance(3_600)
    (fire,) = tick()
    clock.advance(5)
    again = schedule("report", "@every 1h", "mail")
    assert (again.created_at, again.last_fire_at, again.updated_at) == (created, fire.fire_at, clock.now())
    other_grid = schedule("report", "@every 2h", "mail")
    assert (other_grid.created_at, other_grid.last_fire_at) == (created, fire.fire_at)


@pytest.mark.parametrize("ahead", [3_601, 86_400, 400 * 86_400])
def test_a_grid_that_lies_ahead_because_the_clock_once_did_is_put_back_by_declaring(
    clock: ManualClock, ahead: int
) -> None:
    place = schedule("report", "@every 1h", "mail").next_fire_at
    clock.step(ahead)
    while tick():
        pass
    clock.step(-ahead)
    assert stored()["next_fire_at"] > clock.now() + seconds(3_600)
    again = schedule("report", "@every 1h", "mail").next_fire_at
    assert clock.now() < again <= clock.now() + seconds(3_600)
    assert (again - place) % seconds(3_600) == timedelta(0)
    assert stored()["next_fire_at"] == again


def test_a_boundary_just_one_interval_ahead_is_in_its_place(clock: ManualClock) -> None:
    place = schedule("report", "@every 1h", "mail").next_fire_at
    clock.step(-1)
    # One second more than an interval: back on the grid, which is one interval earlier.
    assert schedule("report", "@every 1h", "mail").next_fire_at == place - seconds(3_600)
    clock.step(1)
    Schedule.objects.update(next_fire_at=place)
    assert schedule("report", "@every 1h", "mail").next_fire_at == place


def test_declaring_again_changes_queue_and_payload_and_puts_left_out_options_back_to_their_defaults(
    clock: ManualClock,
) -> None:
    schedule("report", "@every 1h", "mail", {"a": 1}, **OPTIONS)
    schedule("report", "@every 1h", "post", max_attempts=4)
    row = stored()
    assert (row["queue"], row["payload"], row["max_attempts"]) == ("post", None, 4)
    assert row["priority"] == 0
    assert (row["visibility_timeout"], row["backoff_base"], row["expires_in"]) == (None, None, None)
    clock.advance(3_600)
    (fire,) = tick()
    job = Job.objects.get(pk=fire.job_id)
    assert (job.queue, job.priority, job.max_attempts, job.visibility_timeout, job.backoff_base, job.expires_at) == (
        "post",
        0,
        4,
        300.0,
        5.0,
        None,
    )


@pytest.mark.parametrize("spec", ["@every 1h", "@every 2h"])
def test_a_paused_schedule_stays_paused_when_it_is_declared_again(clock: ManualClock, spec: str) -> None:
    schedule("report", "@every 1h", "mail")
    pause_schedule("report")
    again = schedule("report", spec, "mail", [2])
    assert again.enabled is False
    assert stored()["enabled"] is False
    clock.advance(10 * 3_600)
    assert tick() == []


def test_a_row_whose_spec_cannot_be_read_starts_a_new_grid_when_it_is_declared(clock: ManualClock) -> None:
    schedule("report", "@every 1h", "mail")
    raw("UPDATE SCHEDULE SET spec = 'hourly, please'")
    clock.advance(10)
    assert schedule("report", "@every 1h", "mail").next_fire_at == clock.now() + seconds(3_600)


def test_what_is_written_is_seen_by_the_next_declaration_in_the_same_transaction(clock: ManualClock) -> None:
    with transaction.atomic():
        first = schedule("report", "@every 1h", "mail")
        second = schedule("report", "@every 60m", "post")
        assert first.pk == second.pk
    assert stored()["queue"] == "post"


# Transactions


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("way", ["atomic", "savepoint", "autocommit off"])
def test_a_declaration_is_rolled_back_with_the_callers_transaction(clock: ManualClock, way: str, existed: bool) -> None:
    if existed:
        schedule("report", "@every 5m", "before")
    before = list(Schedule.objects.values())
    clock.advance(1)
    if way == "atomic":
        with pytest.raises(Boom), transaction.atomic():  # noqa: PT012
            schedule("report", "@every 1h", "mail")
            raise Boom
    elif way == "savepoint":
        with transaction.atomic():
            Entry.objects.create(text="outer")
            with pytest.raises(Boom), transaction.atomic():  # noqa: PT012
                schedule("report", "@every 1h", "mail")
                raise Boom
        assert Entry.objects.count() == 1
    else:
        transaction.set_autocommit(False)
        try:
            schedule("report", "@every 1h", "mail")
            transaction.rollback()
        finally:
            transaction.set_autocommit(True)
    assert list(Schedule.objects.values()) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda: unschedule("report"),
        lambda: pause_schedule("report"),
        lambda: resume_schedule("asleep"),
        tick,
    ],
    ids=["unschedule", "pause", "resume", "tick"],
)
@pytest.mark.parametrize("way", ["atomic", "autocommit off"])
def test_every_change_is_rolled_back_with_the_callers_transaction(
    clock: ManualClock, change: Callable[[], object], way: str
) -> None:
    schedule("report", "@every 1h", "mail")
    schedule("asleep", "@every 1h", "mail")
    pause_schedule("asleep")
    clock.advance(4_000)
    before = list(Schedule.objects.order_by("pk").values())
    if way == "atomic":
        with pytest.raises(Boom), transaction.atomic():  # noqa: PT012
            assert change()
            raise Boom
    else:
        transaction.set_autocommit(False)
        try:
            assert change()
            transaction.rollback()
        finally:
            transaction.set_autocommit(True)
    assert list(Schedule.objects.order_by("pk").values()) == before
    assert Job.objects.count() == 0


def test_a_refused_declaration_leaves_the_callers_transaction_usable() -> None:
    with transaction.atomic():
        Entry.objects.create(text="before")
        with pytest.raises(InvalidSpec):
            schedule("report", "hourly", "mail")
        Entry.objects.create(text="after")
    assert Entry.objects.count() == 2


def test_past_the_busy_timeout_every_function_raises_operational_error_and_has_changed_nothing(
    clock: ManualClock, other_writer: Any
) -> None:
    schedule("report", "@every 1h", "mail")
    schedule("asleep", "@every 1h", "mail")
    pause_schedule("asleep")
    clock.advance(4_000)
    before = list(Schedule.objects.order_by("pk").values())
    other_writer.cursor().execute("BEGIN IMMEDIATE")
    for call in (
        lambda: schedule("report", "@every 2h", "post"),
        lambda: schedule("new", "@every 2h", "post"),
        lambda: unschedule("report"),
        lambda: pause_schedule("report"),
        lambda: resume_schedule("asleep"),
        tick,
    ):
        # The wait is measured on the library's clock, which only this test moves.
        with pytest.raises(OperationalError), BusyClock(clock):
            call()
    other_writer.cursor().execute("ROLLBACK")
    assert list(Schedule.objects.order_by("pk").values()) == before
    assert Job.objects.count() == 0
    assert len(tick()) == 1


class BusyClock:
    """Inside, each look at the manual clock's monotonic side finds it a second later."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock

    def __enter__(self) -> None:
        self.clock.monotonic = self._later  # type: ignore[method-assign]
        self.looks = 0.0

    def _later(self) -> float:
        self.looks += 1.0
        return self.looks

    def __exit__(self, *_: object) -> None:
        del self.clock.monotonic


# Removing, pausing, resuming


def test_unschedule_returns_true_and_then_false_and_the_jobs_stay(clock: ManualClock) -> None:
    schedule("report", "@every 1h", "mail")
    clock.advance(3_600)
    tick()
    assert unschedule("report") is True
    assert unschedule("report") is False
    assert Schedule.objects.count() == 0
    assert Job.objects.count() == 1
    clock.advance(3_600)
    assert tick() == []


def test_a_schedule_that_comes_back_after_its_removal_is_a_new_one(clock: ManualClock) -> None:
    schedule("report", "@every 1h", "mail", **OPTIONS)
    clock.advance(1_000)
    unschedule("report")
    again = schedule("report", "@every 1h", "mail")
    assert again.next_fire_at == clock.now() + seconds(3_600)
    assert (again.created_at, again.last_fire_at, again.max_attempts) == (clock.now(), None, None)


def test_pausing_and_resuming_say_whether_they_changed_anything(clock: ManualClock) -> None:
    assert pause_schedule("report") is False
    assert resume_schedule("report") is False
    schedule("report", "@every 1h", "mail")
    assert resume_schedule("report") is False
    assert pause_schedule("report") is True
    assert stored()["enabled"] is False
    assert pause_schedule("report") is False
    assert resume_schedule("report") is True
    assert stored()["enabled"] is True
    assert resume_schedule("report") is False


@pytest.mark.parametrize("call", [pause_schedule, resume_schedule, unschedule])
def test_only_the_named_schedule_is_touched(clock: ManualClock, call: Callable[[str], bool]) -> None:
    for name in ("report", "report2", "Report"):
        schedule(name, "@every 1h", "mail")
        if call is resume_schedule:
            pause_schedule(name)
    before = {name: stored(name) for name in ("report2", "Report")}
    assert call("report") is True
    assert {name: stored(name) for name in ("report2", "Report")} == before


@pytest.mark.parametrize("missed", [0, 1, 3, 100])
@pytest.mark.parametrize("offset", [0, 1, 3_599])
def test_f086_a_resumed_schedule_goes_on_from_its_first_boundary_after_now(
    clock: ManualClock, missed: int, offset: int
) -> None:
    place = schedule("report", "@every 1h", "mail").next_fire_at
    pause_schedule("report")
    clock.advance(3_600 * missed + offset)
    assert tick() == []
    assert resume_schedule("report") is True
    expected = place + seconds(3_600 * missed)
    assert stored()["next_fire_at"] == expected > clock.now()
    assert tick() == [], "what the pause missed is not fired"
    clock.advance(3_600 - offset - 1)
    assert tick() == []
    clock.advance(1)
    assert [fire.fire_at for fire in tick()] == [expected]


def test_a_boundary_at_the_very_moment_of_the_resumption_was_missed(clock: ManualClock) -> None:
    place = schedule("report", "@every 1h", "mail").next_fire_at
    pause_schedule("report")
    clock.advance(3_600)
    resume_schedule("report")
    assert stored()["next_fire_at"] == place + seconds(3_600)


def test_a_schedule_paused_ahead_of_a_clock_that_went_back_is_resumed_from_its_first_boundary_after_now(
    clock: ManualClock,
) -> None:
    place = schedule("report", "@every 1h", "mail").next_fire_at
    clock.step(86_400)
    tick()
    pause_schedule("report")
    clock.step(-86_400)
    resume_schedule("report")
    assert stored()["next_fire_at"] == place


def test_resuming_a_schedule_that_was_paused_with_an_error_clears_it(clock: ManualClock) -> None:
    schedule("report", "@every 1h", "mail")
    raw("UPDATE SCHEDULE SET payload = 'not json'")
    clock.advance(3_600)
    tick()
    assert stored()["enabled"] is False
    assert stored()["last_error"]
    schedule("report", "@every 1h", "mail", "mended")
    assert stored()["enabled"] is False
    assert resume_schedule("report") is True
    row = stored()
    assert (row["enabled"], row["last_error"]) == (True, None)
    clock.advance(3_600)
    assert len(tick()) == 1


def test_resuming_a_row_whose_spec_cannot_be_read_is_an_invalid_spec_and_it_stays_paused(clock: ManualClock) -> None:
    schedule("report", "@every 1h", "mail")
    pause_schedule("report")
    raw("UPDATE SCHEDULE SET spec = 'hourly'")
    before = stored()
    with pytest.raises(InvalidSpec):
        resume_schedule("report")
    assert stored() == before


@pytest.mark.parametrize("call", [unschedule, pause_schedule, resume_schedule])
@pytest.mark.parametrize(
    ("name", "error"), [("", InvalidName), ("a b", InvalidName), (None, InvalidName), ("__alkstore_x", ReservedName)]
)
def test_the_name_rule_holds_for_them_too(call: Callable[[Any], bool], name: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call(name)


# Soonest


def test_soonest_is_the_earliest_boundary_of_those_that_are_not_paused(clock: ManualClock) -> None:
    assert soonest() is None
    schedule("hourly", "@every 1h", "mail")
    schedule("daily", "@every 1d", "mail")
    assert soonest() == clock.now() + seconds(3_600)
    pause_schedule("hourly")
    assert soonest() == clock.now() + seconds(86_400)
    pause_schedule("daily")
    assert soonest() is None
    resume_schedule("hourly")
    clock.advance(5_000)
    assert soonest() == clock.now() - seconds(1_400), "an overdue one is soonest of all"


# Another database


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_schedules_live_in_the_database_that_was_asked_for(clock: ManualClock) -> None:
    schedule("report", "@every 1h", "mail", using="other")
    assert Schedule.objects.using("default").count() == 0
    assert soonest() is None
    assert soonest(using="other") == clock.now() + seconds(3_600)
    assert pause_schedule("report") is False
    assert pause_schedule("report", using="other") is True
    assert resume_schedule("report", using="other") is True
    clock.advance(3_600)
    assert tick() == []
    (fire,) = tick(using="other")
    assert Job.objects.using("other").get().pk == fire.job_id
    assert Job.objects.using("default").count() == 0
    assert unschedule("report") is False
    assert unschedule("report", using="other") is True
