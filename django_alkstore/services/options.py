"""The options of jobs and schedules: checked, and written on new jobs."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from difflib import get_close_matches
from enum import Enum
from typing import Any, Final, Literal, Protocol, TypedDict

from django.conf import settings as django_settings

from django_alkstore import conf, registrations, signals
from django_alkstore.conf import OUTBOX_DEFAULTS, PLAIN_DEFAULTS, JobDefaults, Settings
from django_alkstore.dialects.base import NewJob
from django_alkstore.durations import Duration, aware_moment, moment_after, seconds
from django_alkstore.exceptions import InvalidOption, UnknownQueue
from django_alkstore.models import STORED_NEVER
from django_alkstore.names import describe_queue, outbox_of

MAX_TEXT = 255
"""Characters of a unique key, a worker's name or a lock owner's."""


class Never(Enum):
    """The type of `NEVER`."""

    NEVER = "never"

    def __repr__(self) -> str:
        return "NEVER"


NEVER: Final = Never.NEVER
"""As `expires_in`: the job does not expire, whatever the default of its queue is."""


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
    expires_in: Duration | Literal[Never.NEVER] | None
    """Seconds from `run_at` after which the job is not delivered any more, above 0; or `NEVER`."""


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


_REMEMBERED_QUEUES = 1_000
_remembered: tuple[Settings, int, dict[str, JobDefaults]] | None = None
"""The defaults by queue, with the settings and the version of the registrations that they come from."""


def defaults_for(queue: str, settings: Settings) -> JobDefaults:
    """The default options of the jobs of a queue, or of an outbox's queue.

    Each comes from `ALKSTORE["QUEUES"]`, else from the decorator of the handler, else from the library.
    """
    global _remembered  # noqa: PLW0603  to work them out anew would cost each enqueue more than its statement
    if _remembered is None or _remembered[0] is not settings or _remembered[1] != registrations.version:
        _remembered = (settings, registrations.version, {})
    known = _remembered[2]
    defaults = known.get(queue)
    if defaults is None:
        registration = registrations.registration_for(queue)
        defaults = OUTBOX_DEFAULTS if outbox_of(queue) else PLAIN_DEFAULTS
        if registration is not None:
            defaults = defaults._replace(**registration.options)
        defaults = defaults._replace(**settings.queues.get(queue, {}))
        if registrations.is_discovered() and len(known) < _REMEMBERED_QUEUES:
            known[queue] = defaults
    return defaults


_warned: set[str] = set()
"""Queues without a handler that were logged."""


def expect_handler(queue: str, settings: Settings) -> None:
    """Raise `UnknownQueue` if the setting `REQUIRE_HANDLER` asks for a handler and the queue has none.

    Without the setting, and with `DEBUG`, log the queue once in a process if other queues have handlers.
    """
    if not (settings.require_handler or (django_settings.DEBUG and queue not in _warned)):
        return
    if registrations.registration_for(queue) is not None or not registrations.is_discovered():
        return  # before the modules are imported, the handlers are not known
    registered = registrations.registered()
    nearest = _nearest(queue, [registration.queue for registration in registered])
    if settings.require_handler:
        raise UnknownQueue(describe_queue(queue), nearest, [broken.module for broken in registrations.broken_modules()])
    _warned.add(queue)
    if registered:
        signals.emit(signals.queue_unknown, queue=queue, nearest=nearest)


def _nearest(queue: str, others: Iterable[str]) -> str | None:
    """The registered queue with the most similar name, for a message; the outbox, if `queue` is that of an outbox."""
    is_outbox = outbox_of(queue) is not None
    names = {outbox_of(other) or other: other for other in others if (outbox_of(other) is not None) == is_outbox}
    found = get_close_matches(outbox_of(queue) or queue, names, n=1)
    return describe_queue(names[found[0]]) if found else None


def stamp(queue: str, payload: str, options: Mapping[str, Any], defaults: JobDefaults, now: int) -> NewJob:
    """A job as it will be stored, from its options and the defaults. `InvalidOption` names an option out of range."""
    if not options:
        expires_in = defaults.expires_in
        return NewJob(
            queue,
            payload,
            defaults.priority,
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
        priority=_or(checked["priority"], defaults.priority),
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
    attempts, priority = options.get("max_attempts"), options.get("priority")
    return {
        "priority": None if priority is None else conf.priority("priority", priority),
        "max_attempts": None if attempts is None else conf.positive_int("max_attempts", attempts),
        "visibility_timeout": None if timeout is None else seconds("visibility_timeout", timeout, zero=False),
        "backoff_base": None if base is None else seconds("backoff_base", base, zero=True),
        "expires_in": expires_in if expires_in in (None, NEVER) else seconds("expires_in", expires_in, zero=False),
    }


class _WithFireOptions(Protocol):
    """A schedule's row."""

    @property
    def priority(self) -> int: ...
    @property
    def max_attempts(self) -> int | None: ...
    @property
    def visibility_timeout(self) -> float | None: ...
    @property
    def backoff_base(self) -> float | None: ...
    @property
    def expires_in(self) -> float | None: ...


def fire_options_to_store(checked: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a schedule's row."""
    expires_in = checked["expires_in"]
    return {
        **checked,
        "priority": checked["priority"] or 0,
        "expires_in": STORED_NEVER if expires_in is NEVER else expires_in,
    }


def options_of_schedule(row: _WithFireOptions) -> dict[str, Any]:
    """The options that a schedule's row gives to its jobs. A priority of 0 is the default of the queue."""
    return {
        "priority": row.priority or None,
        "max_attempts": row.max_attempts,
        "visibility_timeout": row.visibility_timeout,
        "backoff_base": row.backoff_base,
        "expires_in": NEVER if row.expires_in == STORED_NEVER else row.expires_in,
    }


def expires_after(options: Mapping[str, Any], defaults: JobDefaults) -> float | None:
    """Seconds from `run_at` until the job expires; `None` if it never does."""
    given = options.get("expires_in")
    if given is NEVER:
        return None
    return defaults.expires_in if given is None else seconds("expires_in", given, zero=False)


def refuse_unknown_options(options: Mapping[str, Any], known: type[TypedDict]) -> None:  # type: ignore[valid-type]
    """`TypeError` for an option that the typed dict does not have."""
    _refuse_unknown(options, frozenset(known.__optional_keys__))  # type: ignore[attr-defined]


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


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
