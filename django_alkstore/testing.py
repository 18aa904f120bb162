"""For the tests of projects that use the library, and for our own.

`run_pending` runs jobs in place: in the test's own thread, on its own connection, inside its transaction. It
is the real claim, the real handler and the real ending, so a payload is encoded and decoded as in production.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connections, transaction

from django_alkstore import clock, registry
from django_alkstore.clock import ManualClock
from django_alkstore.dialects.transactions import is_open, resolve_alias
from django_alkstore.exceptions import InvalidOption
from django_alkstore.registry import Registration
from django_alkstore.runtime.announcing import announce_outcome, announce_settled
from django_alkstore.runtime.perform import Ending, perform
from django_alkstore.services import JobHandle
from django_alkstore.services.claims import claim_due

__all__ = ["ManualClock", "frozen_clock", "isolated_registry", "run_pending"]

WORKER = "testing"

isolated_registry = registry.isolated
"""A context manager inside which nothing is registered but what the block registers."""


def run_pending(*names: str, using: str | None = None, limit: int = 1_000) -> list[JobHandle]:
    """Run what is due now in the named queues and outboxes (default: all that are registered).

    Returns the jobs that were run, in order. `get_job` tells what became of each, and a worker's events are sent.
    A job that asks to be run again at once is; more than `limit` runs raise `AssertionError`: something never ends.
    """
    alias = resolve_alias(using)
    registrations = [r for r in registry.registrations() if not names or r.name in names]
    unknown = set(names) - {r.name for r in registrations}
    if unknown:
        raise InvalidOption(f"no handler is registered for {', '.join(sorted(unknown))}")
    ran: list[JobHandle] = []
    while True:
        before = len(ran)
        for registration in registrations:
            ran.extend(_run_all(alias, registration, limit - len(ran)))
        if len(ran) == before:
            return ran


def _run_all(alias: str, registration: Registration, limit: int) -> Iterator[JobHandle]:
    while claimed := claim_due(alias, registration.queue, WORKER, 1):
        assert limit > 0, "run_pending: more jobs than its limit; does one enqueue itself again and again?"
        limit -= 1
        job = claimed[0]
        ending = _perform_in_place(alias, registration, job)
        outcome = ending.outcome
        if job.settled:
            announce_settled(job, ending.seconds, outcome)
        elif outcome is not None and job.settle(outcome):
            announce_outcome(job, outcome, ending.seconds)
        yield job


def _perform_in_place(alias: str, registration: Registration, job: JobHandle) -> Ending:
    """Inside the test's transaction, under a savepoint: what breaks the handler's must not break the test's."""
    if not is_open(connections[alias]):
        return perform(registration, job)
    with transaction.atomic(using=alias):
        return perform(registration, job)


@contextmanager
def frozen_clock(clock_at: ManualClock) -> Iterator[ManualClock]:
    """Let the library read `clock_at` inside the block; move it with `advance` and `step`."""
    with clock.use(clock_at):
        yield clock_at
