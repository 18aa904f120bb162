"""The name rule, the reserved prefix, and the names derived from it."""

import os
import re
import socket
import uuid
from datetime import datetime
from functools import lru_cache

from django_alkstore.clock import to_us
from django_alkstore.exceptions import InvalidName, ReservedName

MAX_LENGTH = 128
RESERVED_PREFIX = "__alkstore_"
LEADERSHIP_LOCK = f"{RESERVED_PREFIX}scheduler"
OUTBOX_PREFIX = f"{RESERVED_PREFIX}outbox:"
OUTBOX_MARK = "outbox:"
"""Where people name a queue or an outbox, a name that begins with this names an outbox."""
MAX_QUEUE_LENGTH = len(OUTBOX_PREFIX) + MAX_LENGTH
"""An outbox's queue is longer than its name: what the columns must hold."""
SIGN_PREFIX = f"{RESERVED_PREFIX}worker:"
"""Of the rows in the lock table that are no locks: a worker's signs of life, one for each of its queues."""
AFTER_SIGNS = f"{RESERVED_PREFIX}worker;"
"""The first name after all those that begin with `SIGN_PREFIX`."""
SHORT_ID_LENGTH = 12
MAX_LOCK_LENGTH = len(SIGN_PREFIX) + SHORT_ID_LENGTH + 1 + MAX_QUEUE_LENGTH

_WELL_FORMED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-:/@+]*", re.ASCII)
_RULE = "ASCII letters, digits and . _ - : / @ +, the first a letter, digit or _"


def validate_name(kind: str, name: object) -> str:
    """Return `name` as a plain `str`, or raise `InvalidName` or `ReservedName`; `kind` is for the message."""
    if not isinstance(name, str):
        raise InvalidName(f"{kind} name must be a str, not {type(name).__name__}")
    plain = name if type(name) is str else str.__str__(name)
    _check(kind, plain)
    return plain


@lru_cache(maxsize=1024)
def _check(kind: str, name: str) -> None:
    """Raise what is wrong with `name`. Only a name that passes is remembered."""
    if not name:
        raise InvalidName(f"{kind} name is empty; it takes 1 to {MAX_LENGTH} characters")
    if len(name) > MAX_LENGTH:
        raise InvalidName(f"{kind} name has {len(name)} characters; at most {MAX_LENGTH} are allowed")
    if not _WELL_FORMED.fullmatch(name):
        matched = _WELL_FORMED.match(name)
        position = matched.end() if matched else 0
        raise InvalidName(f"{kind} name {name!r} has {name[position]!a} at position {position}; allowed are {_RULE}")
    if name.startswith(RESERVED_PREFIX):
        raise ReservedName(f"{kind} name {name!r} begins with {RESERVED_PREFIX!r}, which belongs to the library")


def unique_owner() -> str:
    """A name that nobody else has: host, process, and a random part for this one use."""
    return f"{socket.gethostname()[:64]}:{os.getpid()}:{uuid.uuid4().hex[:SHORT_ID_LENGTH]}"


def outbox_queue(outbox: str) -> str:
    """The queue that holds an outbox's jobs."""
    return OUTBOX_PREFIX + validate_name("outbox", outbox)


def queue_named(name: object) -> str:
    """The queue of a name as people write it: `NAME` for a queue, `outbox:NAME` for an outbox."""
    if isinstance(name, str) and name.startswith(OUTBOX_MARK):
        return outbox_queue(name.removeprefix(OUTBOX_MARK))
    return validate_name("queue", name)


def outbox_of(queue: str) -> str | None:
    """The outbox whose queue this is, or `None` for an ordinary queue."""
    return queue.removeprefix(OUTBOX_PREFIX) if queue.startswith(OUTBOX_PREFIX) else None


def idempotency_key(job_id: int, created_at: datetime) -> str:
    """A text that names one job in other systems: digits and hyphens alone, so that it fits a header or a file name.

    The id alone is not enough: a database that was restored from a backup gives out some ids a second time.
    """
    return f"{job_id}-{to_us(created_at)}"


def sign_name(worker_id: str, queue: str) -> str:
    """The name of a worker's sign of life for one queue. The id's end is its random part."""
    return f"{SIGN_PREFIX}{worker_id[-SHORT_ID_LENGTH:]}:{queue}"


def queue_of_sign(name: str) -> str | None:
    """The queue that a row of the lock table is a sign of life for, or `None` for a lock."""
    return name.removeprefix(SIGN_PREFIX).partition(":")[2] if name.startswith(SIGN_PREFIX) else None


@lru_cache(maxsize=1024)
def describe_queue(queue: str) -> str:
    """A queue as people name it: `queue mail`, `outbox webhooks`."""
    outbox = outbox_of(queue)
    return f"queue {queue}" if outbox is None else f"outbox {outbox}"
