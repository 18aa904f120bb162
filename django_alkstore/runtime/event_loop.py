"""The event loop of a worker: one thread that runs coroutines side by side.

What a coroutine hands to `sync_to_async` (each query of the ORM) runs in a thread of its own, as it does for each
request under ASGI. So a function that blocks there, or leaves a transaction open there, harms no other job. These
threads and their connections are kept from job to job. In any other thread (`asyncio.to_thread`) nothing stays open.

The thread of the loop runs no foreign code but the coroutines: the events thread sends its events.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from contextlib import suppress
from contextvars import Context, ContextVar
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from django.db.transaction import TransactionManagementError

from django_alkstore import clock, signals
from django_alkstore.runtime.announcing import announce_settled
from django_alkstore.runtime.jobs import Run
from django_alkstore.runtime.perform import Ending, ending_of, perform_coroutine, tidy_connections
from django_alkstore.runtime.shared_state import SharedState
from django_alkstore.runtime.sync_thread import SyncThread
from django_alkstore.services.outcomes import RELEASE, retry

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

KEEP_SPARE = 10.0
"""Seconds for which the threads for sync functions are kept while no coroutine runs."""
LONGEST_TIDY = 1.0
"""Seconds to wait for a function that a coroutine called by `sync_to_async` and did not wait for."""

_functions: set[object] = set()
"""One object for each function that runs in another thread for a coroutine."""


def has_abandoned_threads() -> bool:
    """True while such a function runs. Python would wait for it at the end of the process."""
    return bool(_functions)


class EventLoopThread(threading.Thread):
    """Runs any number of coroutines. `begin`, `cancel` and the methods for the keeper may be called in any thread."""

    def __init__(self, state: SharedState, context: Context, post: Callable[[Callable[[], None]], object]) -> None:
        """`context`: that of the command. Each coroutine runs in a fresh copy of it.

        `post`: passes a function to the events thread, which calls it.
        """
        super().__init__(name="alkstore-event-loop", daemon=True)
        self._state = state
        self._project_context = context
        self._post = post
        self._loop: _Loop
        self._beginning: deque[Run] = deque()
        """Handed over, and not begun. To wake the loop for each one would cost more than a short job."""
        self._begins_soon = False
        self._coroutines: dict[Run, _Coroutine] = {}
        """Those that have not ended. Changed in this thread alone."""
        self._spare: list[SyncThread] = []
        self._spare_timer: asyncio.TimerHandle | None = None
        self._ended = False

    def start(self) -> None:
        self._loop = _Loop()
        super().start()

    def run(self) -> None:
        try:
            with signals.passed_to(self._post):
                while not self._ended:
                    self._turn()
        except BaseException as error:  # noqa: BLE001  the keeper ends the worker for it
            self._state.break_down(error)
        finally:
            self._close_spare()
            self._loop.close()

    def _turn(self) -> None:
        """Run the loop until something stops it.

        A handler can stop it by `loop.stop()`, and by a task that raises SystemExit.
        """
        try:
            self._loop.run_forever()
        except BaseException as error:
            if self._loop.is_closed():
                raise
            # asyncio has kept it for whoever awaits the task.
            self._loop.call_exception_handler({"message": "an exception has stopped the loop", "exception": error})

    def begin(self, run: Run) -> None:
        """Let the handler of a job begin."""
        run.thread = self
        self._beginning.append(run)
        if not self._begins_soon:
            self._begins_soon = True
            self._soon(self._begin_all)

    def _soon(self, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        with suppress(RuntimeError):  # the loop is closed: the worker has ended
            self._loop.call_soon_threadsafe(callback, *args)

    def _close_spare(self) -> None:
        while self._spare:
            self._spare.pop().close()

    def _begin_all(self) -> None:
        self._begins_soon = False
        while self._beginning:
            self._begin(self._beginning.popleft())

    def _begin(self, run: Run) -> None:
        if self._spare_timer is not None:
            self._spare_timer.cancel()
            self._spare_timer = None
        coroutine = self._coroutines[run] = _Coroutine(run, self._spare.pop() if self._spare else SyncThread())
        context = self._project_context.copy()
        context.run(_owner.set, coroutine)
        coroutine.task = self._loop.create_task(coroutine.perform(), context=context)
        coroutine.task.add_done_callback(partial(self._end, coroutine))

    def _end(self, coroutine: "_Coroutine", _: object = None) -> None:
        """Cancel the tasks that a handler has left behind. When they have ended, so has the coroutine."""
        left = coroutine.cancel_tasks()
        if left:  # each may start others when it ends
            asyncio.gather(*left, return_exceptions=True).add_done_callback(partial(self._end, coroutine))
            return
        coroutine.has_ended = True
        ending = coroutine.ending()
        tidying = coroutine.sync.begin_to_tidy(ending)
        if tidying is None:
            self._spare.append(coroutine.sync)
            self._finish(coroutine, ending)
            return
        timer = self._loop.call_later(LONGEST_TIDY, self._note_tidied, coroutine, ending, None)
        tidying.add_done_callback(lambda tidied: self._soon(self._note_tidied, coroutine, ending, tidied, timer))

    def _note_tidied(
        self,
        coroutine: "_Coroutine",
        ending: Ending,
        tidied: "Future[bool] | None",
        timer: asyncio.TimerHandle | None = None,
    ) -> None:
        """`tidied`: None if a function still runs in the thread of the coroutine. The next job gets another thread."""
        if timer is not None:
            timer.cancel()
        if coroutine.run not in self._coroutines:
            return
        if tidied is not None:
            self._spare.append(coroutine.sync)
            if tidied.result():
                ending = ending.with_transaction_left_open()
        self._finish(coroutine, ending)

    def _finish(self, coroutine: "_Coroutine", ending: Ending) -> None:
        run = coroutine.run
        del self._coroutines[run]
        if not self._coroutines:
            self._spare_timer = self._loop.call_later(KEEP_SPARE, self._close_spare)
        if not self._state.finish(self, run, ending):
            if ending.outcome is not None:
                ending.outcome.take_exception()  # nobody announces it
        elif ending.outcome is None:
            announce_settled(run.job, ending.seconds)

    def cancel(self, run: Run) -> None:
        """Cancel a coroutine, once."""
        if self._state.note_cancelled(run):
            self._soon(self._cancel, run)

    def _cancel(self, run: Run) -> None:
        coroutine = self._coroutines.get(run)
        if coroutine is not None:
            coroutine.cancel()

    def end(self) -> None:
        """Let the thread end."""
        if self.is_alive():
            self._soon(self._stop_loop)

    def _stop_loop(self) -> None:
        self._ended = True
        self._loop.stop()

    # For the keeper

    def is_blocked(self, run: Run) -> bool:
        """True if the loop has not turned since this coroutine was cancelled."""
        coroutine = self._coroutines.get(run)
        return coroutine is None or not coroutine.is_cancelled

    def current(self) -> Run | None:
        """The job whose code the loop runs at present."""
        task = asyncio.current_task(self._loop)
        for coroutine in list(self._coroutines.values()):
            if task is not None and (task is coroutine.task or task in coroutine.tasks):
                return coroutine.run
        return None

    def cut_off(self, run: Run) -> None:
        """Roll back the open transaction of a coroutine that is out of time, and refuse its later writes.

        Blocks until its current statement has ended.
        """
        coroutine = self._coroutines.get(run)
        if coroutine is not None:
            coroutine.sync.cut_off(run)

    def has_open_transaction(self, run: Run) -> bool:
        """True if its coroutine has a transaction open that was not cut off."""
        coroutine = self._coroutines.get(run)
        return coroutine is not None and coroutine.sync.has_open_transaction(run)


class _Coroutine:
    """One job in the loop. Used in the thread of the loop, and read by the keeper."""

    def __init__(self, run: Run, sync: SyncThread) -> None:
        self.run = run
        self.sync = sync
        sync.run = run
        self.task: asyncio.Task[Ending]
        self.tasks: set[asyncio.Task[Any]] = set()
        """Those that the handler has started, and that have not ended."""
        self.is_cancelled = False
        """True once the worker has cancelled it."""
        self.has_ended = False
        self._began_at = clock.monotonic()

    async def perform(self) -> Ending:
        await self.sync.context.__aenter__()  # type: ignore[no-untyped-call]
        return await perform_coroutine(self.run.registration, self.run.job)

    def adopt(self, task: "asyncio.Task[Any]") -> None:
        """The handler has started a task, or something that it has left behind has."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if self.has_ended:
            task.cancel()

    def cancel_tasks(self) -> "list[asyncio.Task[Any]]":
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        return tasks

    def cancel(self) -> None:
        self.is_cancelled = True
        self.task.cancel()
        if self.task.done():
            self.cancel_tasks()

    def ending(self) -> Ending:
        try:
            ending = self.task.result()
        except asyncio.CancelledError as error:  # before its first step
            ending = ending_of(self.run.registration, self.run.job, error, self._began_at)
        except BaseException as error:  # noqa: BLE001
            # An error of the worker itself. Fail the attempt, so that the job does not stay leased.
            signals.emit(signals.job_mishandled, job=self.run.job, error=error)
            return Ending(retry(error), clock.monotonic() - self._began_at)
        outcome = ending.outcome
        if self.is_cancelled and outcome is not None and outcome.is_failure and not outcome.asked_for:
            # It fails because it was cancelled. If its time limit is over, it has failed before.
            outcome.take_exception()
            return ending._replace(outcome=RELEASE)
        return ending


_owner: ContextVar[_Coroutine] = ContextVar("alkstore_coroutine")
"""The coroutine to which a task, a callback or a function in another thread belongs."""


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that knows which coroutine has started a task, and what runs in other threads."""

    def create_task(  # type: ignore[override]  # what it takes grows with each version of Python
        self, coro: Coroutine[Any, Any, T], **options: Any
    ) -> "asyncio.Task[T]":
        task = super().create_task(coro, **options)
        owner = _owner.get(None)
        if owner is not None:
            owner.adopt(task)
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        owner = _owner.get(None)
        if executor is None:
            call: Callable[..., T] = _leave_nothing
        elif owner is not None and executor is owner.sync.executor:
            owner.sync.note_use()
            call = owner.sync.call
        else:
            call = _call
        return super().run_in_executor(executor, _noted, call, func, *args)


def _noted(call: Callable[..., T], func: Callable[[*Ts], Any], *args: *Ts) -> T:
    mark = object()
    _functions.add(mark)
    try:
        return call(func, *args)
    finally:
        _functions.discard(mark)


def _call(func: Callable[[*Ts], T], *args: *Ts) -> T:
    return func(*args)


def _leave_nothing(func: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call `func` in a thread that nobody else tidies. What it left open would keep the writer lock from everybody."""
    try:
        return func(*args)
    finally:
        if tidy_connections(None):
            raise TransactionManagementError("a transaction was left open in another thread, and was rolled back")
