"""Time that a test moves."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from django_alkstore import clock
from django_alkstore.clock import ManualClock, from_us, now_us, to_us
from django_alkstore.dialects.transactions import read, resolve_alias
from django_alkstore.durations import aware_moment
from django_alkstore.exceptions import InvalidOption
from django_alkstore.services import JobHandle, soonest, tick
from django_alkstore.testing.running import registered_queues, run_pending


@contextmanager
def frozen_clock(clock_at: ManualClock | datetime | None = None) -> Iterator[ManualClock]:
    """Freeze the library's time inside the block: move it with `advance`, `advance_to` and `step` of what it yields.

    `clock_at`: where time stands still, an aware datetime or a `ManualClock` (default: now).
    """
    manual = clock_at if isinstance(clock_at, ManualClock) else ManualClock(clock_at or clock.now())
    with clock.use(manual):
        yield manual


def run_until(
    moment: datetime, *, using: str | None = None, limit: int = 1_000, raise_errors: bool = False
) -> list[JobHandle]:
    """Let time pass until `moment`, an aware datetime. Each boundary fires and each job runs when it is due.

    Moves the `ManualClock` that is installed, and leaves it at `moment`. If none is installed, time moves for the
    length of the call. Returns the jobs that were run, in order. `limit` and `raise_errors` are those of `run_pending`.
    """
    end = aware_moment("moment", moment)
    installed = clock.installed()
    if isinstance(installed, ManualClock):
        return _run_until(installed, end, resolve_alias(using), limit, raise_errors=raise_errors)
    with frozen_clock() as manual:
        return _run_until(manual, end, resolve_alias(using), limit, raise_errors=raise_errors)


def _run_until(manual: ManualClock, end: int, alias: str, limit: int, *, raise_errors: bool) -> list[JobHandle]:
    if end < now_us():
        raise InvalidOption(f"run_until cannot go back: {from_us(end)} is before now, {clock.now()}")
    ran: list[JobHandle] = []
    while True:
        tick(using=alias)
        ran += run_pending(using=alias, limit=limit - len(ran), raise_errors=raise_errors)
        due = _next_due(alias)
        if due is None or due > end:
            manual.advance_to(from_us(end))
            return ran
        assert due > now_us(), f"run_until: what was due at {from_us(due)} cannot be run; does another process hold it?"
        manual.advance_to(from_us(due))


def _next_due(alias: str) -> int | None:
    """When the next boundary or job is due, in microseconds."""
    boundary = soonest(using=alias)
    moments = [*read(alias, lambda db: db.next_claims(registered_queues(alias))).values()]
    moments.append(None if boundary is None else to_us(boundary))
    return min((moment for moment in moments if moment is not None), default=None)
