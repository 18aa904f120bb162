"""Section 8: quick jobs are claimed in batches, and no job of a batch costs another one its attempt or its time."""

import re
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL

import pytest
from django.db import transaction

from django_alkstore import clock
from django_alkstore.models import Job
from django_alkstore.runtime.jobs import LARGEST_BATCH
from django_alkstore.services import claim_batch, enqueue, enqueue_many, reschedule, run_now, sweep
from tests.ledger.tools import end_leases, row, state, variant, wait_for_state
from tests.processes import Process

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]

HOLDS = """
import sys
from django.core.management import call_command
from django_alkstore.runtime import shared_state
shared_state.LONGEST_WAIT_TO_START = 600.0
shared_state.BATCH_SECONDS = 100.0
shared_state.QUICK = 3_600.0
call_command(*sys.argv[1:])
"""
"""A worker that takes every handler for a quick one, however busy the machine is, and gives back no waiting job."""

APP = variant(EXTRA_APPS=["tests.runtime"])


def quick_worker(start: Start, concurrency: int) -> Process:
    """Start a worker that claims batches of the queue "batch", since it knows its handler."""
    worker = start("-c", HOLDS, "run_queue", "batch", "--concurrency", str(concurrency), **APP)
    worker.wait_for("worker started")
    for _ in range(2):
        worker.wait_for(f"completed job {enqueue('batch', None).pk} ")
    return worker


def suspected_job(last_error: str) -> int:
    """A job whose last attempt ended with that error, and which is not due yet."""
    job = enqueue("batch", None).pk
    claim_batch("batch", "ghost")
    end_leases(job)
    assert sweep("batch") == 1
    assert row(job).last_error == "lease expired"
    Job.objects.filter(pk=job).update(last_error=last_error)
    assert reschedule(job, clock.now().replace(year=9000))
    return job


@pytest.mark.parametrize("last_error", ["worker died", "lease expired"])
def test_a_last_attempt_and_a_suspected_job_are_not_held_behind_another(
    start: Start, tmp_path: Path, last_error: str
) -> None:
    end = tmp_path / "end"
    suspected = suspected_job(last_error)
    worker = quick_worker(start, 1)
    with transaction.atomic():
        slow = enqueue("batch", str(end)).pk
        plain = enqueue("batch", None).pk
        last = enqueue("batch", None, max_attempts=1).pk
        run_now(suspected)
        behind = enqueue("batch", None).pk
    worker.wait_for(f"running {slow}")
    assert {state(job_id) for job_id in (slow, plain, behind)} == {"processing"}  # one batch
    assert (row(last).state, row(last).attempts) == ("pending", 0)
    assert (row(suspected).state, row(suspected).attempts) == ("pending", 1)
    end.touch()
    wait_for_state("completed", slow, plain, last, suspected, behind)
    assert {row(job_id).attempts for job_id in (slow, plain, last, behind)} == {1}
    assert row(suspected).attempts == 2


@pytest.mark.parametrize("is_last", [True, False])
def test_nothing_is_held_behind_a_job_that_may_end_the_process(start: Start, tmp_path: Path, is_last: bool) -> None:
    end = tmp_path / "end"
    suspected = suspected_job("worker died")
    worker = quick_worker(start, 1)
    with transaction.atomic():
        if is_last:
            slow = enqueue("batch", str(end), max_attempts=1).pk
        else:
            slow = suspected
            Job.objects.filter(pk=slow).update(payload=str(end))
            run_now(slow)
        behind = enqueue_many("batch", [None] * 5)
    worker.wait_for(f"running {slow}")
    assert {(row(job_id).state, row(job_id).attempts) for job_id in behind} == {("pending", 0)}
    end.touch()
    wait_for_state("completed", slow, *behind)
    assert {row(job_id).attempts for job_id in behind} == {1}


def test_a_job_that_kills_its_process_costs_no_other_job_its_attempts(start: Start) -> None:
    quick = enqueue_many("poison", [None] * 100)
    poison = enqueue("poison", "poison", max_attempts=3, backoff_base=0).pk
    quick += enqueue_many("poison", [None] * 100)
    for _ in range(3):  # as a supervisor does
        worker = start("run_queue", "poison", **APP)
        assert worker.wait() == -SIGKILL
        assert f"poisoned by {poison}" in worker.output
    last = start("run_queue", "poison", **APP)
    wait_for_state("completed", *quick)
    wait_for_state("dead", poison)
    assert [entry["error"] for entry in row(poison).errors] == ["worker died"] * 3
    assert "poisoned" not in last.output
    assert {row(job_id).last_error for job_id in quick} <= {None, "worker died"}
    assert max(len(row(job_id).errors) for job_id in quick) <= 1


ENDED = re.compile(r"ended (\d+) at ([\d.]+)")


def ends(worker: Process) -> dict[int, float]:
    """When the handler of each job ended."""
    return {int(found[1]): float(found[2]) for line in worker.lines if (found := ENDED.search(line))}


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("place", [1, LARGEST_BATCH // 2, LARGEST_BATCH - 1])
def test_results_are_written_at_once_though_a_job_of_their_batch_blocks(
    start: Start, tmp_path: Path, place: int, concurrency: int
) -> None:
    end = tmp_path / "end"
    worker = quick_worker(start, concurrency)
    ids = enqueue_many("batch", [str(end) if number == place else None for number in range(LARGEST_BATCH)])
    worker.wait_for(f"running {ids[place]}")
    wait_for_state("completed", *ids[:place])
    assert state(ids[place]) == "processing"
    ended = ends(worker)
    delays = []
    for job_id in ids[:place]:
        finished_at = row(job_id).finished_at
        assert finished_at is not None
        delays.append(finished_at.timestamp() - ended[job_id])
    assert max(delays) < 2.0  # the promise is 0.1 s, on a machine with time for it
    end.touch()
    wait_for_state("completed", *ids)


@pytest.mark.parametrize("place", [0, LARGEST_BATCH // 2])
def test_a_slow_job_of_a_batch_holds_no_other_up_while_a_thread_is_free(
    start: Start, tmp_path: Path, place: int
) -> None:
    end = tmp_path / "end"
    worker = quick_worker(start, 2)
    ids = enqueue_many("batch", [str(end) if number == place else None for number in range(LARGEST_BATCH)])
    others = [job_id for job_id in ids if job_id != ids[place]]
    wait_for_state("completed", *others)
    assert state(ids[place]) == "processing"
    assert "gives back" not in worker.output
    end.touch()
    wait_for_state("completed", *ids)
    assert set(Job.objects.values_list("attempts", flat=True)) == {1}
