"""The log records of failed attempts: what an error tracker is given, and that nothing is kept alive for it."""

import gc
import io
import json
import logging
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.dispatch import Signal

from django_alkstore import clock as clocks
from django_alkstore import failures, registry, signals
from django_alkstore.exceptions import Discard, Retry
from django_alkstore.registry import handler
from django_alkstore.runtime.announcing import announce, announce_settled
from django_alkstore.runtime.events_thread import EventsThread
from django_alkstore.runtime.jobs import Result, Run
from django_alkstore.runtime.log_handler import BackgroundHandler
from django_alkstore.runtime.perform import announce_failure, perform
from django_alkstore.runtime.writing import Written
from django_alkstore.services import JobHandle, claim_batch, enqueue
from django_alkstore.services.claims import claim_due
from django_alkstore.services.outcomes import TIME_LIMIT, Outcome, outcome_of
from django_alkstore.testing import run_pending
from tests.ledger.tools import wait_for_state
from tests.processes import PATIENCE, Process, wait_until
from tests.runtime.test_hostile import RAISED

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]

RECORDING = """
import json, logging, sys, traceback
from django.core.management import call_command

class Recorder(logging.StreamHandler):
    def emit(self, record):
        kind, error, frames = record.exc_info or (None, None, None)
        about = {name: getattr(record, name, "missing") for name in ("job_id", "queue", "task", "attempt")}
        about |= {"level": record.levelname, "template": record.msg, "arguments": len(record.args or ())}
        about |= {"kind": kind.__name__ if kind else None, "own": type(error) is kind}
        about |= {"function": traceback.extract_tb(frames)[-1].name if frames else None}
        with open(sys.argv[1], "a") as file:
            file.write(json.dumps(about | {"text": self.format(record)}) + "\\n")

logging.getLogger("django_alkstore").addHandler(Recorder())
call_command(*sys.argv[2:])
"""
"""Notes the log records of a command, as a project's log handler with the standard formatter sees them."""


def recorded(path: Path, *levels: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if record["level"] in levels]


def stop(process: Process) -> None:
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.output


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    """The records of this process."""
    seen: list[logging.LogRecord] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record)

    # A logger that pytest does not know: it keeps every record that it is given.
    logger = logging.Logger(signals.logger.name)
    logger.addHandler(Recorder())
    monkeypatch.setattr(signals, "logger", logger)
    return seen


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    with registry.isolated():
        yield


def test_failed_attempts_of_a_worker_have_one_template_and_the_exception_itself(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "records"
    dead = [enqueue("fail", text, max_attempts=1).pk for text in ("x", "y")]
    retried = enqueue("fail", "z", max_attempts=2, backoff_base=0).pk
    process = start("-c", RECORDING, str(path), "run_queue", "fail", "--concurrency", "1")
    wait_for_state("dead", *dead, retried)
    stop(process)
    errors, warnings = recorded(path, "ERROR"), recorded(path, "WARNING")
    assert {record["job_id"]: record["attempt"] for record in errors} == {dead[0]: 1, dead[1]: 1, retried: 2}
    assert [(record["job_id"], record["attempt"]) for record in warnings] == [(retried, 1)]
    assert len({record["template"] for record in errors}) == 1
    for record in errors + warnings:
        assert (record["queue"], record["task"]) == ("fail", None)
        assert (record["kind"], record["own"], record["function"]) == ("ValueError", True, "fail")
        assert record["arguments"] > 0
        assert f"job {record['job_id']} " not in record["template"]
        assert record["text"].count("Traceback (most recent call last)") == 1


def test_an_exception_that_cannot_be_shown_costs_no_line(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "records"
    jobs = {kind: enqueue("hostile", kind, max_attempts=1).pk for kind in [*RAISED, "liar", "huge"]}
    process = start("-c", RECORDING, str(path), "run_queue", "hostile")
    wait_for_state("dead", *jobs.values())
    wait_for_state("completed", enqueue("hostile", "fine").pk)
    stop(process)
    by_job = {record["job_id"]: record for record in recorded(path, "ERROR")}
    assert sorted(by_job) == sorted(jobs.values())
    for kind, job_id in jobs.items():
        assert by_job[job_id]["own"], kind
        assert len(by_job[job_id]["text"]) < 15_000, kind


def test_an_attempt_without_an_exception_has_none_in_its_record(records: list[logging.LogRecord]) -> None:
    job = claimed("q")
    announce_failure(job, TIME_LIMIT, 1.0)
    (record,) = records
    assert record.exc_info is None
    assert record.getMessage().endswith(": time limit")
    assert vars(record)["job_id"] == job.id


def test_other_failures_have_template_and_attributes_too(records: list[logging.LogRecord]) -> None:
    enqueue("odd", None)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_alkstore_job SET payload = '{'")
    assert claim_batch("odd", "w") == []
    unreadable = records.pop()
    job = claimed("q")
    signals.emit(signals.lease_lost, job=job, what="ack", traceback="")
    signals.emit(signals.job_raised_late, job=job, error="e", traceback="Traceback: e\n")
    for record in (unreadable, *records):
        assert isinstance(record.args, tuple)
        assert vars(record)["attempt"] == 1
        named = f"job {vars(record)['job_id']} "
        assert named in record.getMessage()
        assert named not in record.msg
    assert logging.Formatter().format(records[-1]).endswith("e\nTraceback: e")


# What is kept alive


class Kept:
    """Something that a handler has as a local variable."""


class Boom(Exception):
    pass


def raise_boom(refs: list[weakref.ref[Any]], cause: bool = False) -> None:
    local, error = Kept(), Boom("boom")
    refs += [weakref.ref(local), weakref.ref(error)]
    if not cause:
        raise error
    try:
        raise error
    except Boom as first:
        raise ValueError("second") from first


@pytest.fixture
def _no_gc() -> Iterator[None]:
    """Only the counts of references free anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def ending_of(body: Callable[[JobHandle], object], job: JobHandle) -> Outcome:
    handler("kept")(body)
    (registration,) = registry.registrations()
    ending = perform(registration, job)
    assert ending.outcome is not None
    return ending.outcome


@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("cause", [False, True])
def test_the_handler_s_locals_go_at_its_end_and_the_exception_with_its_announcement(
    cause: bool, records: list[logging.LogRecord]
) -> None:
    refs: list[weakref.ref[Any]] = []
    job = claimed("kept")
    outcome = ending_of(lambda _: raise_boom(refs, cause), job)
    local, error = refs
    assert local() is None
    assert error() is not None
    announce_failure(job, outcome, 1.0)
    records.clear()
    assert error() is None


@pytest.mark.usefixtures("_no_gc")
def test_the_events_thread_keeps_no_exception(records: list[logging.LogRecord]) -> None:
    refs: list[weakref.ref[Any]] = []
    job = claimed("kept")
    outcome = ending_of(lambda _: raise_boom(refs), job)
    thread = EventsThread()
    thread.start()
    with thread.sends_for_this_thread():
        announce_failure(job, outcome, 1.0)
    wait_until(lambda: bool(records), "the record is made")
    kinds = [record.exc_info and record.exc_info[0] for record in records]
    records.clear()
    assert kinds == [Boom]
    # No other event follows.
    wait_until(lambda: refs[1]() is None, "the exception is gone")
    thread.finish(PATIENCE)


def test_a_coroutine_that_has_passed_on_its_exception_is_left_alone() -> None:
    """As a client library's in a thread of its own: it catches the exception, passes it on, and continues."""
    passed_on: list[BaseException] = []

    async def client() -> str:
        try:
            raise Boom
        except Boom as error:
            passed_on.append(error)
        await _Once()
        return "continued"

    coroutine = client()
    coroutine.send(None)
    outcome_of(passed_on[0])
    with pytest.raises(StopIteration, match="continued"):
        coroutine.send(None)


class _Once:
    def __await__(self) -> Iterator[None]:
        yield


def test_locals_are_released_whatever_the_exception_overrides() -> None:
    class Hostile(Exception):
        __cause__ = __context__ = __traceback__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

    def fail() -> None:
        local = Kept()
        refs.append(weakref.ref(local))
        raise Hostile

    refs: list[weakref.ref[Any]] = []
    with pytest.raises(Hostile) as raised:
        fail()
    assert refs[0]() is not None
    failures.clear_locals(raised.value)
    assert refs[0]() is None


# The console


@pytest.mark.parametrize(
    ("error", "tracebacks"), [(ValueError("no luck"), 1), (Discard("no luck"), 0), (Retry(delay=5), 0)], ids=repr
)
def test_the_console_shows_a_traceback_once_and_none_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, error: Exception, tracebacks: int
) -> None:
    stream = io.StringIO()
    console = BackgroundHandler()
    monkeypatch.setattr(signals.logger, "handlers", [console])
    seen: list[BaseException | None] = []

    def receive(*, exception: BaseException | None, **_: object) -> None:
        seen.append(exception)

    def run(_: JobHandle) -> None:
        raise error

    job = claimed("kept")
    for event in (signals.job_died, signals.job_retried):
        event.connect(receive)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", stream)
            announce_failure(job, ending_of(run, job), 1.0)
            console.flush(PATIENCE)
            console.close()
    finally:
        for event in (signals.job_died, signals.job_retried):
            event.disconnect(receive)
    assert stream.getvalue().count("Traceback (most recent call last)") == tracebacks
    assert stream.getvalue().count("\n") == 1 or tracebacks
    assert seen == [error]


# A logger that was disabled

DISABLES = """
import logging.config, sys
from django.core.management import call_command
from django_alkstore import signals

def disable(**_):
    logging.config.dictConfig({"version": 1})

signals.worker_started.connect(disable)
call_command(*sys.argv[1:])
"""


def test_a_configuration_of_logging_after_the_start_silences_nothing_and_is_named_once(start: Start) -> None:
    process = start("-c", DISABLES, "run_queue", "fail")
    process.wait_for("worker started")
    jobs = [enqueue("fail", text, max_attempts=1).pk for text in ("x", "y")]
    wait_for_state("dead", *jobs)
    for job_id in jobs:
        process.wait_for(f"dead: job {job_id} ")
    stop(process)
    assert process.output.count("the logger django_alkstore was disabled") == 1


def test_a_logger_whose_level_was_set_stays_silent(
    records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals.logger, "disabled", True)
    signals.logger.setLevel(logging.CRITICAL + 1)
    announce_failure(claimed("q"), TIME_LIMIT, 1.0)
    assert records == []


# Jobs that their handlers settle

EVENTS = {
    name: getattr(signals, name)
    for name in ("job_completed", "job_settled", "job_retried", "job_died", "job_raised_late", "lease_lost")
}

WAYS: dict[str, tuple[Callable[[JobHandle], object], str, bool]] = {
    "ack": (lambda job: job.ack(), "job_completed", False),
    "fail": (lambda job: job.fail("by itself"), "job_died", True),
    "retry": (lambda job: job.retry("by itself", delay=60), "job_retried", True),
    "release": (lambda job: job.release(), "job_settled", False),
}


@pytest.fixture
def sent() -> Iterator[list[str]]:
    """The names of the events about jobs."""
    names: list[str] = []
    receivers: list[tuple[Signal, Callable[..., None]]] = []
    for name, event in EVENTS.items():

        def receive(_name: str = name, **_: object) -> None:
            names.append(_name)

        event.connect(receive, weak=False)
        receivers.append((event, receive))
    yield names
    for event, receive in receivers:
        event.disconnect(receive)


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_its_handler_settles_is_announced_as_what_became_of_it(
    sent: list[str], way: str, atomic: bool
) -> None:
    settle, event, fails = WAYS[way]
    handler("settled", atomic=atomic)(lambda job: settle(job) and None)
    (registration,) = registry.registrations()
    job = claimed("settled")
    assert perform(registration, job).outcome is None
    assert job._settled_by is not None
    assert job._settled_by.is_failure is fails
    announce_settled(job, 1.0)
    assert sent == [event]


def test_a_job_that_its_handler_retries_without_an_attempt_left_is_announced_as_dead(sent: list[str]) -> None:
    job = claimed("settled", max_attempts=1)
    assert job.retry("by itself")
    announce_settled(job, 1.0)
    assert sent == ["job_died"]


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_run_pending_sends_a_worker_s_events(sent: list[str], way: str, atomic: bool) -> None:
    settle, event, _ = WAYS[way]
    ran: list[int] = []

    @handler("settled", atomic=atomic)
    def run(job: JobHandle) -> None:
        ran.append(job.id)
        if len(ran) == 1:
            settle(job)

    enqueue("settled", None)
    run_pending()
    # A job that was given back is run again, and then returns.
    assert sent == ([event, "job_completed"] if way == "release" else [event])


def test_in_run_pending_too_an_error_after_the_job_was_settled_is_announced(sent: list[str]) -> None:
    @handler("settled")
    def run(job: JobHandle) -> None:
        job.ack()
        raise ValueError("after that")

    enqueue("settled", None)
    run_pending()
    assert sent == ["job_completed", "job_raised_late"]


def test_an_atomic_handler_that_returns_has_completed_its_job(sent: list[str]) -> None:
    handler("settled", atomic=True)(lambda job: None)
    (registration,) = registry.registrations()
    job = claimed("settled")
    perform(registration, job)
    announce_settled(job, 1.0)
    assert sent == ["job_completed"]


def test_a_job_that_its_handler_fails_before_it_raises_is_announced_as_dead_too(sent: list[str]) -> None:
    job = claimed("settled")

    def run(job: JobHandle) -> None:
        job.fail("by itself")
        raise ValueError("after that")

    outcome = ending_of(run, job)
    run_of = Run(job, registry.registrations()[0], clocks.monotonic(), clocks.monotonic())
    announce(Written(results=[(Result(run_of, outcome, 1.0, clocks.monotonic()), False)]))
    assert sent == ["job_died", "job_raised_late"]


def claimed(queue: str, max_attempts: int = 2) -> JobHandle:
    enqueue(queue, None, max_attempts=max_attempts)
    (job,) = claim_due("default", queue, threading.current_thread().name, 1)  # as a worker: `claim_batch` is by hand
    return job
