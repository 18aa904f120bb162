"""Running one handler: whatever it does, what comes back is an ending."""

import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.dispatch import receiver

from django_alkstore import clock, signals
from django_alkstore.dialects import dialect_of
from django_alkstore.dialects.transactions import busy_timeout, is_contention, is_left_open, turn
from django_alkstore.registry import Registration
from django_alkstore.services import JobHandle
from django_alkstore.services.handles import await_here, run_to_end
from django_alkstore.services.outcomes import ACK, RELEASE, Kind, Outcome, outcome_of, wait_before_retry


class Ending(NamedTuple):
    """How an attempt ended, and how long it took."""

    outcome: Outcome | None
    """`None`: there is nothing left to write, since the handler, or its transaction, has settled the job."""
    seconds: float
    by_database: bool = False
    """Was it a database error that ended it?"""


BUSY_PAUSE = 1.0
"""Seconds until an atomic job that did not get the writer lock is tried again."""


def perform(
    registration: Registration, job: JobHandle, await_result: Callable[[Awaitable[object]], None] = await_here
) -> Ending:
    """Run the handler on `job` in this thread. Never raises, whatever the handler raises."""
    started = clock.monotonic()
    outcome: Outcome | None = ACK
    by_database = False
    process = os.getpid()
    try:
        if registration.atomic:
            outcome = _run_in_transaction(registration, job, process)
        else:
            run_to_end(registration.target, job, await_result)
    except BaseException as error:  # noqa: BLE001  SystemExit and its kind end the attempt, not the worker
        outcome = outcome_of(error)
        by_database = issubclass(type(error), DatabaseError)  # past what it says that it is
    else:
        outcome = None if job.settled else outcome
    _end_forked_child(process)
    return Ending(outcome, clock.monotonic() - started, by_database)


def _end_forked_child(process: int) -> None:
    """End a child that the handler has forked and let fall through: it is no worker.

    Before anything is written, or rolled back: SQLite's connections are its parent's, and its locks it has not.
    """
    if os.getpid() != process:
        os._exit(0)


def _run_in_transaction(registration: Registration, job: JobHandle, process: int) -> Outcome | None:
    """The handler's rows and the ack commit together; what is left to write.

    The transaction takes the writer lock first: a handler that read and then wrote would otherwise be refused
    by SQLite whenever another had written in between. Where the lock is not to be had, the handler has not run,
    and no attempt is spent.
    """
    running = False
    try:
        with turn(job.using, busy_timeout(job.using)), transaction.atomic(using=job.using):
            if not job.hold(registration.time_limit):
                return RELEASE  # another has the job by now: the handler has not run, and nothing is to be written
            running = True
            try:
                run_to_end(registration.target, job)
            finally:
                _end_forked_child(process)
            job.finish()
    except OperationalError as error:
        if running or not is_contention(job.using, error):
            raise
        return Outcome(Kind.GIVE_BACK, delay=BUSY_PAUSE)
    return None


def announce_failure(job: JobHandle, outcome: Outcome, seconds: float) -> None:
    """Tell of a failed attempt, once `outcome` is on the job's row."""
    said = {
        "seconds": seconds,
        "error": outcome.error,
        "traceback": outcome.traceback,
        "asked_for": outcome.asked_for,
    }
    wait = wait_before_retry(job, outcome)
    if wait is None:
        signals.emit(signals.job_died, job=job, **said)
    else:
        signals.emit(signals.job_retried, job=job, retry_in=wait, **said)


class _Thread(threading.local):
    """What a thread has of connections. To ask Django costs more than a short handler does."""

    has_opened = True
    """Has one been opened since it was last asked? One that never was has nothing to be tidied."""

    def __init__(self) -> None:
        self.connections: Sequence[BaseDatabaseWrapper] = ()


_thread = _Thread()


@receiver(connection_created)
def _note_opened(**_: object) -> None:
    _thread.has_opened = True


def tidy_connections(own: str | None, *, afresh: bool = False) -> bool:
    """Leave the thread's connections fit for the next job, as Django does between two requests.

    That to `own`, the database of the jobs, stays open however old it is: to open it anew for each job costs more
    than most jobs, and nothing at its other end waits to be let go. `None` where the thread is not kept for jobs.
    `afresh`: not even that one; what a job has set on it may be why the next one failed.

    One that the handler left inside a transaction, or in manual commit, is thrown away with all that it had
    not committed; was there any?
    """
    if _thread.has_opened:
        _thread.has_opened = False
        _thread.connections = connections.all(initialized_only=True)
    thrown_away = False
    for connection in _thread.connections:
        connection.queries_log.clear()
        if is_left_open(connection):
            _throw_away(connection)
            thrown_away = True
            continue
        try:
            if connection.alias == own:
                connection.close_at = None
                if afresh or not dialect_of(connection).is_at_rest(connection):
                    connection.close()
            connection.close_if_unusable_or_obsolete()
        except Exception:  # noqa: BLE001  whatever it is, the next job gets another connection
            _throw_away(connection)
    return thrown_away


def _throw_away(connection: BaseDatabaseWrapper) -> None:
    """Django's own `close` would keep the wrapper, and with it the belief that a transaction is open."""
    raw = connection.connection
    del connections[connection.alias]
    _thread.has_opened = True
    if raw is not None:
        with suppress(Exception):  # it is gone either way
            raw.close()
