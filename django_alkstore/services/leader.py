"""The scheduler's leader loop.

One lock row is the leadership. Every step of the leader is one transaction. Its first statement renews the lease by its
token and owner, and the rest of it is a step of the tick. A leader that has been replaced changes no row there, so the
step rolls back and nothing fires. A lease that ran out while nobody took it (a long stall, a held writer lock) is
renewed like any other: another leader in between would have changed the token.

In its first round, the leader brings the rows in line with the schedules that the code declares.

A step is made when a boundary is due, and each 2 s for the renewal. Sleeps are measured on the monotonic clock. What is
due is decided by the wall clock in each step, so a clock that steps forward is noticed within 2 s. A clock that steps
back fires nothing twice, because the stored boundary does not move back with it.
"""

import os
import threading
from collections.abc import Callable

from django.db import DatabaseError, connections

from django_alkstore import clock, names, signals
from django_alkstore.clock import SECOND
from django_alkstore.dialects import Operations
from django_alkstore.dialects.base import DatabaseReplaced
from django_alkstore.dialects.transactions import (
    limited_wait,
    read,
    refuse_open,
    resolve_alias,
    write_operations,
    write_transaction,
)
from django_alkstore.exceptions import LeadershipLost
from django_alkstore.models import Lock
from django_alkstore.services.declared import bring_in_line
from django_alkstore.services.error_backoff import ErrorBackoff
from django_alkstore.services.locks import LockHandle
from django_alkstore.services.maintenance import Upkeep
from django_alkstore.services.ticks import PAUSE, Step, tick_step
from django_alkstore.services.waiting import SLICE, StopRequested, Waiter

LEADERSHIP_TTL = 10.0
RENEW_EVERY = 2.0
SETTLE = 0.1
"""Seconds between two looks at the schedules while others keep committing."""

_AT_ONCE = 0
"""A moment (microseconds) that has passed."""


def run_schedules(stop: threading.Event, *, using: str | None = None) -> None:
    """Lead the schedules of one database until `stop` is set: fire each due boundary into its queue.

    Returns `None` within half a second of the stop, and frees the leadership if the writer lock is free in that time.
    Raises `LeadershipLost` if another scheduler leads or has taken over: nothing was fired since. A database error is
    logged and tried again.
    """
    alias = resolve_alias(using)
    refuse_open(alias, "run_schedules")
    with Waiter(alias, stop) as waiter:
        say_if_leases_decide(waiter.liveness.reason)
        lead(waiter)


def say_if_leases_decide(reason: str | None) -> None:
    """Send the event that the deaths of other processes cannot be seen, if there is a reason for that."""
    if reason is not None:
        signals.emit(signals.crash_detection_off, reason=reason)


def lead(waiter: Waiter, when_elected: Callable[[], object] = lambda: None) -> None:
    """One term: take the leadership, fire until the stop event is set, and free the leadership."""
    liveness = waiter.liveness
    leadership = LockHandle(names.LEADERSHIP_LOCK, LEADERSHIP_TTL, liveness.holder, waiter.alias, liveness)
    try:
        taken = waiter.in_slices(leadership.acquire)
    except StopRequested:
        return
    if not taken:
        raise LeadershipLost(f"another scheduler leads the schedules of the database {waiter.alias!r}")
    when_elected()
    database = str(connections[waiter.alias].settings_dict["NAME"])
    signals.emit(signals.leader_elected, database=database, pid=os.getpid(), owner=leadership.owner)
    try:
        try:
            _Leader(waiter, leadership).lead()
        finally:
            _resign(waiter, leadership)
    except LeadershipLost as lost:
        signals.emit(signals.leader_stood_down, reason=str(lost))
        raise
    signals.emit(signals.leader_stood_down, reason="stopped")


def _resign(waiter: Waiter, leadership: LockHandle) -> None:
    """Free the leadership if nobody has taken it. If that cannot be written now, the leadership lapses."""
    try:
        waiter.watch.version()  # raises if the file is gone: a new connection would make an empty one
        with limited_wait(waiter.alias, SLICE):
            rows = Lock.objects.using(waiter.alias).filter(name=leadership.name)
            mine = rows.filter(token=leadership.token or 0, owner=leadership.owner)
            write_transaction(waiter.alias, lambda _: mine.delete())
    except DatabaseError as error:
        signals.emit(signals.leadership_left, error=error, lapses_in=LEADERSHIP_TTL)


class _Leader:
    """The loop of one term."""

    def __init__(self, waiter: Waiter, leadership: LockHandle) -> None:
        self.waiter = waiter
        self.alias = waiter.alias
        self.stop = waiter.stop
        self.leadership = leadership
        self.upkeep = Upkeep(self.alias)
        self.error_backoff = ErrorBackoff("ticking", self.alias)
        self.renewed_at = clock.monotonic()
        self.in_line = False
        """The rows are those that the code declares."""
        self.due: int | None = _AT_ONCE
        """The earliest next boundary, when the schedules were last read."""
        self.unfinished: dict[int, int] = {}
        """What the last step has left of boundaries that were missed; see `Step`."""

    def lead(self) -> None:
        while not self.stop.is_set():
            try:
                self._round()
            except StopRequested:
                return
            except DatabaseReplaced:
                raise  # the watch is of no use any more
            except DatabaseError as error:
                self.stop.wait(self.error_backoff.after(error))

    def _round(self) -> None:
        """Make a step if one is due. If nothing more is due after it, sleep."""
        watch = self.waiter.watch
        watch.version()  # raises if the file was replaced, before anything is written to the old one
        if not self.in_line:
            self.waiter.in_slices(lambda: bring_in_line(self.alias))
            self.in_line = True
        stepped = self._is_due() or self._renewal_in() <= 0
        more = stepped and self._step()
        self.waiter.in_slices(self.upkeep.step)
        self.waiter.in_slices(self.waiter.recovery.step)
        if more:
            return
        if stepped:
            watch.forget()
        # The version first: a later commit ends the sleep, and the schedules are read after every earlier one.
        seen = watch.version()
        self.due = self.waiter.read(lambda: read(self.alias, lambda db: db.next_boundary()))
        self.error_backoff.reset()
        if self.waiter.wait(seen, self._sleep_for()):
            self.stop.wait(min(SETTLE, self._due_in()))

    def _step(self) -> bool:
        """Renew the lease and fire what is due, in one short transaction; True if more is due."""
        step = self.waiter.in_slices(lambda: write_operations(self.alias, self._renew_and_fire))
        committed = clock.waiting_from()
        self.renewed_at = clock.monotonic()
        self.unfinished = step.unfinished if step.more else {}
        step.announce(between=self._renew_while_announcing)
        if step.more:
            self.stop.wait(max(0.0, PAUSE - clock.waited_since(committed)))
        return step.more

    def _renew_and_fire(self, db: Operations) -> Step:
        now = clock.now_us()
        if not self._renew(db, now):
            raise LeadershipLost("the leadership was taken by another scheduler")
        return tick_step(db, now, self.unfinished) if self._is_due() else Step(now)

    def _renew(self, db: Operations, now: int) -> bool:
        """False if another has taken the leadership. A lease that ran out, and that nobody took, is renewed too."""
        term = self.leadership
        return db.renew_lock(term.name, term.token or 0, term.owner, now + round(LEADERSHIP_TTL * SECOND))

    def _renew_while_announcing(self) -> None:
        """Keep the lease if receivers and log handlers take long. A failure decides nothing: the next step does."""
        if self._renewal_in() > 0:
            return
        self.renewed_at = clock.monotonic()
        try:
            with limited_wait(self.alias, SLICE):
                write_operations(self.alias, lambda db: self._renew(db, clock.now_us()))
        except DatabaseError as error:
            signals.emit(signals.database_trouble, doing="renewing the leadership", error=error, pause=0.0)

    def _sleep_for(self) -> float:
        others = (self.upkeep.due_in(), self.waiter.recovery.due_in())
        return min(self._due_in(), max(0.0, self._renewal_in()), *others)

    def _renewal_in(self) -> float:
        return self.renewed_at + RENEW_EVERY - clock.monotonic()

    def _is_due(self) -> bool:
        return self.due is not None and self.due <= clock.now_us()

    def _due_in(self) -> float:
        """Seconds until the next boundary; 0 if it is due."""
        return float("inf") if self.due is None else max(0.0, (self.due - clock.now_us()) / SECOND)
