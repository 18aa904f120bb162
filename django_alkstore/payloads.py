"""Strict JSON in and out: what goes in comes out, or the call raises and says where in the payload.

Encoding runs in C. The path of a bad value is found by a slower walk in Python, which begins only if something is known
to be wrong. Keys are the exception: each is looked at, since the encoder would silently turn it into a string.
"""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from django_alkstore.exceptions import InvalidPayload, shown


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_decode_strict = json.JSONDecoder(parse_constant=_refuse_constant).decode
_encode_strict = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dumps(value: Any) -> str:
    """A stored JSON column's text, for the ORM. An unreadable text is written back as it was."""
    return value.text if isinstance(value, UnreadablePayload) else _encode_strict(value)


@dataclass(frozen=True, slots=True)
class UnreadablePayload:
    """What a stored payload reads as when its text is not JSON, because something else wrote it."""

    text: str
    reason: str

    def __str__(self) -> str:
        return f"unreadable payload: {self.reason}"


_UNREADABLE_DUMP = "unreadable "
"""No JSON text begins like this."""


def to_dump(value: Any) -> str:
    """A value as text of ASCII characters without control characters, which every serializer of Django can hold."""
    if isinstance(value, UnreadablePayload):
        return _UNREADABLE_DUMP + json.dumps(value.text)
    return json.dumps(value, allow_nan=False)


def from_dump(text: str) -> Any:
    """The value of `to_dump`; an `UnreadablePayload` if the text is not one that `to_dump` has written."""
    if text.startswith(_UNREADABLE_DUMP):
        return read_payload(json.loads(text.removeprefix(_UNREADABLE_DUMP)))
    return read_payload(text)


def encode_payload(payload: Any, *, max_bytes: int, encoder: type[json.JSONEncoder] | None = None) -> str:
    """`payload` as JSON text, or `InvalidPayload` naming the place that is not JSON.

    `encoder` converts what strict JSON refuses, for those who chose one in the settings.
    """
    text, _ = _encode(payload, max_bytes, encoder)
    return text


def encode_and_read(payload: Any, *, max_bytes: int, encoder: type[json.JSONEncoder] | None = None) -> tuple[str, Any]:
    """As `encode_payload`, and the value that the text will be read as."""
    text, flat = _encode(payload, max_bytes, encoder)
    # An encoder of the project's own may have changed anything.
    return text, payload.copy() if flat and encoder is None else decode_payload(text)


def _encode(payload: Any, max_bytes: int, encoder: type[json.JSONEncoder] | None) -> tuple[str, bool]:
    """The text, and True if the payload is a plain dict of plain scalars: JSON gives it back as it is."""
    converter = None if encoder is None else _converter(encoder)
    try:
        text = _encode_strict(payload) if converter is None else converter.encode(payload)
        size = len(text) if text.isascii() else len(text.encode())
    except RecursionError:
        raise InvalidPayload("payload is nested too deeply for the JSON encoder") from None
    except (TypeError, ValueError) as error:
        _explain(payload, converter, otherwise=error)
    flat = (
        type(payload) is dict
        and _PLAIN.issuperset(map(type, payload.values()))
        and _TEXT.issuperset(map(type, payload))
    )
    if not flat:
        if text.count("[") + text.count("{") > _SURELY_READABLE:
            _refuse_too_deep(text)
        _refuse_what_json_would_change(payload, converter)
    if size > max_bytes:
        raise InvalidPayload(f"payload is {size} bytes of JSON; at most {max_bytes} are allowed")
    return text, flat


def _refuse_too_deep(text: str) -> None:
    """Refuse what the decoder may not bear: its limit differs from the encoder's, and a worker's stack is deeper."""
    try:
        decode_payload("[" * _DEPTH_TO_SPARE + text + "]" * _DEPTH_TO_SPARE)
    except RecursionError:
        raise InvalidPayload("payload is nested too deeply for the JSON decoder") from None


_SURELY_READABLE = 900
_DEPTH_TO_SPARE = 10
_TEXT = frozenset((str,))
_PLAIN = frozenset((str, int, float, bool, type(None)))


def _converter(encoder: type[json.JSONEncoder]) -> json.JSONEncoder:
    """The project's encoder. What it makes of a value must be JSON that reads back as it is, like any other value."""

    plain = encoder()

    def default(value: Any) -> Any:
        made = plain.default(value)
        _refuse_what_json_would_change(made, plain)
        return made

    return encoder(default=default, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def decode_payload(text: str | bytes) -> Any:
    """The value of stored JSON text. `TypeError`, `ValueError` or `RecursionError` for what is not JSON text."""
    if isinstance(text, bytes):
        text = text.decode()
    try:
        return _decode_strict(text)
    except RecursionError:
        # It was encoded on a stack that was less deep than this one. The stack of a new thread is empty.
        with ThreadPoolExecutor(max_workers=1) as fresh:
            return fresh.submit(_decode_strict, text).result()


def read_payload(text: Any) -> Any:
    """As `decode_payload`, with an `UnreadablePayload` instead of an error: one bad row must not stop a list."""
    try:
        return decode_payload(text)
    except (TypeError, ValueError, RecursionError) as error:
        return UnreadablePayload(text.decode(errors="replace") if isinstance(text, bytes) else str(text), str(error))


def _refuse_what_json_would_change(payload: Any, converter: json.JSONEncoder | None) -> None:
    """Refuse what the encoder accepts but does not give back: keys that are not strings, enums, multi-dicts.

    The payload was encoded already, so it is finite and holds no cycle. The walk keeps a stack of its own, so the depth
    of the payload is not limited by Python's.
    """
    stack = [payload]
    while stack:
        value = stack.pop()
        kind = type(value)
        if kind is str or kind is int:
            continue
        if isinstance(value, dict):
            if _dict_complaint(value):
                _explain(payload, converter)
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
        elif converter is None and isinstance(value, Enum):
            _explain(payload, converter)


def _explain(payload: Any, converter: json.JSONEncoder | None, otherwise: Exception | None = None) -> NoReturn:
    """Raise `InvalidPayload` for the first thing wrong in `payload`, with its path."""
    complaint = _first_complaint(payload, converter) or f"payload is not JSON: {otherwise}"
    raise InvalidPayload(complaint) from otherwise


def _first_complaint(payload: Any, converter: json.JSONEncoder | None) -> str | None:
    """Walks depth first, in order, on a stack of its own: the payload may be as deep as Python's stack allows."""
    levels = [iter([("payload", payload)])]
    containers: list[int] = [0]  # of each level, to tell a cycle from a value that is used twice
    while levels:
        path, value = next(levels[-1], ("", _END))
        if value is _END:
            levels.pop()
            containers.pop()
        elif not isinstance(value, (dict, list, tuple)):
            if complaint := _scalar_complaint(value, converter):
                return f"{_shown(path)}: {complaint}"
        elif id(value) in containers:
            return f"{_shown(path)}: a cycle is not JSON"
        else:
            if isinstance(value, dict) and (complaint := _dict_complaint(value)):
                return f"{_shown(path)}: {complaint}"
            containers.append(id(value))
            levels.append(_items(path, value))
    return None


_END = object()


def _items(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{path}[{json.dumps(key, ensure_ascii=False)}]", item
    else:
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item


def _shown(path: str) -> str:
    return path if len(path) <= 300 else f"{path[:150]} … {path[-150:]}"


def _dict_complaint(value: dict[Any, Any]) -> str | None:
    """What JSON would not give back of a dict, without a look at its values; None if there is nothing."""
    if type(value).__getitem__ is not dict.__getitem__:
        return f"{type(value).__name__} is not JSON; give it as a dict"
    plain = True
    for key in value:
        if type(key) is not str:
            if not isinstance(key, str):
                return f"the key {shown(key)} is of type {type(key).__name__}; JSON has only str keys"
            plain = False
        if not key.isascii() and _has_surrogate(key):
            return f"the key {key!a} holds a lone surrogate, which UTF-8 cannot hold"
    if not plain and len({str.__str__(key) for key in value}) < len(value):
        return "two of its keys are the same text"
    return None


def _scalar_complaint(value: Any, converter: json.JSONEncoder | None) -> str | None:
    """What is wrong with a value that holds no others, or `None`."""
    if isinstance(value, Enum):
        return f"{type(value).__name__} is not JSON; give its value" if converter is None else None
    if isinstance(value, str):
        return "a lone surrogate is not JSON: UTF-8 cannot hold it" if _has_surrogate(value) else None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value!r} is not JSON"
    if isinstance(value, int):
        return _int_complaint(value)
    return None if value is None else _foreign_complaint(value, converter)


def _foreign_complaint(value: Any, converter: json.JSONEncoder | None) -> str | None:
    if converter is not None:
        try:
            converter.default(value)
        except (TypeError, ValueError) as error:
            return f"{type(value).__name__} is not JSON, for the project's encoder too ({error})"
        return None
    hint = "; pass its primary key" if hasattr(value, "_meta") or hasattr(value, "_iterable_class") else ""
    return f"{type(value).__name__} is not JSON{hint}"


def _int_complaint(value: int) -> str | None:
    try:
        int.__repr__(value)
    except ValueError:
        return "an integer of this many digits is more than the JSON encoder takes"
    return None


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
