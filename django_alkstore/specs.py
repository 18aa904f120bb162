"""When a schedule is due: one object for each kind of spec, and the arithmetic of its boundaries.

No other module knows which kind a spec is. Moments are microseconds since the epoch, in UTC.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import ClassVar, Protocol
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from django.utils import timezone as django_timezone

from django_alkstore.clock import LAST_US, SECOND, from_us, to_us
from django_alkstore.exceptions import InvalidSpec

_EVERY = re.compile(r"\s*@every\s+([1-9][0-9]*)([smhd])\s*")
_AT = re.compile(r"\s*@at\s+(\S+)\s*")
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_MAX_DIGITS = 15
"""Longer numbers are past every date already; refusing them by length keeps them from being parsed at all."""
_NAMED = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
_LONGEST_CHANGE = timedelta(hours=3)
"""Of a wall clock, beside the days that a zone has left out or had twice."""
_LOOK_BACK = (2 * 3_600 * SECOND, 2 * 86_400 * SECOND, 40 * 86_400 * SECOND, 400 * 86_400 * SECOND)
"""How far to look back for the latest boundary, in growing steps, before looking through everything."""
_GRAMMAR = (
    "it is '@every <n><unit>' (n a positive whole number, unit one of s, m, h, d), a cron expression of five fields, "
    "@hourly, @daily, @weekly, @monthly, @yearly, or '@at <ISO 8601>'"
)


class Spec(Protocol):
    """When a schedule is due. A schedule keeps its place if it is declared again with an equal spec."""

    @property
    def catches_up(self) -> str:
        """The default of `catch_up`."""

    def first(self, now: int, starting: int | None) -> int | None:
        """The first boundary of a schedule that is declared at `now`; None if there is none.

        `starting`: a moment of the grid, for a spec that has one.
        """

    def after(self, boundary: int, moment: int) -> int | None:
        """The first boundary strictly after `moment`, of a schedule with this `boundary`; None if there is none."""

    def latest(self, boundary: int, now: int) -> int:
        """The latest boundary up to `now`, of those from `boundary` on, which is not after `now`."""


COUNTED = 1_000
"""Boundaries that are counted one by one, at most. A spec with a boundary each minute has half a million in a year."""


def count(spec: Spec, boundary: int, before: int) -> int:
    """How many boundaries there are from `boundary` on and before `before`; `COUNTED` at most."""
    return sum(1 for _ in due(spec, boundary, before - 1, COUNTED))


def due(spec: Spec, boundary: int, now: int, limit: int) -> Iterator[int]:
    """The boundaries from `boundary` on up to `now`, the earliest first, `limit` at most."""
    moment: int | None = boundary
    while moment is not None and moment <= now and limit > 0:
        yield moment
        limit -= 1
        moment = spec.after(boundary, moment)


@dataclass(frozen=True, slots=True)
class Every:
    """A boundary every `interval` microseconds, on a grid."""

    interval: int
    catches_up: ClassVar[str] = "all"

    def first(self, now: int, starting: int | None) -> int:
        if starting is None:
            boundary = now + self.interval
        else:
            boundary = starting if starting > now else self._after(starting, now)
        if boundary > LAST_US:
            raise InvalidSpec("the first boundary of this interval from now is past the year 9999")
        return boundary

    def _after(self, boundary: int, moment: int) -> int:
        return boundary + ((moment - boundary) // self.interval + 1) * self.interval

    def after(self, boundary: int, moment: int) -> int | None:
        following = self._after(boundary, moment)
        return following if following <= LAST_US else None

    def latest(self, boundary: int, now: int) -> int:
        return self._after(boundary, now) - self.interval


@dataclass(frozen=True, slots=True)
class At:
    """One boundary."""

    moment: int
    catches_up: ClassVar[str] = "latest"

    def first(self, now: int, starting: int | None) -> int | None:
        _refuse_starting(starting)
        return self.after(0, now)

    def after(self, boundary: int, moment: int) -> int | None:
        return self.moment if self.moment > moment else None

    def latest(self, boundary: int, now: int) -> int:
        return boundary


@dataclass(frozen=True, slots=True)
class Cron:
    """The boundaries of a cron expression, by the wall clock of a zone.

    The rule for the nights in which the clock changes is that of the library `cronsim`, which is Debian's. A spec whose
    minute or hour begins with `*` runs by elapsed time. Any other boundary inside a gap fires at the first moment after
    it, and one in an hour that comes twice fires the first time.
    """

    expression: str
    zone: ZoneInfo
    catches_up: ClassVar[str] = "latest"

    def first(self, now: int, starting: int | None) -> int | None:
        _refuse_starting(starting)
        return self.after(0, now)

    def after(self, boundary: int, moment: int) -> int | None:
        start = from_us(moment).astimezone(self.zone)
        try:
            for found in CronSim(self.expression, start):
                # Started in an hour that comes a second time, it begins with moments of the first.
                boundary = to_us(found)
                if boundary > moment:
                    # Not the offset of `found`, which may be a time that the wall clock leaves out.
                    changed = from_us(boundary).astimezone(self.zone).utcoffset() != start.utcoffset()
                    return self._by_elapsed_time(start) if changed and self._is_by_elapsed_time() else boundary
        except OverflowError:  # past the year 9999
            return None
        return None

    def _is_by_elapsed_time(self) -> bool:
        minute, hour, *_ = self.expression.split()
        return minute.startswith("*") or hour.startswith("*")

    def _by_elapsed_time(self, start: datetime) -> int | None:
        """The first moment after `start` at which the wall clock shows a time of the expression.

        `cronsim` is out of step here after a change of the clock by half an hour, or in a gap that begins at midnight.
        """
        asked = start.astimezone(UTC)
        found: set[datetime] = set()
        until = None
        for local in CronSim(self.expression, (start - _LONGEST_CHANGE).replace(tzinfo=None)):
            if until is not None and local > until:
                break
            found |= {moment for moment in self._moments(local) if moment > asked}
            if found and until is None:
                until = local + _LONGEST_CHANGE  # where hours come twice, a later time may come earlier
        return to_us(min(found)) if found else None

    def _moments(self, local: datetime) -> set[datetime]:
        """When the wall clock shows `local`: at no moment, at one or at two."""
        folds = (local.replace(tzinfo=self.zone, fold=fold).astimezone(UTC) for fold in (0, 1))
        return {moment for moment in folds if moment.astimezone(self.zone).replace(tzinfo=None) == local}

    def latest(self, boundary: int, now: int) -> int:
        for distance in _LOOK_BACK:
            start = max(boundary, now - distance)
            found = self.after(boundary, start - 1)
            if found is not None and found <= now:
                return self._last(found, now)
            if start == boundary:
                break
        return self._last(boundary, now)

    def _last(self, found: int, now: int) -> int:
        while True:
            following = self.after(found, found)
            if following is None or following > now:
                return found
            found = following


def _refuse_starting(starting: int | None) -> None:
    if starting is not None:
        raise InvalidSpec("starting is for '@every' alone: the other specs have no grid to begin")


def parse_spec(spec: object, timezone: object = None) -> Spec:
    """Parse `spec`, or raise `InvalidSpec` saying what is wrong. `timezone`: a name (default: the project's)."""
    if not isinstance(spec, str):
        raise InvalidSpec(f"a schedule's spec must be a str, not {type(spec).__name__}")
    name = django_timezone.get_default_timezone_name() if timezone is None else timezone
    if not isinstance(name, str):
        raise InvalidSpec(f"timezone must be the name of a time zone, such as 'Europe/Berlin', not {name!r}")
    return _parse(spec, name)


@lru_cache(maxsize=1_000)
def _parse(spec: str, timezone: str) -> Spec:
    if match := _EVERY.fullmatch(spec):
        digits, unit = match.groups()
        if len(digits) > _MAX_DIGITS:
            raise InvalidSpec(f"an interval of {digits[:20]}…{unit} is longer than any date can hold")
        return Every(int(digits) * _UNITS[unit] * SECOND)
    zone = _zone(timezone)
    if match := _AT.fullmatch(spec):
        return At(_moment(match[1], zone))
    words = spec.split()
    expression = _NAMED.get(words[0].lower(), "") if len(words) == 1 else " ".join(words)
    if len(expression.split()) != 5 or not spec.isascii():
        raise InvalidSpec(f"{spec[:80]!r} is no spec: {_GRAMMAR}")
    cron = Cron(expression, zone)
    try:
        if next(CronSim(expression, datetime(2000, 1, 1, tzinfo=UTC)), None) is None:
            raise InvalidSpec(f"{spec[:80]!r} has no boundary within fifty years")
    except CronSimError as error:
        raise InvalidSpec(f"{spec[:80]!r} is no cron expression: {error}; {_GRAMMAR}") from error
    return cron


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:  # `ZoneInfoNotFoundError` is a KeyError
        raise InvalidSpec(
            f"there is no time zone {name[:80]!r} here. If the name is right: pip install tzdata"
        ) from error


def _moment(text: str, zone: ZoneInfo) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidSpec(f"'@at {text[:60]}' has no moment in ISO 8601, such as 2027-03-01T09:00: {error}") from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=zone, fold=0)
        # In a gap of the wall clock: the first moment after it.
        while moment.astimezone(UTC).astimezone(zone).replace(tzinfo=None) != moment.replace(tzinfo=None):
            moment += timedelta(minutes=1)
    try:
        return to_us(moment.astimezone(UTC))
    except OverflowError as error:
        raise InvalidSpec(f"'@at {text[:60]}' is outside of what a date can hold") from error
