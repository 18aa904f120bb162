"""The log handler of the commands, used if the project has configured no handler: one line for each event.

A thread of its own writes the lines to standard error. So a full disk, a closed stream or a terminal that has been
stopped costs log lines, and never a job, a lease or the process. One write for many lines is also what makes a
worker of 25,000 short jobs a second possible.
"""

import logging
import os
import sys
import threading
from functools import lru_cache
from typing import TextIO
from weakref import WeakSet

from django_alkstore import clock, signals
from django_alkstore.clock import SECOND, from_us
from django_alkstore.dialects.forks import guard

MAX_BUFFERED = 4 * 2**20
"""Characters that may wait to be written. Lines past this are dropped and counted."""
WRITE_EVERY = 0.01
"""Seconds between two writes, so that a busy worker's lines are written many at once."""
FLUSH_TIMEOUT = 2.0

_sleep = clock.sleep


def show_log(verbosity: int) -> None:
    """Show the library's log lines under Django's default logging, which shows warnings at most.

    The project's own configuration has priority: a level that it has set stays, and if it has a handler, none is added.
    """
    logger = signals.logger
    if logger.level == logging.NOTSET:
        logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG))
    if not logger.hasHandlers():
        handler = BackgroundHandler()
        logger.addHandler(handler)
        signals.fast_handler = handler


class BackgroundHandler(signals.FastHandler):
    """Writes lines from a thread of its own to the stream that is `sys.stderr` at that time.

    Nothing that goes wrong with that stream reaches the thread that logs: lines that cannot be written, or that wait
    while `MAX_BUFFERED` characters do, are lost. They are counted, and the next line that can be written says how many.
    """

    def __init__(self) -> None:
        super().__init__()
        self._forget()
        _handlers.add(self)

    def _forget(self) -> None:
        """Begin with nothing buffered and no thread."""
        self._changed = threading.Condition(guard())
        """Protects every attribute below."""
        self._lines: list[str] = []
        self._size = 0
        """Characters in `_lines`."""
        self._lost = 0
        """Lines that no notice has been written about yet."""
        self._error: Exception | None = None
        """The reason for the last loss. `None`: the stream was too slow."""
        self._thread: threading.Thread | None = None
        self._writing = False
        self._notice_wanted = False
        """True while a flush waits for the notice of lost lines to be tried."""
        self._ending = False
        """True while `close` waits for the thread to end."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # A traceback that the handler asked for by `Retry` or `Discard` is no news.
            message = record.getMessage() if getattr(record, "asked_for", False) else self.format(record)
        except Exception as error:  # noqa: BLE001  the arguments are foreign code's, and logging must not fail
            message = f"a log record of {record.pathname}:{record.lineno} cannot be formatted: {type(error).__name__}"
        self.add(record.levelno, message)

    def add(self, level: int, message: str) -> None:
        """Buffer one line: local time, level, message. It raises nothing and waits for no stream."""
        line = f"{_local_time()} {logging.getLevelName(level)} {message}\n"
        with self._changed:
            if self._size + len(line) > MAX_BUFFERED:
                self._lost += 1
                return
            self._lines.append(line)
            self._size += len(line)
            if len(self._lines) == 1:
                self._changed.notify_all()
            if self._thread is None:
                self._start_thread()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._write_lines, name="alkstore-log", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads is reached, or the interpreter is ending
            self._lose(len(self._lines), error)
            self._take_lines()
        else:
            self._thread = thread

    def _lose(self, count: int, error: Exception) -> None:
        self._lost += count
        self._error = error

    def _take_lines(self) -> list[str]:
        lines, self._lines, self._size = self._lines, [], 0
        return lines

    def _write_lines(self) -> None:
        """The thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._notice_wanted or self._ending)
                if not (self._lines or self._notice_wanted):
                    self._thread = None
                    self._ending = False
                    self._changed.notify_all()
                    return
                lines = self._take_lines()
                lost, reason = self._lost, self._error
                self._notice_wanted = False
                self._writing = True
            error = _write(_notice(lost, reason) + "".join(lines))
            with self._changed:
                if error is None:
                    self._lost -= lost
                    self._error = None
                else:
                    self._lose(len(lines), error)
                self._writing = False
                self._changed.notify_all()
            _sleep(WRITE_EVERY)

    def flush(self, timeout: float = FLUSH_TIMEOUT) -> None:
        """Wait until what is buffered has been written or lost; `TimeoutError` after `timeout` seconds."""
        with self._changed:
            if self._thread is None:
                return
            self._notice_wanted = self._lost > 0
            self._changed.notify_all()
            if not self._changed.wait_for(self._is_idle, timeout):
                raise TimeoutError(f"standard error has not taken the last log lines within {timeout:g} s")

    def _is_idle(self) -> bool:
        return not (self._lines or self._writing or self._notice_wanted)

    def close(self) -> None:
        """End the thread once it has written what is buffered. A later line starts another one.

        `logging.config.dictConfig` closes handlers that stay in use.
        """
        with self._changed:
            if self._thread is not None:
                self._ending = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._thread is None, FLUSH_TIMEOUT)
        super().close()


_writes = guard()
"""Held during a write: a child forked in the middle of one would find the stream locked, and write its buffer again."""


def _write(text: str) -> Exception | None:
    """Write `text` to standard error; the exception if that failed."""
    try:
        with _writes:
            stream = sys.stderr
            try:
                stream.write(text)
            except UnicodeEncodeError:
                stream.write(_encodable(text, stream))
            stream.flush()
    except Exception as error:  # noqa: BLE001  the stream may be any object; the lines are lost, and nothing else
        return error
    return None


def _encodable(text: str, stream: TextIO) -> str:
    """`text` with an escape for each character that the stream's encoding lacks."""
    return text.encode(stream.encoding, "backslashreplace").decode(stream.encoding)


def _notice(lost: int, reason: Exception | None) -> str:
    """The line that says how many lines were lost; empty if none was."""
    if not lost:
        return ""
    lines = "line was" if lost == 1 else "lines were"
    # A failed write may have ended in the middle of a line.
    start, why = ("", "it was too slow") if reason is None else ("\n", str(reason) or type(reason).__name__)
    return f"{start}{_local_time()} WARNING {lost} log {lines} not written, or not whole, to standard error: {why}\n"


_handlers: "WeakSet[BackgroundHandler]" = WeakSet()


def _forget_in_child() -> None:
    # The lines are the parent's, which writes them, and its thread does not exist in the child.
    for handler in list(_handlers):
        handler._forget()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_in_child)


def _local_time() -> str:
    second, rest = divmod(clock.now_us(), SECOND)
    return f"{_local_second(second)},{rest // 1_000:03}"


@lru_cache(maxsize=1)
def _local_second(second: int) -> str:
    return from_us(second * SECOND).astimezone().replace(tzinfo=None).isoformat(" ")
