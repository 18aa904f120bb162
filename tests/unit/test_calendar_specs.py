"""Section 11: cron and single moments, and the two nights in which the clock changes."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from django.test import override_settings

from django_alkstore.clock import from_us, to_us
from django_alkstore.exceptions import InvalidSpec
from django_alkstore.specs import At, Cron, parse_spec
from tests.calendar.model import boundaries, by_minutes


def following(spec: str, zone: str, start: str, n: int = 4) -> list[str]:
    """The next boundaries after a moment of the zone, on its wall clock, with the offset from UTC."""
    parsed = parse_spec(spec, zone)
    moment: int | None = to_us(datetime.fromisoformat(start).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC))
    found = []
    for _ in range(n):
        assert moment is not None
        moment = parsed.after(0, moment)
        if moment is None:
            break
        found.append(from_us(moment).astimezone(ZoneInfo(zone)).strftime("%m-%d %H:%M%z"))
    return found


NIGHTS = [
    # Berlin: 02:00 to 03:00 is missing on March 29th, and comes twice on October 25th.
    ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["03-29 03:00+0200", "03-30 02:30+0200"]),
    ("0,30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["03-29 03:00+0200", "03-30 02:00+0200"]),
    ("0 3 * * *", "Europe/Berlin", "2026-03-28T12:00", ["03-29 03:00+0200", "03-30 03:00+0200"]),
    ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00", ["10-25 02:30+0200", "10-26 02:30+0100"]),
    ("*/30 * * * *", "Europe/Berlin", "2026-03-29T01:10", ["03-29 01:30+0100", "03-29 03:00+0200"]),
    (
        "*/30 2 * * *",
        "Europe/Berlin",
        "2026-10-25T01:50",
        ["10-25 02:00+0200", "10-25 02:30+0200", "10-25 02:00+0100", "10-25 02:30+0100"],
    ),
    ("30 * * * *", "Europe/Berlin", "2026-10-25T02:10", ["10-25 02:30+0200", "10-25 02:30+0100", "10-25 03:30+0100"]),
    # New York: 02:00 to 03:00 is missing on March 8th; 01:00 to 02:00 comes twice on November 1st.
    ("30 2 * * *", "America/New_York", "2026-03-07T12:00", ["03-08 03:00-0400", "03-09 02:30-0400"]),
    ("30 1 * * *", "America/New_York", "2026-10-31T12:00", ["11-01 01:30-0400", "11-02 01:30-0500"]),
    # Lord Howe moves its clock by half an hour: 02:00 to 02:30 is missing on October 4th, 01:30 to 02:00 comes twice.
    ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00", ["10-04 02:30+1100", "10-05 02:15+1100"]),
    ("10,20 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00", ["10-04 02:30+1100", "10-05 02:10+1100"]),
    ("45 1 * * *", "Australia/Lord_Howe", "2026-04-04T12:00", ["04-05 01:45+1100", "04-06 01:45+1030"]),
    # Samoa had no December 30th in 2011.
    ("0 12 * * *", "Pacific/Apia", "2011-12-28T13:00", ["12-29 12:00-1000", "12-31 00:00+1400", "12-31 12:00+1400"]),
]


@pytest.mark.parametrize(("spec", "zone", "start", "expected"), NIGHTS)
def test_the_nights_in_which_the_clock_changes(spec: str, zone: str, start: str, expected: list[str]) -> None:
    assert following(spec, zone, start, len(expected)) == expected


@pytest.mark.parametrize("minutes", range(0, 60, 7))
def test_a_boundary_of_an_hour_that_comes_twice_is_not_fired_a_second_time(minutes: int) -> None:
    """Asked in the second of the two hours."""
    asked = datetime(2026, 10, 25, 1, minutes, tzinfo=UTC)  # 02:00 to 03:00 in Berlin, the second time
    found = parse_spec("30 2 * * *", "Europe/Berlin").after(0, to_us(asked))
    assert found is not None
    assert from_us(found) == datetime(2026, 10, 26, 1, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("spec", "start", "expected"),
    [
        ("0 19 * * mon-fri", "2026-11-27T20:00", ["11-30 19:00+0100", "12-01 19:00+0100"]),
        ("0 9 L * *", "2026-02-01T00:00", ["02-28 09:00+0100", "03-31 09:00+0200"]),
        ("0 9 * * mon#1", "2026-11-30T00:00", ["12-07 09:00+0100", "01-04 09:00+0100"]),
        ("0 9 * * fri,sat", "2026-12-01T00:00", ["12-04 09:00+0100", "12-05 09:00+0100"]),
        ("0 0 13 * fri", "2026-11-01T00:00", ["11-06 00:00+0100", "11-13 00:00+0100", "11-20 00:00+0100"]),
        ("0 0 */2 * fri", "2026-11-01T00:00", ["11-13 00:00+0100", "11-27 00:00+0100"]),
        ("@hourly", "2026-12-01T00:00", ["12-01 01:00+0100"]),
        ("@daily", "2026-12-01T00:00", ["12-02 00:00+0100"]),
        ("  @weekly ", "2026-12-01T00:00", ["12-06 00:00+0100"]),
        ("@monthly", "2026-12-01T00:00", ["01-01 00:00+0100"]),
        ("@Yearly", "2026-12-01T00:00", ["01-01 00:00+0100"]),
        ("@at 2027-03-01T09:00", "2026-12-01T00:00", ["03-01 09:00+0100"]),
        ("@at 2027-03-01T09:00+05:00", "2026-12-01T00:00", ["03-01 05:00+0100"]),
        ("@at 2027-03-28T02:30", "2026-12-01T00:00", ["03-28 03:00+0200"]),
        ("@at 2026-10-25T02:30", "2026-10-01T00:00", ["10-25 02:30+0200"]),
    ],
)
def test_what_a_spec_means(spec: str, start: str, expected: list[str]) -> None:
    assert following(spec, "Europe/Berlin", start, len(expected)) == expected


NO_SPECS = [
    "",
    "* * * *",
    "* * * * * *",
    "60 * * * *",
    "* 24 * * *",
    "0 0 30 2 *",
    "0 0 31 4,6 *",
    "@dayly",
    "@at",
    "@at now",
    "@at 2027-13-01",
    "a b c d e",
    "@every 5",
    "@daily @daily",
    "\N{ARABIC-INDIC DIGIT ZERO} 0 * * *",
    "@at 9999-12-31T23:59-12:00",
]


@pytest.mark.parametrize("spec", NO_SPECS)
def test_what_is_no_spec(spec: str) -> None:
    with pytest.raises(InvalidSpec):
        parse_spec(spec, "UTC")


@pytest.mark.parametrize("zone", ["Europe/Berln", "", "../etc/passwd", "/etc/localtime", 5, b"UTC", "UTC\0", "x" * 300])
def test_an_unknown_time_zone(zone: object) -> None:
    with pytest.raises(InvalidSpec):
        parse_spec("@daily", zone)


def test_the_project_s_time_zone_is_the_default() -> None:
    with override_settings(TIME_ZONE="Asia/Tokyo"):
        assert parse_spec("@daily") == Cron("0 0 * * *", ZoneInfo("Asia/Tokyo"))
    with override_settings(TIME_ZONE="Europe/Berlin"):
        assert parse_spec("@daily") == Cron("0 0 * * *", ZoneInfo("Europe/Berlin"))


def test_specs_are_equal_if_they_mean_the_same() -> None:
    assert parse_spec("@every 60s") == parse_spec("@every 1m")
    assert parse_spec("@daily", "UTC") == parse_spec("0 0  * * *", "UTC") != parse_spec("@daily", "Europe/Berlin")
    assert parse_spec("@at 2027-01-01T00:00", "UTC") == At(to_us(datetime(2027, 1, 1, tzinfo=UTC)))


@pytest.mark.parametrize("spec", ["0 7 * * *", "*/5 * * * *", "0 0 1 * *", "@every 7m", "0 0 29 2 *"])
@pytest.mark.parametrize("after", [timedelta(0), timedelta(minutes=3), timedelta(days=3), timedelta(days=900)])
def test_the_latest_boundary_is_the_last_of_all(spec: str, after: timedelta) -> None:
    parsed = parse_spec(spec, "Europe/Berlin")
    begin = parsed.after(0, to_us(datetime(2024, 2, 27, 12, tzinfo=UTC)))
    assert begin is not None
    now = to_us(from_us(begin) + after)
    found = parsed.latest(begin, now)
    assert begin <= found <= now
    later = parsed.after(begin, found)
    assert later is None or later > now


EXPRESSIONS = ["30 2 * * *", "*/20 * * * *", "0 1-4 * * *", "15,45 0-3 1,15 * *", "5 2 * * sun", "0 */6 * * *"]


CHANGES = [  # a day before a change of the clock, in UTC
    ("Europe/Berlin", datetime(2026, 3, 28, tzinfo=UTC)),
    ("Europe/Berlin", datetime(2026, 10, 24, tzinfo=UTC)),
    ("America/New_York", datetime(2026, 3, 7, tzinfo=UTC)),
    ("America/New_York", datetime(2026, 10, 31, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2026, 4, 3, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2026, 10, 2, tzinfo=UTC)),
    ("America/Sao_Paulo", datetime(2018, 11, 3, tzinfo=UTC)),  # the change was at midnight
    ("Africa/Casablanca", datetime(2026, 2, 14, tzinfo=UTC)),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize(("zone", "begin"), CHANGES)
def test_the_boundaries_are_those_of_a_slow_model_around_each_change(
    expression: str, zone: str, begin: datetime
) -> None:
    end = begin + timedelta(days=3)
    assert boundaries(expression, zone, begin, end) == by_minutes(expression, ZoneInfo(zone), begin, end)
