"""Section 11: schedules by the wall clock, what becomes of missed boundaries, and schedules that the code declares."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command

from django_alkstore import registrations
from django_alkstore.clock import ManualClock
from django_alkstore.exceptions import InvalidOption, InvalidSpec
from django_alkstore.models import Job, Schedule
from django_alkstore.registry import handler, scheduled
from django_alkstore.services import (
    next_boundaries,
    pause_schedule,
    resume_schedule,
    schedule,
    soonest,
    tick,
    unschedule,
)
from django_alkstore.services.declared import bring_in_line
from django_alkstore.testing import frozen_clock, isolated_registry

pytestmark = pytest.mark.django_db

START = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)  # a Tuesday
HOUR = timedelta(hours=1)


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    with frozen_clock(ManualClock(START)) as clock:
        yield clock


def row(name: str = "s") -> Schedule:
    return Schedule.objects.get(name=name)


def counts(name: str = "s") -> tuple[int, int, int, int]:
    found = row(name)
    return found.fired, found.coalesced, found.too_late, found.overlapped


def fired(at: datetime | None = None) -> list[datetime]:
    return [fire.fire_at for fire in tick(at)]


# By the wall clock


def test_a_cron_schedule_fires_by_the_wall_clock_of_its_zone(clock: ManualClock) -> None:
    made = schedule("s", "0 19 * * mon-fri", "q", timezone="Europe/Berlin")
    assert made.timezone == "Europe/Berlin"
    assert made.next_fire_at == datetime(2026, 12, 1, 18, 0, tzinfo=UTC)
    assert fired() == []
    clock.advance(6 * 3_600)
    assert fired() == [datetime(2026, 12, 1, 18, 0, tzinfo=UTC)]
    assert row().next_fire_at == datetime(2026, 12, 2, 18, 0, tzinfo=UTC)
    assert next_boundaries("s", 3) == [datetime(2026, 12, day, 18, 0, tzinfo=UTC) for day in (2, 3, 4)]
    assert next_boundaries("s", 4)[-1] == datetime(2026, 12, 7, 18, 0, tzinfo=UTC)
    assert next_boundaries("unknown") == []


def test_the_project_s_zone_is_the_default_and_kept_on_the_row(clock: ManualClock, settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Tokyo"
    made = schedule("s", "@daily", "q")
    settings.TIME_ZONE = "UTC"
    assert (made.timezone, row().next_fire_at) == ("Asia/Tokyo", datetime(2026, 12, 1, 15, 0, tzinfo=UTC))
    assert next_boundaries("s", 1) == [datetime(2026, 12, 1, 15, 0, tzinfo=UTC)]


@pytest.mark.parametrize(
    "options",
    [{"timezone": "Europe/Berln"}, {"timezone": 5}, {"starting": START}],
)
def test_a_wrong_zone_or_a_start_of_no_grid_is_an_invalid_spec_and_nothing_is_stored(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec):
        schedule("s", "@daily", "q", **options)
    assert not Schedule.objects.exists()


@pytest.mark.parametrize(
    "options",
    [
        {"catch_up": "some"},
        {"overlap": "queue"},
        {"grace": -1},
        {"jitter": -1},
        {"starts_at": datetime(2026, 1, 1)},
        {"starts_at": START + HOUR, "ends_at": START},
    ],
)
def test_a_wrong_option_is_refused_and_nothing_is_stored(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        schedule("s", "@every 1h", "q", **options)
    assert not Schedule.objects.exists()


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="zone"):
        schedule("s", "@daily", "q", zone="UTC")  # type: ignore[call-arg]


def test_at_fires_once(clock: ManualClock) -> None:
    schedule("s", "@at 2026-12-01T15:00", "q", timezone="UTC")
    clock.advance(4 * 3_600)
    assert fired() == [START + 3 * HOUR]
    assert row().next_fire_at is None
    assert row().enabled
    assert (fired(), soonest(), next_boundaries("s")) == ([], None, [])


@pytest.mark.django_db(transaction=True)
def test_at_in_the_past_is_stored_without_a_next_boundary_and_logged(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "django_alkstore"):
        made = schedule("s", "@at 2026-01-01T00:00", "q")
    assert made.next_fire_at is None
    assert "schedule s has no next boundary" in caplog.text
    assert (tick(), soonest()) == ([], None)


# The grid of `@every`


def test_starting_is_the_first_boundary(clock: ManualClock) -> None:
    schedule("s", "@every 1h", "q", starting=START + timedelta(minutes=10))
    assert next_boundaries("s", 2) == [START + timedelta(minutes=10), START + timedelta(minutes=70)]


def test_a_start_in_the_past_is_a_moment_of_the_grid(clock: ManualClock) -> None:
    begin = START - timedelta(days=3, minutes=50)
    schedule("s", "@every 1h", "q", starting=begin)
    assert row().next_fire_at == START + timedelta(minutes=10)
    clock.advance(300)
    schedule("s", "@every 60m", "q", starting=begin)
    assert row().next_fire_at == START + timedelta(minutes=10)


def test_a_start_far_ahead_is_kept_when_it_is_declared_again(clock: ManualClock) -> None:
    begin = START + timedelta(days=9)
    for _ in range(2):
        schedule("s", "@every 1h", "q", starting=begin)
        assert row().next_fire_at == begin
        clock.advance(600)


def test_no_boundary_before_the_start_and_none_after_the_end(clock: ManualClock) -> None:
    options: dict[str, Any] = {"starts_at": START + 2 * HOUR, "ends_at": START + 4 * HOUR}
    schedule("s", "@every 1h", "q", **options)
    assert next_boundaries("s") == [START + 2 * HOUR, START + 3 * HOUR, START + 4 * HOUR]
    schedule("s", "@every 1h", "q", **options)
    assert row().next_fire_at == START + 2 * HOUR
    clock.advance(10 * 3_600)
    assert fired() == [START + 2 * HOUR, START + 3 * HOUR, START + 4 * HOUR]
    assert row().next_fire_at is None
    assert row().enabled


# What was missed


def test_all_is_the_default_of_every_and_fires_the_earliest_64(clock: ManualClock) -> None:
    schedule("s", "@every 1m", "q")
    clock.advance(100 * 60)
    assert fired() == [START + timedelta(minutes=n) for n in range(1, 65)]
    assert counts() == (64, 0, 36, 0)
    assert row().next_fire_at == START + timedelta(minutes=101)


@pytest.mark.django_db(transaction=True)
def test_latest_is_the_default_of_cron_and_fires_once(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    schedule("s", "0 * * * *", "q", timezone="UTC")
    clock.advance(5 * 3_600 + 60)
    with caplog.at_level("WARNING", "django_alkstore"):
        assert fired() == [START + 5 * HOUR]
    assert counts() == (1, 4, 0, 0)
    assert "4 covered by a later one" in caplog.text
    assert row().next_fire_at == START + 6 * HOUR


def test_cron_may_fire_all(clock: ManualClock) -> None:
    schedule("s", "0 * * * *", "q", timezone="UTC", catch_up="all")
    clock.advance(3 * 3_600)
    assert fired() == [START + HOUR, START + 2 * HOUR, START + 3 * HOUR]


def test_none_fires_only_what_has_just_become_due(clock: ManualClock) -> None:
    schedule("s", "@every 1h", "q", catch_up="none")
    clock.advance(3 * 3_600 + 30)
    assert fired() == [START + 3 * HOUR]
    assert counts() == (1, 0, 2, 0)
    clock.advance(3_600 + 31)
    assert fired() == []
    assert counts() == (1, 0, 3, 0)
    assert row().next_fire_at == START + 5 * HOUR


def test_grace_is_the_time_in_which_a_boundary_fires(clock: ManualClock) -> None:
    schedule("s", "@every 1h", "q", grace=2 * HOUR)
    clock.advance(5 * 3_600)
    assert fired() == [START + 3 * HOUR, START + 4 * HOUR, START + 5 * HOUR]
    assert counts() == (3, 0, 2, 0)
    schedule("late", "0 6 * * *", "q", timezone="UTC", grace=60)
    clock.advance(24 * 3_600)
    assert [fire for fire in tick() if fire.name == "late"] == []
    assert counts("late") == (0, 0, 1, 0)


def test_overlap_skip_fires_nothing_beside_the_job_of_an_earlier_boundary(clock: ManualClock) -> None:
    schedule("s", "@every 1h", "q", overlap="skip")
    clock.advance(3 * 3_600)
    assert fired() == [START + HOUR]
    assert counts() == (1, 0, 0, 2)
    clock.advance(3_600)
    assert fired() == []
    assert counts() == (1, 0, 0, 3)
    Job.objects.update(state="completed", finished_at=START, worker_id=None, lease_expires_at=None)
    clock.advance(3_600)
    assert fired() == [START + 5 * HOUR]


def test_jitter_puts_a_job_off_by_the_same_each_time_and_leaves_its_boundary(clock: ManualClock) -> None:
    schedule("s", "@every 1h", "q", jitter=600, expires_in=60)
    clock.advance(8 * 3_600)
    tick()
    jobs = list(Job.objects.order_by("fire_at"))
    now = START + 8 * HOUR
    put_off = [(job.run_at - now).total_seconds() for job in jobs]
    assert all(0 <= seconds <= 600 for seconds in put_off)
    assert len(set(put_off)) == 8
    assert [job.fire_at for job in jobs] == [START + n * HOUR for n in range(1, 9)]
    assert all(job.expires_at == job.run_at + timedelta(seconds=60) for job in jobs)
    unschedule("s")
    Job.objects.all().delete()
    clock.step(-8 * 3_600)
    schedule("s", "@every 1h", "q", jitter=600)
    clock.step(8 * 3_600)
    tick()
    assert [(job.run_at - now).total_seconds() for job in Job.objects.order_by("fire_at")] == put_off


# Declaring again, pausing


def test_a_cron_schedule_that_is_declared_again_keeps_what_it_has_missed(clock: ManualClock) -> None:
    schedule("s", "0 * * * *", "q", timezone="UTC")
    clock.advance(3_600 + 60)
    schedule("s", "0  * * * *", "q", timezone="UTC")
    assert fired() == [START + HOUR]
    clock.advance(3_600)
    schedule("s", "0 * * * *", "q", timezone="Asia/Kolkata")
    assert row().next_fire_at == START + timedelta(hours=2, minutes=30)


def test_a_pause_of_a_cron_schedule(clock: ManualClock) -> None:
    schedule("s", "0 * * * *", "q", timezone="UTC")
    assert pause_schedule("s")
    clock.advance(5 * 3_600)
    schedule("s", "0 * * * *", "q", timezone="UTC")
    assert (fired(), row().enabled) == ([], False)
    assert resume_schedule("s")
    assert row().next_fire_at == START + 6 * HOUR


# Declared in code


@pytest.fixture
def code() -> Iterator[None]:
    with isolated_registry():
        yield


def declare(spec: str = "0 7 * * *", name: str | None = "morning", **options: Any) -> None:
    @scheduled(spec, name, timezone="UTC", **options)
    @handler("reports")
    def build(job: object) -> None: ...


def changes() -> list[tuple[str, str]]:
    return [(difference.name, difference.change.value) for difference in bring_in_line()]


def test_the_rows_are_brought_in_line_with_the_code(clock: ManualClock) -> None:
    with isolated_registry():
        declare(payload={"kind": "sales"}, max_attempts=2)
        assert changes() == [("morning", "added")]
        assert changes() == []
        found = row("morning")
        assert (found.queue, found.payload, found.max_attempts, found.from_code) == (
            "reports",
            {"kind": "sales"},
            2,
            True,
        )
    with isolated_registry():
        declare("0 8 * * *")
        assert changes() == [("morning", "changed")]
        assert row("morning").next_fire_at == datetime(2026, 12, 2, 8, 0, tzinfo=UTC)
        pause_schedule("morning")
    with isolated_registry():
        assert changes() == [("morning", "disabled")]
        clock.advance(3 * 86_400)
        assert (tick(), soonest()) == ([], None)
        assert changes() == []
    with isolated_registry():
        declare("0 8 * * *")
        assert changes() == [("morning", "changed")]
        assert not row("morning").enabled
        assert row("morning").undeclared_at is None


def test_a_row_of_schedule_stands(code: None) -> None:
    schedule("morning", "@every 1h", "q")
    declare()
    assert changes() == [("morning", "conflict")]
    assert row("morning").spec == "@every 1h"
    with isolated_registry():
        assert changes() == []


def test_nothing_is_disabled_if_a_module_could_not_be_imported(code: None) -> None:
    declare()
    changes()
    with isolated_registry():
        registrations._broken.append(registrations.BrokenModule("shop.alkstore", "error", "traceback"))
        assert changes() == []


def build_report(job: object) -> None: ...


def test_the_name_is_that_of_the_function_by_default(code: None) -> None:
    scheduled("@daily")(handler("reports")(build_report))
    assert changes() == [("tests.contract.test_calendar.build_report", "added")]


def test_two_of_one_name_are_improperly_configured(code: None) -> None:
    declare()
    with pytest.raises(ImproperlyConfigured, match="declared twice"):

        @scheduled("@daily", "morning")
        @handler("other")
        def other(job: object) -> None: ...


@pytest.mark.parametrize(
    ("error", "spec", "options"),
    [(InvalidSpec, "nonsense", {}), (InvalidOption, "@daily", {"grace": -1}), (TypeError, "@daily", {"zone": "UTC"})],
)
def test_what_is_wrong_is_said_where_it_is_written(
    code: None, error: type[Exception], spec: str, options: dict[str, Any]
) -> None:
    with pytest.raises(error):
        declare(spec, **options)


def test_a_plain_function_cannot_be_scheduled(code: None) -> None:
    with pytest.raises(InvalidOption, match="above @handler or @task"):
        scheduled("@daily")(lambda: None)


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    call_command("alkstore_schedules", *arguments)
    return capsys.readouterr().out


def test_the_command_lists_and_operates(capsys: pytest.CaptureFixture[str], code: None, clock: ManualClock) -> None:
    assert run(capsys) == "There are no schedules.\n"
    schedule("s", "0 7 * * *", "q", timezone="Europe/Berlin")
    listed = run(capsys)
    assert "s: 0 7 * * * into q, on" in listed
    assert listed.count("07:00:00 CET") == 5
    assert "paused schedule s" in run(capsys, "pause", "s")
    assert "fired schedule s: job" in run(capsys, "fire", "s")
    assert "resumed schedule s" in run(capsys, "resume", "s")
    (described,) = json.loads(run(capsys, "--json"))
    assert described["name"] == "s"
    assert described["last result"].endswith("is pending")
    assert "deleted schedule s" in run(capsys, "delete", "s")
    with pytest.raises(CommandError, match="there is no schedule"):
        run(capsys, "pause", "s")
    with pytest.raises(CommandError, match="needs the name"):
        run(capsys, "pause")


def test_the_check_shows_what_differs_and_ends_with_status_1(capsys: pytest.CaptureFixture[str], code: None) -> None:
    assert "are those of the code" in run(capsys, "--check")
    declare()
    with pytest.raises(CommandError) as caught:
        run(capsys, "--check")
    assert caught.value.returncode == 1
    assert "added     morning" in capsys.readouterr().out
    bring_in_line()
    assert "are those of the code" in run(capsys, "--check")


def test_the_check_fails_if_a_module_cannot_be_imported(
    capsys: pytest.CaptureFixture[str], code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the module declares is not known, so the schedules cannot be called those of the code."""
    monkeypatch.setattr(registrations, "_broken", [registrations.BrokenModule("shop.alkstore", "OSError: no", "")])
    with pytest.raises(CommandError, match=r"cannot compare: shop\.alkstore cannot be imported") as caught:
        run(capsys, "--check")
    assert caught.value.returncode == 1
