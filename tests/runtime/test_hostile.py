"""Section 8: whatever a handler does, its attempt is recorded and the next job on the thread is unharmed."""

import signal
from collections.abc import Callable

import pytest

from django_alkstore.models import Job
from django_alkstore.services import enqueue, enqueue_many
from tests.ledger.models import Entry
from tests.ledger.tools import row, wait_for_state
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]
LIMIT = 10_000

RAISED = {
    "exit": "SystemExit: leaving",
    "interrupt": "KeyboardInterrupt",
    "rude": "Rude: rude",
    "unprintable": "Unprintable",
    "not text": "NotText",
    "bad repr": "BadRepr: with a message",
    "bad init": "RuntimeError: no exception",
    "circular": "ValueError: first",
    "group": "ExceptionGroup: several",
    "base group": "BaseExceptionGroup: several",
    "deep frames": "ValueError: deep",
    "odd text": "ValueError: nul \N{REPLACEMENT CHARACTER}, surrogate \N{REPLACEMENT CHARACTER}, \N{PILE OF POO}",
    "stop iteration": "StopIteration: early",
    "generator exit": "GeneratorExit",
    "memory": "MemoryError",
    "recursion": "RecursionError: maximum recursion depth exceeded",
}
"""What a handler raises, and how the error that is kept begins."""


BREAKS_AFTER_A_JOB = """
from django.core.management import call_command
from django_alkstore import signals
from django_alkstore.runtime.keeper import Keeper

def look_after(self):
    raise ZeroDivisionError("broken")

def break_the_keeper(**_):
    Keeper.look_after = look_after

signals.job_completed.connect(break_the_keeper)
call_command("run_queue", "async-hostile", "noop", "--concurrency", "2")
"""


def run_with_a_fine_job_behind_each(start: Start, kinds: list[str], queue: str = "hostile") -> dict[str, Job]:
    """One thread (or the event loop) runs each hostile job and, next, one that writes a row; all of them end."""
    hostile, fine = {}, []
    for kind in kinds:
        hostile[kind] = enqueue(queue, kind, max_attempts=1)
        fine.append(enqueue(queue, "write", max_attempts=1))
    process = start("run_queue", queue, "--concurrency", "1", "--async-concurrency", "1")
    wait_for_state("completed", *(job.pk for job in fine))
    assert Entry.objects.filter(text="fine").count() == len(kinds)
    assert process.popen.poll() is None
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.output
    return {kind: row(job.pk) for kind, job in hostile.items()}


def test_f038_f105_whatever_is_raised_is_a_failed_attempt_with_its_traceback(start: Start) -> None:
    jobs = run_with_a_fine_job_behind_each(start, list(RAISED))
    for kind, job in jobs.items():
        assert (job.state, job.attempts, len(job.errors)) == ("dead", 1, 1), kind
        error = job.errors[0]["error"]
        assert error.startswith(RAISED[kind]), (kind, error)
        assert job.last_error == error
        assert job.errors[0]["traceback"].strip(), kind
        assert len(job.errors[0]["traceback"]) <= LIMIT, kind


def test_f038_what_an_async_handler_raises_is_a_failed_attempt_too(start: Start) -> None:
    kinds = ["exit", "interrupt", "rude", "unprintable", "generator exit", "group", "deep frames"]
    jobs = run_with_a_fine_job_behind_each(start, kinds, queue="async-hostile")
    for kind, job in jobs.items():
        assert (job.state, job.attempts, len(job.errors)) == ("dead", 1, 1), kind
        assert job.errors[0]["error"].startswith(RAISED[kind]), kind


def test_f104_an_error_of_five_megabytes_is_cut_on_the_job_and_in_the_log(start: Start) -> None:
    job = enqueue("hostile", "huge", max_attempts=1)
    process = start("run_queue", "hostile")
    wait_for_state("dead", job.pk)
    (entry,) = row(job.pk).errors
    assert entry["error"].startswith("ValueError: xxxx")
    assert len(entry["error"]) <= LIMIT
    assert not entry["error"].endswith("xxxxx")  # the mark
    assert len(entry["traceback"]) <= LIMIT
    assert "Traceback (most recent call last)" in entry["traceback"]
    following = enqueue("hostile", "fine")
    wait_for_state("completed", following.pk)
    process.signal(signal.SIGTERM)
    process.wait()
    assert len(process.output) < 5 * LIMIT


def test_f104_a_traceback_a_thousand_frames_deep_keeps_both_its_ends(start: Start) -> None:
    job = run_with_a_fine_job_behind_each(start, ["deep frames"])["deep frames"]
    traceback = job.errors[0]["traceback"]
    assert traceback.startswith("Traceback (most recent call last):")
    assert traceback.rstrip().endswith("ValueError: deep")


def test_f059_a_transaction_that_is_left_open_harms_no_other_job_and_is_never_committed(start: Start) -> None:
    kinds = ["broken transaction", "manual commit", "swallowed", "close in transaction", "savepoint", "close"]
    kinds += ["open cursor", "manual commit", "broken transaction", "raw begin", "ack in raw begin"]
    jobs = run_with_a_fine_job_behind_each(start, kinds)
    assert not Entry.objects.exclude(text="fine").exists()
    assert {job.state for job in jobs.values()} <= {"completed", "dead"}
    assert jobs["savepoint"].state == "dead"
    for kind in ("raw begin", "ack in raw begin"):
        assert "left a transaction open" in jobs[kind].errors[0]["error"], kind
    assert jobs["close"].state == "completed"
    assert jobs["open cursor"].state == "completed"


@pytest.mark.parametrize("queue", ["hostile", "async-hostile"])
def test_what_a_handler_sets_on_its_connection_costs_others_no_more_than_an_attempt(start: Start, queue: str) -> None:
    spoil = "spoil the connection" if queue == "hostile" else "beside: spoil the connection"
    spoilt = enqueue(queue, spoil, max_attempts=1)
    start("run_queue", queue, "--concurrency", "1")
    wait_for_state("completed", spoilt.pk)
    writing = enqueue_many(queue, ["write"] * 5, backoff_base=0, max_attempts=2)
    wait_for_state("completed", *writing)
    assert sum(row(job).attempts - 1 for job in writing) <= 1


def test_f059_so_it_is_where_an_async_handler_s_queries_run(start: Start) -> None:
    kinds = ["broken transaction", "manual commit", "close in transaction", "savepoint", "close", "open cursor"]
    kinds.append("raw begin")
    jobs = run_with_a_fine_job_behind_each(start, [f"beside: {kind}" for kind in kinds], queue="async-hostile")
    assert not Entry.objects.exclude(text="fine").exists()
    for kind in ("broken transaction", "manual commit", "savepoint"):
        assert jobs[f"beside: {kind}"].state == "dead", kind
    for kind in ("manual commit", "raw begin"):
        assert "left a transaction open" in jobs[f"beside: {kind}"].errors[0]["error"], kind
    for kind in ("close", "open cursor"):
        assert jobs[f"beside: {kind}"].state == "completed", kind


def test_f059_so_it_is_in_any_thread_that_an_async_handler_uses(start: Start) -> None:
    kinds = ["broken transaction", "manual commit", "savepoint", "close", "open cursor", "raw begin"]
    jobs = run_with_a_fine_job_behind_each(start, [f"elsewhere: {kind}" for kind in kinds], queue="async-hostile")
    assert not Entry.objects.exclude(text="fine").exists()
    for kind in ("broken transaction", "manual commit", "savepoint", "raw begin"):
        assert jobs[f"elsewhere: {kind}"].state == "dead", kind
    for kind in ("close", "open cursor"):
        assert jobs[f"elsewhere: {kind}"].state == "completed", kind


def test_a_loop_that_is_stopped_after_its_job_costs_no_thread(start: Start) -> None:
    job = enqueue("async-hostile", "stop the loop afterwards", max_attempts=1)
    process = start("run_queue", "async-hostile", "--concurrency", "1")
    wait_for_state("completed", job.pk)
    fine = enqueue("async-hostile", "write", backoff_base=0)
    wait_for_state("completed", fine.pk)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.output


def test_a_worker_that_breaks_ends_whatever_a_coroutine_has_running_in_another_thread(start: Start) -> None:
    enqueue("async-hostile", "beside: never end")
    process = start("-c", BREAKS_AFTER_A_JOB)
    wait_until(lambda: Job.objects.filter(state="processing").exists(), "the coroutine is claimed")
    enqueue("noop", None)
    assert process.wait() == 1, process.output
    assert "ZeroDivisionError: broken" in process.output


def test_a_coroutine_s_context_is_its_own_whatever_the_thread_has_run_before(start: Start) -> None:
    setting = enqueue("hostile", "set the context")
    process = start("run_queue", "hostile", "async-hostile", "--concurrency", "1")
    wait_for_state("completed", setting.pk)
    wait_for_state("completed", enqueue("async-hostile", "write").pk)
    assert process.popen.poll() is None
    assert Entry.objects.get().text == "fine"


def test_what_a_coroutine_leaves_behind_harms_no_other_job(start: Start) -> None:
    """Its tasks, its context, and a loop that it has stopped or tried to close."""
    kinds = ["set the context", "leave a task", "stop the loop", "close the loop", "leave a task", "stop the loop"]
    kinds.append("leave a task that leaves another")
    jobs = run_with_a_fine_job_behind_each(start, kinds, queue="async-hostile")
    assert not Entry.objects.exclude(text="fine").exists()
    assert jobs["set the context"].state == jobs["leave a task"].state == jobs["stop the loop"].state == "completed"
    assert "Cannot close a running event loop" in jobs["close the loop"].errors[0]["error"]


@pytest.mark.parametrize(
    "kind",
    ["bad retry", "retry for ever", "snooze for nan", "snooze for text", "own retry", "own snooze", "liar"],
)
def test_a_request_that_makes_no_sense_is_a_failed_attempt(start: Start, kind: str) -> None:
    job = run_with_a_fine_job_behind_each(start, [kind])[kind]
    assert (job.state, job.attempts, len(job.errors)) == ("dead", 1, 1)


@pytest.mark.parametrize("kind", ["retry past all dates", "snooze past all dates"])
def test_a_delay_past_the_last_date_is_a_failed_attempt_and_not_the_worker_s_end(start: Start, kind: str) -> None:
    job = enqueue("hostile", kind, backoff_base=0, max_attempts=2)
    behind = enqueue("hostile", "write")
    process = start("run_queue", "hostile", "--concurrency", "1")
    wait_for_state("completed", behind.pk)
    wait_for_state("dead", job.pk)
    assert row(job.pk).attempts == 2
    assert process.popen.poll() is None


def test_f153_a_failure_is_logged_with_its_traceback(start: Start) -> None:
    job = enqueue("fail", "x", max_attempts=1)
    process = start("run_queue", "fail")
    wait_for_state("dead", job.pk)
    process.wait_for("ValueError: no luck with x", 2)  # the line of the failure, and the traceback's last
    process.wait_for('raise ValueError(f"no luck with {job.payload}")')
