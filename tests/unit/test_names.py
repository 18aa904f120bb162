"""The name rule, against every character there is."""

import string
import sys

import pytest

from django_alkstore.exceptions import InvalidName, ReservedName
from django_alkstore.names import describe_queue, outbox_of, outbox_queue, validate_name

FIRST = set(string.ascii_letters + string.digits + "_")
LATER = FIRST | set(".-:/@+")


def taken(name: str) -> bool:
    try:
        return validate_name("queue", name) == name
    except InvalidName:
        return False


def test_of_all_characters_only_those_of_the_rule_are_taken() -> None:
    everything = map(chr, range(sys.maxunicode + 1))
    # Past Latin-1 one in 37 is enough, together with every digit, letter-like and fold of the ASCII ones.
    some = [c for c in everything if ord(c) < 256 or ord(c) % 37 == 0 or c.isdecimal() or c.casefold() in FIRST]
    assert {c for c in some if taken(c)} == FIRST
    assert {c for c in some if taken(f"a{c}")} == LATER
    assert {c for c in some if taken(f"a{c}z")} == LATER


@pytest.mark.parametrize("length", [1, 2, 127, 128])
def test_f103_the_lengths_of_the_rule_are_taken(length: int) -> None:
    assert taken("a" * length)


@pytest.mark.parametrize("length", [0, 129, 10_000])
def test_f103_other_lengths_are_not(length: int) -> None:
    assert not taken("a" * length)


@pytest.mark.parametrize("kind", ["queue", "lock", "schedule", "outbox"])
def test_the_message_says_which_kind_and_what_was_wrong(kind: str) -> None:
    with pytest.raises(InvalidName, match=rf"{kind}.*'\$' at position 2"):
        validate_name(kind, "ab$cd")
    with pytest.raises(InvalidName, match=rf"{kind}.*129"):
        validate_name(kind, "a" * 129)
    with pytest.raises(ReservedName, match=kind):
        validate_name(kind, "__alkstore_x")


def test_a_refusal_is_not_remembered_as_a_pass() -> None:
    for _ in range(3):
        assert not taken("no good")
        assert taken("good")


def test_the_queue_of_an_outbox_and_back() -> None:
    assert outbox_queue("mail") == "__alkstore_outbox:mail"
    assert outbox_of(outbox_queue("mail")) == "mail"
    assert outbox_of("mail") is None
    assert describe_queue("mail") != describe_queue(outbox_queue("mail"))
    with pytest.raises(ReservedName):
        outbox_queue("__alkstore_outbox:mail")
