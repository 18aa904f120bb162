"""Contract, section 3: any JSON value goes in and comes out the same; everything else is refused, with its place."""

import datetime
import enum
import json
import math
import pathlib
import uuid
from collections import OrderedDict, defaultdict, namedtuple
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from django.core.serializers.json import DjangoJSONEncoder
from django.db import connection
from django.http import QueryDict
from django.test import override_settings
from django.utils.functional import lazystr
from django.utils.translation import gettext_lazy

from django_alkstore.exceptions import InvalidPayload
from django_alkstore.models import Job
from django_alkstore.services import claim_batch, enqueue, enqueue_many, enqueue_tx, get_job, get_or_enqueue, outbox
from tests.ledger.models import Entry

pytestmark = pytest.mark.django_db

Pair = namedtuple("Pair", "left right")


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


def nested(depth: int, bottom: Any = 1, *, kind: type = list) -> Any:
    value = bottom
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


def same(left: object, right: object) -> bool:
    """Equal and of the same type all the way down, without Python's own recursion."""
    stack = [(left, right)]
    while stack:
        a, b = stack.pop()
        if type(a) is not type(b):
            return False
        if isinstance(a, dict):
            if list(a) != list(b):
                return False
            stack.extend((a[key], b[key]) for key in a)
        elif isinstance(a, list):
            if len(a) != len(b):
                return False
            stack.extend(zip(a, b, strict=True))
        elif a != b or (isinstance(a, float) and math.copysign(1, a) != math.copysign(1, b)):
            return False
    return True


def delivered(payload: Any) -> Any:
    """What comes back, by each way of looking at the job."""
    job = enqueue("mail", payload)
    stored = get_job(job.id)
    [handle] = claim_batch("mail", "worker")
    assert same(job.payload, stored.payload)
    assert same(job.payload, handle.payload)
    return job.payload


ROUND = [
    None,
    True,
    False,
    0,
    -1,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    -(2**70),
    10**4000,
    0.0,
    -0.0,
    1.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    "",
    "a\x00b",
    "\x00",
    "\U0001f600 \u00e9\u6f22",
    "\u2028\u2029\ufeff\uffff",
    "\r\n\t\\\"'</script>%s %(x)s {} ?",
    "null",
    "x" * 100_000,
    [],
    {},
    [[], {}, [[]]],
    {"": "", "a\x00": "\x00", "\U0001f600": 1},
    {"b": 1, "a": 2, "1": 3},
    [1, 1.0, True, "1", None],
    nested(200),
    nested(200, kind=dict),
]


@pytest.mark.parametrize("payload", ROUND, ids=lambda value: type(value).__name__)
def test_f098_any_json_value_comes_back_as_it_went_in(payload: Any) -> None:
    assert same(delivered(payload), payload)


@pytest.mark.parametrize(
    ("payload", "back"),
    [
        ((), []),
        ((1, (2, {"a": (3,)})), [1, [2, {"a": [3]}]]),
        (Pair(1, 2), [1, 2]),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (defaultdict(list, a=[1]), {"a": [1]}),
    ],
)
def test_f100_a_tuple_comes_back_a_list_and_a_dict_subclass_a_dict(payload: Any, back: Any) -> None:
    assert same(delivered(payload), back)


def test_f102_the_job_carries_the_decoded_copy_and_not_the_callers_object() -> None:
    payload = {"items": (1, 2)}
    job = enqueue("mail", payload)
    payload["items"] = "changed later"
    assert job.payload == {"items": [1, 2]}


def model_instance() -> Entry:
    return Entry(text="row")


REFUSED: list[tuple[Any, str]] = [
    (Decimal("1.10"), "Decimal"),
    (datetime.datetime(2026, 1, 1), "datetime"),
    (datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), "datetime"),
    (datetime.date(2026, 1, 1), "date"),
    (datetime.time(1), "time"),
    (datetime.timedelta(1), "timedelta"),
    (uuid.UUID(int=1), "UUID"),
    ({1}, "set"),
    (frozenset(), "frozenset"),
    (b"bytes", "bytes"),
    (bytearray(b"x"), "bytearray"),
    (memoryview(b"x"), "memoryview"),
    (1j, "complex"),
    (object(), "object"),
    (range(3), "range"),
    (iter([]), "iterator"),
    (pathlib.PurePosixPath("/"), "PurePosixPath"),
    (Colour.RED, "Colour"),
    (Level.LOW, "Level"),
    (Word.YES, "Word"),
    (Entry(text="row"), "Entry"),
    (Entry.objects.all(), "QuerySet"),
    (gettext_lazy("lazy"), "proxy"),
    (lazystr("lazy"), "proxy"),
    (lambda: None, "function"),
    (ValueError("x"), "ValueError"),
    (math.nan, "nan"),
    (math.inf, "inf"),
    (-math.inf, "-inf"),
    ("\ud800", "surrogate"),
    ("\ud83d\ude00", "surrogate"),
    (QueryDict("a=1&a=2"), "QueryDict"),
    (10**5000, "integer"),
]
PLACES = [
    (lambda bad: bad, "payload"),
    (lambda bad: {"order": {"total": bad}}, 'payload["order"]["total"]'),
    (lambda bad: [0, [{"a": (1, bad)}]], 'payload[1][0]["a"][1]'),
]


@pytest.mark.parametrize(("bad", "told"), REFUSED, ids=[ascii(told) + str(i) for i, (_, told) in enumerate(REFUSED)])
@pytest.mark.parametrize(("place", "path"), PLACES, ids=["top", "dict", "deep"])
def test_f095_f101_what_is_not_json_is_refused_with_its_place_and_nothing_is_written(
    place: Any, path: str, bad: Any, told: str
) -> None:
    with pytest.raises(InvalidPayload) as raised:
        enqueue("mail", place(bad))
    assert isinstance(raised.value, TypeError)
    assert str(raised.value).startswith(f"{path}: ")
    assert told in str(raised.value)
    assert not Job.objects.exists()


def test_the_message_is_the_one_that_the_contract_shows() -> None:
    with pytest.raises(InvalidPayload, match=r'^payload\["order"\]\["total"\]: Decimal is not JSON$'):
        enqueue("mail", {"order": {"total": Decimal(1)}})


@pytest.mark.parametrize("bad", [Entry(text="row"), Entry.objects.all()], ids=["instance", "queryset"])
def test_f101_a_model_or_queryset_is_refused_with_a_hint_to_pass_the_key(bad: Any) -> None:
    with pytest.raises(InvalidPayload, match="primary key"):
        enqueue("mail", {"order": bad})


@pytest.mark.parametrize(
    "keys",
    [
        {1: "a"},
        {1: "a", "1": "b"},
        {None: 1},
        {True: 1},
        {1.5: 1},
        {(1,): 1},
        {b"a": 1},
        {uuid.UUID(int=1): 1},
        {gettext_lazy("a"): 1},
    ],
    ids=repr,
)
@pytest.mark.parametrize("encoder", [None, "django.core.serializers.json.DjangoJSONEncoder"])
def test_f100_a_key_that_is_no_str_is_refused_with_its_place(keys: dict[Any, Any], encoder: str | None) -> None:
    with override_settings(ALKSTORE={"JSON_ENCODER": encoder}), pytest.raises(InvalidPayload) as raised:
        enqueue("mail", {"a": [keys]})
    assert str(raised.value).startswith('payload["a"][0]: ')
    assert not Job.objects.exists()


def test_a_lone_surrogate_in_a_key_is_refused_with_a_message_that_can_be_printed() -> None:
    with pytest.raises(InvalidPayload, match="surrogate") as raised:
        enqueue("mail", {"a": {"\udcff": 1}})
    str(raised.value).encode()


def test_the_path_of_a_bad_value_can_be_printed_whatever_the_keys_on_the_way() -> None:
    with pytest.raises(InvalidPayload) as raised:
        enqueue("mail", {'a"]\x00\n\U0001f600': Decimal(1)})
    str(raised.value).encode()
    assert "\n" not in str(raised.value)
    assert "\x00" not in str(raised.value)


def cyclic_list() -> Any:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    return cycle


def cyclic_dict() -> Any:
    cycle: dict[str, Any] = {}
    cycle["self"] = [cycle]
    return cycle


@pytest.mark.parametrize("make", [cyclic_list, cyclic_dict])
def test_a_cycle_is_refused_with_its_place(make: Any) -> None:
    with pytest.raises(InvalidPayload, match=r'payload\["c"\]\S+: .*cycle'):
        enqueue("mail", {"c": make()})
    assert not Job.objects.exists()


def test_one_object_in_two_places_is_no_cycle() -> None:
    shared = [1]
    assert delivered({"a": shared, "b": [shared, shared]}) == {"a": [1], "b": [[1], [1]]}


@pytest.mark.parametrize("kind", [list, dict])
def test_nesting_past_the_encoders_limit_is_refused(kind: type) -> None:
    with pytest.raises(InvalidPayload, match="deep"):
        enqueue("mail", nested(100_000, kind=kind))
    assert not Job.objects.exists()


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("depth", [300, 600, 950, 2_000, 100_000])
@pytest.mark.parametrize("bottom", [Decimal(1), {1: 2}, "\ud800"], ids=["value", "key", "surrogate"])
def test_a_bad_value_at_any_depth_is_an_invalid_payload_and_nothing_else(kind: type, depth: int, bottom: Any) -> None:
    with pytest.raises(InvalidPayload):
        enqueue("mail", nested(depth, bottom, kind=kind))
    assert not Job.objects.exists()


def within(frames: int, call: Any) -> Any:
    """`call()` with that many more frames on Python's stack."""
    return call() if frames == 0 else within(frames - 1, call)


def within_c(calls: int, call: Any) -> Any:
    """`call()` with that many more calls on C's stack, which Python counts by itself from 3.12 on."""
    return call() if calls == 0 else next(map(partial(within_c, calls - 1), [call]))


@pytest.mark.parametrize("kind", [list, dict])
def test_what_was_taken_can_be_delivered_however_deep_it_is(kind: type) -> None:
    """The deepest payload that `enqueue` takes is also read: by `enqueue`, by `get_job`, and by a worker whose
    own stack is deeper than the caller's was."""
    accepted, refused = 200, 100_000
    while refused - accepted > 1:
        depth = (accepted + refused) // 2
        before = Job.objects.count()
        try:
            enqueue("mail", nested(depth, kind=kind))
        except InvalidPayload:
            refused = depth
            assert Job.objects.count() == before, "refused, and written all the same"
        else:
            accepted = depth
    Job.objects.all().delete()
    job = enqueue("mail", nested(accepted, kind=kind))
    read = same(within(60, lambda: within_c(10, lambda: get_job(job.id))).payload, nested(accepted, kind=kind))
    assert read, f"taken at depth {accepted}, and unreadable by get_job"
    claimed = within(60, lambda: within_c(10, lambda: claim_batch("mail", "worker")))
    assert len(claimed) == 1, f"taken at depth {accepted}, and killed as unreadable by the claim"
    delivered = same(claimed[0].payload, nested(accepted, kind=kind))
    assert delivered


def quoted(size: int, character: str = "x") -> str:
    """A string whose JSON is `size` bytes."""
    each = len(character.encode())
    assert (size - 2) % each == 0
    return character * ((size - 2) // each)


@pytest.mark.parametrize("character", ["x", "\u00e9", "\U0001f600"])
def test_the_size_limit_counts_utf8_bytes_and_is_one_mebibyte_by_default(character: str) -> None:
    limit = 1024 * 1024
    fits = quoted(limit - (limit - 2) % len(character.encode()), character)
    enqueue("mail", fits)
    with pytest.raises(InvalidPayload, match="bytes"):
        enqueue("mail", fits + character)
    assert Job.objects.count() == 1


@override_settings(ALKSTORE={"MAX_PAYLOAD_BYTES": 10})
def test_the_size_limit_is_the_settings() -> None:
    enqueue("mail", "12345678")
    enqueue("mail", [1, 2, 3, 4])
    with pytest.raises(InvalidPayload):
        enqueue("mail", "123456789")
    assert Job.objects.count() == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda bad: enqueue("mail", bad),
        lambda bad: enqueue_tx("mail", bad),
        lambda bad: get_or_enqueue("mail", "key", bad),
        lambda bad: enqueue_many("mail", [bad]),
        lambda bad: outbox("mail").enqueue(bad),
        lambda bad: outbox("mail").enqueue_tx(bad),
    ],
)
def test_every_way_in_refuses_alike(call: Any) -> None:
    with pytest.raises(InvalidPayload):
        call({"at": Decimal(1)})
    assert not Job.objects.exists()


def test_a_bad_payload_is_refused_even_where_the_unique_key_is_taken() -> None:
    get_or_enqueue("mail", "key", 1)
    with pytest.raises(InvalidPayload):
        get_or_enqueue("mail", "key", Decimal(1))


@pytest.mark.parametrize("encoder", ["django.core.serializers.json.DjangoJSONEncoder", DjangoJSONEncoder])
def test_an_encoder_in_the_settings_converts(encoder: Any) -> None:
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    with override_settings(ALKSTORE={"JSON_ENCODER": encoder}):
        back = delivered({"total": Decimal("1.10"), "at": moment, "id": uuid.UUID(int=1), "lazy": lazystr("text")})
    assert back == {"total": "1.10", "at": "2026-01-02T03:04:05Z", "id": str(uuid.UUID(int=1)), "lazy": "text"}


@override_settings(ALKSTORE={"JSON_ENCODER": "django.core.serializers.json.DjangoJSONEncoder"})
@pytest.mark.parametrize(
    "bad", [{1}, b"x", object(), math.nan, math.inf, "\ud800", 1j], ids=lambda bad: type(bad).__name__
)
def test_what_the_chosen_encoder_cannot_convert_is_refused_with_its_place(bad: Any) -> None:
    with pytest.raises(InvalidPayload) as raised:
        enqueue("mail", {"ok": Decimal(1), "order": {"total": bad}})
    assert str(raised.value).startswith('payload["order"]["total"]: ')
    assert not Job.objects.exists()


class Bag:
    """Converted by the encoder below into what JSON does not have."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


class BagEncoder(json.JSONEncoder):
    def default(self, o: Any) -> Any:
        return o.inside if isinstance(o, Bag) else super().default(o)


@override_settings(ALKSTORE={"JSON_ENCODER": BagEncoder})
@pytest.mark.parametrize("inside", [{1: "a", "1": "b"}, {None: 1}, math.nan, "\ud800", {2}], ids=repr)
def test_what_an_encoder_makes_must_be_json_too(inside: Any) -> None:
    with pytest.raises(InvalidPayload):
        enqueue("mail", {"bag": Bag(inside)})
    assert not Job.objects.exists()


BROKEN_TEXTS = {
    "no JSON": "'{broken'",
    "empty": "''",
    "NaN": "'NaN'",
    "deep": "'" + "[" * 100_000 + "'",
    "long number": "'" + "9" * 5_000 + "'",
    "blob": "X'ff00'",
    "invalid UTF-8": "CAST(X'22ff22' AS TEXT)",
}


@pytest.mark.parametrize("text", BROKEN_TEXTS.values(), ids=BROKEN_TEXTS.keys())
def test_f051_a_payload_corrupted_in_its_row_kills_that_job_alone_with_a_clear_reason(text: str) -> None:
    before, bad, after = (enqueue("mail", name).id for name in ("before", "bad", "after"))
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE django_alkstore_job SET payload = {text} WHERE id = {bad}")
    handles = claim_batch("mail", "worker", limit=3)
    assert [handle.id for handle in handles] == [before, after]
    assert all(handle.ack() for handle in handles)
    dead = Job.objects.defer("payload").get(pk=bad)
    assert dead.state == "dead"
    assert "payload" in dead.last_error
    assert dead.errors[-1]["error"] == dead.last_error
    assert claim_batch("mail", "worker") == []


def test_f051_a_queue_whose_first_job_is_corrupted_hands_out_the_next_at_once() -> None:
    bad, good = enqueue("mail", "bad").id, enqueue("mail", "good").id
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE django_alkstore_job SET payload = 'x' WHERE id = {bad}")
    assert [handle.id for handle in claim_batch("mail", "worker", limit=1)] == [good]


@pytest.mark.parametrize("text", BROKEN_TEXTS.values(), ids=BROKEN_TEXTS.keys())
def test_f051_a_corrupted_payload_can_still_be_looked_at(text: str) -> None:
    bad = enqueue("mail", "bad").id
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE django_alkstore_job SET payload = {text} WHERE id = {bad}")
    assert get_job(bad).id == bad
