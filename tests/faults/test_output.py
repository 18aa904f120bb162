"""Standard error, standard output and the project's log handlers fail or block: no job and no status suffers.

The log handler itself: tests/runtime/test_log_handler.py.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from django_alkstore.models import Job
from django_alkstore.services import enqueue, enqueue_many, schedule
from tests.ledger.tools import database, row, variant, wait_for_state
from tests.processes import PATIENCE, wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(sys.platform != "linux", reason="/dev/full and the size of a pipe"),
]

Run = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def run() -> Iterator[Run]:
    """Start a command whose streams are what the test says."""
    started: list[subprocess.Popen[bytes]] = []

    def run_one(*arguments: str, environment: dict[str, str] | None = None, **streams: Any) -> Any:
        process = subprocess.Popen(
            [sys.executable, "-m", "django", *arguments],
            env={
                **{name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
                "DJANGO_SETTINGS_MODULE": "tests.settings",
                "ALKSTORE_TEST_DATABASE": database(),
                **(environment or {}),
            },
            cwd=Path(__file__).parent.parent.parent,
            **{"stdout": subprocess.DEVNULL, **streams},
        )
        started.append(process)
        return process

    yield run_one
    for process in started:
        process.kill()
        process.communicate(timeout=PATIENCE)


@contextmanager
def broken_stream(kind: str) -> Iterator[dict[str, Any]]:
    """The arguments for a process whose standard error cannot be written."""
    if kind == "closed":
        yield {"preexec_fn": lambda: os.close(2)}
    elif kind == "full":
        with open("/dev/full", "wb") as full:
            yield {"stderr": full}
    else:
        reader, writer = os.pipe()
        os.close(reader)
        try:
            yield {"stderr": writer}
        finally:
            os.close(writer)


@contextmanager
def stuck_pipe() -> Iterator[int]:
    """A pipe that takes very little, and that nobody reads."""
    import fcntl

    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    try:
        yield writer
    finally:
        os.close(writer)
        os.close(reader)


def stop(process: "subprocess.Popen[bytes]") -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(PATIENCE)


BROKEN = pytest.mark.parametrize("kind", ["full", "closed", "a broken pipe"])


@BROKEN
def test_a_worker_whose_standard_error_can_not_be_written_runs_its_jobs_and_ends_with_status_0(
    run: Run, kind: str
) -> None:
    jobs = enqueue_many("noop", [None] * 30)
    bad = enqueue("fail", "x", max_attempts=1)
    with broken_stream(kind) as streams:
        process = run("run_queue", "noop", "fail", **streams)
        wait_for_state("completed", *jobs)
        wait_for_state("dead", bad.pk)
        wait_for_state("completed", enqueue("noop", None).pk)
        assert stop(process) == 0


@BROKEN
def test_a_scheduler_whose_standard_error_can_not_be_written_fires_and_ends_with_status_0(run: Run, kind: str) -> None:
    schedule("often", "@every 1s", "noop")
    with broken_stream(kind) as streams:
        process = run("run_schedules", **streams)
        wait_until(lambda: Job.objects.filter(schedule="often").count() >= 2, "two are fired")
        assert stop(process) == 0


@BROKEN
def test_a_command_that_refuses_to_start_keeps_its_status_though_it_can_not_say_why(run: Run, kind: str) -> None:
    with broken_stream(kind) as streams:
        assert run("run_queue", "nope", **streams).wait(PATIENCE) == 2


def test_a_check_s_warning_that_can_not_be_written_is_no_reason_not_to_start(run: Run) -> None:
    job = enqueue("noop", None)
    with broken_stream("full") as streams:
        process = run("run_queue", "noop", environment={"ALKSTORE_TEST_TRANSACTION_MODE": "DEFERRED"}, **streams)
        wait_for_state("completed", job.pk)
        assert stop(process) == 0


def test_a_worker_whose_standard_error_blocks_runs_its_jobs_and_ends_with_status_0(run: Run) -> None:
    with stuck_pipe() as pipe:
        process = run("run_queue", "noop", stderr=pipe)
        wait_for_state("completed", *enqueue_many("noop", [None] * 500))
        assert stop(process) == 0


def test_at_a_hard_end_too_jobs_are_given_back_though_standard_error_blocks(run: Run, tmp_path: Path) -> None:
    with stuck_pipe() as pipe:
        process = run("run_queue", "noop", "wait", "--grace", "0", stderr=pipe)
        wait_for_state("completed", *enqueue_many("noop", [None] * 500))
        job = enqueue("wait", str(tmp_path / "never"))
        wait_for_state("processing", job.pk)
        assert stop(process) == 1
    assert (row(job.pk).state, row(job.pk).attempts) == ("pending", 0)


# The project's own handlers


def logging_to(handler: dict[str, Any]) -> dict[str, str]:
    """The environment of a process whose project logs to this handler alone."""
    return variant(
        LOGGING={
            "version": 1,
            "disable_existing_loggers": False,
            "handlers": {"one": handler},
            "root": {"handlers": ["one"], "level": "INFO"},
        }
    )


@pytest.mark.parametrize("how", ["raises an OSError", "raises", "blocks"])
def test_a_handler_whose_flush_fails_or_blocks_does_not_change_the_status(run: Run, how: str) -> None:
    environment = logging_to({"class": "tests.ledger.handlers.BadFlush", "how": how})
    job = enqueue("noop", None)
    process = run("run_queue", "noop", environment=environment, stderr=subprocess.PIPE)
    wait_for_state("completed", job.pk)
    assert stop(process) == 0
    said = process.communicate(timeout=PATIENCE)[1].decode()
    assert "cannot flush <BadFlush" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_console_handler_on_a_full_disk_does_not_change_the_status(run: Run, stream: str) -> None:
    environment = logging_to({"class": "logging.StreamHandler", "stream": f"ext://sys.{stream}"})
    job = enqueue("noop", None)
    with open("/dev/full", "wb") as full:
        process = run("run_queue", "noop", environment=environment, **{"stderr": subprocess.DEVNULL, stream: full})
        wait_for_state("completed", job.pk)
        assert stop(process) == 0


@pytest.mark.parametrize("what", ["full", "stuck"])
def test_what_a_handler_prints_does_not_change_the_status_though_standard_output_fails_or_blocks(
    run: Run, what: str
) -> None:
    """It is printed to the buffer of standard output, which Python flushes at its end."""
    job = enqueue("print", "x" * (100 if what == "full" else 7_000))
    with stuck_pipe() as pipe, open("/dev/full", "wb") as full:
        process = run("run_queue", "print", stdout=full if what == "full" else pipe, stderr=subprocess.PIPE)
        wait_for_state("completed", job.pk)
        assert stop(process) == 0
    said = process.communicate(timeout=PATIENCE)[1].decode()
    assert "cannot flush <_io.TextIOWrapper name='<stdout>'" in said
