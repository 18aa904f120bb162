"""Ages as people read them."""

from datetime import UTC, datetime, timedelta

import pytest

from django_alkstore.ages import age, distance


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0 s"),
        (0, "0 s"),
        (0.9, "0 s"),
        (1, "1 s"),
        (59.99, "59 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (3_599, "59 min 59 s"),
        (3_600, "1 h"),
        (3_605, "1 h"),
        (86_399, "23 h 59 min"),
        (86_400, "1 d"),
        (90_000 * 2, "2 d 2 h"),
        (86_400 * 400, "400 d"),
    ],
)
def test_the_largest_unit_and_the_one_below_it(seconds: float, words: str) -> None:
    assert age(seconds) == words


def test_a_distance_says_which_way() -> None:
    now = datetime(2026, 3, 1, tzinfo=UTC)
    assert distance(now - timedelta(seconds=200), now) == "3 min 20 s ago"
    assert distance(now, now) == "0 s ago"
    assert distance(now + timedelta(hours=2), now) == "in 2 h"
