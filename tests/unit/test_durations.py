"""What a caller may give as a duration or a moment."""

import math
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from django_alkstore.clock import LAST_US, from_us, to_us
from django_alkstore.durations import aware_moment, moment_after, seconds
from django_alkstore.exceptions import InvalidOption


@pytest.mark.parametrize(
    ("given", "read"),
    [(1, 1.0), (1.5, 1.5), (timedelta(days=1, microseconds=1), 86_400.000_001), (10**9, 1e9), (0.000_001, 1e-6)],
)
def test_seconds_reads_numbers_and_timedeltas_as_float(given: Any, read: float) -> None:
    assert seconds("ttl", given, zero=False) == read
    assert type(seconds("ttl", given, zero=False)) is float


@pytest.mark.parametrize("zero", [0, 0.0, -0.0, timedelta(0)])
def test_zero_is_taken_where_it_is_allowed(zero: Any) -> None:
    assert seconds("delay", zero, zero=True) == 0.0
    with pytest.raises(InvalidOption, match="ttl"):
        seconds("ttl", zero, zero=False)


BAD = [
    -1,
    -1e-9,
    math.nan,
    math.inf,
    -math.inf,
    True,
    None,
    "1",
    b"1",
    Decimal(1),
    1j,
    [],
    1e300,
    10**400,
    10**5000,
    timedelta.max,
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: type(bad).__name__)
@pytest.mark.parametrize("zero", [True, False])
def test_everything_else_is_an_invalid_option_that_names_the_option(bad: Any, zero: bool) -> None:
    with pytest.raises(InvalidOption, match="the_option"):
        seconds("the_option", bad, zero=zero)


def test_a_moment_past_the_last_date_is_refused() -> None:
    assert moment_after("delay", LAST_US - 1_000_000, 1.0) == LAST_US
    with pytest.raises(InvalidOption, match="delay"):
        moment_after("delay", LAST_US, 1.0)


@pytest.mark.parametrize(
    "bad",
    [
        datetime(2026, 1, 1),
        datetime(2026, 1, 1).date(),
        "2026-01-01",
        5,
        None,
        datetime.max.replace(tzinfo=timezone(-timedelta(hours=1))),
    ],
    ids=repr,
)
def test_a_moment_is_an_aware_datetime_that_utc_can_hold(bad: Any) -> None:
    with pytest.raises(InvalidOption, match="run_at"):
        aware_moment("run_at", bad)


@pytest.mark.parametrize(
    "moment",
    [
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(2026, 10, 25, 0, 59, 59, 1, tzinfo=UTC),
        datetime.max.replace(tzinfo=UTC),
    ],
)
def test_microseconds_and_moments_convert_exactly_both_ways(moment: datetime) -> None:
    assert from_us(to_us(moment)) == moment
    assert to_us(from_us(to_us(moment))) == to_us(moment)
