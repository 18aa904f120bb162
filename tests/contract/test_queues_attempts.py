"""What a job says about its attempts: when they began, who made them, and what ended each."""

from datetime import timedelta

import pytest
from django.db import connection

from django_alkstore.clock import ManualClock
from django_alkstore.exceptions import Discard, Retry
from django_alkstore.models import Job
from django_alkstore.services import cancel, claim_batch, enqueue, get_job, requeue, sweep
from django_alkstore.services.handles import JobHandle

pytestmark = pytest.mark.django_db(transaction=True)


def claimed(worker: str = "worker") -> JobHandle:
    [handle] = claim_batch("work", worker)
    return handle


def job(handle: JobHandle) -> Job:
    found = get_job(handle.id)
    assert found is not None
    return found


def times(job: Job) -> tuple[object, object]:
    return job.started_at, job.last_attempted_at


def test_a_new_job_has_no_attempt() -> None:
    assert times(enqueue("work", None)) == (None, None)
    assert enqueue("work", None).worker_ids == []


def test_each_claim_is_kept_with_its_time_and_its_worker(clock: ManualClock) -> None:
    enqueue("work", None)
    first = clock.now()
    handle = claimed("a")
    assert times(job(handle)) == (first, first)
    handle.retry(delay=0)
    clock.advance(5)
    handle = claimed("b")
    assert times(job(handle)) == (first, first + timedelta(seconds=5))
    assert job(handle).worker_ids == ["a", "b"]
    handle.ack()
    assert times(job(handle)) == (first, first + timedelta(seconds=5))
    assert job(handle).worker_ids == ["a", "b"]


def test_an_attempt_that_is_given_back_leaves_no_trace_but_its_moment(clock: ManualClock) -> None:
    enqueue("work", None)
    handle = claimed("a")
    handle.release()
    assert times(job(handle)) == (None, None)
    assert job(handle).worker_ids == []
    clock.advance(5)
    claimed("b").retry(delay=0)
    first = clock.now()
    clock.advance(5)
    claimed("c").release()
    assert times(job(handle)) == (first, clock.now()), "the row does not know when the claim before was made"
    assert job(handle).worker_ids == ["b"]


@pytest.mark.parametrize("worker", ['quo"ted', "back\\slash", "a],[b", "Zoë 🐝", "]", '",'])
def test_an_id_of_any_text_comes_back_as_it_was(worker: str) -> None:
    enqueue("work", None)
    claimed(worker).retry(delay=0)
    claimed(worker).retry(delay=0)
    claimed("last").release()
    handle = claimed("last")
    assert job(handle).worker_ids == [worker, worker, "last"]


def test_the_last_20_are_kept() -> None:
    enqueue("work", None, max_attempts=100)
    for attempt in range(25):
        claimed(f'"{attempt}],').retry(delay=0)
    handle = claimed("last")
    assert job(handle).worker_ids == [*(f'"{attempt}],' for attempt in range(6, 25)), "last"]
    handle.release()
    handle = claimed("again")
    assert job(handle).worker_ids == [*(f'"{attempt}],' for attempt in range(6, 25)), "again"]


def test_requeueing_starts_the_list_anew(clock: ManualClock) -> None:
    enqueue("work", None)
    handle = claimed("a")
    handle.fail("no")
    assert requeue(handle.id)
    assert job(handle).worker_ids == []
    clock.advance(5)
    assert times(job(claimed("b"))) == (clock.now(), clock.now())
    assert job(handle).worker_ids == ["b"]


@pytest.mark.parametrize("stored", ["", "x", "{}", "[1", "null"])
@pytest.mark.parametrize("attempts", [0, 1, 30])
def test_a_damaged_list_is_no_obstacle(stored: str, attempts: int) -> None:
    enqueue("work", None, max_attempts=100)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_alkstore_job SET worker_ids = %s, attempts = %s", [stored, attempts])
    claimed().release()
    assert claimed().attempt == attempts + 1


def exceptions(handle: JobHandle) -> list[str]:
    return [entry["exception"] for entry in job(handle).errors]


@pytest.mark.parametrize(
    ("error", "path"),
    [
        (ValueError("x"), "builtins.ValueError"),
        (Retry("x"), "django_alkstore.exceptions.Retry"),
        (Discard("x"), "django_alkstore.exceptions.Discard"),
        ("a text", ""),
    ],
)
def test_an_entry_names_the_class_of_its_exception(error: object, path: str) -> None:
    enqueue("work", None)
    handle = claimed()
    handle.retry(error)
    assert exceptions(handle) == [path]


def test_an_entry_names_what_ended_an_attempt_without_an_exception(clock: ManualClock) -> None:
    enqueue("work", None, max_attempts=5, expires_in=1000)
    handle = claimed()
    clock.advance(301)
    sweep()
    clock.advance(1000)
    sweep()
    assert exceptions(handle) == ["django_alkstore.exceptions.LeaseExpired", "django_alkstore.exceptions.Expired"]
    assert not cancel(handle.id)


def test_a_running_attempt_that_is_cancelled_is_kept_as_cancelled_and_a_pending_job_has_no_attempt(
    clock: ManualClock,
) -> None:
    pending, running = enqueue("mail", 1, delay=60), enqueue("mail", 2)
    (handle,) = claim_batch("mail", "me")
    clock.advance(1)
    assert cancel(pending.pk)
    assert cancel(running.pk)
    assert (Job.objects.get(pk=pending.pk).errors, Job.objects.get(pk=pending.pk).last_error) == ([], None)
    after = Job.objects.get(pk=running.pk)
    assert after.errors == [
        {
            "attempt": 1,
            "at": clock.now().isoformat(),
            "error": "cancelled",
            "traceback": "",
            "exception": "django_alkstore.exceptions.Cancelled",
        }
    ]
    assert (after.last_error, after.attempts, after.worker_id) == ("cancelled", 1, None)
    assert handle.ack() is False
    assert cancel(running.pk) is False
