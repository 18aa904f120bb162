"""The outcomes of an attempt, and the functions that write them to the job's row."""

from enum import Enum, auto
from typing import NamedTuple, Protocol

from django_alkstore import backoff, clock, conf, failures
from django_alkstore.clock import LAST_US, SECOND, from_us
from django_alkstore.dialects import Operations
from django_alkstore.dialects.base import Claim
from django_alkstore.durations import Duration, moment_after, seconds
from django_alkstore.exceptions import Discard, Retry, Snooze


class Kind(Enum):
    """What happens to the job."""

    ACK = auto()  # completed
    RETRY = auto()  # a failed attempt: pending again while attempts are left, else dead
    FAIL = auto()  # a failed attempt: dead at once
    GIVE_BACK = auto()  # pending again, the attempt not counted


class Raised:
    """The exception that ended an attempt, for the announcement of the failure.

    It refers to frames of the worker, which refer to the outcome. Whoever takes it breaks that cycle.
    """

    __slots__ = ("_exception",)

    def __init__(self, exception: BaseException) -> None:
        self._exception: BaseException | None = exception

    def take(self) -> BaseException | None:
        """The exception, the first time; then None."""
        exception, self._exception = self._exception, None
        return exception


class Outcome(NamedTuple):
    """The end of one attempt."""

    kind: Kind
    error: str = ""
    traceback: str = ""
    exception: str = ""
    """The dotted path of the exception's class; empty if there is none."""
    delay: float | None = None
    """Seconds; for RETRY `None` is the curve, for GIVE_BACK `None` leaves `run_at` as it was."""
    lock_errors: int | None = None
    """For GIVE_BACK: the job's lock errors in a row from now on; `None` leaves them as they were."""
    asked_for: bool = False
    """True if the handler asked for it by `Retry` or `Discard`. Then its traceback is no news."""
    result: str | None = None
    """For ACK: what a task returned, as JSON."""
    raised: Raised | None = None
    """What the handler raised, if the outcome is a failed attempt."""

    @property
    def is_failure(self) -> bool:
        """True if the attempt counts as failed."""
        return self.kind in (Kind.RETRY, Kind.FAIL)

    def take_exception(self) -> BaseException | None:
        """What the handler raised; None if it raised nothing, or if this was called before."""
        return None if self.raised is None else self.raised.take()


ACK = Outcome(Kind.ACK)
RELEASE = Outcome(Kind.GIVE_BACK)
TIME_LIMIT = Outcome(Kind.RETRY, *failures.describe_reason(failures.TIME_LIMIT))
"""The handler has run for longer than its time limit."""


class Claimed(Protocol):
    """The attributes of a claimed job that an outcome needs."""

    def _claim(self, held_at: int) -> Claim: ...
    @property
    def attempt(self) -> int: ...
    @property
    def max_attempts(self) -> int: ...
    @property
    def _backoff_base(self) -> float: ...
    @property
    def _jitter(self) -> float: ...
    @property
    def _history(self) -> bytes: ...


def retry(error: object = None, delay: Duration | None = None) -> Outcome:
    wait = None if delay is None else _delay(delay)
    return Outcome(Kind.RETRY, *failures.describe("retry" if error is None else error), wait)


def _delay(delay: object) -> float:
    """Seconds that end at a moment which a date can hold, or `InvalidOption`."""
    wait = seconds("delay", delay, zero=True)
    moment_after("delay", clock.now_us(), wait)
    return wait


def fail(error: object) -> Outcome:
    return Outcome(Kind.FAIL, *failures.describe(error))


def give_back_after(delay: Duration) -> Outcome:
    """Pending again after a delay, the attempt not counted. `InvalidOption` for a delay out of range."""
    return Outcome(Kind.GIVE_BACK, delay=_delay(delay))


def outcome_of(error: BaseException) -> Outcome:
    """The outcome of a handler that raised `error`. A request with a wrong value (`Retry(delay=-1)`) is a failure.

    The local variables of the handler are released.
    """
    try:
        outcome = _asked_for(error)
    except Exception as nonsense:  # noqa: BLE001  the handler's exception may do anything when it is looked at
        outcome = retry(nonsense)._replace(raised=Raised(nonsense))
        failures.clear_locals(nonsense)
    failures.clear_locals(error)
    return outcome


def _asked_for(error: BaseException) -> Outcome:
    kind = type(error)  # `isinstance` would ask the error itself
    if issubclass(kind, Snooze):
        return Outcome(Kind.GIVE_BACK, delay=_delay(getattr(error, "delay", None)), lock_errors=0)
    if issubclass(kind, Discard):
        return fail(error)._replace(asked_for=True, raised=Raised(error))
    if issubclass(kind, Retry):
        return retry(error, getattr(error, "delay", None))._replace(asked_for=True, raised=Raised(error))
    return retry(error)._replace(raised=Raised(error))


def wait_before_retry(job: Claimed, outcome: Outcome) -> float | None:
    """Seconds until the next attempt that `outcome` leads to, or `None` if there is none.

    The answer is the same each time, so that the row and the announcement agree: the claim has one `jitter`.
    """
    if outcome.kind is not Kind.RETRY or job.attempt >= job.max_attempts:
        return None
    if outcome.delay is not None:
        return outcome.delay
    return curve_wait(job._backoff_base, job.attempt, job._jitter)


def curve_wait(base: float, attempt: int, jitter: float) -> float:
    """Seconds by the retry curve and the settings. `jitter`, from 0 to 1: how much of the random extra is added."""
    settings = conf.settings()
    return backoff.backoff(base, attempt, settings.max_backoff, jitter * settings.backoff_jitter)


def apply(db: Operations, job: Claimed, outcome: Outcome, now: int, held_at: int | None = None) -> bool:
    """Write `outcome` to the job's row. `False`, with nothing changed, if its lease was lost. One statement.

    `held_at`: the moment at which the lease must not have run out (default: now).
    """
    claim = job._claim(now if held_at is None else held_at)
    if outcome.kind is Kind.ACK:
        if outcome.result is not None and conf.settings().keep_completed != 0:
            return db.complete(claim, now, outcome.result)
        return bool(ack_all(db, [claim], now))
    if outcome.kind is Kind.GIVE_BACK:
        run_at = None if outcome.delay is None else _later(now, outcome.delay)
        return db.give_back(claim, run_at, outcome.lock_errors)
    entry = failures.failure(
        job.attempt, from_us(now), failures.Described(outcome.error, outcome.traceback, outcome.exception)
    )
    errors = failures.append(job._history, entry)
    wait = wait_before_retry(job, outcome)
    if wait is None:
        return db.bury(claim, now, errors, outcome.error)
    return db.retry(claim, _later(now, wait), errors, outcome.error)


def _later(now: int, wait: float) -> int:
    return min(now + round(wait * SECOND), LAST_US)


def ack_all(db: Operations, claims: list[Claim], now: int) -> set[tuple[int, int]]:
    """Complete the jobs of these claims, or delete them if completed jobs are not kept.

    Returns the claims that took effect, by id and fence.
    """
    return db.ack(claims, now, delete=conf.settings().keep_completed == 0)
