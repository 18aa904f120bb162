"""Lock errors of handlers: three in a row cost no attempt, whichever workers run them. They are counted on the row."""

import sqlite3
from collections.abc import Callable, Iterator
from signal import SIGTERM

import pytest
from django.db import OperationalError

from django_alkstore.clock import ManualClock
from django_alkstore.exceptions import Snooze
from django_alkstore.models import Job
from django_alkstore.registry import handler, isolated
from django_alkstore.runtime.perform import LOCK_ERRORS_IN_A_ROW, LONGEST_LOCK_PAUSE
from django_alkstore.services import JobHandle, cancel, claim_batch, enqueue, enqueue_many, requeue, run_now, sweep
from django_alkstore.testing import run_pending
from tests.ledger.tools import database, variant, wait_for_state
from tests.processes import Process

pytestmark = pytest.mark.django_db(transaction=True)

LONGEST_PAUSE = LONGEST_LOCK_PAUSE * 2 ** (LOCK_ERRORS_IN_A_ROW - 1)


def lock_error() -> OperationalError:
    cause = sqlite3.OperationalError("database is locked")
    cause.sqlite_errorcode = sqlite3.SQLITE_BUSY
    error = OperationalError("database is locked")
    error.__cause__ = cause
    return error


@pytest.fixture
def raised() -> Iterator[list[BaseException]]:
    """What the handler of "mail" raises, first to last; then lock errors."""
    errors: list[BaseException] = []
    with isolated():

        @handler("mail")
        def run(job: JobHandle) -> None:
            raise errors.pop(0) if errors else lock_error()

        yield errors


def step(clock: ManualClock) -> Job:
    """Run the job once, if it is due."""
    clock.advance(LONGEST_PAUSE)
    run_pending("mail")
    return Job.objects.get()


def test_they_are_counted_on_the_row_and_the_fourth_is_a_failed_attempt(
    clock: ManualClock, raised: list[BaseException]
) -> None:
    enqueue("mail", None, backoff_base=0, max_attempts=2)
    seen = []
    while not seen or seen[-1][0] == "pending":
        job = step(clock)
        seen.append((job.state, job.attempts, job.lock_errors))
        if job.lock_errors and job.state == "pending":
            shortest, wait = LONGEST_LOCK_PAUSE / 5, (job.run_at - clock.now()).total_seconds()
            assert shortest <= wait / 2 ** (job.lock_errors - 1) <= LONGEST_LOCK_PAUSE
    # The handler is due again at once after a failed attempt, so that its first lock error follows in the same step.
    assert seen == [("pending", 0, 1), ("pending", 0, 2), ("pending", 0, 3),
                    ("pending", 1, 1), ("pending", 1, 2), ("pending", 1, 3), ("dead", 2, 3)]  # fmt: skip


def lapse(job_id: int, clock: ManualClock) -> None:
    claim_batch("mail", "by hand")
    clock.advance(301)
    assert sweep("mail") == 1


def revive(job_id: int, clock: ManualClock) -> None:
    assert cancel(job_id)
    assert requeue(job_id)


def retry(job_id: int, clock: ManualClock) -> None:
    [job] = claim_batch("mail", "by hand")
    assert job.retry("boom", delay=0)


def release(job_id: int, clock: ManualClock) -> None:
    [job] = claim_batch("mail", "by hand")
    assert job.release()


def make_due(job_id: int, clock: ManualClock) -> None:
    assert run_now(job_id)


@pytest.mark.parametrize(
    ("event", "left"),
    [(lapse, 0), (revive, 0), (retry, 0), (release, 2), (make_due, 2)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_ends_a_row_of_them_and_what_does_not(
    clock: ManualClock, raised: list[BaseException], event: Callable[[int, ManualClock], None], left: int
) -> None:
    job_id = enqueue("mail", None).pk
    step(clock)
    assert step(clock).lock_errors == 2
    if event is not make_due:
        clock.advance(LONGEST_PAUSE)
    event(job_id, clock)
    assert Job.objects.get().lock_errors == left


def test_a_snooze_ends_a_row_of_them(clock: ManualClock, raised: list[BaseException]) -> None:
    enqueue("mail", None)
    assert step(clock).lock_errors == 1
    raised.append(Snooze(1))
    assert step(clock).lock_errors == 0


Start = Callable[..., Process]


def begin(start: Start) -> Process:
    options = variant(EXTRA_APPS=["tests.runtime"])
    return start("run_queue", "locked-out", "--concurrency", "1", **options, ALKSTORE_TEST_TIMEOUT="0.2")


def deliveries(*workers: Process) -> list[str]:
    return sorted(line for worker in workers for line in worker.lines if line.startswith("delivery of"))


def test_two_workers_together_try_three_times_more(start: Start) -> None:
    ids = enqueue_many("locked-out", [[database(), 1_000]] * 3, max_attempts=1)
    workers = begin(start), begin(start)
    wait_for_state("dead", *ids)
    for worker in workers:
        worker.signal(SIGTERM)
        assert worker.wait() == 0
    assert deliveries(*workers) == sorted(f"delivery of {job} with attempt 1" for job in ids for _ in range(4))


def test_so_does_a_worker_after_a_restart(start: Start) -> None:
    job = enqueue("locked-out", [database(), 1_000], max_attempts=1).pk
    first = begin(start)
    first.wait_for(f"locked out job {job}")
    first.signal(SIGTERM)
    assert first.wait() == 0
    second = begin(start)
    wait_for_state("dead", job)
    second.signal(SIGTERM)
    assert second.wait() == 0
    assert deliveries(first, second) == [f"delivery of {job} with attempt 1"] * 4
