"""A claimed job in its holder's hands."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from functools import partial
from inspect import isasyncgen, isawaitable, isgenerator
from typing import Any

from asgiref.sync import async_to_sync
from django.db import connections, transaction

from django_alkstore import backoff, clock
from django_alkstore.clock import LAST_US, SECOND, from_us, readable
from django_alkstore.dialects import Operations
from django_alkstore.dialects.base import UNTAKEN, Claim, ClaimedJob
from django_alkstore.dialects.forks import guard
from django_alkstore.dialects.transactions import (
    mark_for_rollback,
    refuse_if_ended,
    require_open,
    write_statement,
)
from django_alkstore.durations import Duration, moment_after, seconds
from django_alkstore.exceptions import LeaseLost
from django_alkstore.names import idempotency_key
from django_alkstore.payloads import decode_payload, read_payload
from django_alkstore.services import outcomes
from django_alkstore.services.events import tell_settled
from django_alkstore.services.outcomes import Outcome
from django_alkstore.services.twins import twin


def _list_of(text: bytes) -> list[Any]:
    """A stored list; empty if another program has damaged it."""
    found = read_payload(text)
    return found if isinstance(found, list) else []


_making_events = guard()


def run_to_end(target: Callable[["JobHandle"], object], job: "JobHandle") -> object:
    """Call a handler or a delivery, and return its value. A coroutine is awaited in an event loop that is made for it.

    The coroutine's calls of the ORM run in this thread, on its connections. Raises `TypeError` for a generator: nothing
    of it has run, so its job must not count as done.
    """
    result = target(job)
    if isawaitable(result):
        return async_to_sync(_awaited)(result)
    if isgenerator(result) or isasyncgen(result):
        raise TypeError(f"{target!r} returned a generator, which has not run")
    return result


async def _awaited(result: Awaitable[object]) -> object:
    """Await it; tasks that it started and left behind are cancelled, as at the end of `asyncio.run`."""
    before = asyncio.all_tasks()
    try:
        return await result
    finally:
        left = asyncio.all_tasks() - before
        for task in left:
            task.cancel()
        await ended(left)


async def ended(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Until they have ended, however they do."""
    await asyncio.gather(*tasks, return_exceptions=True)


class JobHandle:
    """What a handler is given: the job, and the ways to end or extend its claim.

    Each method returns `True` if the lease was still this handle's, and the call took effect. It returns `False`, with
    nothing changed, if the lease had run out or was taken, or if the job was cancelled or deleted.
    """

    __slots__ = (
        "_claimed_at",
        "_fence",
        "_jitter",
        "_lease_expires_us",
        "_lease_lost",
        "_refused",
        "_row",
        "_settled_by",
        "_settling",
        "_stopping",
        "_task_result",
        "_using",
        "attempt",
        "id",
        "max_attempts",
        "payload",
        "queue",
    )

    def __init__(self, using: str, row: ClaimedJob) -> None:
        """`TypeError`, `ValueError` or `RecursionError` if the stored payload cannot be read."""
        self._row = row
        self._using = using
        self.id: int = row.id
        self.queue: str = row.queue
        self.payload: Any = decode_payload(row.payload)
        self.attempt: int = row.attempts
        """Which delivery this is, from 1."""
        self.max_attempts: int = row.max_attempts
        self._lease_expires_us = row.lease_expires_at
        self._fence: int = row.fence
        self._jitter = backoff.rng.random()
        """From 0 to 1: how much of `BACKOFF_JITTER` is added to the wait if this attempt fails."""
        self._settled_by: Outcome | None = None
        """The outcome by which one of this handle's own calls ended the claim, once that is committed."""
        self._settling = False
        """True once one of them has done so in an open transaction, which may still be rolled back."""
        self._refused = False
        """True once one of this handle's own calls has found that the lease is lost."""
        self._claimed_at: float | None = None
        """For a claim by hand: its moment on the monotonic clock. None for a worker's."""
        self._task_result: Any = None
        """For a task's job: Django's result object of this attempt, once the attempt has begun."""
        self._lease_lost: threading.Event | None = None
        self._stopping: threading.Event | None = None

    def __repr__(self) -> str:
        return f"<JobHandle {self.id} in {self.queue}, attempt {self.attempt} of {self.max_attempts}>"

    @property
    def _settled(self) -> bool:
        """True once one of this handle's own calls has ended the claim, and that is committed."""
        return self._settled_by is not None

    def _claim(self, held_at: int) -> Claim:
        """The claim, whose lease must not have run out at `held_at` (microseconds)."""
        return (self.id, self._fence, held_at)

    @property
    def idempotency_key(self) -> str:
        """The same on every delivery of this job, and different for any other job of the database.

        Send it to other systems, so that they can tell a repeat.
        """
        return idempotency_key(self.id, self.enqueued_at)

    @property
    def lease_expires_at(self) -> datetime:
        """When the lease ends, unless it is extended."""
        return from_us(self._lease_expires_us)

    @property
    def priority(self) -> int:
        return self._row.priority

    @property
    def enqueued_at(self) -> datetime:
        return readable(self._row.created_at)

    @property
    def run_at(self) -> datetime:
        return readable(self._row.run_at)

    @property
    def last_error(self) -> str | None:
        """The error of the last failed attempt, or `None`."""
        error = self._row.last_error
        return None if error is None else error.decode(errors="replace")

    @property
    def schedule(self) -> str | None:
        """The schedule that fired it, or `None`."""
        return None if self._row.schedule is None else self._row.schedule.decode(errors="replace")

    @property
    def fire_at(self) -> datetime | None:
        """The boundary that it was fired for, or `None`."""
        return None if self._row.fire_at is None else readable(self._row.fire_at)

    @property
    def _visibility_timeout(self) -> float:
        """Seconds."""
        return self._row.visibility_timeout

    @property
    def _backoff_base(self) -> float:
        """Seconds."""
        return self._row.backoff_base

    @property
    def _history(self) -> bytes:
        """The errors so far, as stored."""
        return self._row.errors

    @property
    def _lock_errors(self) -> int:
        """How many attempts in a row have ended with a lock error of the database and were given back."""
        return self._row.lock_errors

    @property
    def _task(self) -> str:
        """The dotted path of a task; empty for a handler's job."""
        return self._row.task.decode(errors="replace")

    def _errors(self) -> list[Any]:
        """The entries about failed attempts."""
        return _list_of(self._row.errors)

    def _worker_ids(self) -> list[Any]:
        """Who has made each counted attempt, the present one included."""
        return _list_of(self._row.worker_ids)

    @property
    def lease_lost(self) -> threading.Event:
        """Set once the lease is known to be lost: a long handler can look, and stop."""
        if self._lease_lost is None:
            with _making_events:  # the thread of the handler and that of the keeper may both be the first
                self._lease_lost = self._lease_lost or threading.Event()
        return self._lease_lost

    @property
    def stopping(self) -> threading.Event:
        """Set once the worker is told to stop: a long handler can save its place and raise `Snooze(0)`."""
        if self._stopping is None:
            self._stopping = threading.Event()
        return self._stopping

    def ack(self) -> bool:
        """The job is done."""
        return self._settle(outcomes.ACK)

    def retry(self, error: object = None, delay: Duration | None = None) -> bool:
        """This attempt failed with `error` (text or exception): pending again after `delay` seconds (default: the
        backoff curve) while attempts are left, else dead. `InvalidOption` for a delay out of range."""
        return self._settle(outcomes.retry(error, delay))

    def fail(self, error: object) -> bool:
        """This attempt failed with `error` (text or exception). The job is dead at once, without another attempt."""
        return self._settle(outcomes.fail(error))

    def release(self) -> bool:
        """Give the job back at once; this attempt is not counted."""
        return self._settle(outcomes.RELEASE)

    def heartbeat(self, extend: Duration | None = None) -> bool:
        """Let the lease end `extend` seconds (default: the job's visibility timeout) from now."""
        extension = self._visibility_timeout if extend is None else seconds("extend", extend, zero=False)
        if extend is not None:
            moment_after("extend", clock.now_us(), extension)

        def renew(db: Operations) -> int | None:
            now = clock.now_us()
            ends = min(now + round(extension * SECOND), LAST_US)
            return ends if db.renew(self._claim(now), ends) else None

        ends = write_statement(self._using, renew)
        if ends is None:
            self._note_refusal()
            return False
        self._lease_expires_us = ends
        return True

    def ack_tx(self) -> None:
        """Ack inside the caller's open transaction: its rows and the ack commit together or not at all.

        Raises `TransactionRequired` outside one, and `LeaseLost` if the lease was lost; the transaction is
        then marked for rollback, so that catching the error does not commit.
        """
        require_open(self._using, "ack_tx")
        refuse_if_ended(self._using)
        acked = write_statement(self._using, lambda db: outcomes.apply(db, self, outcomes.ACK, clock.now_us()))
        if not acked:
            self._note_refusal()
            mark_for_rollback(self._using)
            raise LeaseLost(self.id)
        self._settle_at_commit(outcomes.ACK)

    aack = twin(ack)
    aretry = twin(retry)
    afail = twin(fail)
    arelease = twin(release)
    aheartbeat = twin(heartbeat)

    def _hold(self, duration: float) -> bool:
        """In the caller's open transaction: take the writer lock, and lease for `duration` seconds from now.

        Nobody else could renew the lease while the lock is held. If the transaction is rolled back, the lease was never
        extended. A lease that ran out during the wait for the lock counts unless another has taken it: then `False`.
        """

        def extend(db: Operations) -> bool:
            ends = min(clock.now_us() + round(duration * SECOND), LAST_US)
            return db.renew(self._claim(UNTAKEN), ends)

        return write_statement(self._using, extend)

    def _finish(self, outcome: Outcome = outcomes.ACK) -> None:
        """In the transaction that `_hold` has begun: ack, unless the job has been settled in it."""
        refuse_if_ended(self._using)
        if write_statement(self._using, lambda db: outcomes.apply(db, self, outcome, clock.now_us(), UNTAKEN)):
            self._settle_at_commit(outcome)

    def _settle_at_commit(self, outcome: Outcome) -> None:
        """Now, or when the open transaction is committed: a rollback to a savepoint may still undo it."""
        connection = connections[self._using]
        if connection.in_atomic_block:
            self._settling = True
            transaction.on_commit(partial(self._mark_settled, outcome), using=self._using)
        elif connection.autocommit:  # known: it has just written
            self._mark_settled(outcome)

    def _mark_settled(self, outcome: Outcome) -> None:
        # Without the exception, which refers to frames that refer to this handle.
        self._settled_by = outcome._replace(raised=None)
        tell_settled(self, outcome)

    def _settle(self, outcome: Outcome) -> bool:
        """End the claim with `outcome`, which the methods above are made of."""
        done = write_statement(self._using, lambda db: outcomes.apply(db, self, outcome, clock.now_us()))
        if done:
            self._settle_at_commit(outcome)
        else:
            self._note_refusal()
        return done

    def _note_refusal(self) -> None:
        self._refused = True
        self.lease_lost.set()
