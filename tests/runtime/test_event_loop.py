"""Coroutines: all of a worker run side by side in one event loop. Section 8, and section 3 of the issue about tasks."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from django_alkstore.models import Job
from django_alkstore.services import cancel, enqueue, enqueue_many, outbox
from tests.ledger.models import Entry
from tests.ledger.tools import can_write_at_once, row, variant, wait_for_state, wait_past
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]


@pytest.fixture
def begin(start: Start) -> Start:
    """Start a process that knows the handlers of `tests/runtime/alkstore.py`."""

    def begin_one(*arguments: str, **environment: str) -> Process:
        return start(*arguments, **variant(EXTRA_APPS=["tests.runtime"]), **environment)

    return begin_one


def outcome(job_id: int) -> tuple[str, int, list[str]]:
    """State, attempts, and the errors of the attempts."""
    job = row(job_id)
    return job.state, job.attempts, [entry["error"] for entry in job.errors]


GIVEN_BACK = ("pending", 0, [])
COMPLETED = ("completed", 1, [])
TOO_LATE = ("pending", 1, ["time limit"])
"""Of a job with attempts left."""


def end(worker: Process) -> None:
    """A worker that is as it was: it ends with status 0."""
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.output


# How many


def test_a_thousand_coroutines_that_wait_for_a_second_end_in_a_few(begin: Start) -> None:
    """4 threads would take 250 s for them."""
    ids = enqueue_many("nap", [1] * 1_000, max_attempts=1)
    worker = begin("run_queue", "nap", "most-naps")
    worker.wait_for("worker started")
    started = time.monotonic()
    wait_for_state("completed", *ids)
    assert time.monotonic() - started < 60
    wait_for_state("completed", enqueue("most-naps", None).pk)
    assert 90 <= int(Entry.objects.get().text) <= 100
    end(worker)


def test_at_most_so_many_coroutines_run_at_once(begin: Start) -> None:
    ids = enqueue_many("nap", [0.05] * 20)
    worker = begin("run_queue", "nap", "most-naps", "--async-concurrency", "3")
    wait_for_state("completed", *ids)
    wait_for_state("completed", enqueue("most-naps", None).pk)
    assert Entry.objects.get().text == "3"
    end(worker)


@pytest.mark.parametrize(("full", "other"), [("wait-async", "noop"), ("wait", "nap")])
def test_a_full_loop_does_not_stop_threads_and_full_threads_do_not_stop_the_loop(
    begin: Start, tmp_path: Path, full: str, other: str
) -> None:
    file = tmp_path / "end"
    first, second, waiting = enqueue_many(full, [str(file)] * 3)
    worker = begin("run_queue", full, other, "--concurrency", "2", "--async-concurrency", "2")
    worker.wait_for("running", 2)
    for _ in range(3):
        wait_for_state("completed", *enqueue_many(other, [0] * 20))
    assert [row(job).state for job in (first, second, waiting)] == ["processing", "processing", "pending"]
    file.touch()
    wait_for_state("completed", first, second, waiting)
    end(worker)


@pytest.mark.parametrize(("full", "other"), [("async", "sync"), ("sync", "async")])
def test_tasks_of_one_kind_do_not_wait_for_a_place_of_the_other(
    begin: Start, tmp_path: Path, full: str, other: str
) -> None:
    end, now = tmp_path / "end", tmp_path / "now"
    now.touch()
    known = enqueue("other-tasks", [other, str(now)]).pk
    worker = begin("run_queue", "tasks", "other-tasks", "--concurrency", "2", "--async-concurrency", "2")
    wait_for_state("completed", known)
    held = enqueue_many("tasks", [[full, str(end)]] * 3)
    worker.wait_for("running", 3)
    wait_for_state("completed", *enqueue_many("other-tasks", [[other, str(now)]] * 10))
    assert [row(job).state for job in held] == ["processing", "processing", "pending"]
    end.touch()
    wait_for_state("completed", *held)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_a_task_of_an_unexpected_kind_spends_no_attempt(begin: Start, tmp_path: Path) -> None:
    end, now = tmp_path / "end", tmp_path / "now"
    now.touch()
    known = enqueue("other-tasks", ["async", str(now)]).pk
    worker = begin("run_queue", "tasks", "other-tasks", "--concurrency", "1", "--async-concurrency", "20")
    wait_for_state("completed", known)
    held = enqueue("tasks", ["sync", str(end)]).pk
    worker.wait_for(f"running {held}")
    unexpected = enqueue_many("other-tasks", [["sync", str(now)]] * 10, max_attempts=1)
    worker.wait_for("no thread became free")
    assert {row(job).state for job in unexpected} == {"pending"}
    end.touch()
    wait_for_state("completed", held, *unexpected)
    assert [outcome(job) for job in unexpected] == [COMPLETED] * 10


def test_a_full_queue_of_coroutines_does_not_starve_another(begin: Start) -> None:
    many = enqueue_many("nap", [0.2] * 100)
    worker = begin("run_queue", "nap", "nap-too", "--async-concurrency", "2")
    wait_until(lambda: Job.objects.filter(state="processing").exists(), "the first ones run")
    wait_for_state("completed", enqueue("nap-too", 0).pk)
    assert Job.objects.filter(pk__in=many, state="pending").count() > 50
    end(worker)


def test_coroutines_and_threads_share_a_worker(begin: Start) -> None:
    ids = [
        *enqueue_many("noop", [None] * 1_000, max_attempts=1),
        *enqueue_many("nap", [0] * 300, max_attempts=1),
        *enqueue_many("paced", [0.05] * 40, max_attempts=1),
        *enqueue_many("nap-and-write", [0.05] * 200, max_attempts=1),
        *enqueue_many("record", ["a"] * 200, max_attempts=1),
    ]
    worker = begin("run_queue", "noop", "nap", "paced", "nap-and-write", "record", "-v", "0")
    wait_for_state("completed", *ids)
    assert Entry.objects.filter(text="rested").count() == 200
    assert set(Job.objects.values_list("attempts", flat=True)) == {1}
    end(worker)


def test_a_delivery_may_be_a_coroutine(begin: Start) -> None:
    job = outbox("letters-async").enqueue("dear")
    begin("run_outbox", "letters-async", "--async-concurrency", "1")
    wait_for_state("completed", job.pk)
    assert Entry.objects.get().job_id == job.pk


# Outcomes


def test_a_coroutine_ends_by_whatever_it_raises_and_harms_no_other(begin: Start, tmp_path: Path) -> None:
    file = tmp_path / "end"
    beside = enqueue("wait-async", str(file)).pk
    worker = begin("run_queue", "wait-async", "hostile-async", "nap-and-write")
    worker.wait_for(f"running {beside}")
    kinds = ("task that exits", "raise CancelledError", "retry", "discard", "snooze", "ack")
    ids = {kind: enqueue("hostile-async", kind, backoff_base=3_600).pk for kind in kinds}
    wait_for_state("completed", *enqueue_many("nap-and-write", [0] * 5), ids["ack"])
    wait_until(lambda: not Job.objects.filter(pk__in=ids.values(), state="processing").exists(), "all have ended")
    assert {kind: outcome(job) for kind, job in ids.items()} == {
        "task that exits": ("pending", 1, ["SystemExit: in a task"]),
        "raise CancelledError": ("pending", 1, ["CancelledError"]),
        "retry": ("pending", 1, ["Retry: later"]),
        "discard": ("dead", 1, ["Discard: never"]),
        "snooze": ("pending", 0, []),
        "ack": COMPLETED,
    }
    assert row(beside).state == "processing"
    file.touch()
    wait_for_state("completed", beside)
    end(worker)


def test_a_coroutine_that_cancels_all_tasks_of_the_loop_fails_their_attempts_and_no_more(begin: Start) -> None:
    beside = enqueue("wait-async", "never", backoff_base=3_600).pk
    worker = begin("run_queue", "wait-async", "hostile-async", "nap-and-write")
    worker.wait_for(f"running {beside}")
    wild = enqueue("hostile-async", "cancel everything", backoff_base=3_600).pk
    wait_for_state("pending", wild, beside)
    assert outcome(wild) == outcome(beside) == ("pending", 1, ["CancelledError"])
    wait_for_state("completed", *enqueue_many("nap-and-write", [0] * 5))
    end(worker)


def test_each_coroutine_has_the_project_s_language_and_time_zone(begin: Start) -> None:
    ids = enqueue_many("surroundings-async", [None] * 20)
    begin("run_queue", "surroundings-async", "--async-concurrency", "5")
    wait_for_state("completed", *ids)
    assert len(set(Entry.objects.values_list("text", flat=True))) == 1


RECEIVES = """
import sys
from django.core.management import call_command
from django_alkstore import signals
from tests.ledger.models import Entry

def receive(signal, job, **data):
    (name,) = [name for name, value in vars(signals).items() if value is signal]
    Entry.objects.create(text=f"{job.id} {name}")

for signal in (signals.job_started, signals.job_completed, signals.job_retried):
    signal.connect(receive, weak=False)
call_command(*sys.argv[1:])
"""


def test_receivers_of_a_coroutine_s_events_use_the_orm(begin: Start) -> None:
    ids = {kind: enqueue("hostile-async", kind, backoff_base=3_600).pk for kind in ("ack", "nothing", "retry")}
    worker = begin("-c", RECEIVES, "run_queue", "hostile-async")
    wait_until(lambda: Entry.objects.count() == 6, "all events were received")
    last = {"ack": "job_completed", "nothing": "job_completed", "retry": "job_retried"}
    for kind, job in ids.items():
        events = Entry.objects.filter(text__startswith=f"{job} ").order_by("pk")
        assert [entry.text for entry in events] == [f"{job} job_started", f"{job} {last[kind]}"]
    end(worker)


# Time limit and end


def test_a_coroutine_past_its_time_limit_is_cancelled_and_costs_no_place(begin: Start, tmp_path: Path) -> None:
    late = enqueue_many("limited-async", [str(tmp_path / "never")] * 4, backoff_base=3_600)
    worker = begin("run_queue", "limited-async", "nap", "--async-concurrency", "2", "--concurrency", "1")
    worker.wait_for("cancelled", 4)
    wait_for_state("completed", *enqueue_many("nap", [0] * 5))
    assert [outcome(job) for job in late] == [TOO_LATE] * 4
    end(worker)


@pytest.mark.parametrize("how", ["second signal", "end of the grace"])
def test_at_a_hard_end_coroutines_are_cancelled_and_given_back(begin: Start, tmp_path: Path, how: str) -> None:
    ids = enqueue_many("wait-async", [str(tmp_path / "never")] * 3)
    worker = begin("run_queue", "wait-async", "--grace", "1" if how == "end of the grace" else "3600")
    worker.wait_for("running", 3)
    worker.signal(signal.SIGTERM)
    worker.wait_for("worker stopping")
    if how == "second signal":
        threshold = row(ids[0]).last_attempted_at
        assert threshold is not None
        time.sleep(1.1)  # an earlier signal counts as the same
        worker.signal(signal.SIGTERM)
    assert worker.wait() == 1
    assert sum("cancelled" in line for line in worker.lines) == 3
    assert [outcome(job) for job in ids] == [GIVEN_BACK] * 3


def test_a_coroutine_hears_that_the_worker_stops(begin: Start, tmp_path: Path) -> None:
    file = tmp_path / "end"
    place, finishing = enqueue("wait-async", "stopping").pk, enqueue("wait-async", str(file)).pk
    worker = begin("run_queue", "wait-async")
    worker.wait_for("running", 2)
    worker.signal(signal.SIGTERM)
    wait_for_state("pending", place)
    assert outcome(place) == GIVEN_BACK
    file.touch()
    assert worker.wait() == 0
    assert outcome(finishing) == COMPLETED


def test_a_coroutine_that_refuses_to_end_ends_the_worker_with_status_4(begin: Start, tmp_path: Path) -> None:
    beside = enqueue("wait-async", str(tmp_path / "never")).pk
    stuck = enqueue("refuses-to-end", None, backoff_base=3_600).pk
    worker = begin("run_queue", "refuses-to-end", "wait-async")
    assert worker.wait() == 4
    assert f"tests.runtime.alkstore.refuses_to_end (job {stuck} in queue refuses-to-end)" in worker.output
    assert (outcome(stuck), outcome(beside)) == (TOO_LATE, GIVEN_BACK)


def test_a_coroutine_that_blocks_the_loop_ends_the_worker_with_status_4(begin: Start, tmp_path: Path) -> None:
    """Its attempt counts, though its own time limit is far: it would block the next worker as well."""
    never = str(tmp_path / "never")
    late = enqueue("limited-async", never, backoff_base=3_600).pk
    worker = begin("run_queue", "limited-async", "blocks")
    worker.wait_for(f"running {late}")
    blocking = enqueue("blocks", never, backoff_base=3_600).pk
    assert worker.wait() == 4
    assert f"tests.runtime.alkstore.blocks (job {blocking} in queue blocks) blocks the event loop" in worker.output
    assert (outcome(late), outcome(blocking)) == (TOO_LATE, TOO_LATE)


def test_a_coroutine_that_blocks_the_loop_past_its_own_time_limit_is_named(begin: Start, tmp_path: Path) -> None:
    """It blocks in a task that it has started. A sync handler beside it is given back."""
    blocking = enqueue("blocks-too-long", str(tmp_path / "never"), backoff_base=3_600).pk
    beside = enqueue("wait", str(tmp_path / "never")).pk
    worker = begin("run_queue", "blocks-too-long", "wait")
    assert worker.wait() == 4
    assert f"tests.runtime.alkstore.blocks_too_long (job {blocking} in queue blocks-too-long) blocks" in worker.output
    assert (outcome(blocking), outcome(beside)) == (TOO_LATE, GIVEN_BACK)


# Leases


def test_the_leases_of_running_coroutines_are_renewed(begin: Start, tmp_path: Path) -> None:
    file = tmp_path / "end"
    ids = enqueue_many("wait-async", [str(file)] * 10, visibility_timeout=1)
    first = begin("run_queue", "wait-async")
    first.wait_for("running", 10)
    second = begin("run_queue", "wait-async")
    second.wait_for("worker started")
    claimed_until = max(job.lease_expires_at for job in Job.objects.all() if job.lease_expires_at)
    for _ in range(3):
        wait_past(claimed_until)
        claimed_until = max(job.lease_expires_at for job in Job.objects.all() if job.lease_expires_at)
    file.touch()
    wait_for_state("completed", *ids)
    assert [outcome(job) for job in ids] == [COMPLETED] * 10


def test_a_coroutine_is_told_that_its_job_was_cancelled(begin: Start, tmp_path: Path) -> None:
    job = enqueue("wait-async", str(tmp_path / "never"), visibility_timeout=600).pk
    worker = begin("run_queue", "wait-async")
    worker.wait_for(f"running {job}")
    assert cancel(job)
    worker.wait_for(f"told that the lease of {job} is lost")
    assert row(job).state == "cancelled"
    end(worker)


def test_the_coroutines_of_a_killed_worker_run_again(begin: Start, tmp_path: Path) -> None:
    file = tmp_path / "end"
    ids = enqueue_many("wait-async", [str(file)] * 20)
    first = begin("run_queue", "wait-async")
    first.wait_for("running", 20)
    first.signal(signal.SIGKILL)
    first.wait()
    second = begin("run_queue", "wait-async")
    second.wait_for("running", 20)
    file.touch()
    wait_for_state("completed", *ids)
    assert [outcome(job) for job in ids] == [("completed", 2, ["worker died"])] * 20


def test_a_coroutine_that_kills_its_process_costs_each_other_job_one_attempt_at_most(begin: Start) -> None:
    others = enqueue_many("poison-async", [None] * 50)
    poison = enqueue("poison-async", "poison", max_attempts=3, backoff_base=0).pk
    others += enqueue_many("poison-async", [None] * 50)
    for _ in range(3):  # as a supervisor does
        worker = begin("run_queue", "poison-async")
        assert worker.wait() == -signal.SIGKILL
        assert f"poisoned by {poison}" in worker.output
    begin("run_queue", "poison-async")
    wait_for_state("completed", *others)
    wait_for_state("dead", poison)
    assert max(len(row(job).errors) for job in others) <= 1


# The ORM


def test_a_transaction_that_a_coroutine_leaves_open_takes_in_no_other_job(begin: Start) -> None:
    leaving = enqueue("open-transaction-async", 0.5, max_attempts=1).pk
    beside = enqueue_many("nap-and-write", [0.1] * 10)  # they write while the transaction is open
    worker = begin("run_queue", "open-transaction-async", "nap-and-write")
    wait_for_state("dead", leaving)
    wait_for_state("completed", *beside)
    assert Entry.objects.count() == 10
    assert outcome(leaving) == ("dead", 1, ["the handler left a transaction open, which was rolled back"])
    wait_for_state("completed", *enqueue_many("nap-and-write", [0] * 10))
    assert Entry.objects.count() == 20
    end(worker)


def test_a_coroutine_s_rows_and_ack_commit_together_or_not_at_all(begin: Start) -> None:
    good, bad = enqueue("exact-async", "good").pk, enqueue("exact-async", "fail", max_attempts=1).pk
    worker = begin("run_queue", "exact-async")
    wait_for_state("completed", good)
    wait_for_state("dead", bad)
    assert list(Entry.objects.values_list("job_id", flat=True)) == [good]
    assert outcome(bad) == ("dead", 1, ["ValueError: after the ack"])
    end(worker)
    assert "worker stopped: 1 completed, 1 failed" in worker.output


def test_a_coroutine_past_its_time_limit_keeps_no_transaction_open(begin: Start, tmp_path: Path) -> None:
    file = tmp_path / "end"
    late = enqueue("late-transaction-async", str(file), backoff_base=3_600).pk
    worker = begin("run_queue", "late-transaction-async", "nap-and-write")
    worker.wait_for(f"transaction of {late}")
    wait_until(can_write_at_once, "the transaction is rolled back")
    wait_for_state("completed", *enqueue_many("nap-and-write", [0] * 10))
    file.touch()
    worker.wait_for(f"late row of {late} refused")
    assert outcome(late) == TOO_LATE
    assert not Entry.objects.filter(text__in=("in a transaction", "too late")).exists()
    end(worker)
