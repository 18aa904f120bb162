"""Strict JSON: what the encoder must not quietly change, and texts that are not JSON."""

import json
import random
from decimal import Decimal
from typing import Any

import pytest
from django.core.serializers.json import DjangoJSONEncoder

from django_alkstore.exceptions import InvalidPayload
from django_alkstore.payloads import UnreadablePayload, decode_payload, encode_payload, read_payload

LIMIT = 2**20


def any_json(dice: random.Random, depth: int) -> Any:
    kind = dice.randrange(8 if depth else 6)
    if kind == 6:
        return [any_json(dice, depth - 1) for _ in range(dice.randrange(4))]
    if kind == 7:
        return {any_text(dice): any_json(dice, depth - 1) for _ in range(dice.randrange(4))}
    return [None, dice.random() < 0.5, dice.randrange(-(2**80), 2**80), dice.uniform(-1e9, 1e9), any_text(dice), ""][
        kind
    ]


def any_text(dice: random.Random) -> str:
    ranges = [(0, 0xD7FF), (0xE000, 0x10FFFF)]
    return "".join(chr(dice.randint(*dice.choice(ranges))) for _ in range(dice.randrange(5)))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("encoder", [None, DjangoJSONEncoder])
def test_random_values_come_back_as_they_went_in(seed: int, encoder: Any) -> None:
    dice = random.Random(seed)
    for _ in range(100):
        value = any_json(dice, 4)
        text = encode_payload(value, max_bytes=LIMIT, encoder=encoder)
        assert decode_payload(text) == value
        assert repr(decode_payload(text)) == repr(value)  # True is not 1, nor 1.0


@pytest.mark.parametrize("size", [2, 3, 100])
def test_the_limit_is_the_bytes_of_the_text(size: int) -> None:
    assert encode_payload("x" * (size - 2), max_bytes=size)
    with pytest.raises(InvalidPayload, match=f"{size + 1} bytes"):
        encode_payload("x" * (size - 1), max_bytes=size)


class Unordered(str):
    """A key that equals only itself, so that a dict can hold its text twice."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def test_f100_two_keys_of_one_text_are_never_merged_silently() -> None:
    with pytest.raises(InvalidPayload):
        encode_payload({Unordered("a"): 1, Unordered("a"): 2}, max_bytes=LIMIT)


@pytest.mark.parametrize(
    "text", ["", "{", "NaN", "-Infinity", "1 2", "'a'", "[" * 100_000, "9" * 5_000, b"\xff", None, 5]
)
def test_a_text_that_is_not_json_reads_as_unreadable_and_raises_nothing(text: Any) -> None:
    read = read_payload(text)
    assert isinstance(read, UnreadablePayload) or (text == 5 and read == 5)
    if isinstance(read, UnreadablePayload):
        assert "unreadable" in str(read)


def test_a_refused_payload_is_left_as_it_was() -> None:
    payload = {"a": [1, {"b": Decimal(1)}]}
    with pytest.raises(InvalidPayload):
        encode_payload(payload, max_bytes=LIMIT)
    assert payload == {"a": [1, {"b": Decimal(1)}]}


def test_the_first_of_two_faults_is_named() -> None:
    with pytest.raises(InvalidPayload, match=r'^payload\["a"\]: set is not JSON'):
        encode_payload({"a": {1}, "b": Decimal(1)}, max_bytes=LIMIT)


def test_the_message_of_a_huge_bad_payload_is_short() -> None:
    with pytest.raises(InvalidPayload) as raised:
        encode_payload({"k" * 100_000: Decimal(1)}, max_bytes=LIMIT)
    assert len(json.dumps(str(raised.value))) < 110_000
