"""A failed attempt as it is kept."""

import json
from datetime import UTC, datetime

import pytest
from django.utils.module_loading import import_string

from django_alkstore import failures
from django_alkstore.exceptions import AlkstoreError

AT = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize("length", [0, 1, 9_999, 10_000, 10_001, 20_000])
def test_f104_no_text_is_longer_than_10_000_characters_and_only_a_longer_one_is_cut(length: int) -> None:
    text, *rest = failures.describe("x" * length)
    assert rest == ["", ""]
    assert (text == "x" * length) is (length <= 10_000)
    assert len(text) == min(length, 10_000)


def test_f104_a_cut_traceback_keeps_both_ends() -> None:
    try:
        raise ValueError("x" * 50_000 + " the end")
    except ValueError as error:
        line, traceback, exception = failures.describe(error)
    assert line.startswith("ValueError: xxx")
    assert exception == "builtins.ValueError"
    assert traceback.startswith("Traceback")
    assert traceback.rstrip().endswith("the end")
    assert len(traceback) <= 10_000


@pytest.mark.parametrize("text", ["\x00", "\ud800", "a\udfffb\x00c", "\ud83d\ude00"])
def test_f098_nul_and_lone_surrogates_are_replaced(text: str) -> None:
    for error in (text, ValueError(text)):
        for cleaned in failures.describe(error):
            assert "\x00" not in cleaned
            cleaned.encode()
    assert len(failures.describe(text)[0]) == len(text)


def test_the_last_20_entries_are_kept_in_order() -> None:
    history = b"[]"
    for attempt in range(1, 31):
        history = failures.append(history, failures.failure(attempt, AT, failures.Described(str(attempt)))).encode()
    assert [entry["attempt"] for entry in json.loads(history)] == list(range(11, 31))
    assert json.loads(history)[0] == {
        "attempt": 11,
        "at": "2026-03-01T12:00:00+00:00",
        "error": "11",
        "traceback": "",
        "exception": "",
    }


@pytest.mark.parametrize("history", [b"", b"x", b"{}", b"null", b"5", b"[" * 100_000, b"\xff", b"9" * 5_000], ids=len)
def test_a_history_that_cannot_be_read_is_no_obstacle(history: bytes) -> None:
    entries = json.loads(failures.append(history, failures.failure(1, AT, failures.Described("new"))))
    assert entries[-1]["error"] == "new"
    assert all(set(entry) == {"attempt", "at", "error", "traceback", "exception"} for entry in entries)


def test_f105_an_error_of_another_kind_is_text_too() -> None:
    assert failures.describe(5) == ("5", "", "")


@pytest.mark.parametrize(
    "reason", [failures.LEASE_EXPIRED, failures.WORKER_DIED, failures.EXPIRED, failures.TIME_LIMIT]
)
def test_each_of_the_librarys_reasons_has_an_exception_that_stands_for_it(reason: str) -> None:
    described = failures.describe_reason(reason)
    assert described.error == reason
    assert issubclass(import_string(described.exception), AlkstoreError)
