"""Outboxes: jobs that exist exactly when the business rows do, delivered at least once.

An outbox is a queue under a reserved name. The public queue functions refuse that name, so that jobs are added to an
outbox, and claimed from it, by the outbox alone.
"""

from collections.abc import Callable
from typing import Any, Protocol, Unpack

from django.db import DatabaseError

from django_alkstore import conf
from django_alkstore.dialects.transactions import require_open, resolve_alias
from django_alkstore.exceptions import InvalidOption, shown
from django_alkstore.models import Job
from django_alkstore.names import outbox_queue
from django_alkstore.services.claims import claim_from
from django_alkstore.services.handles import JobHandle, run_to_end
from django_alkstore.services.options import JobOptions, expect_handler
from django_alkstore.services.outcomes import outcome_of
from django_alkstore.services.queues import add


class Delivery(Protocol):
    """An object that delivers."""

    def deliver(self, job: JobHandle) -> object:
        """Deliver the job. Returning acks it; raising an exception fails the attempt."""


class Outbox:
    """One outbox. `outbox()` makes it."""

    def __init__(self, name: str, using: str | None = None) -> None:
        self.queue = outbox_queue(name)
        self.name = name
        self._using = using

    def __repr__(self) -> str:
        return f"<Outbox {self.name}>"

    def enqueue(self, payload: Any, **options: Unpack[JobOptions]) -> Job:
        """Add a job: in the caller's transaction if one is open, else committed at once. Raises as `enqueue`."""
        settings = conf.settings()
        expect_handler(self.queue, settings)
        return add(resolve_alias(self._using), self.queue, payload, options, settings)

    def enqueue_tx(self, payload: Any, **options: Unpack[JobOptions]) -> Job:
        """Add a job in the caller's transaction: it exists exactly when the caller's rows do.

        Raises `TransactionRequired` if no transaction is open on the database, and otherwise as `enqueue`.
        """
        alias = resolve_alias(self._using)
        require_open(alias, "outbox_enqueue_tx")
        settings = conf.settings()
        expect_handler(self.queue, settings)
        return add(alias, self.queue, payload, options, settings)

    def run_once(self, worker_id: str, delivery: Delivery | Callable[[JobHandle], object]) -> bool:
        """Claim one job and deliver it; `False` if none was due.

        If `delivery` returns, the job is acked. If it raises, the attempt has failed with that error, and the job
        waits by the retry curve (`Retry`, `Discard` and `Snooze` mean what they mean in a handler).
        `KeyboardInterrupt` and `SystemExit` give the job back and are raised on. Only `job.heartbeat()` renews the
        lease. Raises `RuntimeError` inside an open transaction.
        """
        deliver = delivery.deliver if hasattr(delivery, "deliver") else delivery
        if not callable(deliver):
            raise InvalidOption(f"a delivery is a callable, or has a deliver method; {shown(delivery)} is neither")
        claimed = claim_from(resolve_alias(self._using), self.queue, worker_id, 1, "run_once")
        if not claimed:
            return False
        job = claimed[0]
        try:
            run_to_end(deliver, job)
        except Exception as error:  # noqa: BLE001  any exception ends this attempt
            job._settle(outcome_of(error))
        except BaseException as error:
            try:
                job.release()
            except DatabaseError as failure:
                error.add_note(f"{job!r} could not be given back ({failure}); its lease runs out by itself")
            raise
        else:
            if not job._settled:
                job.ack()
        return True


def outbox(name: str, *, using: str | None = None) -> Outbox:
    """The outbox `name`. Raises `InvalidName` or `ReservedName`."""
    return Outbox(name, using)


def outbox_enqueue_tx(name: str, payload: Any, *, using: str | None = None, **options: Unpack[JobOptions]) -> Job:
    """Add a job to the outbox `name` in the caller's transaction. As `Outbox.enqueue_tx`."""
    return Outbox(name, using).enqueue_tx(payload, **options)
