"""runtime/log_handler.py: the commands' own log lines, whatever becomes of standard error."""

import functools
import io
import logging
import logging.config
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_alkstore import signals
from django_alkstore.runtime import log_handler
from django_alkstore.runtime.log_handler import BackgroundHandler
from tests.processes import PATIENCE, Process

Start = Callable[..., Process]


class Stream(io.StringIO):
    """A standard error that can be made to fail or to block."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.writes = 0
        self.taking = threading.Event()
        """While it is not set, a write blocks."""
        self.taking.set()
        self.blocked = threading.Event()

    def write(self, text: str) -> int:
        if not self.taking.is_set():
            self.blocked.set()
            assert self.taking.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        self.writes += 1
        return super().write(text)

    @property
    def lines(self) -> list[str]:
        return [line for line in self.getvalue().split("\n") if line]


@pytest.fixture
def stream() -> Stream:
    return Stream()


def writes_to_stream(test: Callable[..., None]) -> Callable[..., None]:
    """Let `stream` be standard error during the test. (pytest sets its own after the fixtures.)"""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", fixtures["stream"])
            test(**fixtures)

    return run


@pytest.fixture
def handler(stream: Stream) -> Iterator[BackgroundHandler]:
    made = BackgroundHandler()
    yield made
    stream.taking.set()
    made.close()


@writes_to_stream
def test_lines_are_written_in_order_and_many_at_once(handler: BackgroundHandler, stream: Stream) -> None:
    for number in range(5_000):
        handler.add(logging.INFO, f"line {number}")
    handler.flush(PATIENCE)
    assert [line.split(" INFO ")[1] for line in stream.lines] == [f"line {number}" for number in range(5_000)]
    assert stream.writes <= 500


@writes_to_stream
def test_a_line_goes_to_what_is_standard_error_at_the_time(
    handler: BackgroundHandler, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler.add(logging.INFO, "first")
    handler.flush(PATIENCE)
    another = Stream()
    monkeypatch.setattr(sys, "stderr", another)
    handler.add(logging.INFO, "second")
    handler.flush(PATIENCE)
    assert "second" not in stream.getvalue()
    assert another.getvalue().endswith(" INFO second\n")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("closed"), RuntimeError("odd")])
@writes_to_stream
def test_lines_that_can_not_be_written_are_counted_and_the_next_line_says_so(
    handler: BackgroundHandler, stream: Stream, error: Exception
) -> None:
    handler.add(logging.INFO, "before")
    handler.flush(PATIENCE)
    stream.error = error
    for _ in range(3):
        handler.add(logging.INFO, "lost")
        handler.flush(PATIENCE)
    handler.add(logging.INFO, "lost")
    handler.flush(PATIENCE)
    stream.error = None
    for text in ("after", "and on"):
        handler.add(logging.INFO, text)
        handler.flush(PATIENCE)
    before, notice, after, and_on = stream.lines
    assert " WARNING 4 log lines were not written" in notice
    assert str(error) in notice
    assert (before.split()[-1], after.split()[-1], and_on.split()[-1]) == ("before", "after", "on")


@writes_to_stream
def test_a_flush_says_how_many_lines_were_lost_also_if_no_line_follows(
    handler: BackgroundHandler, stream: Stream
) -> None:
    stream.error = OSError("full")
    handler.add(logging.INFO, "lost")
    handler.flush(PATIENCE)
    stream.error = None
    handler.flush(PATIENCE)
    (notice,) = stream.lines
    assert "1 log line was not written" in notice


@pytest.mark.parametrize("what", ["none", "closed"])
@writes_to_stream
def test_without_a_standard_error_nothing_is_raised(
    handler: BackgroundHandler, stream: Stream, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "none":
        monkeypatch.setattr(sys, "stderr", None)
    else:
        sys.stderr.close()
    handler.handle(logging.makeLogRecord({"msg": "lost", "levelno": logging.INFO}))
    handler.flush(PATIENCE)
    monkeypatch.setattr(sys, "stderr", Stream())
    handler.add(logging.INFO, "after")
    handler.flush(PATIENCE)
    notice, after = sys.stderr.lines  # type: ignore[attr-defined]
    assert "1 log line was not written" in notice
    assert after.endswith("after")


@writes_to_stream
def test_a_stream_that_blocks_keeps_no_thread_waiting_and_the_buffer_has_a_limit(
    handler: BackgroundHandler, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_handler, "MAX_BUFFERED", 10_000)
    stream.taking.clear()
    handler.add(logging.INFO, "line")
    assert stream.blocked.wait(PATIENCE)
    for _ in range(10_000):  # this thread goes on, or the test never ends
        handler.add(logging.INFO, "line")
    with pytest.raises(TimeoutError):
        handler.flush(0.05)
    stream.taking.set()
    handler.flush(PATIENCE)
    handler.add(logging.INFO, "last")
    handler.flush(PATIENCE)
    written = sum(line.endswith(" INFO line") for line in stream.lines)
    (notice,) = [line for line in stream.lines if "WARNING" in line]
    assert 100 < written < 1_000
    assert f"{10_001 - written} log lines were not written" in notice
    assert "too slow" in notice


@writes_to_stream
def test_what_the_stream_can_not_encode_is_escaped_and_costs_no_line(
    handler: BackgroundHandler, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    for text in ("plain", "caf\xe9 \ud800", "end"):
        handler.add(logging.INFO, text)
    handler.flush(PATIENCE)
    lines = raw.getvalue().decode("ascii").splitlines()
    assert [line.split(" INFO ")[1] for line in lines] == ["plain", "caf\\xe9 \\ud800", "end"]


@writes_to_stream
def test_a_record_that_can_not_be_formatted_is_a_line_that_says_so(handler: BackgroundHandler, stream: Stream) -> None:
    handler.handle(logging.makeLogRecord({"msg": "%d jobs", "args": ("no number",), "pathname": "there.py"}))
    handler.flush(PATIENCE)
    (line,) = stream.lines
    assert "there.py" in line
    assert "TypeError" in line


@writes_to_stream
def test_a_closed_handler_has_no_thread_and_a_later_line_is_written_all_the_same(
    handler: BackgroundHandler, stream: Stream
) -> None:
    """As after `logging.config.dictConfig`, which closes every handler and leaves ours at its logger."""
    handler.add(logging.INFO, "first")
    handler.close()
    assert "alkstore-log" not in [thread.name for thread in threading.enumerate()]
    handler.add(logging.INFO, "second")
    handler.flush(PATIENCE)
    assert [line.split()[-1] for line in stream.lines] == ["first", "second"]


@writes_to_stream
def test_where_no_thread_can_be_started_lines_are_lost_and_counted(
    handler: BackgroundHandler, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        handler.add(logging.INFO, "lost")
        handler.flush(PATIENCE)
    handler.add(logging.INFO, "after")
    handler.flush(PATIENCE)
    notice, after = stream.lines
    assert "1 log line was not written" in notice
    assert "can't start new thread" in notice
    assert after.endswith("after")


FORKS = """
import os
from django_alkstore import signals
from django_alkstore.runtime.log_handler import show_log
show_log(1)
(handler,) = signals.logger.handlers
for round_ in range(20):
    for number in range(50):
        handler.add(20, f"parent {round_} {number}.")
    child = os.fork()
    if child == 0:
        handler.add(20, f"child {round_}.")
        handler.flush(60)
        os._exit(0)
    os.waitpid(child, 0)
handler.flush(60)
"""


def test_a_forked_child_writes_its_own_lines_and_none_of_its_parent_s(start: Start) -> None:
    process = start("-c", FORKS)
    assert process.wait() == 0, process.output
    wanted = [f"parent {round_} {number}." for round_ in range(20) for number in range(50)]
    wanted += [f"child {round_}." for round_ in range(20)]
    # Python 3.12 and newer warn of a fork in a process with threads.
    lines = [line for line in process.lines if "DeprecationWarning" not in line and not line.startswith("  ")]
    assert sorted(line.split(" INFO ")[1] for line in lines) == sorted(wanted)


# The events


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    before = signals.logger.level
    yield
    signals.logger.setLevel(before)


def broken() -> None:
    signals.emit(signals.module_broken, module="a.b", error="ImportError", traceback="")


@writes_to_stream
def test_an_error_is_a_record_also_if_no_other_handler_is_there(
    handler: BackgroundHandler, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Error trackers look at each record as it passes through the logger."""
    seen = []
    call = logging.Logger.callHandlers

    def look(self: logging.Logger, record: logging.LogRecord) -> None:
        seen.append(record.levelname)
        call(self, record)

    # As a command leaves the logger if the project configures nothing.
    monkeypatch.setattr(signals.logger, "handlers", [handler])
    monkeypatch.setattr(signals.logger, "propagate", False)
    monkeypatch.setattr(signals, "fast_handler", handler)
    signals.logger.setLevel(logging.INFO)
    monkeypatch.setattr(logging.Logger, "callHandlers", look)
    signals.emit(signals.database_recovered, doing="working")
    broken()
    handler.flush(PATIENCE)
    assert seen == ["ERROR"]
    assert [line.split()[2] for line in stream.lines] == ["INFO", "ERROR"]


class Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("a bad handler")


@pytest.mark.parametrize("stderr", ["fine", "full", "closed", "none"])
@writes_to_stream
def test_a_log_handler_that_raises_stops_nothing_whatever_standard_error_is(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, stderr: str
) -> None:
    monkeypatch.setattr(signals.logger, "handlers", [Raising()])
    received = []

    def receive(**data: object) -> None:
        received.append(data["module"])

    signals.module_broken.connect(receive)
    try:
        if stderr == "full":
            stream.error = OSError(28, "No space left on device")
        elif stderr == "closed":
            stream.close()
        elif stderr == "none":
            monkeypatch.setattr(sys, "stderr", None)
        broken()
    finally:
        signals.module_broken.disconnect(receive)
    assert received == ["a.b"]
    if stderr == "fine":
        assert "a bad handler" in stream.getvalue()


@writes_to_stream
def test_a_receiver_that_raises_stops_nothing_though_django_s_own_line_about_it_fails_too(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("django.dispatch"), "handlers", [Raising()])

    def receive(**_: object) -> None:
        raise RuntimeError("a bad receiver")

    signals.module_broken.connect(receive)
    try:
        broken()
    finally:
        signals.module_broken.disconnect(receive)
    assert "a bad handler" in stream.getvalue()


# Flushing at the end


class Odd(logging.Handler):
    """A handler whose flush does what it is told."""

    def __init__(self, flush: Callable[[], object]) -> None:
        super().__init__()
        self._flush = flush

    def flush(self) -> None:
        self._flush()


@pytest.fixture
def foreign() -> Iterator[logging.Logger]:
    """A logger of the project's own."""
    logger = logging.getLogger("tests.runtime.foreign")
    yield logger
    logger.handlers = []


@writes_to_stream
def test_flush_flushes_every_handler_of_the_process_and_the_standard_streams(
    stream: Stream, foreign: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    foreign.addHandler(Odd(lambda: flushed.append("foreign")))
    monkeypatch.setattr(signals.logger, "handlers", [Odd(lambda: flushed.append("ours"))])
    for name in ("stdout", "stderr"):
        standard = Stream()
        standard.flush = lambda name=name: flushed.append(name)  # type: ignore[method-assign,misc]
        monkeypatch.setattr(sys, name, standard)
    assert signals.flush(PATIENCE) == []
    assert sorted(flushed) == ["foreign", "ours", "stderr", "stdout"]


@writes_to_stream
def test_flush_names_what_fails_or_blocks_and_flushes_the_rest(stream: Stream, foreign: logging.Logger) -> None:
    end = threading.Event()
    flushed = threading.Event()

    def fail() -> None:
        raise RuntimeError("out of order")

    failing, blocking, fine = Odd(fail), Odd(lambda: end.wait(PATIENCE * 10)), Odd(flushed.set)
    foreign.handlers = [failing, blocking, fine]
    try:
        failed = signals.flush(0.5)  # the old one waited for the event
    finally:
        end.set()
    assert failed == [failing, blocking]
    assert flushed.is_set()
    assert "out of order" in stream.getvalue()
    assert "it has not finished" in stream.getvalue()


@writes_to_stream
def test_flush_raises_nothing_where_standard_error_is_what_fails(
    stream: Stream, foreign: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)

    def fail() -> None:
        raise RuntimeError("out of order")

    failing = Odd(fail)
    foreign.handlers = [failing]
    assert signals.flush(PATIENCE) == [failing]
