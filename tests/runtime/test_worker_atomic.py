"""Section 8: an atomic handler holds the writer lock for as long as it runs, and nothing around it is lost for that."""

import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import connection, transaction

from django_alkstore import clock
from django_alkstore.models import Job
from django_alkstore.registry import handler
from django_alkstore.services import JobHandle, enqueue, enqueue_many
from django_alkstore.testing import isolated_registry, run_pending
from tests.ledger.models import Entry
from tests.ledger.tools import PATIENT_END, row, wait_for_state, wait_past
from tests.processes import Process

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]

# While an atomic handler runs, these tests ask the database nothing: an EXCLUSIVE transaction in a rollback journal
# lets nobody read.


def test_an_atomic_handler_longer_than_its_lease_runs_once(start: Start, tmp_path: Path) -> None:
    """Its transaction holds the writer lock, so nobody can renew beside it, nor claim."""
    open_end = tmp_path / "open"
    job = enqueue("doomed", str(open_end), visibility_timeout=1, backoff_base=0)
    process = start("run_queue", "doomed", "--concurrency", "1")
    process.wait_for(f"row of {job.pk}")
    # Nothing is asked of the database here: an EXCLUSIVE transaction in a rollback journal lets nobody read.
    wait_past(clock.now() + timedelta(seconds=2))
    open_end.touch()
    wait_for_state("completed", job.pk)
    assert row(job.pk).attempts == 1
    assert list(Entry.objects.values_list("text", "job_id")) == [("attempt 1", job.pk)]


def test_one_that_outlives_its_lease_still_has_the_last_word(start: Start) -> None:
    job = enqueue("atomic-late", None, visibility_timeout=1)
    worker = start("run_queue", "atomic-late", "--concurrency", "1")
    worker.wait_for("dead: job")
    after = row(job.pk)
    assert (after.state, after.attempts, after.last_error) == ("dead", 1, "Discard: the real reason")
    assert "lost the lease" not in worker.output


def test_those_that_wait_for_each_other_past_their_leases_run_once_each(start: Start) -> None:
    ids = enqueue_many("atomic-late", [None] * 4, visibility_timeout=1, max_attempts=1)
    worker = start("run_queue", "atomic-late", "--concurrency", "4")
    for job_id in ids:
        worker.wait_for(f"dead: job {job_id} ")
    assert {(job.attempts, len(job.errors), job.last_error) for job in Job.objects.all()} == {
        (1, 1, "Discard: the real reason")
    }


def test_a_plain_handler_beside_one_keeps_its_lease_and_runs_once(start: Start, tmp_path: Path) -> None:
    plain_end, atomic_end = tmp_path / "plain", tmp_path / "atomic"
    plain = enqueue("wait", str(plain_end), visibility_timeout=1, max_attempts=1)
    worker = start("run_queue", "wait", "doomed")
    worker.wait_for(f"running {plain.pk}")
    atomic = enqueue("doomed", str(atomic_end))
    worker.wait_for(f"row of {atomic.pk}")
    wait_past(clock.now() + timedelta(seconds=2))
    plain_end.touch()
    worker.wait_for(f"done {plain.pk}")
    atomic_end.touch()
    wait_for_state("completed", plain.pk, atomic.pk)
    assert {(job.attempts, len(job.errors)) for job in Job.objects.all()} == {(1, 0)}
    assert list(Entry.objects.filter(text__startswith="started").values_list("text", flat=True)) == ["started 1"]


def test_a_second_signal_takes_back_its_rows_and_gives_everything_back(start: Start, tmp_path: Path) -> None:
    plain = enqueue("wait", str(tmp_path / "never"))
    worker = start("-c", PATIENT_END, "run_queue", "wait", "doomed")
    worker.wait_for(f"running {plain.pk}")
    atomic = enqueue("doomed", str(tmp_path / "never"))
    worker.wait_for(f"row of {atomic.pk}")
    worker.signal(signal.SIGTERM)
    worker.wait_for("worker stopping")
    wait_past(clock.now() + timedelta(seconds=1))  # a signal that comes earlier counts as the same
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 1
    assert {(job.state, job.attempts, len(job.errors)) for job in Job.objects.all()} == {("pending", 0, 0)}
    assert not Entry.objects.filter(job_id=atomic.pk).exists()
    assert "database is locked" not in worker.output


def test_one_past_its_time_limit_has_failed_and_no_longer_holds_the_writer_lock(start: Start, tmp_path: Path) -> None:
    open_end = tmp_path / "open"
    stubborn = enqueue("atomic-stubborn", str(open_end), backoff_base=3_600)
    worker = start("run_queue", "atomic-stubborn", "noop", "--concurrency", "2")
    worker.wait_for(f"running {stubborn.pk}")
    worker.wait_for("time limit")
    after = row(stubborn.pk)
    assert (after.state, [failure["error"] for failure in after.errors]) == ("pending", ["time limit"])
    beside = enqueue("noop", None)
    wait_for_state("completed", beside.pk)
    open_end.touch()
    worker.wait_for(f"late row of {stubborn.pk} refused")
    wait_for_state("completed", *enqueue_many("noop", range(4)))
    assert (row(stubborn.pk).state, Entry.objects.count()) == ("pending", 0)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_a_worker_whose_only_thread_one_keeps_past_its_time_limit_exits_to_be_started_afresh(
    start: Start, tmp_path: Path
) -> None:
    stubborn = enqueue("atomic-stubborn", str(tmp_path / "never"), backoff_base=3_600)
    worker = start("run_queue", "atomic-stubborn", "--concurrency", "1")
    assert worker.wait() == 4
    assert (row(stubborn.pk).state, row(stubborn.pk).last_error) == ("pending", "time limit")


def test_of_two_queues_neither_is_always_first_whatever_else_is_written_between_two_claims(start: Start) -> None:
    """Each job's lease is renewed once while it runs, which is a round of its own."""
    for queue in ("paced", "paced-too"):
        enqueue_many(queue, [0.5] * 6, visibility_timeout=1)
    worker = start("run_queue", "paced", "paced-too", "--concurrency", "1")
    worker.wait_for("completed job", times=5)
    done = Job.objects.filter(state="completed").values_list("queue", flat=True)
    assert set(done) == {"paced", "paced-too"}


@pytest.mark.parametrize("settled_by", ["the worker", "ack_tx"])
def test_a_transaction_that_is_ended_past_django_completes_no_job(settled_by: str) -> None:
    """The rows of the handler are gone, so its ack must not stand."""
    with isolated_registry():

        @handler("q", atomic=settled_by == "the worker")
        def run(job: JobHandle) -> None:
            if settled_by == "the worker":
                Entry.objects.create(text="lost")
                connection.connection.rollback()
                return
            with transaction.atomic():
                Entry.objects.create(text="lost")
                connection.connection.rollback()
                job.ack_tx()

        job = enqueue("q", None)
        run_pending("q")
    after = row(job.pk)
    assert (after.state, after.attempts, Entry.objects.count()) == ("pending", 1, 0)
    assert "has been ended past Django" in str(after.last_error)
