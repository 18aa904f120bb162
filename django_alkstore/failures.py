"""A failed attempt as it is kept on the job: safe text, bounded, in a bounded list."""

import inspect
import json
import re
import sys
import traceback
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import Any, NamedTuple, TypedDict, cast

from django_alkstore.exceptions import Cancelled, Expired, LeaseExpired, TimeLimitExceeded, WorkerDied

MAX_ERRORS = 20
MAX_TEXT = 10_000
_MARK = " … [cut] … "

LEASE_EXPIRED = "lease expired"
WORKER_DIED = "worker died"
EXPIRED = "expired"
TIME_LIMIT = "time limit"
CANCELLED = "cancelled"


class Failure(TypedDict):
    """One entry of `Job.errors`."""

    attempt: int
    at: str
    """ISO 8601 in UTC."""
    error: str
    traceback: str
    """Empty if the failure was not an exception."""
    exception: str
    """The dotted path of the exception's class, or of the class that stands for what happened; empty for a text that
    was given as the error."""


_TRACEBACK, _CAUSE, _CONTEXT = (vars(BaseException)[name] for name in ("__traceback__", "__cause__", "__context__"))
_GROUPED = vars(BaseExceptionGroup)["exceptions"]
"""Descriptors: they read the attribute itself, also if a class overrides it."""

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_SPARES_SUSPENDED = sys.version_info >= (3, 13)
"""True if Python refuses to clear the frame of a suspended coroutine. Before 3.13 it ended the coroutine, which may be
another thread's that has only passed the exception on."""


class Described(NamedTuple):
    """An error as texts that any database can hold."""

    error: str
    traceback: str = ""
    exception: str = ""


def describe(error: object) -> Described:
    """`error`: a string or an exception."""
    if issubclass(type(error), BaseException):  # `isinstance` would ask the error itself
        return Described(
            _cut_end(_clean(_exception_line(error))),
            _cut_middle(_clean(_format_traceback(error))),
            _cut_end(_clean(_path_of(type(error)))),
        )
    return Described(_cut_end(_clean(error if isinstance(error, str) else repr(error))))


def traceback_of(error: BaseException) -> TracebackType | None:
    """The traceback of `error`, whatever its class overrides."""
    return cast("TracebackType | None", _TRACEBACK.__get__(error))


def clear_locals(error: BaseException) -> None:
    """Release the local variables of all frames in the tracebacks of `error` and of the exceptions behind it.

    An exception that is kept would otherwise keep them: rows, cursors and generators of a handler that has ended.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        _clear_frames(traceback_of(one))
        waiting += _CAUSE.__get__(one), _CONTEXT.__get__(one)
        if issubclass(type(one), BaseExceptionGroup):
            waiting += _GROUPED.__get__(one)


def _clear_frames(link: TracebackType | None) -> None:
    while link is not None:
        frame, link = link.tb_frame, link.tb_next
        if _SPARES_SUSPENDED or not frame.f_code.co_flags & _SUSPENDABLE:
            with suppress(RuntimeError):  # it is still running
                frame.clear()


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")

_STANDS_FOR = {
    LEASE_EXPIRED: _path_of(LeaseExpired),
    WORKER_DIED: _path_of(WorkerDied),
    EXPIRED: _path_of(Expired),
    TIME_LIMIT: _path_of(TimeLimitExceeded),
    CANCELLED: _path_of(Cancelled),
}


def describe_reason(reason: str) -> Described:
    """One of the library's own reasons, for which no exception was raised."""
    return Described(reason, "", _STANDS_FOR[reason])


def failure(attempt: int, at: datetime, described: Described) -> Failure:
    """The entry of an attempt that failed."""
    return {"attempt": attempt, "at": at.isoformat(), **described._asdict()}  # type: ignore[typeddict-item]


def append(history: bytes | str, entry: Failure) -> str:
    """The stored list `history` with `entry` behind it: the last `MAX_ERRORS`, as JSON text.

    A list that cannot be read (something else wrote it) is kept as an entry's text, so that it is not lost.
    """
    try:
        entries = json.loads(history)
        if not isinstance(entries, list):
            raise TypeError("not a list")
    except (TypeError, ValueError, RecursionError):
        text = history.decode(errors="replace") if isinstance(history, bytes) else str(history)
        unreadable: dict[str, Any] = {
            **entry,
            "error": _cut_end(f"unreadable history: {_clean(text)}"),
        }
        entries = [unreadable | {"traceback": "", "exception": ""}]
    # In ASCII: what something else wrote may hold what UTF-8 cannot.
    return json.dumps([*entries, entry][-MAX_ERRORS:])


def _exception_line(error: object) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001  a handler's exception may do anything when asked for its text
        return f"{name}: <its message cannot be read>"
    return f"{name}: {text}" if text else name


def _format_traceback(error: Any) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as broken:  # noqa: BLE001  as above: any of the chain's exceptions may be hostile
        return f"{type(error).__name__}: its traceback cannot be formatted ({type(broken).__name__})"


def _clean(text: str) -> str:
    """Replace what a database, a terminal or a dump in XML cannot hold: control characters and lone surrogates."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _cut_end(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - len(_MARK)] + _MARK


def _cut_middle(text: str) -> str:
    """Keep both ends: a traceback says where it started at the top and what happened at the bottom."""
    if len(text) <= MAX_TEXT:
        return text
    half = (MAX_TEXT - len(_MARK)) // 2
    return text[:half] + _MARK + text[-half:]
