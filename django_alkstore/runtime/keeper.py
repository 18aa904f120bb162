"""The keeper: the main thread of a worker. It looks after everything that no handler thread waits for.

It renews leases, watches time limits and the grace, lets another thread lead if the leader turns out to be slow, writes
results that no thread can write in time, sweeps, prunes, and looks for dead workers.
"""

import selectors
import threading
from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar

from django.db import DatabaseError

from django_alkstore import clock, signals
from django_alkstore.dialects.base import DatabaseReplaced
from django_alkstore.dialects.liveness import Liveness
from django_alkstore.dialects.watch import Bell
from django_alkstore.runtime.announcing import announce, announce_given_back, announce_loss
from django_alkstore.runtime.jobs import LOOK_FOR_LOSS, Result, Run
from django_alkstore.runtime.shared_state import SharedState
from django_alkstore.runtime.writing import BETWEEN_SLICES, Writer
from django_alkstore.services.maintenance import Upkeep
from django_alkstore.services.recovery import Recovery

T = TypeVar("T")

LONGEST_SLEEP = 60.0
LONGEST_PAUSE = 1.0
"""Seconds for which the keeper sleeps although something is due, if there is trouble with the database."""
LOOK_FOR_TRANSACTIONS = 0.5
"""Seconds between two looks for transactions of handlers that are past their time limit."""
CONFIRM_LOSS = 0.1
"""Seconds until a second look at a lost claim. A handler that has just settled its job itself has lost nothing."""


class Keeper:
    """The duties between two sleeps. Used by one thread."""

    def __init__(
        self,
        state: SharedState,
        writer: Writer,
        liveness: Liveness,
        queues: Sequence[str],
        bell: Bell,
        version: Callable[[], object],
    ) -> None:
        """`version`: that of the database. It changes with each commit of another connection."""
        self._state = state
        self._version = version
        self._seen: object = None
        """The version before the last look for lost leases."""
        self._writer = writer
        self._liveness = liveness
        self._bell = bell
        self._upkeep = Upkeep(writer.alias, queues, liveness.holder, liveness.file)
        self._recovery = Recovery(writer.alias, liveness)
        self._look_for_loss_at = 0.0
        self._missing: set[Run] = set()
        """Running jobs whose claim was gone at the last look."""
        self._cutters: dict[Run, threading.Thread] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(bell, selectors.EVENT_READ)
        descriptor = liveness.fileno()
        if descriptor is not None:
            self._selector.register(descriptor, selectors.EVENT_READ)

    def look_after(self) -> None:
        """Do everything that is due. Raises `DatabaseReplaced` if the database file is another one, or gone."""
        now = clock.monotonic()
        self._state.promote(now)
        late = self._state.fail_at_time_limit(now)
        for result in late:
            result.run.job.lease_lost.set()
        self.cut_off(self._state.overdue())
        withdrawn = self._state.withdraw_waiting(now)
        results = [*self._state.take_old_results(now), *late, *withdrawn]
        if not (results or self._is_due(now)):
            return
        with self._writer.turn():
            if self._writer.trouble.pause():
                self._state.put_back(results)
                return
            try:
                self._write(results)
                self._look_for_loss(now)
                self._writer.limit_wait()
                self._recovery.step()
            except DatabaseReplaced:
                raise
            except DatabaseError as error:
                self._writer.trouble.note(error)

    def _is_due(self, now: float) -> bool:
        """True if the database is to be asked for anything but results."""
        return (
            self._upkeep.due_in() <= 0
            or self._recovery.due_in() <= 0
            or now >= self._next_look()
            or bool(self._state.to_renew(now))
        )

    def _write(self, results: list[Result]) -> None:
        """Write results and renewals; then the upkeep.

        The upkeep sweeps. So before it, every result is written and every lease of this worker that is over is renewed:
        a worker must not take its own jobs for those of a dead one.
        """
        planned_at = (
            clock.now_us()
        )  # before the renewals are chosen, so that every lease that is over by now is among them
        began_at = clock.monotonic()
        upkeep_is_due = self._upkeep.due_in() <= 0
        if upkeep_is_due:
            results += self._state.take_results()
        renewals = self._state.to_renew(began_at, planned_at if upkeep_is_due else None)
        if results or renewals:
            try:
                written = self._writer.write(results, renewals)
            except BaseException:
                self._state.put_back(results)
                raise
            self._state.note_written(len(results), written.completed, written.failed)
            self._state.note_renewals(written.renewals, began_at)
            announce(written)
            announce_given_back(written, stopping=self._state.is_stopping)
        if upkeep_is_due:
            with self._writer.writing():
                self._upkeep.step(planned_at)

    def _next_look(self) -> float:
        """When to look for lost leases. A job that ends within a second costs no look."""
        started = min((run.started_at or 0.0 for run in self._state.running()), default=inf)
        return max(self._look_for_loss_at, started if self._missing else started + LOOK_FOR_LOSS)

    def _look_for_loss(self, now: float) -> None:
        """Tell handlers whose job was cancelled, deleted or taken: at most two seconds later."""
        if now < self._next_look():
            return
        # The own ack of a settling job may be committed, though its handle does not know that yet.
        running = [run for run in self._state.running() if run.holds_lease and not run.job._settling]
        self._look_for_loss_at = now + LOOK_FOR_LOSS
        version = self._version()  # also to notice that the database was replaced: no other thread may be free
        if not running or (version == self._seen and not self._missing):
            return
        held = self._writer.read(lambda db: db.held([(run.job.id, run.job._fence) for run in running]))
        self._seen = version
        missing = {run for run in running if (run.job.id, run.job._fence) not in held}
        for run in missing & self._missing:
            if self._state.lose(run):
                announce_loss(run, "renewal")
        self._missing = missing - self._missing
        if self._missing:
            self._look_for_loss_at = now + CONFIRM_LOSS

    def cut_off(self, runs: Sequence[Run]) -> None:
        """Cancel these handlers if they are coroutines, and roll back the transactions that they have open.

        A transaction would keep the writer lock from everybody. It is rolled back in a thread of its own, which waits
        for the statement that the handler is in.
        """
        for run, cutter in list(self._cutters.items()):
            if not cutter.is_alive():
                del self._cutters[run]
        for run in runs:
            thread = run.thread
            if thread is None:
                continue
            thread.cancel(run)
            if run not in self._cutters and thread.has_open_transaction(run):
                cutter = threading.Thread(target=thread.cut_off, args=[run], name="alkstore-cutter", daemon=True)
                try:
                    cutter.start()
                except RuntimeError as error:  # the process may start no more threads; it is tried again
                    signals.emit(signals.cut_off_failed, job=run.job, error=error)
                else:
                    self._cutters[run] = cutter

    def sleep(self, latest: float) -> None:
        """Sleep until something is due, at most until `latest`, or until the bell is rung or a worker may have died."""
        now = clock.monotonic()
        latest = min(latest, now + min(LONGEST_SLEEP, self._recovery.due_in(), self._upkeep.due_in()))
        latest = min(latest, self._next_look())
        if self._state.overdue():
            latest = min(latest, now + LOOK_FOR_TRANSACTIONS)
        timeout = max(0.0, self._state.sleep_until(latest, now) - now)
        pause = self._writer.trouble.pause()
        if pause:
            timeout = max(timeout, min(pause, LONGEST_PAUSE))  # what is due cannot be written yet
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._bell:
                self._bell.hear()
            elif self._liveness.take_events():
                self._recovery.note_event()

    def write_at_the_end(self, results: list[Result], deadline: float) -> bool:
        """Write results at the end of the worker. False if that failed."""
        if not results:
            return True
        written = self._write_until(deadline, "writing the last results", lambda: self._writer.write(results, []))
        if written is None:
            return False
        self._state.note_written(len(results), written.completed, written.failed)
        announce(written)
        return True

    def end(self, deadline: float) -> bool:
        """Take back the sign of life. False if that failed."""

        def take_back() -> bool:
            with self._writer.writing():
                self._upkeep.end()
            return True

        return self._write_until(deadline, "taking back the sign of life", take_back) is not None

    def _write_until(self, deadline: float, doing: str, write: Callable[[], T]) -> T | None:
        """Write, however long another process has the writer lock, until `deadline`. None if it cannot be written."""
        while True:
            with self._writer.turn():
                try:
                    return write()
                except DatabaseError as error:
                    if clock.waiting_from() >= deadline or not self._writer.is_contention(error):
                        # Leases and signs lapse by themselves. No thread is left here that could try again.
                        signals.emit(signals.database_trouble, doing=doing, error=error, pause=0.0, reason=None)
                        return None
            _sleep(BETWEEN_SLICES)

    def close(self) -> None:
        self._selector.close()


_sleep = clock.sleep
