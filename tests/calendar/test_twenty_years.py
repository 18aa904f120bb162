"""Boundaries of random cron expressions, in 40 zones over 20 years: against a slow model and against `cronsim`."""

from datetime import UTC, datetime, timedelta
from functools import cache
from random import Random
from zoneinfo import ZoneInfo, available_timezones

import pytest
from cronsim import CronSim, CronSimError

from tests.calendar.model import boundaries, by_minutes

BEGIN = datetime(2010, 1, 1, tzinfo=UTC)
END = datetime(2030, 1, 1, tzinfo=UTC)
ALWAYS = (
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",  # moves its clock by half an hour
    "Pacific/Apia",  # left out a day
    "Asia/Beirut",  # leaves out midnight
    "Africa/Casablanca",  # changes four times in some years
    "America/Caracas",  # has moved by half an hour, twice
    "Asia/Pyongyang",
    "Europe/Istanbul",  # has given up changing
)
DAYS = ("*", "*", "*", "*/2", "1,15", "L", "10-20")
WEEKDAYS = ("*", "*", "*", "mon-fri", "sun", "sun#1", "0,6")


@cache
def zones() -> list[str]:
    others = sorted(zone for zone in available_timezones() if "/" in zone and zone not in ALWAYS)
    return [*ALWAYS, *Random(11).sample(others, 40 - len(ALWAYS))]


def changes(zone: str) -> list[datetime]:
    """The hours, in UTC, in which the zone's offset changes."""
    local = ZoneInfo(zone)
    found = []
    day = BEGIN
    while day < END:
        following = day + timedelta(days=1)
        if day.astimezone(local).utcoffset() != following.astimezone(local).utcoffset():
            hour = day
            while hour.astimezone(local).utcoffset() == (hour + timedelta(hours=1)).astimezone(local).utcoffset():
                hour += timedelta(hours=1)
            found.append(hour)
        day = following
    return found


def expression(random: Random) -> str:
    """One that often has boundaries in the small hours, in which clocks change."""
    while True:
        minute = random.choice(("*", "*/10", "*/7", "0", "30", "15,45", "10-50/20", str(random.randrange(60))))
        hour = random.choice(("*", "*/2", "*/3", "0", "1", "2", "3", "0-4", "1,2,23", str(random.randrange(24))))
        made = f"{minute} {hour} {random.choice(DAYS)} * {random.choice(WEEKDAYS)}"
        try:
            CronSim(made, BEGIN)
        except CronSimError:
            continue
        return made


@pytest.mark.parametrize("zone", zones())
def test_around_each_change_of_the_clock_the_boundaries_are_those_of_the_model(zone: str) -> None:
    random = Random(zone)
    for change in changes(zone):
        begin = (change - timedelta(hours=random.randrange(6, 26))).replace(minute=0)
        end = change + timedelta(hours=30)
        cron = expression(random)
        assert boundaries(cron, zone, begin, end) == by_minutes(cron, ZoneInfo(zone), begin, end), (cron, change)


@pytest.mark.parametrize("zone", [zone for zone in zones() if zone not in ("Australia/Lord_Howe", "America/Caracas")])
def test_over_twenty_years_the_boundaries_are_those_of_cronsim(zone: str) -> None:
    """`cronsim` is left out where it goes out of step: a change by half an hour. The model has those."""
    random = Random(zone)
    hours = random.sample(range(24), 2)
    cron = f"{random.randrange(60)} {min(hours)},{max(hours)} {random.choice(DAYS)} * {random.choice(WEEKDAYS)}"
    expected: list[datetime] = []
    for moment in CronSim(cron, (BEGIN - timedelta(minutes=1)).astimezone(ZoneInfo(zone))):
        if moment >= END:
            break
        expected.append(moment.astimezone(UTC))
    assert expected
    assert boundaries(cron, zone, BEGIN, END) == expected, cron
