"""Every error of the library. Each docstring says when it is raised; the attributes carry the data.

Ordinary outcomes (nothing to claim, a lease that was lost) are return values and not errors.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

__all__ = [
    "AlkstoreError",
    "Cancelled",
    "Discard",
    "DuplicateJob",
    "Expired",
    "InvalidName",
    "InvalidOption",
    "InvalidPayload",
    "InvalidReturnValue",
    "InvalidSpec",
    "LeadershipLost",
    "LeaseExpired",
    "LeaseLost",
    "LockHeld",
    "LockLost",
    "ReservedName",
    "Retry",
    "Snooze",
    "TimeLimitExceeded",
    "TransactionRequired",
    "UnknownQueue",
    "WorkerDied",
]


def shown(value: object) -> str:
    """`value` for an error message: its `repr`, cut, or a description if it has none."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  what is wrong with the value must not hide what is wrong with the call
        return f"<{type(value).__name__}>"
    return text if len(text) <= 120 else f"{text[:100]}…"


class AlkstoreError(Exception):
    """The parent of every error of this library."""


class InvalidName(AlkstoreError, ValueError):
    """A queue, lock, schedule or outbox name breaks the name rule. The message says which character or length."""


class ReservedName(InvalidName):
    """A name begins with `__alkstore_`, which belongs to the library."""


class InvalidPayload(AlkstoreError, TypeError):
    """A payload is not JSON, or is too large. The message says where in the payload."""


class InvalidOption(AlkstoreError, ValueError):
    """An option is out of range or of the wrong kind. The message names the option and the value."""


class InvalidSpec(AlkstoreError, ValueError):
    """A schedule's spec is outside the grammar, or its first boundary is past what a date can hold."""


class TransactionRequired(AlkstoreError, RuntimeError):
    """A function that joins the caller's transaction was called outside one, or on another database's."""


class UnknownQueue(AlkstoreError, LookupError):
    """No handler is registered for a queue or an outbox, and `ALKSTORE["REQUIRE_HANDLER"]` asks for one.

    `.queue` names it as people do (`queue mail`), `.nearest` the most similar one that has a handler, or `None`.
    """

    def __init__(self, queue: str, nearest: str | None = None, broken: Sequence[str] = ()) -> None:
        super().__init__(queue, nearest, broken)
        self.queue = queue
        self.nearest = nearest
        self.broken = broken

    def __str__(self) -> str:
        meant = f". Did you mean {self.nearest}?" if self.nearest else ""
        broken = f". Cannot be imported: {', '.join(self.broken)} (the log says why)" if self.broken else ""
        return f"no handler is registered for the {self.queue}{meant}{broken}"


class DuplicateJob(AlkstoreError):
    """A live job of the queue has this unique key already: `.queue`, `.unique_key`, `.job_id`."""

    def __init__(self, queue: str, unique_key: str, job_id: int) -> None:
        super().__init__(queue, unique_key, job_id)
        self.queue = queue
        self.unique_key = unique_key
        self.job_id = job_id

    def __str__(self) -> str:
        return f"queue {self.queue!r} has a live job with the unique key {self.unique_key!r}: job {self.job_id}"


class LeaseLost(AlkstoreError):
    """The lease on a job ran out, or was taken, before `ack_tx`; the transaction must roll back: `.job_id`."""

    def __init__(self, job_id: int) -> None:
        super().__init__(job_id)
        self.job_id = job_id

    def __str__(self) -> str:
        return f"the lease on job {self.job_id} was lost; its transaction is rolled back"


class LockHeld(AlkstoreError):
    """The lock is held: `.name`, `.owner` and `.expires_at` of its holder."""

    def __init__(self, name: str, owner: str, expires_at: datetime) -> None:
        super().__init__(name, owner, expires_at)
        self.name = name
        self.owner = owner
        self.expires_at = expires_at

    def __str__(self) -> str:
        return f"lock {self.name!r} is held by {self.owner} until {self.expires_at.isoformat(timespec='seconds')}"


class LockLost(AlkstoreError):
    """A `with` block ended without its lock, which had lapsed or been taken: `.name`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"lock {self.name!r} was lost before the end of its block, which ran unprotected from then on"


class LeadershipLost(AlkstoreError):
    """Another scheduler leads: this one could not take the leadership, or has lost it. It fired nothing since."""


class WorkerDied(AlkstoreError):
    """Never raised; named as `exception` in `Job.errors`: the worker's process ended during the attempt."""


class LeaseExpired(AlkstoreError):
    """Never raised; named as `exception` in `Job.errors`: the lease ran out during the attempt."""


class TimeLimitExceeded(AlkstoreError):
    """Never raised; named as `exception` in `Job.errors`: the handler ran for longer than its `time_limit`."""


class Expired(AlkstoreError):
    """Never raised; named as `exception` in `Job.errors`: the job's `expires_at` passed before its claim."""


class Cancelled(AlkstoreError):
    """Never raised: names the end of a job that was cancelled."""


def _describe_delay(delay: float | timedelta | None) -> str:
    if delay is None:
        return ""
    return f"in {delay.total_seconds() if isinstance(delay, timedelta) else delay:g} s"


class Retry(AlkstoreError):
    """Raised by a handler: this attempt failed; try again after `delay` seconds (default: the backoff curve).

    With no attempts left the job becomes dead, with `reason` as its error.
    """

    def __init__(self, reason: str = "", *, delay: float | timedelta | None = None) -> None:
        if not isinstance(reason, str):
            raise TypeError(f"Retry takes a reason and, by name, a delay: Retry(delay={shown(reason)})?")
        super().__init__(reason or f"retry asked for {_describe_delay(delay)}".rstrip())
        self.delay = delay


class Discard(AlkstoreError):
    """Raised by a handler: give up at once. The job becomes dead with `reason`, whatever attempts are left."""

    def __init__(self, reason: str = "discarded") -> None:
        super().__init__(reason)


class InvalidReturnValue(Discard, TypeError):
    """A task has returned what JSON cannot hold. Its effects are done, so it fails without a further attempt."""


class Snooze(AlkstoreError):
    """Raised by a handler: run again after `delay` seconds. This attempt is not counted."""

    def __init__(self, delay: float | timedelta) -> None:
        super().__init__(delay)
        self.delay = delay

    def __str__(self) -> str:
        return f"snoozed {_describe_delay(self.delay)}"
