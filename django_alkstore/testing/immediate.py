"""Jobs that run as soon as they are committed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from django.dispatch import Signal
from django.utils.asyncio import async_unsafe

from django_alkstore import signals
from django_alkstore.dialects.transactions import resolve_alias
from django_alkstore.testing.commits import blocks_commit
from django_alkstore.testing.running import run_pending

_MAKE_DUE: tuple[Signal, ...] = (
    signals.jobs_enqueued,
    signals.job_requeued,
    signals.job_run_now,
    signals.job_rescheduled,
    signals.schedule_fired,
)
"""The signals after which a job may be due."""


@contextmanager
def immediately(*, using: str | None = None) -> Iterator[None]:
    """Inside the block, jobs run right after the commit that stores them, in the thread that commits.

    In a `TestCase` the commit is the end of the outermost block that is not the test's own. `on_commit` callbacks of
    such a block run then, too. What a handler enqueues runs after the handler. Jobs that are not due stay pending.
    Raises `SynchronousOnlyOperation` in a coroutine, whose database connections are those of another thread.
    """
    _refuse_event_loop()
    runner = _Runner(resolve_alias(using))
    for signal in _MAKE_DUE:
        signal.connect(runner.run)
    try:
        with blocks_commit():
            yield
    finally:
        for signal in _MAKE_DUE:
            signal.disconnect(runner.run)
    if runner.error is not None:
        raise runner.error


@async_unsafe
def _refuse_event_loop() -> None:
    """Raise if an event loop runs in this thread: the block would watch the wrong connections."""


class _Runner:
    """Runs what is due whenever a job may have become due."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._threads = threading.local()
        self.error: Exception | None = None
        """The first error of `run_pending`. A signal would only log it, and the test would go on."""

    def run(self, **_: object) -> None:
        if getattr(self._threads, "runs", False):
            return  # a handler has enqueued: `run_pending` finds the job once the handler has ended
        self._threads.runs = True
        try:
            run_pending(using=self._alias)
        except Exception as error:  # noqa: BLE001  raised at the end of the block
            self.error = self.error or error
        finally:
            self._threads.runs = False
