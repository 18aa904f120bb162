"""The log as a command shows it where the project has configured none: one line for each event, on standard error.

A worker that runs thousands of short jobs a second ends as many lines. Those of one round are written together:
to write each by itself would cost more than a short handler does.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from django_alkstore import clock, signals
from django_alkstore.clock import SECOND, from_us
from django_alkstore.dialects.forks import guard


def show_log(verbosity: int) -> None:
    """Let the library's log lines be seen under Django's default logging, which shows warnings at most.

    What the project has configured stands: its level, and its handlers, to which nothing is added.
    """
    logger = signals.logger
    if logger.level == logging.NOTSET:
        logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG))
    if not logger.hasHandlers():
        logger.addHandler(LineHandler())


@contextmanager
def gathered() -> Iterator[None]:
    """Inside, lines are held back; they are written together at its end. For a worker's rounds alone."""
    handlers = [handler for handler in signals.logger.handlers if isinstance(handler, LineHandler)]
    if not handlers:
        yield
        return
    handler = handlers[0]
    handler.stamp = _local_time()
    signals.only_listener = handler.add if _hears_alone(signals.logger) else None
    try:
        yield
    finally:
        signals.only_listener = None
        handler.stamp = ""
        handler.flush()


def _hears_alone(logger: logging.Logger) -> bool:
    """Would nothing but the logger's own one handler see a record, or be asked about it?"""
    handlers = logger.handlers + (logging.root.handlers if logger.propagate else [])
    return len(handlers) == 1 and not handlers[0].filters and not logger.filters


def _local_time() -> str:
    second, rest = divmod(clock.now_us(), SECOND)
    return f"{_local_second(second)},{rest // 1_000:03}"


@lru_cache(maxsize=1)
def _local_second(second: int) -> str:
    return from_us(second * SECOND).astimezone().replace(tzinfo=None).isoformat(" ")


class LineHandler(logging.Handler):
    """Writes lines to whatever is standard error at the time."""

    def __init__(self) -> None:
        super().__init__()
        self.stamp = ""
        """The time of all lines that are held back, while they are."""
        self._adding = guard()
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.add(record.levelno, self.format(record))
            if not self.stamp:
                self.flush()
        except Exception:  # noqa: BLE001  as every handler does: it is shown, and stops nothing
            self.handleError(record)

    def add(self, level: int, message: str) -> None:
        """Add a line: local time, level, message."""
        line = f"{self.stamp or _local_time()} {logging.getLevelName(level)} {message}\n"
        with self._adding:
            self._lines.append(line)

    def flush(self) -> None:
        with self._adding:
            lines, self._lines = self._lines, []
            if lines:
                sys.stderr.write("".join(lines))
                sys.stderr.flush()
