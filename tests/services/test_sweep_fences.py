"""A sweep names the claim that it has read: what happened since then stands, and is not counted. F022.

On SQLite nothing can happen in between, since the sweep holds the writer lock. Here it does, in the same transaction.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from django_alkstore import signals
from django_alkstore.clock import ManualClock, to_us
from django_alkstore.dialects.base import UNTAKEN, SweptJob
from django_alkstore.dialects.sqlite import SQLiteOperations
from django_alkstore.dialects.transactions import write_operations
from django_alkstore.models import Job
from django_alkstore.services import claim_batch, enqueue, get_job, sweep
from django_alkstore.services.claims import sweep_batch

pytestmark = pytest.mark.django_db(transaction=True)

Event = Callable[[SQLiteOperations, Any, int], object]
"""What somebody else does to a job that a sweep has read, at a moment."""


ON_LAPSED: dict[str, Event] = {
    "acked": lambda db, job, now: db.ack([(job.id, job.fence, UNTAKEN)], now, delete=False),
    "deleted at the ack": lambda db, job, now: db.ack([(job.id, job.fence, UNTAKEN)], now, delete=True),
    "retried": lambda db, job, now: db.retry((job.id, job.fence, UNTAKEN), now, "[]", "boom"),
    "failed": lambda db, job, now: db.bury((job.id, job.fence, UNTAKEN), now, "[]", "boom"),
    "renewed": lambda db, job, now: db.renew((job.id, job.fence, UNTAKEN), now + 1),
    "released": lambda db, job, now: db.give_back((job.id, job.fence, UNTAKEN), None),
    "cancelled": lambda db, job, now: db.cancel_running(now, SweptJob("[]", "cancelled", job.id, job.fence)),
}
ON_EXPIRED: dict[str, Event] = {
    "cancelled": lambda db, job, now: db.cancel_pending(job.id, now),
    "cancelled and requeued": lambda db, job, now: db.cancel_pending(job.id, now) and db.requeue(job.id, now),
    "rescheduled": lambda db, job, now: db.reschedule(job.id, now + 1_000_000, now - 1_000_000),
}


@contextmanager
def _events() -> Iterator[list[int]]:
    """The ids of the jobs that sweeps say they have changed."""
    said: list[int] = []

    def note(job_id: int, **_: Any) -> None:
        said.append(job_id)

    signals.job_lapsed.connect(note)
    signals.job_expired.connect(note)
    try:
        yield said
    finally:
        signals.job_lapsed.disconnect(note)
        signals.job_expired.disconnect(note)


def _happens_after(monkeypatch: pytest.MonkeyPatch, reading: str, event: Event) -> list[list[dict[str, Any]]]:
    """Let `event` happen to the first job that `reading` has read. The rows as it left them are in the list."""
    real = getattr(SQLiteOperations, reading)
    left: list[list[dict[str, Any]]] = []

    def read(db: SQLiteOperations, queue: str, now: int, limit: int) -> list[Any]:
        found: list[Any] = real(db, queue, now, limit)
        if found and not left:
            event(db, found[0], now)
            left.append(list(Job.objects.filter(pk=found[0].id).values()))
        return found

    monkeypatch.setattr(SQLiteOperations, reading, read)
    return left


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize("event", ON_LAPSED.values(), ids=ON_LAPSED.keys())
def test_f022_a_lapsed_job_that_was_changed_since_it_was_read_is_left_as_it_is_and_not_counted(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock, event: Event, attempts: int
) -> None:
    jobs = [enqueue("mail", None, max_attempts=attempts, visibility_timeout=10 + n) for n in range(2)]
    assert len(claim_batch("mail", "w", limit=2)) == 2
    clock.advance(60)
    left = _happens_after(monkeypatch, "lapsed", event)
    with _events() as said:
        assert sweep("mail") == 1
    assert said == [jobs[1].id]
    assert list(Job.objects.filter(pk=jobs[0].id).values()) == left[0]
    assert get_job(jobs[1].id).state == ("pending" if attempts > 1 else "dead")


@pytest.mark.parametrize("event", ON_EXPIRED.values(), ids=ON_EXPIRED.keys())
def test_f022_an_expired_job_that_was_changed_since_it_was_read_is_left_as_it_is_and_not_counted(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock, event: Event
) -> None:
    first, second = (enqueue("mail", None, delay=delay, expires_in=30) for delay in (0, 0.5))
    clock.advance(30.5)
    left = _happens_after(monkeypatch, "expired", event)
    with _events() as said:
        assert sweep("mail") == 1
    assert said == [second.id]
    assert list(Job.objects.filter(pk=first.id).values()) == left[0]
    assert get_job(second.id).state == "dead"


def test_f022_a_later_claim_that_has_lapsed_too_is_not_the_one_that_was_read(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    job = enqueue("mail", None)
    claim_batch("mail", "w")
    clock.advance(1_000)

    def take(db: SQLiteOperations, lapsed: Any, now: int) -> None:
        assert db.give_back((lapsed.id, lapsed.fence, UNTAKEN), None)
        [taken] = db.claim("mail", "another", 1, now - 500_000_000)
        assert (taken.id, taken.lease_expires_at < now) == (job.id, True)

    left = _happens_after(monkeypatch, "lapsed", take)
    assert not write_operations("default", partial(sweep_batch, "mail", None))
    assert list(Job.objects.filter(pk=job.id).values()) == left[0]
    assert get_job(job.id).worker_id == "another"


def test_a_lease_that_ends_at_the_very_moment_of_the_sweep_has_lapsed(clock: ManualClock) -> None:
    job = enqueue("mail", None)
    claim_batch("mail", "w")
    lease_ends = get_job(job.id).lease_expires_at
    clock.step((lease_ends - clock.now()) / timedelta(seconds=1))
    assert to_us(clock.now()) == to_us(lease_ends)
    assert sweep("mail") == 1
