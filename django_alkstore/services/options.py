"""The options of jobs and schedules: checked, and written on new jobs."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict

from django_alkstore import conf
from django_alkstore.conf import JobDefaults
from django_alkstore.dialects.base import NewJob
from django_alkstore.durations import Duration, aware_moment, moment_after, seconds
from django_alkstore.exceptions import InvalidOption, shown

MAX_TEXT = 255
"""Characters of a unique key, a worker's name or a lock owner's."""


class FireOptions(TypedDict, total=False):
    """The options of a schedule. One that is left out, or `None`, has the default of the queue."""

    priority: int | None
    """Higher goes first; any 32-bit integer. Default 0."""
    max_attempts: int | None
    """The largest number of deliveries, the first included. At least 1."""
    visibility_timeout: Duration | None
    """Seconds for which a claim is leased. Above 0."""
    backoff_base: Duration | None
    """Seconds before the second attempt; doubles with each one. 0 or more."""
    expires_in: Duration | None
    """Seconds from `run_at` after which the job is not delivered any more. Above 0. Default: never."""


class UnkeyedOptions(FireOptions, total=False):
    """The options of a job whose unique key, if any, is an argument of its own."""

    delay: Duration | None
    """Seconds from now until it is due. 0 or more."""
    run_at: datetime | None
    """When it is due: an aware datetime, instead of a delay. A moment in the past means now."""


class JobOptions(UnkeyedOptions, total=False):
    """The options of a job. One that is left out, or `None`, has the default of the queue."""

    unique_key: str | None
    """At most one live job of the queue has this key."""


_KNOWN = JobOptions.__required_keys__ | JobOptions.__optional_keys__
_KNOWN_TO_SCHEDULES = FireOptions.__required_keys__ | FireOptions.__optional_keys__


def stamp(queue: str, payload: str, options: Mapping[str, Any], defaults: JobDefaults, now: int) -> NewJob:
    """A job as it will be stored, from its options and the defaults. `InvalidOption` names an option out of range."""
    if not options:
        expires_in = defaults.expires_in
        return NewJob(
            queue,
            payload,
            0,
            now,
            defaults.max_attempts,
            defaults.visibility_timeout,
            defaults.backoff_base,
            None if expires_in is None else moment_after("expires_in", now, expires_in),
            None,
            None,
            None,
            now,
        )
    _refuse_unknown(options, _KNOWN)
    run_at = _run_at(options.get("delay"), options.get("run_at"), now)
    checked = check_fire_options(options)
    expires_in = expires_after(options, defaults)
    key = options.get("unique_key")
    return NewJob(
        queue=queue,
        payload=payload,
        priority=checked["priority"],
        run_at=run_at,
        max_attempts=_or(checked["max_attempts"], defaults.max_attempts),
        visibility_timeout=_or(checked["visibility_timeout"], defaults.visibility_timeout),
        backoff_base=_or(checked["backoff_base"], defaults.backoff_base),
        expires_at=None if expires_in is None else moment_after("expires_in", run_at, expires_in),
        unique_key=None if key is None else check_text("unique_key", key),
        schedule=None,
        fire_at=None,
        created_at=now,
    )


def check_fire_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that jobs and schedules share, checked; `None` for each that was left out."""
    timeout, base, expires_in = (options.get(k) for k in ("visibility_timeout", "backoff_base", "expires_in"))
    attempts = options.get("max_attempts")
    return {
        "priority": _priority(options.get("priority")),
        "max_attempts": None if attempts is None else conf.positive_int("max_attempts", attempts),
        "visibility_timeout": None if timeout is None else seconds("visibility_timeout", timeout, zero=False),
        "backoff_base": None if base is None else seconds("backoff_base", base, zero=True),
        "expires_in": None if expires_in is None else seconds("expires_in", expires_in, zero=False),
    }


def expires_after(options: Mapping[str, Any], defaults: JobDefaults) -> float | None:
    """Seconds from `run_at` until the job expires; `None` if it never does."""
    given = options.get("expires_in")
    return defaults.expires_in if given is None else seconds("expires_in", given, zero=False)


def refuse_unknown_schedule_options(options: Mapping[str, Any]) -> None:
    _refuse_unknown(options, _KNOWN_TO_SCHEDULES)


def check_text(option: str, value: object) -> str:
    """A short text that every database can hold: 1 to 255 characters, no NUL, no lone surrogate."""
    if not isinstance(value, str):
        raise InvalidOption(f"{option} must be a str, not {type(value).__name__}")
    if not 1 <= len(value) <= MAX_TEXT:
        raise InvalidOption(f"{option} must have 1 to {MAX_TEXT} characters; this one has {len(value)}")
    if "\x00" in value:
        raise InvalidOption(f"{option} holds a NUL character at position {value.index(chr(0))}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidOption(f"{option} holds a lone surrogate at position {error.start}") from None
    return str.__str__(value)


def _refuse_unknown(options: Mapping[str, Any], known: frozenset[str]) -> None:
    unknown = options.keys() - known
    if unknown:
        raise TypeError(
            f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, sorted(unknown)))}; "
            f"known are {', '.join(sorted(known))}"
        )


def _run_at(delay: object, run_at: object, now: int) -> int:
    if delay is not None and run_at is not None:
        raise InvalidOption("give delay or run_at, not both")
    if run_at is not None:
        return max(now, aware_moment("run_at", run_at))
    if delay is not None:
        return moment_after("delay", now, seconds("delay", delay, zero=True))
    return now


def _priority(value: object) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**31) <= value <= conf.MAX_INT32:
        raise InvalidOption(f"priority must be a 32-bit whole number, not {shown(value)}")
    return value


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
