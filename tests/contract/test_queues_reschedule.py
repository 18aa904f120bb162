"""Contract, section 4: a pending job is put off or brought forward, and what is no job's id."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.db import transaction

from django_alkstore.clock import ManualClock
from django_alkstore.exceptions import InvalidOption
from django_alkstore.models import Job
from django_alkstore.services import (
    cancel,
    claim_batch,
    enqueue,
    get_job,
    next_claim_at,
    outbox,
    requeue,
    reschedule,
    run_now,
    sweep,
)

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)


def row(job_id: int) -> dict[str, Any]:
    return Job.objects.filter(pk=job_id).values().get()


@pytest.mark.parametrize("due_in", [timedelta(), HOUR, timedelta(days=2)])
@pytest.mark.parametrize("to", [timedelta(microseconds=1), timedelta(minutes=5), timedelta(days=30)])
def test_a_pending_job_is_due_at_the_new_moment(clock: ManualClock, due_in: timedelta, to: timedelta) -> None:
    job = enqueue("mail", None, run_at=clock.now() + due_in)
    before = row(job.id)
    moment = clock.now() + to
    assert reschedule(job.id, moment.astimezone(ZoneInfo("Asia/Tokyo"))) is True
    assert row(job.id) == {**before, "run_at": moment}
    assert next_claim_at("mail") == moment
    clock.advance(to.total_seconds() - 0.000_001)
    assert claim_batch("mail", "w") == []
    clock.advance(0.000_001)
    assert [handle.id for handle in claim_batch("mail", "w")] == [job.id]


def test_a_moment_in_the_past_means_now(clock: ManualClock) -> None:
    job = enqueue("mail", None, delay=60)
    assert reschedule(job.id, clock.now() - HOUR) is True
    assert get_job(job.id).run_at == clock.now()


def test_an_outbox_s_job_can_be_rescheduled_by_its_id(clock: ManualClock) -> None:
    job = outbox("mail").enqueue(None)
    assert reschedule(job.id, clock.now() + HOUR) is True
    assert outbox("mail").run_once("w", lambda _: None) is False


def test_a_failed_job_that_waits_can_be_rescheduled_and_keeps_its_history(clock: ManualClock) -> None:
    job = enqueue("mail", None)
    claim_batch("mail", "w")[0].retry("boom")
    assert reschedule(job.id, clock.now() + HOUR) is True
    stored = get_job(job.id)
    assert (stored.run_at, stored.attempts, stored.last_error) == (clock.now() + HOUR, 1, "boom")


def test_only_a_pending_job_can_be_rescheduled(clock: ManualClock) -> None:
    made = {state: enqueue(state, None) for state in ("processing", "completed", "dead", "cancelled")}
    claim_batch("processing", "w")
    claim_batch("completed", "w")[0].ack()
    claim_batch("dead", "w")[0].fail("x")
    cancel(made["cancelled"].id)
    for state, job in made.items():
        before = row(job.id)
        assert before["state"] == state
        assert reschedule(job.id, clock.now() + HOUR) is False
        assert row(job.id) == before
    assert reschedule(10**9, clock.now() + HOUR) is False


@pytest.mark.parametrize(
    "moment", [datetime(2100, 1, 1), None, 5, "2100-01-01", datetime(2100, 1, 1, tzinfo=UTC).date(), timedelta(1)]
)
def test_anything_but_an_aware_datetime_is_refused_and_changes_nothing(clock: ManualClock, moment: Any) -> None:
    job = enqueue("mail", None)
    before = row(job.id)
    for job_id in (job.id, 10**9):
        with pytest.raises(InvalidOption, match="run_at must be an aware datetime"):
            reschedule(job_id, moment)
    assert row(job.id) == before


# Expiry counts from the moment at which a job is due


@pytest.mark.parametrize("to", [timedelta(minutes=1), 3 * HOUR])
def test_an_expiry_keeps_its_distance_from_run_at(clock: ManualClock, to: timedelta) -> None:
    job = enqueue("mail", None, delay=3_600, expires_in=60)
    assert reschedule(job.id, clock.now() + to)
    assert get_job(job.id).expires_at == clock.now() + to + timedelta(seconds=60)
    clock.advance(to.total_seconds() + 59)
    assert [handle.id for handle in claim_batch("mail", "w")] == [job.id]


def test_a_job_whose_retry_lies_past_its_expiry_can_be_brought_back_before_it(clock: ManualClock) -> None:
    job = enqueue("mail", None, expires_in=60)
    expires_at = get_job(job.id).expires_at
    claim_batch("mail", "w")[0].retry("x", delay=3_600)
    assert reschedule(job.id, clock.now() + timedelta(seconds=20))
    assert get_job(job.id).expires_at == expires_at
    clock.advance(20)
    assert [handle.id for handle in claim_batch("mail", "w")] == [job.id]


def test_an_expired_job_stays_expired(clock: ManualClock) -> None:
    job = enqueue("mail", None, expires_in=60)
    clock.advance(60)
    assert reschedule(job.id, clock.now() + HOUR) is False
    assert sweep("mail") == 1
    assert get_job(job.id).state == "dead"


def test_the_last_moment_that_a_date_can_hold_is_possible(clock: ManualClock) -> None:
    job = enqueue("mail", None, expires_in=60)
    last = datetime.max.replace(tzinfo=UTC)
    assert reschedule(job.id, last)
    assert (get_job(job.id).run_at, get_job(job.id).expires_at) == (last, last)


def test_it_joins_the_caller_s_transaction(clock: ManualClock) -> None:
    job = enqueue("mail", None)
    with transaction.atomic():
        assert reschedule(job.id, clock.now() + HOUR)
        assert get_job(job.id).run_at == clock.now() + HOUR
        transaction.set_rollback(True)
    assert get_job(job.id).run_at == clock.now()


# Ids

BY_ID: dict[str, Callable[[Any], object]] = {
    "get_job": get_job,
    "cancel": cancel,
    "requeue": requeue,
    "run_now": run_now,
    "reschedule": lambda job_id: reschedule(job_id, datetime(2100, 1, 1, tzinfo=UTC)),
}


@pytest.mark.parametrize("call", BY_ID.values(), ids=BY_ID.keys())
def test_what_is_no_id_is_nobody_s(clock: ManualClock, call: Callable[[Any], object]) -> None:
    first = enqueue("mail", None, delay=60)
    Job.objects.filter(pk=first.id).update(id=1)  # the id that `True` equals
    before = row(1)
    for value in (True, False, None, "1", 1.0, 0, -1, 2**63, 10**400, [1]):
        assert not call(value)
    assert row(1) == before
    assert get_job(1).id == 1
