"""The `ALKSTORE` setting: its keys, their defaults and their rules. Read when used, so that overrides take effect."""

import copy
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NamedTuple

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.functional import empty
from django.utils.module_loading import import_string

from django_alkstore.durations import seconds
from django_alkstore.exceptions import AlkstoreError, InvalidName, InvalidOption, shown
from django_alkstore.names import queue_named


class JobDefaults(NamedTuple):
    """The options that a job gets if its enqueue gives none. Durations are seconds."""

    visibility_timeout: float = 300.0
    max_attempts: int = 3
    backoff_base: float = 5.0
    expires_in: float | None = None
    priority: int = 0


PLAIN_DEFAULTS = JobDefaults()
OUTBOX_DEFAULTS = JobDefaults(visibility_timeout=60.0, max_attempts=5, backoff_base=5.0)


class Settings(NamedTuple):
    """The `ALKSTORE` setting, validated."""

    database: str | None = None
    json_encoder: type[json.JSONEncoder] | None = None
    max_payload_bytes: int = 1_048_576
    max_backoff: float = 3_600.0
    backoff_jitter: float = 0.1
    """The random extra on top of a wait of the retry curve is at most this share of the wait."""
    keep_completed: float | None = 86_400.0
    """Seconds; 0 deletes a job when it is acked, `None` keeps it for ever."""
    keep_dead: float | None = None
    queues: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Options of jobs by the queue's own name, which for an outbox is the derived one."""
    liveness: bool = True
    """False: leases alone decide when a killed worker's jobs run again."""
    require_handler: bool = False
    """True: an enqueue to a queue without a registered handler is an error."""


MAX_INT32 = 2**31 - 1


def positive_int(option: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_INT32:
        raise InvalidOption(f"{option} must be a whole number from 1 to 2147483647, not {shown(value)}")
    return value


def priority(option: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**31) <= value <= MAX_INT32:
        raise InvalidOption(f"{option} must be a 32-bit whole number, not {shown(value)}")
    return value


def _unknown_key(where: str, key: object, known: Collection[str]) -> str:
    """The sentence that says that `key` is unknown, with the most similar known key."""
    by_folded = {name.casefold(): name for name in known}
    near = get_close_matches(str(key).casefold(), by_folded, n=1)
    meant = f" Did you mean {by_folded[near[0]]!r}?" if near else ""
    return f"{where} has an unknown key {shown(key)}.{meant} It takes {', '.join(known)}"


def _duration(option: str, value: object, *, zero: bool, none: bool = False) -> float | None:
    return None if none and value is None else seconds(option, value, zero=zero)


def _share(where: str, value: object) -> float:
    """A number from 0 to 1. Anything greater is most likely meant as a percentage."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise InvalidOption(f"{where} must be a number from 0 to 1 (a share of the wait), not {shown(value)}")
    return float(value)


def _job_options(where: str, value: object) -> dict[str, Any]:
    """Read one queue's default options. `InvalidOption` names a wrong key."""
    if not isinstance(value, Mapping):
        raise InvalidOption(f"{where} must be a dict of job options, not {shown(value)}")
    known = sorted(JobDefaults._fields)
    for key in value:
        if key not in known:
            raise InvalidOption(_unknown_key(where, key, known))
    readers: dict[str, Callable[[str, object], Any]] = {
        "visibility_timeout": lambda o, v: seconds(o, v, zero=False),
        "max_attempts": positive_int,
        "backoff_base": lambda o, v: seconds(o, v, zero=True),
        "expires_in": lambda o, v: _duration(o, v, zero=False, none=True),
        "priority": priority,
    }
    return {key: readers[key](f"{where}[{key!r}]", given) for key, given in value.items()}


def _database(where: str, value: object) -> str | None:
    if value is None or (isinstance(value, str) and value in django_settings.DATABASES):
        return value
    known = ", ".join(map(repr, django_settings.DATABASES))
    raise InvalidOption(f"{where} must be an alias in DATABASES ({known}) or None, not {shown(value)}")


def _json_encoder(where: str, value: object) -> type[json.JSONEncoder] | None:
    if isinstance(value, str):
        try:
            value = import_string(value)
        except Exception as error:
            raise InvalidOption(f"{where} cannot be imported: {error}") from error
    if value is not None and not (isinstance(value, type) and issubclass(value, json.JSONEncoder)):
        raise InvalidOption(f"{where} must be a json.JSONEncoder class or the dotted path of one, not {shown(value)}")
    return value


def _queues(where: str, value: object) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping):
        raise InvalidOption(
            f"{where} must be a dict from a queue's name, or 'outbox:' and an outbox's name, to a dict of job options, "
            f"not {shown(value)}"
        )
    return dict(_queue(f"{where}[{shown(key)}]", key, given) for key, given in value.items())


def _queue(where: str, key: object, value: object) -> tuple[str, dict[str, Any]]:
    """One entry of `QUEUES`: the name of the queue that holds the jobs, and their default options."""
    try:
        return queue_named(key), _job_options(where, value)
    except InvalidName as error:
        raise InvalidOption(f"{where}: {error}") from error


def _boolean(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidOption(f"{where} must be True or False, not {shown(value)}")
    return value


_READERS: dict[str, Callable[[str, object], Any]] = {
    "DATABASE": _database,
    "JSON_ENCODER": _json_encoder,
    "MAX_PAYLOAD_BYTES": positive_int,
    "MAX_BACKOFF": lambda where, value: seconds(where, value, zero=True),
    "BACKOFF_JITTER": _share,
    "KEEP_COMPLETED": lambda where, value: _duration(where, value, zero=True, none=True),
    "KEEP_DEAD": lambda where, value: _duration(where, value, zero=True, none=True),
    "QUEUES": _queues,
    "LIVENESS": _boolean,
    "REQUIRE_HANDLER": _boolean,
}


def problems(raw: object) -> Iterator[str]:
    """Every fault of an `ALKSTORE` setting, one sentence each, for the system check."""
    if not isinstance(raw, Mapping):
        yield f"ALKSTORE must be a dict, not {type(raw).__name__}"
        return
    for key, value in raw.items():
        if key not in _READERS:
            yield _unknown_key("ALKSTORE", key, _READERS)
            continue
        try:
            _READERS[key](f"ALKSTORE[{key!r}]", value)
        except AlkstoreError as error:
            message = str(error)
            yield message if message.startswith("ALKSTORE") else f"ALKSTORE[{key!r}]: {message}"


def raw_setting() -> object:
    # Not through Django's lazy object, which raises and catches an exception each time a missing setting is read.
    holder = object.__getattribute__(django_settings, "_wrapped")
    return getattr(django_settings if holder is empty else holder, "ALKSTORE", _NOTHING)


_NOTHING: dict[str, Any] = {}
_read: tuple[object, object, Settings] | None = None
"""The setting, a copy of its content, and the result of reading it."""


def settings() -> Settings:
    """The setting as it is now. `ImproperlyConfigured` with everything that is wrong with it.

    Remembered for as long as the setting is the same object with the same content.
    """
    global _read  # noqa: PLW0603  one setting, one reading of it
    raw = raw_setting()
    if _read is None or _read[0] is not raw or _read[1] != raw:
        faults = list(problems(raw))
        if faults or not isinstance(raw, Mapping):
            raise ImproperlyConfigured("; ".join(faults))
        values = {key.lower(): _READERS[key](f"ALKSTORE[{key!r}]", value) for key, value in raw.items()}
        _read = (raw, copy.deepcopy(raw), Settings(**values))
    return _read[2]
