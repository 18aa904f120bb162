"""The threads that run handlers, and the two lists through which they meet the worker's rounds."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_alkstore import clock, signals
from django_alkstore.dialects import dialect_of
from django_alkstore.registry import Registration
from django_alkstore.runtime.hosting import Host
from django_alkstore.runtime.perform import Ending, perform, tidy_connections
from django_alkstore.services import JobHandle
from django_alkstore.services.outcomes import ACK, retry

LONGEST_CUT = 1.0
"""Seconds."""


@dataclass(slots=True, eq=False)
class Run:
    """One claimed job in this worker."""

    job: JobHandle
    registration: Registration
    claimed_at: float = field(default_factory=clock.monotonic)
    started_at: float | None = None
    """Monotonic; `None` while it waits for a free thread."""
    renew_at: float = 0.0
    seconds: float = 0.0
    """How long its handler took, once it has ended."""
    lost: bool = False
    """Is the lease known to be lost?"""
    connection: BaseDatabaseWrapper | None = None
    """Where its handler holds the writer lock (`atomic=True`): its thread's connection, until it ends."""
    was_cut_off: bool = False

    @property
    def holds_lease(self) -> bool:
        return not (self.lost or self.job.settled)


class Threads:
    """`count` threads. A job given to them waits until one is free, and can be withdrawn until then."""

    def __init__(self, count: int, relieve: Callable[[], bool], ring: Callable[[], None]) -> None:
        """`relieve` lets a thread that has ended a job do the loop's work; `False`: `ring`, and the loop does it."""
        self.count = count
        self._relieve = relieve
        self._ring = ring
        self._waiting: dict[Run, None] = {}
        """What has been given and neither started nor withdrawn."""
        self._inbox: deque[Run] = deque()
        """The same in order."""
        self._calls: SimpleQueue[bool] = SimpleQueue()
        """`True` calls one sleeping thread, `False` ends one."""
        self._cutting = threading.Lock()
        self._ended: deque[tuple[Run, Ending]] = deque()
        self.quiet = False
        """Set by the loop before it sleeps: the first ending after that which needs it rings."""
        self.one_by_one = False
        """Set by each round: are handlers quicker than waking a thread is? See `call_next`."""
        self._latest: Run | None = None
        """The run that was started last."""
        self.started = 0
        """How many runs have been started, more or less: two threads may count at once."""
        self._threads = [
            threading.Thread(target=self._work, name=f"alkstore-handler-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def give(self, runs: Iterable[Run]) -> None:
        """To be started by threads that are awake; `call_next` wakes one."""
        for run in runs:
            self._waiting[run] = None
            self._inbox.append(run)

    def call_next(self) -> None:
        """Wake one thread, if there is something to start.

        An awake thread wakes the next one before it starts, unless they are called one by one: waking costs more
        than a short handler, and one awake thread ends several of those before another is there. The loop then
        calls the next after a moment, if anything is left.
        """
        if self._inbox and self._calls.empty():
            self._calls.put(True)

    def any_waiting(self) -> bool:
        return bool(self._inbox)

    def withdraw(self) -> list[Run]:
        """Take back what no thread has started."""
        withdrawn = [run for run in list(self._waiting) if self._take(run)]
        self._inbox.clear()
        return withdrawn

    def endings(self) -> list[tuple[Run, Ending]]:
        """What has ended since the last call."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def any_ended(self) -> bool:
        return bool(self._ended)

    def finish(self, patience: float) -> bool:
        """Let the free threads end; `False` where a handler still holds one."""
        for _ in self._threads:
            self._calls.put(False)
        deadline = clock.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, deadline - clock.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def cut_off(self, run: Run) -> None:
        """Take the writer lock from an atomic handler: until then nobody could write, the loop neither.

        Waits a moment at most. One that is in a long statement keeps the lock until that ends.
        """
        if run.connection is not None:
            cutter = threading.Thread(target=self._cut_off, args=[run], name="alkstore-cutter", daemon=True)
            cutter.start()
            cutter.join(LONGEST_CUT)

    def _cut_off(self, run: Run) -> None:
        with self._cutting:
            if run.connection is not None:  # it may have ended, and its thread may be running the next
                run.was_cut_off = True
                dialect_of(run.connection).cut_off(run.connection)

    def _take(self, run: Run) -> bool:
        """Exactly one of a thread and `withdraw` gets a run: removing a key is atomic."""
        try:
            del self._waiting[run]
        except KeyError:
            return False
        return True

    def _next(self, *, called: bool) -> Run | None:
        """The next run to start, once there is one, and the thread is called or need not be; `None` at the end."""
        while True:
            if not called and not self._calls.get():
                return None
            called = True
            try:
                run = self._inbox.popleft()
            except IndexError:
                called = False
                continue
            if not self.one_by_one:
                self.call_next()
            if self._take(run):
                return run

    def _work(self) -> None:
        host = Host()
        called = False
        while (run := self._next(called=called)) is not None:
            self._latest = run
            if run.registration.atomic:
                run.connection = connections[run.job.using]
            run.started_at = clock.monotonic()
            self.started += 1
            signals.emit(signals.job_started, job=run.job)
            ending = perform(run.registration, run.job, host.run)
            if run.connection is not None:
                with self._cutting:
                    connection, run.connection = run.connection, None
                if run.was_cut_off:
                    connection.close()
            left_open = tidy_connections(run.job.using, afresh=ending.by_database)
            left_open |= host.tidy(run.job.using, afresh=ending.by_database)
            if left_open and ending.outcome in (ACK, None):
                # What it wrote is not there, its own ack neither: its job must not count as done.
                ending = Ending(retry("the handler left a transaction open, which was rolled back"), ending.seconds)
            self._ended.append((run, ending))
            called = True
            if self.one_by_one and self._inbox:
                # Where another has started one meanwhile it gets on, and two would be in each other's way.
                called = self._latest is run
                continue
            if not self._relieve() and self.quiet:
                self.quiet = False  # one ring is enough: the loop takes in all that has ended by then
                self._ring()
        host.close()
