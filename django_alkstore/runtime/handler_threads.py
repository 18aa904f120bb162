"""The threads that run handlers. At most one of them leads: it writes results, claims jobs and waits for work.

A thread that leads claims a batch and runs it itself, so quick jobs need no switch between threads. Before a handler
that is not quick it gives up the leadership to a follower. `docs/worker.md` has the states.
"""

import threading
from collections.abc import Mapping
from functools import partial

from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_alkstore import clock, signals
from django_alkstore.dialects import dialect_of
from django_alkstore.dialects.base import DatabaseReplaced
from django_alkstore.dialects.transactions import is_left_open
from django_alkstore.dialects.watch import Watch
from django_alkstore.registry import Registration
from django_alkstore.runtime.announcing import announce
from django_alkstore.runtime.claim_times import ClaimTimes
from django_alkstore.runtime.crew import RENEWALS_PER_LEASE, Crew, Plan, Run, Runner
from django_alkstore.runtime.event_loop import Host
from django_alkstore.runtime.perform import Ending, perform, tidy_connections
from django_alkstore.runtime.writing import Writer, Written
from django_alkstore.services.outcomes import ACK, retry

LONGEST_SLEEP = 60.0
"""Seconds that the leader waits for work before it looks again."""
LEFT_OPEN = "the handler left a transaction open, which was rolled back"


class Leadership:
    """What the leading thread does between two batches. Threads use it one after the other."""

    def __init__(
        self,
        crew: Crew,
        writer: Writer,
        watch: Watch,
        registrations: Mapping[str, Registration],
        stopping: threading.Event,
    ) -> None:
        """`stopping`: becomes the `stopping` flag of every job that this worker claims."""
        self._crew = crew
        self._writer = writer
        self._watch = watch
        self._registrations = registrations
        self._stopping = stopping
        self._times = ClaimTimes(registrations, watch.version)

    def round(self, me: Runner) -> bool:
        """Write what has finished, and claim; if there is neither, wait for work. False if `me` does not lead."""
        planned_at = clock.now_us()  # before the renewals are chosen, see `Writer.claim`
        pause = self._writer.trouble.pause()
        if pause:
            self._watch.wait_for_bell(pause)
            return True
        plan = self._crew.plan(me)
        if plan is None:
            return False
        try:
            self._times.check()
            queues = self._times.due() if plan.free else []
            if plan.free and self._times.unknown() and (plan.results or not queues):
                with self._writer.turn():
                    self._writer.read(self._times.look)
                queues = self._times.due()
            if plan.results or queues:
                self._write(me, plan, queues, planned_at)
            else:
                self._wait(me, listen=plan.free > 0)
        except DatabaseError as error:
            if isinstance(error, DatabaseReplaced):
                raise
            self._crew.put_back(plan.results)
            self._writer.note_trouble(error)
        return True

    def _write(self, me: Runner, plan: Plan, queues: list[str], planned_at: int) -> None:
        with self._writer.turn():
            if self._writer.trouble.pause():  # the keeper has met it meanwhile
                self._crew.put_back(plan.results)
                return
            if self._crew.is_stopping:
                queues = []
            claims = partial(self._writer.claim, queues, plan, planned_at) if queues else None
            began_at = clock.monotonic()  # not after any of the leases begins to count
            written = self._writer.write(plan.results, plan.renewals, claims)
            self._crew.note_written(len(plan.results))
            plan.results.clear()  # no error from here on puts them back
            self._crew.add(self._runs(written, plan, began_at))
            lost = self._crew.note_renewals(written.renewals, began_at)
        self._times.note_write()
        for queue in written.emptied:
            self._times.forget(queue)
        if queues:
            self._times.note_claim(written.claimed[0].queue if written.claimed else None)
        self._crew.mark_busy(me)
        announce(self._crew, written, lost)
        self._writer.bury_unreadable(written.unreadable)

    def _runs(self, written: Written, plan: Plan, began_at: float) -> list[Run]:
        """The claimed jobs; first those that other threads take over at once, since their handlers are not quick."""
        now = clock.monotonic()
        runs = []
        for job in sorted(written.claimed, key=lambda job: job.queue in plan.batches):
            job._stopping = self._stopping
            renew_at = began_at + job.visibility_timeout / RENEWALS_PER_LEASE
            runs.append(Run(job, self._registrations[job.queue], claimed_at=now, renew_at=renew_at))
        return runs

    def _wait(self, me: Runner, *, listen: bool) -> None:
        """Wait for work: a commit, the next due moment, or a result of another thread, which rings the bell."""
        if not self._crew.begin_wait(me):
            return
        try:
            is_news = self._sleep(listen=listen)
        finally:
            self._crew.end_wait()
        if is_news:
            self._times.take_news()

    def _sleep(self, *, listen: bool) -> bool:
        """True if there was a commit."""
        if not listen:
            self._watch.wait_for_bell(LONGEST_SLEEP)
            return False
        timeout = max(0.0, min(LONGEST_SLEEP, self._times.due_in()))
        pause = min(self._times.pause(), timeout)
        if pause and self._watch.wait_for_bell(pause):
            return False
        return self._watch.wait(self._times.seen, timeout - pause)


class HandlerThread(threading.Thread):
    """Runs one handler at a time, and leads if no other thread does."""

    def __init__(self, number: int, crew: Crew, leadership: Leadership) -> None:
        super().__init__(name=f"alkstore-handler-{number}", daemon=True)
        self._crew = crew
        self._leadership = leadership
        self._cutting = threading.Lock()
        """Protects the next three attributes, which the keeper uses too."""
        self._run: Run | None = None
        """The job whose handler runs in this thread."""
        self._connection: BaseDatabaseWrapper | None = None
        """The connection of this thread to the database of that job, while its handler runs."""
        self._cut_off: object | None = None
        """The database's own connection that was cut off. A handler can close it and open another."""

    def run(self) -> None:
        host = Host()
        try:
            while self._crew.lead(self):
                self._lead(host)
        except BaseException as error:  # noqa: BLE001  the keeper ends the worker for it
            self._crew.break_down(error)
        finally:
            host.close()

    def _lead(self, host: Host) -> None:
        while True:
            run = self._crew.start_next(self, clock.monotonic(), clock.now_us())
            if run is not None:
                self._perform(run, host)
            elif not self._leadership.round(self):
                return

    def _perform(self, run: Run, host: Host) -> None:
        started = clock.monotonic()
        try:
            ending = self._run_handler(run, host)
        except BaseException as error:  # noqa: BLE001
            # Not the handler's: `perform` raises nothing. The job must not stay leased for it.
            signals.logger.exception("the worker failed around job %s", run.job.id)
            ending = Ending(retry(error), clock.monotonic() - started)
        if not self._crew.finish(self, run, ending):
            return
        if ending.outcome is None:
            self._crew.mark_busy(self)
            self._crew.count(completed=1)
            event = signals.job_completed if run.registration.atomic else signals.job_settled
            signals.emit(event, job=run.job, seconds=ending.seconds)

    def _run_handler(self, run: Run, host: Host) -> Ending:
        job = run.job
        with self._cutting:
            self._run, self._connection = run, connections[job.using]
        signals.emit(signals.job_started, job=job)
        ending = perform(run.registration, job, host.run, partial(self._crew.count_time_from_now, run))
        with self._cutting:
            connection, self._run, self._connection = self._connection, None, None
            was_cut_off, self._cut_off = self._cut_off is not None, None
        if was_cut_off:
            connection.close()
        left_open = tidy_connections(job.using, afresh=ending.by_database)
        left_open |= host.tidy(job.using, afresh=ending.by_database)
        if left_open and ending.outcome in (ACK, None):
            # What the handler wrote is not there, nor is its own ack: the job must not count as done.
            return Ending(retry(LEFT_OPEN), ending.seconds)
        return ending

    def cut_off(self, run: Run) -> None:
        """Roll back the open transaction of a handler that is out of time, and refuse its later writes.

        Waits for the statement that the handler is in. The handler keeps this thread.
        """
        with self._cutting:
            # The thread may have gone on to another job since the keeper has looked.
            if self._run is run and self._connection is not None and self._connection.connection is not self._cut_off:
                self._cut_off = self._connection.connection
                dialect_of(self._connection).cut_off(self._connection)

    def has_open_transaction(self, run: Run) -> bool:
        """True if its handler has a transaction open that was not cut off."""
        # No lock: a cutter may hold it for as long as a statement takes.
        connection = self._connection
        if connection is None or self._run is not run or connection.connection is self._cut_off:
            return False
        return is_left_open(connection)
