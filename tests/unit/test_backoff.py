"""The retry curve, and the random extra on top of it: F043."""

import itertools

import pytest

from django_alkstore.backoff import backoff


@pytest.mark.parametrize("base", [0.0, 1e-6, 1.5, 2.0, 5.0, 10.0, 1e308])
@pytest.mark.parametrize("cap", [0.0, 1.0, 3600.0, 1e9])
def test_f043_the_curve_never_raises_never_passes_the_cap_and_never_goes_back(base: float, cap: float) -> None:
    waits = [backoff(base, attempt, cap) for attempt in range(1, 10_001)]
    assert all(0 <= wait <= cap for wait in waits)
    assert all(earlier <= later for earlier, later in itertools.pairwise(waits))


def test_the_curve_is_the_contracts() -> None:
    assert [backoff(5, attempt, 3600) for attempt in (1, 2, 3, 10, 11)] == [5, 10, 20, 2560, 3600]


def test_the_largest_attempt_that_a_column_holds_is_the_cap() -> None:
    assert backoff(0.001, 2**31 - 1, 3600) == 3600


@pytest.mark.parametrize("attempt", [1, 2, 10, 11, 2**31 - 1])
def test_the_extra_is_a_share_of_the_wait_and_comes_on_top_of_the_cap(attempt: int) -> None:
    wait = backoff(5, attempt, 3600)
    assert backoff(5, attempt, 3600, 0.1) == pytest.approx(wait * 1.1)
    assert backoff(5, attempt, 3600, 1) == pytest.approx(wait * 2)
    assert backoff(0, attempt, 3600, 1) == 0
