"""Section 8: SIGTERM, SIGINT, the grace, the second signal, and what becomes of what is still running."""

import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from signal import SIGINT, SIGTERM

import pytest

from django_alkstore import clock
from django_alkstore.exceptions import DuplicateJob
from django_alkstore.models import Job
from django_alkstore.services import claim_batch, enqueue, enqueue_many, get_or_enqueue, outbox
from tests.faults.tools import Passage
from tests.ledger.models import Entry
from tests.ledger.tools import PATIENT_END, row, wait_for_state, wait_past, writer_lock
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]
COMMANDS = [("run_queue", "wait"), ("run_alkstore",)]


def is_given_back(job_id: int) -> bool:
    """Pending and due, and as if it had never been claimed."""
    job = row(job_id)
    return (job.state, job.attempts, job.worker_id, job.lease_expires_at, job.errors, job.last_error) == (
        "pending",
        0,
        None,
        None,
        [],
        None,
    ) and job.run_at <= clock.now()


@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
@pytest.mark.parametrize(
    "command", [("run_queue", "wait"), ("run_outbox", "mail"), ("run_alkstore",), ("run_schedules",)]
)
def test_f039_an_idle_command_stops_at_a_signal_with_status_0(
    start: Start, command: tuple[str, ...], number: signal.Signals
) -> None:
    process = start(*command)
    process.wait_for("leads" if command[0] == "run_schedules" else "worker started")
    process.signal(number)
    assert process.wait() == 0
    assert "stop" in process.lines[-1]
    assert "Traceback" not in process.output


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
def test_f033_at_one_signal_the_running_handler_finishes_and_nothing_new_is_claimed(
    start: Start, tmp_path: Path, command: tuple[str, ...], number: signal.Signals
) -> None:
    open_end = tmp_path / "open"
    job = enqueue("wait", str(open_end))
    process = start(*command, "--concurrency", "2")
    process.wait_for(f"running {job.pk}")
    process.signal(number)
    process.wait_for("worker stopping")
    late = enqueue("wait", str(open_end))  # a thread is free for it, but the worker claims no more
    wait_past(clock.now() + timedelta(seconds=0.3))
    open_end.touch()
    assert process.wait() == 0
    process.wait_for(f"done {job.pk}")
    assert (row(job.pk).state, row(job.pk).attempts) == ("completed", 1)
    assert is_given_back(late.pk)
    assert f"running {late.pk}" not in process.output


def test_a_failure_in_the_grace_is_recorded_like_any_other(start: Start, tmp_path: Path) -> None:
    open_end = tmp_path / "open"
    job = enqueue("late-failure", str(open_end), max_attempts=1)
    process = start("run_queue", "late-failure")
    process.wait_for(f"running {job.pk}")
    process.signal(SIGTERM)
    process.wait_for("worker stopping")
    open_end.touch()
    assert process.wait() == 0
    assert (row(job.pk).state, row(job.pk).last_error) == ("dead", "ValueError: after the wait")


@pytest.mark.parametrize("command", COMMANDS)
def test_f034_at_the_end_of_the_grace_everything_is_given_back_with_status_1(
    start: Start, tmp_path: Path, command: tuple[str, ...]
) -> None:
    open_end = tmp_path / "open"
    job = enqueue("wait", str(open_end), unique_key="one")
    process = start(*command, "--grace", "1")
    process.wait_for(f"running {job.pk}")
    process.signal(SIGTERM)
    assert process.wait() == 1
    assert "worker stopped: 0 completed, 0 failed" in process.output  # the scheduler may say later that it has stopped
    assert is_given_back(job.pk)
    assert f"done {job.pk}" not in process.output
    with pytest.raises(DuplicateJob):
        enqueue("wait", str(open_end), unique_key="one")
    open_end.touch()
    start("run_queue", "wait")
    wait_for_state("completed", job.pk)
    assert row(job.pk).attempts == 1
    assert get_or_enqueue("wait", "one", str(open_end))[1] is True


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("first", "second"), [(SIGTERM, SIGTERM), (SIGINT, SIGINT), (SIGTERM, SIGINT)])
def test_f033_at_a_second_signal_everything_is_given_back_at_once_with_status_1(
    start: Start, tmp_path: Path, command: tuple[str, ...], first: signal.Signals, second: signal.Signals
) -> None:
    jobs = enqueue_many("wait", [str(tmp_path / "never")] * 2)
    process = start(*command, "--grace", "3600", "--concurrency", "2")
    for job_id in jobs:
        process.wait_for(f"running {job_id}")
    process.signal(first)
    process.wait_for("worker stopping")
    assert {row(job_id).state for job_id in jobs} == {"processing"}
    wait_past(clock.now() + timedelta(seconds=1))  # one that comes earlier counts as the same
    process.signal(second)
    assert process.wait() == 1
    assert all(is_given_back(job_id) for job_id in jobs)
    assert [job.id for job in claim_batch("wait", "another", 2)] == jobs


def test_an_outbox_s_delivery_is_given_back_like_a_queue_s_job(start: Start, tmp_path: Path) -> None:
    job = outbox("slow").enqueue(str(tmp_path / "never"))
    process = start("run_outbox", "slow", "--grace", "0")
    process.wait_for(f"running {job.pk}")
    process.signal(SIGTERM)
    assert process.wait() == 1
    assert is_given_back(job.pk)


def test_a_failed_attempt_stays_counted_where_the_next_is_given_back(start: Start, tmp_path: Path) -> None:
    """Giving back refunds the attempt that it interrupts, and no other."""
    job = enqueue("doomed-once", str(tmp_path / "never"), backoff_base=0)
    process = start("run_queue", "doomed-once", "--grace", "0")
    process.wait_for(f"running {job.pk}")
    process.signal(SIGTERM)
    assert process.wait() == 1
    assert (row(job.pk).state, row(job.pk).attempts, len(row(job.pk).errors)) == ("pending", 1, 1)


def test_nothing_is_given_back_while_the_process_goes_on(start: Start, tmp_path: Path) -> None:
    """In the grace the leases are renewed as before, and an idle worker beside it gets nothing."""
    open_end, passage = tmp_path / "open", Passage(tmp_path / "passage")
    job = enqueue("wait", str(open_end), visibility_timeout=600)
    first = passage.start(start, "run_queue", "wait", "--grace", "3600")
    first.wait_for(f"running {job.pk}")
    holder = row(job.pk).worker_id
    second = passage.start(start, "run_queue", "wait")
    second.wait_for("worker started")
    first.signal(SIGTERM)
    first.wait_for("worker stopping")
    passage.outlast_leases(600, job.pk)
    held = row(job.pk)
    assert (held.state, held.attempts, held.worker_id, held.errors) == ("processing", 1, holder, [])
    open_end.touch()
    assert first.wait() == 0
    assert (row(job.pk).state, row(job.pk).attempts) == ("completed", 1)
    assert list(Entry.objects.values_list("text", flat=True)) == ["started 1"]


def test_claims_that_have_not_started_are_given_back_at_the_first_signal(start: Start, tmp_path: Path) -> None:
    open_end = tmp_path / "open"
    ids = enqueue_many("mix", [None] * 60 + [str(open_end)] + [None] * 5)
    slow, behind = ids[60], ids[61:]
    process = start("run_queue", "mix", "--concurrency", "1")
    process.wait_for(f"running {slow}")
    process.signal(SIGTERM)
    process.wait_for("worker stopping")
    wait_until(lambda: all(is_given_back(job_id) for job_id in behind), "the unstarted are given back")
    assert row(slow).state == "processing"
    assert process.popen.poll() is None
    open_end.touch()
    assert process.wait() == 0
    assert all(is_given_back(job_id) for job_id in behind)
    assert row(slow).state == "completed"


def test_a_grace_of_nothing_gives_back_at_once(start: Start, tmp_path: Path) -> None:
    job = enqueue("wait", str(tmp_path / "never"))
    process = start("run_queue", "wait", "--grace", "0")
    process.wait_for(f"running {job.pk}")
    process.signal(SIGINT)
    assert process.wait() == 1
    assert is_given_back(job.pk)


def test_a_handler_in_a_transaction_does_not_keep_the_process_past_its_grace(start: Start, tmp_path: Path) -> None:
    """It holds the writer lock, which is taken from it: its job is given back, and no row is left."""
    job = enqueue("doomed", str(tmp_path / "never"))
    process = start("-c", PATIENT_END, "run_queue", "doomed", "--grace", "0", ALKSTORE_TEST_TIMEOUT="0.3")
    process.wait_for(f"row of {job.pk}")
    process.signal(SIGTERM)
    assert process.wait() == 1
    assert (row(job.pk).state, row(job.pk).attempts, Entry.objects.count()) == ("pending", 0, 0)


def test_an_idle_worker_stops_while_the_database_is_locked(start: Start) -> None:
    process = start("run_queue", "noop", ALKSTORE_TEST_TIMEOUT="0.2")
    process.wait_for("worker started")
    with writer_lock():
        process.signal(SIGTERM)
        assert process.wait() == 0


def test_a_worker_that_cannot_write_its_ack_ends_with_its_grace(start: Start, tmp_path: Path) -> None:
    open_end = tmp_path / "open"
    job = enqueue("mix", str(open_end), visibility_timeout=600)
    process = start("run_queue", "mix", "--grace", "1", ALKSTORE_TEST_TIMEOUT="0.2")
    process.wait_for(f"running {job.pk}")
    with writer_lock():
        open_end.touch()
        process.wait_for("database trouble")
        process.signal(SIGTERM)
        assert process.wait() == 1
    assert (row(job.pk).state, row(job.pk).attempts) == ("processing", 1)


def test_the_work_of_a_finished_handler_is_acked_before_the_process_ends(start: Start) -> None:
    """Stopped in the middle of many short jobs: each has run and is acked, or has not started."""
    ids = enqueue_many("ledger", [f"job {number}" for number in range(300)])
    process = start("run_queue", "ledger", "-v", "0")
    wait_until(lambda: Entry.objects.count() >= 30, "some are done")
    process.signal(SIGTERM)
    assert process.wait() == 0
    done = set(Job.objects.filter(state="completed").values_list("id", flat=True))
    assert done == set(Entry.objects.values_list("job_id", flat=True))
    assert [vars(row(job_id)) for job_id in set(ids) - done if not is_given_back(job_id)] == []
