"""What the leading thread does between two batches: it writes results, claims jobs and waits for work."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from django.db import DatabaseError

from django_alkstore import clock
from django_alkstore.dialects.base import DatabaseReplaced
from django_alkstore.dialects.watch import Watch
from django_alkstore.registry import Registration
from django_alkstore.runtime.announcing import announce, announce_given_back
from django_alkstore.runtime.claim_times import ClaimTimes
from django_alkstore.runtime.jobs import Plan, Run, Runner, renewal_after
from django_alkstore.runtime.shared_state import SharedState
from django_alkstore.runtime.writing import Writer, Written

LONGEST_SLEEP = 60.0
"""Seconds that the leader waits for work before it looks again."""


class Leadership:
    """Used by the leader only, so by one thread after the other."""

    def __init__(
        self,
        state: SharedState,
        writer: Writer,
        watch: Watch,
        registrations: Mapping[str, Registration],
        stopping: threading.Event,
        new_queues: Callable[[set[str]], list[Registration]] | None = None,
    ) -> None:
        """`stopping`: becomes the `stopping` flag of every job that this worker claims.

        `new_queues`: takes the known queues, and returns those that have come since. None if there are never any.
        """
        self._state = state
        self._writer = writer
        self._watch = watch
        self._registrations = dict(registrations)
        self._stopping = stopping
        self._new_queues = new_queues
        self._times = ClaimTimes(registrations, watch.version)
        self._async = frozenset(queue for queue, registration in registrations.items() if registration.is_async)
        """The queues whose handlers are coroutines."""
        self._mixed = frozenset(queue for queue, registration in registrations.items() if registration.resolve)
        """The queues of tasks that have held both kinds, or none yet. Only a claimed job tells which it is."""
        self._seen: set[tuple[str, bool]] = set()
        """The queues of tasks that have held a coroutine (True) or a sync function (False)."""
        self._sync = frozenset(registrations) - self._async - self._mixed

    def round(self, me: Runner) -> bool:
        """Write what has finished, and claim; if there is neither, wait for work. False if `me` does not lead."""
        if not self._state.leads(me):
            return False
        pause = max(self._writer.trouble.pause(), self._times.gathering())
        if pause:
            self._watch.wait_for_bell(pause)
            return True
        with self._writer.turn():
            if self._writer.trouble.pause():  # the keeper has met it meanwhile
                return True
            try:
                written = self._write_and_claim(me)
            except DatabaseReplaced:
                raise
            except DatabaseError as error:
                self._writer.trouble.note(error)
                return True
        if written is None:
            self._wait(me)
            return True
        if written.has_news:
            try:
                announce(written)
                announce_given_back(written, stopping=self._state.is_stopping)
            finally:
                self._state.end_announcing()
        if written.unreadable:
            self._bury_unreadable(written)
        return True

    def _write_and_claim(self, me: Runner) -> Written | None:
        """One transaction. None if there is nothing to write and nothing to claim. Needs the turn."""
        planned_at = clock.now_us()  # before the renewals are chosen, see `Writer.claim`
        began_at = clock.monotonic()  # not after any of the leases begins to count
        plan = self._state.plan(me, began_at, planned_at)
        if plan is None:
            return None
        try:
            return self._carry_out(me, plan, planned_at, began_at)
        finally:
            self._state.end_plan()

    def _carry_out(self, me: Runner, plan: Plan, planned_at: int, began_at: float) -> Written | None:
        try:
            queues = self._queues(plan)
            if not (plan.results or queues):
                return None
            claims = partial(self._writer.claim, queues, self._async, self._mixed, plan, planned_at) if queues else None
            written = self._writer.write(plan.results, plan.renewals, claims)
        except BaseException:
            self._state.put_back(plan.results)
            raise
        if written.has_news:
            self._state.note_written(len(plan.results), written.completed, written.failed, me)
        self._state.note_renewals(written.renewals, began_at)
        self._state.add(self._runs(written, plan, began_at))
        self._note_claims(queues, plan, written)
        return written

    def _queues(self, plan: Plan) -> list[str]:
        """The queues to claim from."""
        self._times.check()
        if self._new_queues is not None and self._times.take_commit():
            self._add_queues(self._new_queues(set(self._registrations)))
        self._times.open = (
            (self._sync if plan.free else frozenset())
            | (self._async if plan.coroutines else frozenset())
            | (self._mixed if plan.free and plan.coroutines else frozenset())
        )
        if not self._times.open:
            return []
        queues = self._times.due()
        if self._times.unknown() and (plan.results or not queues):
            self._writer.read(self._times.look)
            queues = self._times.due()
        return queues

    def _add_queues(self, registrations: Sequence[Registration]) -> None:
        for registration in registrations:
            self._registrations[registration.queue] = registration
            self._mixed |= {registration.queue}
            self._times.add(registration.queue)

    def _note_claims(self, queues: list[str], plan: Plan, written: Written) -> None:
        self._times.note_write()
        for queue in written.emptied:
            self._times.forget(queue)
        if queues:
            self._times.note_claim(written.claimed[0].queue if written.claimed else None)
        if written.emptied and len(written.claimed) > 1 and plan.batches:
            self._times.note_several()

    def _runs(self, written: Written, plan: Plan, began_at: float) -> list[Run]:
        """The claimed jobs; first those that other threads take over at once, since their handlers are not quick."""
        now = clock.monotonic()
        runs = []
        for job in sorted(written.claimed, key=lambda job: job.queue in plan.batches):
            job._stopping = self._stopping
            registration = self._registrations[job.queue]
            in_loop = job.queue in self._async
            if registration.resolve is not None:
                registration = registration.resolve(job)
                in_loop = registration.is_async
                self._note_kind(job.queue, in_loop)
            runs.append(Run(job, registration, claimed_at=now, renew_at=renewal_after(began_at, job), in_loop=in_loop))
        return runs

    def _note_kind(self, queue: str, in_loop: bool) -> None:
        """As long as a queue of tasks has held one kind, it need not wait for a place of the other.

        If a task of the other kind comes after all and there is no place for it, it is given back after a second, and
        no attempt is spent.
        """
        if (queue, in_loop) in self._seen:
            return
        self._seen.add((queue, in_loop))
        only = {queue} if (queue, not in_loop) not in self._seen else set()
        self._mixed = self._mixed - only | ({queue} - only)
        self._async = self._async - {queue} | (only if in_loop else set())
        self._sync = self._sync - {queue} | (only if not in_loop else set())

    def _bury_unreadable(self, written: Written) -> None:
        with self._writer.turn():
            try:
                self._writer.bury_unreadable(written.unreadable)
            except DatabaseError as error:  # the leases lapse, and it is tried again
                self._writer.trouble.note(error)

    def _wait(self, me: Runner) -> None:
        """Wait for work: a commit, the next due moment, or a result of another thread, which rings the bell."""
        if not self._state.begin_wait(me):
            return
        try:
            is_news = self._sleep()
        finally:
            self._state.end_wait()
        if is_news:
            self._times.take_news()

    def _sleep(self) -> bool:
        """True if there was a commit."""
        if self._state.is_stopping:
            self._watch.wait_for_bell(LONGEST_SLEEP)
            return False
        timeout = max(0.0, min(LONGEST_SLEEP, self._times.due_in()))
        pause = min(self._times.pause(), timeout)
        if pause and self._watch.wait_for_bell(pause):
            return False
        return self._watch.wait(self._times.seen, timeout - pause)
