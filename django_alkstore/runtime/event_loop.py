"""An event loop in a handler's own thread.

`async_to_sync` makes a thread and a loop for each call, and handing a coroutine to a loop in another thread costs
two switches: both more than a short job. So each handler's thread runs its coroutines itself, one job at a time.
What they hand to `sync_to_async` (each query of the ORM) runs in one thread that is kept for it, whose connections
stay open between jobs as the handler's own do. In any other thread (`asyncio.to_thread`) nothing stays open.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple

from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.db.transaction import TransactionManagementError

from django_alkstore.runtime.perform import tidy_connections
from django_alkstore.services.handles import ended

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


LONGEST_TIDY = 1.0
"""Seconds to wait for a function that a handler called by `sync_to_async` and did not wait for."""

_abandoned: list[Future[bool]] = []
"""One for each thread that is kept by such a function; done once the function has ended. Only ever appended to."""


def has_abandoned_threads() -> bool:
    """True while such a thread runs. Python would wait for it at the end of the process."""
    return any(not tidied.done() for tidied in _abandoned)


class Host:
    """Runs coroutines in the thread that it is used in. What that takes is made when it is first needed."""

    def __init__(self, context: contextvars.Context) -> None:
        """`context`: each coroutine runs in a fresh copy of it."""
        self._runner: asyncio.Runner | None = None
        self._loop: _Loop
        self._base_context = context
        self._context: contextvars.Context
        self._threads: ThreadSensitiveContext

    def run(self, result: Awaitable[object]) -> None:
        """Await it, and cancel the tasks that it leaves behind."""
        self._open()
        try:
            self._run(result if asyncio.iscoroutine(result) else _awaited(result))
        finally:
            while left := asyncio.all_tasks(self._loop):  # which may make others when they end
                for task in left:
                    task.cancel()
                self._run(ended(left))

    def tidy(self, own: str, *, afresh: bool) -> bool:
        """As `tidy_connections`, in the other thread, if anything has run there since the last time.

        Not through the loop: a handler may have left something in it that stops it.
        """
        if self._runner is None or not self._loop.has_used_threads:
            return False
        self._loop.has_used_threads = False
        executor = SyncToAsync.context_to_thread_executor.get(self._threads)
        if executor is None:
            return False
        tidied = executor.submit(tidy_connections, own, afresh=afresh)
        try:
            return tidied.result(LONGEST_TIDY)
        except TimeoutError:
            # The handler has given up waiting for a function that still runs there. The next job gets other threads.
            _abandoned.append(tidied)
            self._loop.close()
            self._runner = None
            return False

    def close(self) -> None:
        """Waits for what still runs in other threads."""
        if self._runner is not None and not self._loop.is_closed():
            with suppress(Exception):  # whatever handlers have left in the loop, it ends here
                self._runner.run(_left(self._threads), context=self._context)
                self._runner.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self._runner is not None
        # A copy each, so that what a job sets is not there for the next one.
        return self._runner.run(coroutine, context=self._context.copy())

    def _open(self) -> None:
        if self._runner is not None and not self._loop.is_closed():
            return
        self._loop = _Loop()
        self._runner = asyncio.Runner(loop_factory=lambda: self._loop)
        self._context = self._base_context.copy()
        self._threads = ThreadSensitiveContext()
        self._runner.run(_entered(self._threads), context=self._context)


async def _entered(threads: ThreadSensitiveContext) -> None:
    await threads.__aenter__()  # type: ignore[no-untyped-call]


async def _left(threads: ThreadSensitiveContext) -> None:
    await threads.__aexit__(None, None, None)  # type: ignore[no-untyped-call]


async def _awaited(result: Awaitable[object]) -> None:
    await result


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that knows whether anything was run in other threads, and keeps its own ones tidy."""

    has_used_threads = False

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        if executor is None:
            return super().run_in_executor(None, _leave_nothing, func, *args)
        self.has_used_threads = True
        return super().run_in_executor(executor, func, *args)


def _leave_nothing(func: Callable[[*Ts], T], *args: *Ts) -> T:
    """`func` in a thread that nobody else tidies: what it left open would keep the writer lock for good."""
    try:
        return func(*args)
    finally:
        if tidy_connections(None):
            raise TransactionManagementError("a transaction was left open in another thread, and was rolled back")
