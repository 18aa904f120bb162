"""A slow and obvious model of cron boundaries, and the library's own boundaries in the same form."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim

from django_alkstore.clock import from_us, to_us
from django_alkstore.specs import parse_spec

MINUTE = timedelta(minutes=1)


def by_minutes(expression: str, zone: ZoneInfo, begin: datetime, end: datetime) -> list[datetime]:
    """A slow and obvious model: each minute of real time, by the rule of the contract."""
    minute, hour, *_ = expression.split()
    simple = CronSim(expression, datetime(2000, 1, 1))  # its sets of numbers alone
    wanted: list[datetime] = []
    owed = False
    seen: set[datetime] = set()
    elapsed = minute.startswith("*") or hour.startswith("*")
    now = begin
    last_local = begin.astimezone(zone).replace(tzinfo=None) - MINUTE
    while now < end:
        local = now.astimezone(zone).replace(tzinfo=None)
        if elapsed:
            if matches(simple, local):
                wanted.append(now)
        else:
            skipped = last_local + MINUTE
            while skipped < local:  # the minutes of a gap
                owed = owed or matches(simple, skipped)
                skipped += MINUTE
            if (owed or matches(simple, local)) and local not in seen:
                wanted.append(now)
            owed = False
            seen.add(local)
            last_local = max(last_local, local)
        now += MINUTE
    return wanted


def matches(simple: CronSim, local: datetime) -> bool:
    return (
        local.minute in simple.minutes
        and local.hour in simple.hours
        and local.month in simple.months
        and simple.match_day(local.date())
    )


def boundaries(expression: str, zone: str, begin: datetime, end: datetime) -> list[datetime]:
    """The library's boundaries from `begin` on and before `end`."""
    parsed = parse_spec(expression, zone)
    found = []
    moment = parsed.after(0, to_us(begin) - 1)
    while moment is not None and moment < to_us(end):
        found.append(from_us(moment).astimezone(UTC))
        moment = parsed.after(0, moment)
    return found
