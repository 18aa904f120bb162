"""The scheduler's leader loop.

One lock row is the leadership. Each round is one transaction whose first statement renews the lease *by its
token and owner* and whose rest is the tick: a leader that has been replaced changes no row, rolls back, and
has fired nothing. A lease that merely ran out while nobody else took it (a long stall, a held writer lock) is
renewed like any other: had there been another leader in between, the token would be another.

The renewals in the sleep keep the lease alive and decide nothing. Sleeps are measured on the monotonic clock;
what is due is asked of the wall clock at least at each renewal, so a clock that steps forward is noticed, and
one that steps back fires nothing twice because the stored boundary does not move back with it.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.db import DatabaseError, connections
from django.db.models import QuerySet

from django_alkstore import clock, names, signals
from django_alkstore.clock import SECOND, from_us
from django_alkstore.dialects import Operations
from django_alkstore.dialects.forks import guard
from django_alkstore.dialects.transactions import refuse_open, resolve_alias, write_transaction
from django_alkstore.dialects.vitals import others_version
from django_alkstore.dialects.watch import Watch
from django_alkstore.exceptions import LeadershipLost
from django_alkstore.models import Lock
from django_alkstore.services.locks import LockHandle, unique_owner
from django_alkstore.services.maintenance import Upkeep
from django_alkstore.services.patience import Patience
from django_alkstore.services.schedules import Ticked, soonest, tick_step

LEADERSHIP_TTL = 10.0
RENEW_EVERY = 2.0
LONGEST_SLEEP = 60.0
STOP_NOTICED_WITHIN = 0.35
"""Seconds between looks at a stop event that rings nothing."""
SETTLE = 0.1
"""Seconds between two looks at the schedules while others keep committing."""


class StopEvent(threading.Event):
    """A stop event that wakes whoever waits in a `Watch`, who need not look at it every now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._bells: list[Callable[[], None]] = []

    def set(self) -> None:
        super().set()
        for ring in tuple(self._bells):
            ring()

    @contextmanager
    def ringing(self, watch: Watch) -> Iterator[None]:
        """Inside, setting it rings the watch's bell."""
        self._bells.append(watch.ring)
        try:
            yield
        finally:
            self._bells.remove(watch.ring)


@contextmanager
def noticed(stop: threading.Event, watch: Watch) -> Iterator[float]:
    """How long a wait in `watch` may be, in seconds, and end soon after `stop` is set."""
    if not isinstance(stop, StopEvent):
        yield STOP_NOTICED_WITHIN
        return
    with stop.ringing(watch):
        yield LONGEST_SLEEP


def run_schedules(stop: threading.Event, *, using: str | None = None) -> None:
    """Lead the schedules of one database until `stop` is set: fire each due boundary into its queue.

    Returns `None` after a clean stop, with the leadership freed. Raises `LeadershipLost` where another leads,
    or has taken over: nothing was fired since. A database error is logged and tried again.
    """
    alias = resolve_alias(using)
    refuse_open(alias, "run_schedules")
    leadership = LockHandle(names.LEADERSHIP_LOCK, LEADERSHIP_TTL, unique_owner(), alias)
    # First, so that it sees a file which is replaced at any moment after the leadership is taken.
    with Watch(alias) as watch, noticed(stop, watch) as longest_wait:
        if not leadership.acquire():
            raise LeadershipLost(f"another scheduler leads the schedules of the database {alias!r}")
        _lead(_Leader(alias, leadership, watch, stop, longest_wait))


def _lead(leader: "_Leader") -> None:
    database = str(connections[leader.alias].settings_dict["NAME"])
    signals.emit(signals.leader_elected, database=database, pid=os.getpid(), owner=leader.leadership.owner)
    try:
        leader.lead()
    except LeadershipLost as lost:
        signals.emit(signals.leader_stood_down, reason=str(lost))
        raise
    else:
        signals.emit(signals.leader_stood_down, reason="stopped")
    finally:
        _resign(leader)


def _resign(leader: "_Leader") -> None:
    """Free the leadership if nobody has taken it since. Where even that cannot be written, it lapses by itself.

    By its token and owner, as it is renewed: one that ran out while others held the writer lock is no use to anybody.
    """
    try:
        leader.watch.version()  # raises where the file is gone: a new connection would make an empty one
        write_transaction(leader.alias, lambda _: _term(leader.leadership).delete())
    except DatabaseError as error:
        signals.emit(signals.leadership_left, error=error, lapses_in=LEADERSHIP_TTL)


def _term(leadership: LockHandle) -> QuerySet[Lock]:
    """The leadership's row, as long as it is this holder's."""
    return Lock.objects.using(leadership.using).filter(
        name=leadership.name, token=leadership.token or 0, owner=leadership.owner
    )


class _Leader:
    """The loop of one term."""

    def __init__(
        self, alias: str, leadership: LockHandle, watch: Watch, stop: threading.Event, longest_wait: float
    ) -> None:
        self.alias = alias
        self.leadership = leadership
        self.watch = watch
        self.stop = stop
        self.longest_wait = longest_wait
        """Seconds after which it looks at the stop event again."""
        self.upkeep = Upkeep(alias)
        self.patience = Patience("ticking", alias)
        self.renewed_at = clock.monotonic()
        self._reading = guard()
        self._others: int | None = None
        """`others_version` just before the schedules were last looked at."""

    def lead(self) -> None:
        while not self.stop.is_set():
            seen = self.watch.version()
            try:
                self._others = self._others_version()
                self._renew_and_tick()
                self.upkeep.step()
                due = self._soonest_us()
                self.patience.reset()
                self._sleep(self._without_own(seen), due)
            except DatabaseError as error:
                self.stop.wait(self.patience.after(error))

    def _renew_and_tick(self) -> None:
        def round_(db: Operations) -> Ticked:
            now = clock.now_us()
            if not self._renew(now):
                raise LeadershipLost("the leadership was taken by another scheduler")
            return tick_step(db, now)

        ticked = write_transaction(self.alias, round_)
        self.renewed_at = clock.monotonic()
        ticked.announce()

    def _renew(self, now: int) -> bool:
        ends = from_us(now + round(LEADERSHIP_TTL * SECOND))
        return _term(self.leadership).update(expires_at=ends) == 1

    def _soonest_us(self) -> int | None:
        with self._reading:
            moment = soonest(using=self.alias)
        return None if moment is None else clock.to_us(moment)

    def _sleep(self, seen: object, due: int | None) -> None:
        """Until a boundary is due, the schedules change, upkeep is due or the lease is lost; 60 s at the most."""
        ends = clock.monotonic() + min(LONGEST_SLEEP, self.upkeep.due_in())
        while not self.stop.is_set() and clock.monotonic() < ends and not _is_due(due):
            if clock.monotonic() - self.renewed_at >= RENEW_EVERY:
                if not self._renew_in_sleep():
                    return
                seen = self._without_own(seen)
            renewal_in = self.renewed_at + RENEW_EVERY - clock.monotonic()
            left = min(ends - clock.monotonic(), _seconds_until(due), renewal_in, self.longest_wait)
            if self.watch.wait(seen, max(0.0, left)):
                seen = self.watch.version()
                self._others = self._others_version()
                due = self._soonest_us()
                self.stop.wait(max(0.0, min(SETTLE, _seconds_until(due))))

    def _others_version(self) -> int:
        with self._reading:
            return others_version(connections[self.alias])

    def _without_own(self, seen: object) -> object:
        """The present version, if nobody else has committed since the last look at the schedules; else `seen`."""
        now = self.watch.version()
        if self._others_version() != self._others:
            return seen
        self.watch.forget()
        return now

    def _renew_in_sleep(self) -> bool:
        """Keep the lease. That it failed decides nothing: the next round's first statement does."""
        try:
            kept = write_transaction(self.alias, lambda _: self._renew(clock.now_us()))
        except DatabaseError as error:
            signals.emit(signals.database_trouble, doing="renewing the leadership", error=error, pause=0.0)
            return False
        self.renewed_at = clock.monotonic()
        return kept


def _is_due(due: int | None) -> bool:
    return due is not None and due <= clock.now_us()


def _seconds_until(due: int | None) -> float:
    return LONGEST_SLEEP if due is None else (due - clock.now_us()) / SECOND
