"""Seconds in, seconds out: the one reader of every duration and moment that a caller gives."""

import math
from datetime import datetime, timedelta

from django_alkstore.clock import LAST_US, SECOND, to_us
from django_alkstore.exceptions import InvalidOption, shown

Duration = float | timedelta
"""What a caller may give: seconds, or a timedelta."""

SHORTEST = 1 / SECOND
"""Seconds: what a stored moment can tell apart."""


def seconds(option: str, value: object, *, zero: bool) -> float:
    """`value` (int, float or timedelta) as float seconds, not negative, and above 0 unless `zero` is allowed.

    Raises `InvalidOption` naming `option` for everything else, NaN and infinities included.
    """
    if isinstance(value, timedelta):
        number = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    else:
        raise InvalidOption(f"{option} must be a number of seconds or a timedelta, not {shown(value)}")
    if not math.isfinite(number) or number < (0 if zero else SHORTEST):
        bound = "0 or more" if zero else "above 0"
        raise InvalidOption(f"{option} must be finite and {bound}, not {shown(value)}")
    if number * SECOND > LAST_US:
        raise InvalidOption(f"{option} of {shown(value)} s is longer than any date can hold")
    return number


def moment_after(option: str, start: int, delay: float) -> int:
    """`start` (microseconds) plus `delay` seconds; `InvalidOption` naming `option` past the year 9999."""
    moment = start + round(delay * SECOND)
    if moment > LAST_US:
        raise InvalidOption(f"{option} of {delay!r} s from now is past the year 9999")
    return moment


def aware_moment(option: str, value: object) -> int:
    """An aware datetime as microseconds since the epoch; `InvalidOption` for a naive one or another type."""
    if not isinstance(value, datetime):
        raise InvalidOption(f"{option} must be an aware datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise InvalidOption(f"{option} must be an aware datetime; {value!r} has no time zone")
    moment = to_us(value)
    if moment > LAST_US:
        raise InvalidOption(f"{option} is past the year 9999 in UTC")
    return moment
