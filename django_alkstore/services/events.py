"""Events: which signal tells of an outcome, and the signals of what a program does by calling a service.

The signals of a service go to receivers after the commit and write no log line. If nobody listens they cost one look
at the signal.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from django.db import connections, transaction
from django.dispatch import Signal

from django_alkstore import clock, signals
from django_alkstore.dialects.transactions import is_open
from django_alkstore.services.outcomes import Claimed, Kind, Outcome, wait_before_retry

T = TypeVar("T")


class Event(NamedTuple):
    """A signal and its arguments."""

    signal: Signal
    data: dict[str, Any]


def tell(using: str, signal: Signal, **data: Any) -> None:
    """Send `signal` once what has just been written is committed. Not sent if the transaction is rolled back.

    Not sent either inside a transaction in manual commit (`set_autocommit(False)`): Django tells nobody of its commit.
    """
    if not signal.receivers:
        return
    connection = connections[using]
    if connection.in_atomic_block:
        transaction.on_commit(partial(signals.tell, signal, using=using, **data), using=using, robust=True)
    elif not is_open(connection):
        signals.tell(signal, using=using, **data)


def told(result: T, using: str, signal: Signal, **data: Any) -> T:
    """`result`, after `tell` if it says that something was changed."""
    if result:
        tell(using, signal, **data)
    return result


def failure_event(job: Claimed, outcome: Outcome, seconds: float) -> Event:
    """The event of a failed attempt. Takes the exception out of `outcome`."""
    data = {
        "job": job,
        "seconds": seconds,
        "error": outcome.error,
        "traceback": outcome.traceback,
        "asked_for": outcome.asked_for,
        "exception": outcome.take_exception(),
    }
    wait = wait_before_retry(job, outcome)
    if wait is None:
        return Event(signals.job_died, data)
    return Event(signals.job_retried, {**data, "retry_in": wait})


def outcome_event(job: Claimed, outcome: Outcome, seconds: float) -> Event | None:
    """The event of an attempt's outcome; None for a job that is given back without a delay."""
    if outcome.kind is Kind.ACK:
        return Event(signals.job_completed, {"job": job, "seconds": seconds})
    if outcome.is_failure:
        return failure_event(job, outcome, seconds)
    if outcome.error:
        return Event(signals.job_locked_out, {"job": job, "error": outcome.error, "delay": outcome.delay})
    if outcome.delay is not None:
        return Event(signals.job_snoozed, {"job": job, "delay": outcome.delay})
    return None


def settled_event(job: Claimed, outcome: Outcome, seconds: float) -> Event | None:
    """As `outcome_event`, for a job that one of its handle's own methods has settled."""
    if outcome.kind is Kind.GIVE_BACK and outcome.delay is None:
        return Event(signals.job_settled, {"job": job, "seconds": seconds})
    return outcome_event(job, outcome, seconds)


class ClaimedByHand(Claimed, Protocol):
    """The handle of a job that no worker runs."""

    @property
    def _claimed_at(self) -> float | None: ...


def tell_settled(job: ClaimedByHand, outcome: Outcome) -> None:
    """Tell of the end of a claim that `claim_batch` or `run_once` has made, once it is committed.

    Nothing is sent for a worker's job: the worker announces the end itself, together with its log line.
    """
    if job._claimed_at is None:
        return
    event = settled_event(job, outcome, clock.monotonic() - job._claimed_at)
    if event is not None:
        signals.tell(event.signal, **event.data)
