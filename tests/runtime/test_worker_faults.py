"""Section 8: what a worker promises if something around it goes wrong, each by a fault that it once had."""

import json
from collections.abc import Callable
from contextvars import copy_context
from datetime import timedelta
from itertools import count
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import cast

import pytest
from django.db import transaction

from django_alkstore import clock as clocks
from django_alkstore.clock import ManualClock
from django_alkstore.dialects import Operations
from django_alkstore.models import Job
from django_alkstore.registry import Registration
from django_alkstore.runtime.claim_times import GATHER, ClaimTimes
from django_alkstore.runtime.event_loop import EventLoopThread
from django_alkstore.runtime.handler_threads import HandlerThread
from django_alkstore.runtime.jobs import Run
from django_alkstore.runtime.leadership import Leadership
from django_alkstore.runtime.shared_state import SharedState
from django_alkstore.services import JobHandle, cancel, claim_batch, enqueue, enqueue_many, requeue
from django_alkstore.services.outcomes import ACK
from tests.ledger.models import Entry
from tests.ledger.tools import can_write_at_once, database, row, variant, wait_for_state, wait_past, writer_lock
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]
SAME_SIGNAL = timedelta(seconds=1)
"""A signal that comes earlier after the first counts as the same."""


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


def stop(worker: Process, *, at_once: bool = False) -> None:
    """Tell the worker to stop; with `at_once`, a second time, so that it does not wait for its handlers."""
    worker.signal(SIGTERM)
    worker.wait_for("worker stopping")
    if at_once:
        wait_past(clocks.now() + SAME_SIGNAL)
        worker.signal(SIGTERM)


# A hard end


@pytest.mark.parametrize("seconds", [0.3, 3.0])
@pytest.mark.parametrize("how", ["second signal", "end of the grace"])
def test_a_foreign_write_at_a_hard_end_costs_no_result_and_no_refund(
    begin: Start, tmp_path: Path, how: str, seconds: float
) -> None:
    end = tmp_path / "end"
    done = enqueue("mix", str(end), max_attempts=1).pk
    failed = enqueue("late-failure", str(end), max_attempts=1).pk
    running = enqueue_many("mix", [str(tmp_path / "never")] * 2, max_attempts=1)
    grace = 1 if how == "end of the grace" else 3_600
    worker = begin("run_queue", "mix", "late-failure", "--grace", str(grace))
    worker.wait_for("running ", 4)
    if how == "second signal":
        stop(worker)
        wait_past(clocks.now() + SAME_SIGNAL)
    with writer_lock():
        end.touch()
        worker.wait_for(f"done {done}")
        worker.wait_for(f"done {failed}")
        worker.signal(SIGTERM)
        if how == "end of the grace":
            worker.wait_for("worker stopping")
            wait_past(clocks.now() + timedelta(seconds=grace))
        wait_past(clocks.now() + timedelta(seconds=seconds))
    assert worker.wait() == 1
    assert outcome(done) == COMPLETED
    assert outcome(failed) == ("dead", 1, ["ValueError: after the wait"])
    assert [outcome(job_id) for job_id in running] == [GIVEN_BACK] * 2


@pytest.mark.parametrize("names", [(SIGTERM, SIGINT), (SIGTERM, SIGTERM), (SIGTERM, SIGINT, SIGTERM)])
def test_signals_within_a_moment_count_as_one(begin: Start, tmp_path: Path, names: tuple[int, ...]) -> None:
    end = tmp_path / "end"
    job = enqueue("mix", str(end))
    worker = begin("run_queue", "mix")
    worker.wait_for(f"running {job.pk}")
    for name in names:
        worker.signal(name)
        wait_past(clocks.now() + timedelta(seconds=0.01))
    worker.wait_for("worker stopping")
    wait_past(clocks.now() + timedelta(seconds=3))
    end.touch()
    assert worker.wait() == 0
    assert outcome(job.pk) == COMPLETED


def test_a_later_signal_cuts_off_though_the_first_two_counted_as_one(begin: Start, tmp_path: Path) -> None:
    job = enqueue("mix", str(tmp_path / "never"))
    worker = begin("run_queue", "mix", "--grace", "3600")
    worker.wait_for(f"running {job.pk}")
    worker.signal(SIGTERM)
    worker.signal(SIGINT)
    worker.wait_for("worker stopping")
    wait_past(clocks.now() + SAME_SIGNAL)
    assert worker.popen.poll() is None
    worker.signal(SIGINT)
    assert worker.wait() == 1
    assert outcome(job.pk) == GIVEN_BACK


FLUSHED = """
import json, logging, sys
from pathlib import Path
from django.core.management import call_command
from django_alkstore import signals
from django_alkstore.models import Job

class Buffer(logging.Handler):
    lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def flush(self):
        Path(sys.argv[1], "log").write_text("".join(self.lines))

def receive(**data):
    Path(sys.argv[1], "event").write_text(json.dumps(dict(Job.objects.values_list("pk", "state"))))
    logging.getLogger("shop").warning("the last line")

logging.getLogger("shop").addHandler(Buffer())
signals.worker_stopped.connect(receive, weak=False)
call_command(*sys.argv[2:])
"""
"""Writes down the states of all jobs when the worker announces its end, and a line into a log with a buffer."""


@pytest.mark.parametrize("how", ["second signal", "end of the grace"])
def test_at_a_hard_end_receivers_are_called_and_the_log_and_the_output_are_flushed(
    begin: Start, tmp_path: Path, how: str
) -> None:
    told, end = tmp_path / "told", tmp_path / "end"
    done = enqueue("mix", str(end)).pk
    grace = "1" if how == "end of the grace" else "3600"
    command = ("run_queue", "silent", "mix", "--grace", grace)
    worker = begin("-c", FLUSHED, str(tmp_path), *command, PYTHONUNBUFFERED="")
    worker.wait_for(f"running {done}")
    end.touch()
    worker.wait_for(f"done {done}")  # with a flush of the output
    running = enqueue("silent", [str(told), str(tmp_path / "never")]).pk
    wait_until(told.exists, "the handler has printed")
    stop(worker, at_once=how == "second signal")
    assert worker.wait() == 1
    assert f"output of {running}" in worker.output
    assert json.loads((tmp_path / "event").read_text()) == {str(running): "processing", str(done): "completed"}
    assert (tmp_path / "log").read_text() == "the last line"
    assert outcome(running) == GIVEN_BACK


def test_the_log_and_the_output_are_flushed_if_every_thread_is_kept_past_its_time_limit(
    begin: Start, tmp_path: Path
) -> None:
    stuck = enqueue("stubborn", str(tmp_path / "never"), backoff_base=3_600).pk
    worker = begin("-c", FLUSHED, str(tmp_path), "run_queue", "stubborn", "--concurrency", "1")
    assert worker.wait() == 4
    assert json.loads((tmp_path / "event").read_text()) == {str(stuck): "pending"}
    assert (tmp_path / "log").read_text() == "the last line"
    assert outcome(stuck) == ("pending", 1, ["time limit"])


BAD_AT_THE_END = """
import logging, sys, threading
from django.core.management import call_command
from django_alkstore import signals
from tests.ledger.handlers import BadFlush

def fail(**data):
    raise RuntimeError("a bad receiver")

def block(**data):
    threading.Event().wait()

class BlocksAtTheEnd(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("gives back"):
            threading.Event().wait()

if sys.argv[1] == "receiver raises":
    signals.worker_stopped.connect(fail, weak=False)
elif sys.argv[1] == "receiver blocks":
    signals.worker_stopped.connect(block, weak=False)
elif sys.argv[1] == "log line blocks":
    logging.getLogger("django_alkstore").addHandler(BlocksAtTheEnd())
else:
    logging.getLogger("elsewhere").addHandler(BadFlush(sys.argv[1].removeprefix("flush ")))
logging.getLogger("django_alkstore").addHandler(logging.StreamHandler())
call_command(*sys.argv[2:])
"""


@pytest.mark.parametrize(
    "fault",
    [
        "receiver raises",
        "receiver blocks",
        "log line blocks",
        "flush raises",
        "flush raises an OSError",
        "flush blocks",
    ],
)
def test_what_fails_or_blocks_at_a_hard_end_changes_nothing_else(begin: Start, tmp_path: Path, fault: str) -> None:
    told = tmp_path / "told"
    job = enqueue("silent", [str(told), str(tmp_path / "never")]).pk
    worker = begin("-c", BAD_AT_THE_END, fault, "run_queue", "silent", PYTHONUNBUFFERED="")
    wait_until(told.exists, "the handler has printed")
    stop(worker, at_once=True)
    assert worker.wait() == 1
    assert f"output of {job}" in worker.output
    assert outcome(job) == GIVEN_BACK


# Transactions and the time limit


def test_a_handler_in_its_own_transaction_is_cut_off_past_its_time_limit(begin: Start, tmp_path: Path) -> None:
    end = tmp_path / "end"
    job = enqueue("open-transaction", str(end), backoff_base=3_600).pk
    worker = begin("run_queue", "open-transaction", "noop", "--concurrency", "2")
    worker.wait_for(f"transaction of {job}")
    worker.wait_for("time limit")
    wait_until(can_write_at_once, "the transaction is rolled back")
    assert outcome(job) == ("pending", 1, ["time limit"])
    wait_for_state("completed", enqueue("noop", None).pk)
    end.touch()
    worker.wait_for(f"late row of {job} refused")
    wait_for_state("completed", *enqueue_many("noop", range(4)))
    assert not Entry.objects.filter(text="in a transaction").exists()
    assert outcome(job) == ("pending", 1, ["time limit"])


def test_a_worker_ends_with_status_4_though_its_only_thread_has_a_transaction_open(
    begin: Start, tmp_path: Path
) -> None:
    job = enqueue("open-transaction", str(tmp_path / "never"), backoff_base=3_600).pk
    worker = begin("run_queue", "open-transaction", "--concurrency", "1")
    assert worker.wait() == 4
    assert outcome(job) == ("pending", 1, ["time limit"])
    assert Entry.objects.count() == 0


def test_a_handler_past_its_time_limit_does_not_change_the_status_of_a_worker_that_was_told_to_stop(
    begin: Start, tmp_path: Path
) -> None:
    job = enqueue("open-transaction", str(tmp_path / "never"), backoff_base=3_600).pk
    worker = begin("run_queue", "open-transaction", "--concurrency", "2")
    worker.wait_for("time limit")
    worker.signal(SIGTERM)
    assert worker.wait() == 0
    assert outcome(job) == ("pending", 1, ["time limit"])
    assert Entry.objects.count() == 0


@pytest.mark.parametrize("how", ["second signal", "end of the grace"])
def test_a_handler_in_its_own_transaction_is_cut_off_at_a_hard_end(begin: Start, tmp_path: Path, how: str) -> None:
    job = enqueue("long-transaction", str(tmp_path / "never"), max_attempts=1).pk
    grace = "1" if how == "end of the grace" else "3600"
    worker = begin("run_queue", "long-transaction", "--grace", grace)
    worker.wait_for(f"transaction of {job}")
    stop(worker, at_once=how == "second signal")
    assert worker.wait() == 1
    assert outcome(job) == GIVEN_BACK
    assert Entry.objects.count() == 0


def test_a_handler_that_opens_its_transaction_past_its_time_limit_is_cut_off(begin: Start, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    job = enqueue("late-transaction", [str(first), str(second)], backoff_base=3_600).pk
    worker = begin("run_queue", "late-transaction", "noop", "--concurrency", "2")
    worker.wait_for("time limit")
    first.touch()
    worker.wait_for(f"transaction of {job}")
    wait_until(can_write_at_once, "others can write")
    second.touch()
    worker.wait_for(f"late row of {job} refused")
    assert not Entry.objects.filter(text="in a transaction").exists()


def test_a_handler_that_connects_again_after_it_was_cut_off_is_cut_off_again(begin: Start, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    job = enqueue("reconnecting", [str(first), str(second)], backoff_base=3_600).pk
    worker = begin("run_queue", "reconnecting", "noop", "--concurrency", "2")
    worker.wait_for("time limit")
    first.touch()
    worker.wait_for(f"transaction of {job}", 2)
    wait_until(can_write_at_once, "others can write")
    second.touch()
    worker.wait_for(f"late row of {job} refused", 2)
    assert not Entry.objects.filter(text="in a transaction").exists()


def test_a_cutter_that_comes_late_leaves_the_next_job_of_the_thread_alone() -> None:
    """It cuts off the job that is past its time limit, and not what the thread runs by now."""
    enqueue_many("noop", [None] * 2)
    state = SharedState(1, lambda: None, lambda: None)
    nothing = cast("Leadership", None), cast("EventLoopThread", None)
    thread = HandlerThread(0, state, *nothing, copy_context())

    def run(job: JobHandle, target: Callable[[JobHandle], object]) -> Run:
        registration = Registration("noop", target, time_limit=60, atomic=False, module=__name__)
        return Run(job, registration, claimed_at=0, renew_at=0, thread=thread)

    def write_past_a_cutter(job: JobHandle) -> None:
        with transaction.atomic():
            thread.cut_off(late)
            Entry.objects.create(text="next", job_id=job.id)

    first, second = claim_batch("noop", "by hand", 2)
    late, following = run(first, print), run(second, write_past_a_cutter)
    assert thread._run_handler(following).outcome is ACK
    assert Entry.objects.get().job_id == second.id


def test_atomic_handlers_that_wait_for_each_other_for_longer_than_their_time_limit_all_run(begin: Start) -> None:
    ids = enqueue_many("short-atomic", [1.0] * 4, max_attempts=1)
    worker = begin("run_queue", "short-atomic", "--concurrency", "4")
    worker.wait_for("completed job", 4)
    assert [outcome(job_id) for job_id in ids] == [COMPLETED] * 4


def test_atomic_handlers_that_wait_for_longer_than_the_busy_timeout_spend_no_attempt(begin: Start) -> None:
    ids = enqueue_many("short-atomic", [1.0] * 4, max_attempts=1)
    worker = begin("run_queue", "short-atomic", "--concurrency", "4", ALKSTORE_TEST_TIMEOUT="0.3")
    worker.wait_for("completed job", 4)
    assert [outcome(job_id) for job_id in ids] == [COMPLETED] * 4
    assert Entry.objects.count() == 4


GATED = """
import sys, threading
from pathlib import Path
from django.core.management import call_command
from django_alkstore import signals

def receive(job, **data):
    print(f"about to start {job.id}")
    while not Path(sys.argv[1]).exists():
        threading.Event().wait(0.02)

signals.job_started.connect(receive, weak=False)
call_command(*sys.argv[2:])
"""
"""Starts no handler before the file exists."""


def test_an_atomic_handler_that_waits_for_a_foreign_writer_past_its_time_limit_runs(
    begin: Start, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = enqueue("limited-atomic", None, max_attempts=1).pk
    worker = begin("-c", GATED, str(gate), "run_queue", "limited-atomic", "--concurrency", "2")
    worker.wait_for(f"about to start {job}")
    with writer_lock():
        gate.touch()
        wait_past(clocks.now() + timedelta(seconds=2))
    worker.wait_for("completed job")
    assert outcome(job) == COMPLETED


# Foreign code


BLOCKING = """
import logging, sys, threading
from pathlib import Path
from django.core.management import call_command
from django_alkstore import signals

what, end = sys.argv[1:3]
blocked = threading.Event()

def block():
    if not blocked.is_set():
        blocked.set()
        print("foreign code waits")
        while not Path(end).exists():
            threading.Event().wait(0.02)

class Blocks(logging.Handler):
    def emit(self, record):
        if "completed job" in record.getMessage():
            block()

def receive(job=None, **data):
    if job is None or job.queue != "wait":
        block()

if what == "log handler":
    logging.getLogger("django_alkstore").addHandler(Blocks())
else:
    getattr(signals, what).connect(receive, weak=False)
call_command(*sys.argv[3:])
"""


@pytest.mark.parametrize(
    ("what", "queue"),
    [("job_completed", "noop"), ("job_started", "noop"), ("job_retried", "stubborn"), ("log handler", "noop")],
)
def test_foreign_code_that_blocks_for_longer_than_a_lease_stops_no_renewal_and_no_claim(
    begin: Start, tmp_path: Path, what: str, queue: str
) -> None:
    job_end, foreign_end = tmp_path / "job", tmp_path / "foreign"
    held = enqueue("wait", str(job_end), visibility_timeout=3, max_attempts=1).pk
    worker = begin("-c", BLOCKING, what, str(foreign_end), "run_queue", "wait", "noop", "stubborn")
    worker.wait_for(f"running {held}")
    enqueue(queue, str(tmp_path / "never"), backoff_base=3_600)
    worker.wait_for("foreign code waits")
    waited_since = row(held).lease_expires_at
    assert waited_since is not None

    def is_renewed() -> bool:
        ends = row(held).lease_expires_at
        return ends is not None and waited_since is not None and ends > waited_since + timedelta(seconds=3)

    wait_until(is_renewed, "the lease is renewed for longer than it lasts")
    wait_for_state("completed", *enqueue_many("noop", range(3)))
    assert not foreign_end.exists()
    foreign_end.touch()
    job_end.touch()
    wait_for_state("completed", held)
    assert outcome(held) == COMPLETED


@pytest.mark.parametrize("what", ["job_completed", "worker_stopping"])
def test_a_receiver_that_never_returns_keeps_no_worker_from_its_end(begin: Start, tmp_path: Path, what: str) -> None:
    job = enqueue("noop", None).pk
    worker = begin("-c", BLOCKING, what, str(tmp_path / "never"), "run_queue", "noop")
    wait_for_state("completed", job)
    if what == "job_completed":
        worker.wait_for("foreign code waits")
    worker.signal(SIGTERM)
    worker.wait_for("foreign code waits")
    assert worker.wait() == 0


WRITING = """
import sys, threading
from pathlib import Path
from django.core.management import call_command
from django_alkstore import signals
from tests.ledger.models import Entry

what, gate = sys.argv[1:3]

def receive(**data):
    print("receiver waits")
    while not Path(gate).exists():
        threading.Event().wait(0.02)
    print("receiver writes")
    Entry.objects.create(text="by a receiver")
    print("receiver has written")

getattr(signals, what).connect(receive, weak=False)
call_command(*sys.argv[3:])
"""


@pytest.mark.parametrize(
    ("what", "queue"),
    [
        ("job_completed", "noop"),
        ("job_completed", "ledger"),
        ("job_completed", "settle"),
        ("job_started", "noop"),
        ("job_retried", "stubborn"),
        ("worker_stopping", "noop"),
    ],
)
def test_the_row_of_a_receiver_is_kept_though_another_process_writes(
    begin: Start, tmp_path: Path, what: str, queue: str
) -> None:
    gate = tmp_path / "gate"
    worker = begin("-c", WRITING, what, str(gate), "run_queue", queue)
    worker.wait_for("worker started")
    enqueue(queue, "ack" if queue == "settle" else str(tmp_path / "never"), backoff_base=3_600)
    if what == "worker_stopping":
        wait_for_state("completed", Job.objects.get().pk)
        worker.signal(SIGTERM)
    worker.wait_for("receiver waits")
    with writer_lock():
        gate.touch()
        worker.wait_for("receiver writes")
        wait_past(clocks.now() + timedelta(seconds=0.5))
    worker.wait_for("receiver has written")
    assert Entry.objects.filter(text="by a receiver").count() == 1


# Errors of the worker's own


BREAKS_ONCE = """
import sys
from django.core.management import call_command
from django_alkstore.runtime import perform

tidy, broken = perform.tidy_connections, []

def tidy_connections(own, *, afresh=False):
    if not broken:
        broken.append(True)
        raise RuntimeError("out of order")
    return tidy(own, afresh=afresh)

perform.tidy_connections = tidy_connections
call_command(*sys.argv[1:])
"""


def test_an_error_of_the_worker_around_a_handler_fails_the_attempt_and_ends_no_thread(begin: Start) -> None:
    job = enqueue("noop", None, backoff_base=0).pk
    worker = begin("-c", BREAKS_ONCE, "run_queue", "noop", "--concurrency", "1")
    wait_for_state("completed", job, enqueue("noop", None).pk)
    assert outcome(job) == ("completed", 2, ["RuntimeError: out of order"])
    worker.signal(SIGTERM)
    assert worker.wait() == 0


@pytest.mark.parametrize("way", ["sync_to_async", "to_thread"])
def test_a_coroutine_that_gives_up_waiting_for_another_thread_keeps_no_handler_thread(
    begin: Start, tmp_path: Path, way: str
) -> None:
    ids = enqueue_many("gives-up", [[way, str(tmp_path / "never")]] * 2, max_attempts=1)
    worker = begin("run_queue", "gives-up", "async", "--concurrency", "1")
    worker.wait_for(f"{ids[1]} gave up")
    following = enqueue("async", "after it").pk
    wait_for_state("completed", *ids, following)
    assert Entry.objects.get().job_id == following
    worker.signal(SIGTERM)
    assert worker.wait() == 0
    assert "worker stopped: 3 completed, 0 failed" in worker.output


def test_a_look_that_takes_long_makes_the_worker_wait_for_a_second_at_most(clock: ManualClock) -> None:
    """On a machine without time for it, a pause in proportion kept a worker from its jobs for a minute."""

    class Slow:
        def next_claims(self, queues: list[str]) -> dict[str, int | None]:
            clock.advance(10)
            return dict.fromkeys(queues)

    versions = count()
    times = ClaimTimes(["noop"], lambda: next(versions))
    times.forget("noop")
    times.take_news()  # of another process
    times.look(cast("Operations", Slow()))
    assert 0 < times.pause() <= 1


def test_jobs_gather_between_two_claims_only_while_they_keep_arriving_several_at_a_time(clock: ManualClock) -> None:
    times = ClaimTimes(["noop"], lambda: 0)
    times.note_several()
    assert times.gathering() == 0
    clock.advance(GATHER)
    times.note_several()
    assert times.gathering() == GATHER
    clock.advance(GATHER)
    assert times.gathering() == 0
    clock.advance(3 * GATHER)
    times.note_several()
    assert times.gathering() == 0


# What a running handler is told


@pytest.mark.parametrize("how", ["cancel", "delete", "cancel and requeue"])
def test_a_running_handler_is_told_at_once_that_its_job_was_taken(begin: Start, tmp_path: Path, how: str) -> None:
    """A third of its lease is 200 s, so no renewal tells it within the patience of a test."""
    job = enqueue("wait", str(tmp_path / "never"), visibility_timeout=600).pk
    worker = begin("run_queue", "wait", "--concurrency", "2")
    worker.wait_for(f"running {job}")
    if how == "delete":
        Job.objects.filter(pk=job).delete()
    else:
        assert cancel(job)
    if how == "cancel and requeue":
        assert requeue(job)
        worker.wait_for(f"running {job}", 2)  # by the same worker's other thread
    worker.wait_for(f"told that the lease of {job} is lost")
    if how == "cancel":
        assert row(job).state == "cancelled"
    elif how == "cancel and requeue":
        assert row(job).state == "processing"
        assert worker.output.count("is lost") == 1


def test_a_running_handler_is_told_that_the_worker_stops_and_can_save_its_place(begin: Start) -> None:
    job = enqueue("save-place", None).pk
    worker = begin("run_queue", "save-place", "--grace", "3600")
    worker.wait_for(f"running {job}")
    worker.signal(SIGTERM)
    assert worker.wait() == 0
    assert outcome(job) == GIVEN_BACK
    assert row(job).run_at <= clocks.now()


# Lock errors of handlers


def test_a_lock_error_of_a_handler_is_tried_again_three_times_in_a_row_without_spending_an_attempt(
    begin: Start,
) -> None:
    job = enqueue("locked-out", [database(), 1_000], max_attempts=2, backoff_base=0).pk
    worker = begin("run_queue", "locked-out", ALKSTORE_TEST_TIMEOUT="0.2")
    wait_for_state("dead", job)
    deliveries = [line for line in worker.lines if line.startswith("delivery of")]
    assert deliveries == [f"delivery of {job} with attempt {attempt}" for attempt in [1] * 4 + [2] * 4]
    assert outcome(job) == ("dead", 2, ["OperationalError: database is locked"] * 2)
    told = [line for line in worker.lines if f"locked out job {job} " in line]
    assert len(told) == 6
    assert all("transaction_mode" in line for line in told)


def test_a_handler_that_gets_the_lock_in_the_end_has_spent_no_attempt(begin: Start) -> None:
    job = enqueue("locked-out", [database(), 3], max_attempts=1).pk
    begin("run_queue", "locked-out", ALKSTORE_TEST_TIMEOUT="0.2")
    wait_for_state("completed", job)
    assert outcome(job) == COMPLETED


def test_four_threads_with_stock_settings_lose_hardly_an_attempt_to_each_other(begin: Start) -> None:
    """Without the further tries they lost 58 to 261. A job can still meet a lock four times in a row."""
    ids = enqueue_many("read-and-write", [None] * 200)
    begin("run_queue", "read-and-write", ALKSTORE_TEST_TRANSACTION_MODE="", ALKSTORE_TEST_TIMEOUT="5")
    wait_for_state("completed", *ids)
    assert sum(len(job.errors) for job in Job.objects.all()) <= 5
    assert Entry.objects.count() == 200


def test_an_atomic_handler_that_hangs_keeps_no_other_atomic_job_waiting(begin: Start, tmp_path: Path) -> None:
    """Its transaction was cut off, so its turn to write is taken from it too."""
    hangs = enqueue("short-atomic", 600.0, max_attempts=1).pk
    worker = begin("run_queue", "short-atomic", "noop", "--concurrency", "2", ALKSTORE_TEST_TIMEOUT="1000")
    wait_for_state("dead", hangs)
    following = enqueue_many("short-atomic", [0.0] * 3)
    wait_for_state("completed", *following)
    assert worker.popen.poll() is None
