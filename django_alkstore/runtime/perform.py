"""Runs one handler. Whatever the handler does, the result is an `Ending`."""

import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from inspect import isawaitable
from typing import NamedTuple, cast

from django.conf import settings
from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.dispatch import receiver
from django.utils import timezone, translation

from django_alkstore import clock, failures, signals
from django_alkstore.dialects import dialect_of
from django_alkstore.dialects.transactions import busy_timeout, is_contention, is_left_open, turn
from django_alkstore.registry import Registration
from django_alkstore.services import JobHandle
from django_alkstore.services.events import failure_event
from django_alkstore.services.handles import run_to_end
from django_alkstore.services.outcomes import ACK, RELEASE, Kind, Outcome, outcome_of, retry

LEFT_OPEN = "the handler left a transaction open, which was rolled back"


class Ending(NamedTuple):
    """How an attempt ended, and how long it took."""

    outcome: Outcome | None
    """None if nothing is left to write, since the handler or its transaction has settled the job."""
    seconds: float
    by_database: bool = False
    """True if a database error ended it."""

    def with_transaction_left_open(self) -> "Ending":
        """This ending, after a transaction that the handler had left open was rolled back.

        What the handler wrote is not there, nor is its own ack: the job must not count as done.
        """
        return Ending(retry(LEFT_OPEN), self.seconds) if self.outcome in (ACK, None) else self


BUSY_PAUSE = 1.0
"""Seconds until an atomic job that did not get the writer lock is tried again."""
LOCK_ERRORS_IN_A_ROW = 3
"""How often a job that ends with a lock error of the database is tried again without spending an attempt."""
LONGEST_LOCK_PAUSE = 0.5
"""Seconds until the next attempt after a lock error; at least a fifth of it. Twice as long after each further one."""

_random = random.Random()


def _do_nothing() -> None:
    """The default of `on_writer_lock`."""


def project_context() -> Context:
    """A copy of the present context, with the project's language and time zone. Handlers run in copies of it."""
    context = copy_context()
    context.run(_reset_language_and_time_zone)
    return context


def _reset_language_and_time_zone() -> None:
    translation.activate(settings.LANGUAGE_CODE)
    timezone.deactivate()


def perform(
    registration: Registration,
    job: JobHandle,
    on_writer_lock: Callable[[], object] = _do_nothing,
) -> Ending:
    """Run the handler on `job` in this thread, to its end if it is a coroutine. Raises nothing that the handler raises.

    `on_writer_lock`: called when an atomic handler has the writer lock and is about to begin.
    """
    started = clock.monotonic()
    outcome: Outcome | None = ACK
    process = os.getpid()
    try:
        if registration.atomic:
            outcome = _run_in_transaction(registration, job, process, on_writer_lock)
        else:
            outcome = _outcome_of_return(run_to_end(registration.target, job))
    except BaseException as error:  # noqa: BLE001  SystemExit and its kind end the attempt, not the worker
        _end_forked_child(process)
        return ending_of(registration, job, error, started)
    _end_forked_child(process)
    return Ending(None if job._settled else outcome, clock.monotonic() - started)


async def perform_coroutine(registration: Registration, job: JobHandle) -> Ending:
    """Await the handler on `job` in the running event loop. Raises nothing that the handler raises."""
    started = clock.monotonic()
    process = os.getpid()
    try:
        result = registration.target(job)
        if isawaitable(result):
            result = await result
    except BaseException as error:  # noqa: BLE001  SystemExit and its kind end the attempt, not the worker
        _end_forked_child(process)
        return ending_of(registration, job, error, started)
    _end_forked_child(process)
    return Ending(None if job._settled else _outcome_of_return(result), clock.monotonic() - started)


def _outcome_of_return(value: object) -> Outcome:
    """The outcome of a handler that has returned: the one that a task's runner returns, else an ack."""
    return value if type(value) is Outcome else ACK


def ending_of(registration: Registration, job: JobHandle, error: BaseException, started: float) -> Ending:
    """The ending of an attempt that began at `started` and that `error` has ended."""
    by_database = issubclass(type(error), DatabaseError)  # `isinstance` would ask the error itself
    outcome = _outcome_of(job, error)
    if registration.after_failure is not None:
        outcome = registration.after_failure(job, error, outcome)
    return Ending(outcome, clock.monotonic() - started, by_database)


def _outcome_of(job: JobHandle, error: BaseException) -> Outcome:
    is_locked_out = issubclass(type(error), OperationalError) and is_contention(
        job._using, cast("OperationalError", error)
    )
    if not is_locked_out or job._lock_errors >= LOCK_ERRORS_IN_A_ROW:
        return outcome_of(error)
    delay = _random.uniform(LONGEST_LOCK_PAUSE / 5, LONGEST_LOCK_PAUSE) * 2**job._lock_errors
    return Outcome(Kind.GIVE_BACK, failures.describe(error)[0], delay=delay, lock_errors=job._lock_errors + 1)


def _end_forked_child(process: int) -> None:
    """End the process if it is a child that the handler has forked, and that has returned from the handler.

    Nothing may be written or rolled back before: the connections are the parent's, and so are their locks.
    """
    if os.getpid() != process:
        os._exit(0)


def _run_in_transaction(
    registration: Registration, job: JobHandle, process: int, on_writer_lock: Callable[[], object]
) -> Outcome | None:
    """Commit the handler's rows and the ack together. Returns what is left to write.

    The transaction takes the writer lock first: SQLite would otherwise refuse a handler that reads and then writes
    whenever another process has written in between. If the lock is not free within the busy timeout, the handler has
    not run, and no attempt is spent.
    """
    running = False
    announcements: list[Callable[[], object]] = []
    try:
        # Receivers of what the handler's commit makes true must not run while this thread has its turn to write.
        with (
            signals.passed_to(announcements.append),
            turn(job._using, busy_timeout(job._using)),
            transaction.atomic(using=job._using),
        ):
            if not job._hold(registration.time_limit):
                return RELEASE  # another worker has the job by now: the handler has not run
            running = True
            on_writer_lock()
            try:
                outcome = _outcome_of_return(run_to_end(registration.target, job))
            finally:
                _end_forked_child(process)
            if outcome.kind is not Kind.ACK:
                return outcome
            job._finish(outcome)
    except OperationalError as error:
        if running or not is_contention(job._using, error):
            raise
        return Outcome(Kind.GIVE_BACK, failures.describe(error)[0], delay=BUSY_PAUSE)
    finally:
        for announce in announcements:
            announce()
    return None


def announce_failure(job: JobHandle, outcome: Outcome, seconds: float) -> None:
    """Announce a failed attempt, once `outcome` is on the job's row."""
    event = failure_event(job, outcome, seconds)
    signals.emit(event.signal, **event.data)


class _Thread(threading.local):
    """The open connections of a thread. Asking Django for them costs more than a short handler."""

    has_opened = True
    """True if a connection has been opened since the last call. Without one, there is nothing to tidy."""

    def __init__(self) -> None:
        self.connections: Sequence[BaseDatabaseWrapper] = ()


_thread = _Thread()


@receiver(connection_created)
def _note_opened(**_: object) -> None:
    _thread.has_opened = True


def tidy_connections(own: str | None, *, afresh: bool = False) -> bool:
    """Leave the thread's connections fit for the next job, as Django does between two requests.

    The connection to `own`, the database of the jobs, stays open however old it is: to open one for each job costs more
    than most jobs do. Pass None if the thread is not kept for jobs. `afresh`: that connection is closed too, since
    something that a job has set on it may be why the next job failed.

    A connection that the handler has left inside a transaction, or in manual commit, is discarded with everything that
    it had not committed. Returns True if there was one.
    """
    if _thread.has_opened:
        _thread.has_opened = False
        _thread.connections = connections.all(initialized_only=True)
    thrown_away = False
    for connection in _thread.connections:
        connection.queries_log.clear()
        connection.execute_wrappers.clear()
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
    """Close a connection and forget its wrapper, which after Django's own `close` would still be in a transaction."""
    raw = connection.connection
    del connections[connection.alias]
    _thread.has_opened = True
    if raw is not None:
        with suppress(Exception):  # nothing refers to the connection any more
            raw.close()
