"""The schedule grammar: `@every <n><unit>`, and the arithmetic of its grid."""

import re
from typing import NamedTuple

from django_alkstore.clock import LAST_US, SECOND
from django_alkstore.exceptions import InvalidSpec

_EVERY = re.compile(r"\s*@every\s+([1-9][0-9]*)([smhd])\s*")
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_MAX_DIGITS = 15
"""Longer numbers are past every date already; refusing them by length keeps them from being parsed at all."""


class Every(NamedTuple):
    """A parsed spec: one boundary every `interval` microseconds."""

    interval: int

    def first_after(self, boundary: int, now: int) -> int:
        """The first boundary strictly after `now`, on the grid through `boundary`."""
        return boundary + ((now - boundary) // self.interval + 1) * self.interval

    def due(self, boundary: int, now: int) -> int:
        """How many boundaries from `boundary` on are due at `now`, `boundary` itself included."""
        return max(0, (now - boundary) // self.interval + 1)


def parse_spec(spec: object) -> Every:
    """Parse `spec`, or raise `InvalidSpec` saying what is wrong with it."""
    if not isinstance(spec, str):
        raise InvalidSpec(f"a schedule's spec must be a str, not {type(spec).__name__}")
    match = _EVERY.fullmatch(spec)
    if match is None:
        raise InvalidSpec(
            f"{spec[:80]!r} is not '@every <n><unit>', n a positive whole number and unit one of s, m, h, d"
        )
    digits, unit = match.groups()
    if len(digits) > _MAX_DIGITS:
        raise InvalidSpec(f"an interval of {digits[:20]}…{unit} is longer than any date can hold")
    return Every(int(digits) * _UNITS[unit] * SECOND)


def first_boundary(every: Every, now: int) -> int:
    """The first boundary of a new grid; `InvalidSpec` where no date can hold it."""
    boundary = now + every.interval
    if boundary > LAST_US:
        raise InvalidSpec("the first boundary of this interval from now is past the year 9999")
    return boundary
