"""The schedule grammar and the arithmetic of its grid."""

import pytest

from django_alkstore.clock import LAST_US, SECOND
from django_alkstore.exceptions import AlkstoreError, InvalidSpec
from django_alkstore.specs import Every, count, parse_spec

HOUR = 3_600 * SECOND


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        ("@every 1s", 1),
        ("@every 90s", 90),
        ("@every 1m", 60),
        ("@every 60m", 3_600),
        ("@every 1h", 3_600),
        ("@every 24h", 86_400),
        ("@every 1d", 86_400),
        ("@every 365d", 365 * 86_400),
        ("@every 100000s", 100_000),
    ],
)
def test_a_spec_is_a_number_of_units(spec: str, seconds: int) -> None:
    assert parse_spec(spec) == Every(seconds * SECOND)


@pytest.mark.parametrize("around", ["", " ", "   ", "\t", "\n", "\r\n", " \t\n "])
@pytest.mark.parametrize("between", [" ", "  ", "\t", "\n", "\r\n", " \t\n "])
def test_white_space_around_and_between_the_two_words_is_free(around: str, between: str) -> None:
    assert parse_spec(f"{around}@every{between}5m{around}") == Every(300 * SECOND)


INVALID = [
    "",
    " ",
    "@every",
    "@every ",
    "5s",
    "every 5s",
    "@ every 5s",
    "@Every 5s",
    "@EVERY 5s",
    "@every5s",
    "@every 5",
    "@every s",
    "@every 0s",
    "@every 00s",
    "@every 05s",
    "@every 1.5h",
    "@every 1,5h",
    "@every 1e3s",
    "@every 1_000s",
    "@every 0x10s",
    "@every +5s",
    "@every -5s",
    "@every 5 s",
    "@every 5S",
    "@every 5M",
    "@every 1w",
    "@every 1y",
    "@every 5ms",
    "@every 5us",
    "@every 5ss",
    "@every 1h30m",
    "@every 1h 30m",
    "@every 5s 5s",
    "@every 5s.",
    "@every 5s;",
    "@every 5s\x00",
    "\x00@every 5s",
    "@every\x005s",
    "\ufeff@every 5s",
    "@every 5s\u200b",
    "@every \u200b5s",
    "x@every 5s",
    "@@every 5s",
    "@every @every 5s",
    # Digits, but not ASCII ones: full width, Arabic-Indic, Devanagari, superscript, in all places of the number.
    "@every \uff15s",
    "@every \u0665s",
    "@every \u096bs",
    "@every 1\u0660s",
    "@every 5\u00b2s",
    "@every 5\u017f",  # LATIN SMALL LETTER LONG S: an "s" to whoever ignores case
    "@every 5\uff53",
    "@every 5s\ud800",
]


@pytest.mark.parametrize("spec", INVALID)
def test_nothing_else_is_in_the_grammar(spec: str) -> None:
    with pytest.raises(InvalidSpec):
        parse_spec(spec)


@pytest.mark.parametrize("spec", [None, 5, 5.0, b"@every 5s", ["@every 5s"], ("@every", "5s"), object(), True])
def test_a_spec_that_is_not_text_is_invalid(spec: object) -> None:
    with pytest.raises(InvalidSpec):
        parse_spec(spec)


def test_an_invalid_spec_is_a_value_error_and_ours_and_says_what_was_wrong() -> None:
    with pytest.raises(InvalidSpec, match="@every 1w") as caught:
        parse_spec("@every 1w")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AlkstoreError)


@pytest.mark.parametrize("digits", [1, 12, 15, 16, 100, 4_299, 4_301, 100_000])
@pytest.mark.parametrize("unit", ["s", "m", "h", "d"])
def test_a_number_of_any_length_gives_an_interval_or_invalid_spec_and_no_other_error(digits: int, unit: str) -> None:
    """4,300 digits are where Python itself stops to read whole numbers."""
    try:
        every = parse_spec(f"@every {'9' * digits}{unit}")
        boundary = every.first(0, None)
    except InvalidSpec:
        assert digits >= 12
    else:
        assert boundary is not None
        assert boundary <= LAST_US
        assert digits <= 12


def test_the_first_boundary_may_be_the_last_second_that_a_date_can_hold_and_none_later() -> None:
    now = LAST_US - HOUR
    assert Every(HOUR).first(now, None) == LAST_US
    with pytest.raises(InvalidSpec):
        Every(HOUR).first(now + 1, None)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (0, 100),  # long before the known point: still on the grid
        (999, 1_000),
        (1_000, 1_100),  # strictly after
        (1_001, 1_100),
        (1_099, 1_100),
        (1_100, 1_200),
        (1_950, 2_000),
    ],
)
def test_the_first_boundary_after_now_is_on_the_grid_and_strictly_later(now: int, expected: int) -> None:
    found = Every(100).after(1_000, now)
    assert found == expected


@pytest.mark.parametrize(("now", "due"), [(0, 0), (999, 0), (1_000, 1), (1_099, 1), (1_100, 2), (20_900, 200)])
def test_a_boundary_is_due_at_its_very_moment_and_none_before(now: int, due: int) -> None:
    assert count(Every(100), 1_000, now + 1) == due
