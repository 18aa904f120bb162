"""Jobs that are run in place.

In the test's own thread, on its own connection, inside its transaction. It is the real claim, the real handler and the
real ending, so a payload is encoded and decoded as in production.
"""

from collections.abc import Iterator

from django_alkstore.dialects.transactions import resolve_alias
from django_alkstore.exceptions import InvalidOption
from django_alkstore.handled import handled
from django_alkstore.registrations import Registration
from django_alkstore.runtime.announcing import announce_outcome, announce_settled
from django_alkstore.runtime.perform import Ending, perform
from django_alkstore.services import JobHandle
from django_alkstore.services.claims import claim_due
from django_alkstore.services.outcomes import Raised
from django_alkstore.testing.commits import outside_transactions

WORKER = "testing"


def run_pending(
    *names: str, using: str | None = None, limit: int = 1_000, raise_errors: bool = False
) -> list[JobHandle]:
    """Run what is due now in the named queues and outboxes (default: all that are registered), as a worker does.

    Returns the jobs that were run, in order. `get_job` tells what became of each. A job that asks to be run again at
    once is run again; more than `limit` runs raise `AssertionError`, since something never ends.

    `raise_errors`: raise the exception of the first handler that fails, once its job's row is written. `Retry`,
    `Discard` and `Snooze` are no failures of the handler.

    The handler believes that no transaction is open, in a `TestCase` too: a durable block is allowed, and the
    `on_commit` callbacks of its blocks run when the block ends.
    """
    alias = resolve_alias(using)
    registrations = _registrations(names, alias)
    ran: list[JobHandle] = []
    while True:
        before = len(ran)
        for registration in registrations:
            ran.extend(_run_all(alias, registration, limit - len(ran), raise_errors=raise_errors))
        if len(ran) == before:
            return ran


def registered_queues(using: str) -> list[str]:
    """The full names of the queues from which `run_pending` takes jobs."""
    return [registration.queue for registration in _registrations((), using)]


def _registrations(names: tuple[str, ...], alias: str) -> list[Registration]:
    registrations = [r for r in handled(alias) if not names or r.name in names]
    unknown = set(names) - {r.name for r in registrations}
    if unknown:
        raise InvalidOption(f"no handler is registered for {', '.join(sorted(unknown))}")
    return registrations


def _run_all(alias: str, registration: Registration, limit: int, *, raise_errors: bool) -> Iterator[JobHandle]:
    while claimed := claim_due(alias, registration.queue, WORKER, 1):
        assert limit > 0, "run_pending: more jobs than its limit; does one enqueue itself again and again?"
        limit -= 1
        job = claimed[0]
        job_s_own = registration if registration.resolve is None else registration.resolve(job)
        with outside_transactions():
            ending = perform(job_s_own, job)
        error = _end(job, ending)
        if error is not None and raise_errors:
            raise error
        yield job


def _end(job: JobHandle, ending: Ending) -> BaseException | None:
    """Write and announce the ending. Returns the exception by which the handler has failed."""
    outcome = ending.outcome
    error = None if outcome is None or outcome.asked_for else outcome.take_exception()
    if outcome is not None and error is not None:
        outcome = outcome._replace(raised=Raised(error))  # the announcement takes it, too
    if job._settled:
        announce_settled(job, ending.seconds, outcome)
    elif outcome is not None and job._settle(outcome):
        announce_outcome(job, outcome, ending.seconds)
    return error
