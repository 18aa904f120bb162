"""Leading the schedules, and standing by while another scheduler leads."""

import threading
from datetime import timedelta

from django.db import DatabaseError

from django_alkstore import clock, names, signals
from django_alkstore.dialects.base import DatabaseReplaced
from django_alkstore.dialects.transactions import write_transaction
from django_alkstore.exceptions import LeadershipLost
from django_alkstore.models import Lock
from django_alkstore.services.error_backoff import ErrorBackoff
from django_alkstore.services.leader import LEADERSHIP_TTL, lead, say_if_leases_decide
from django_alkstore.services.waiting import StopRequested, Waiter

EXIT_OK = 0
EXIT_NOT_LEADING = 3

SETTLE = 0.2
"""Seconds between two looks at the leadership while others keep committing."""
HEAD_START = 0.5
"""Seconds in which a leader may renew a lease that has run out, once the writer lock is free. Perhaps another process
held the writer lock until then."""
_MARGIN = 0.05
"""Seconds past the lease's end, so that it has ended by the database's microseconds too."""


def schedule_until(stop: threading.Event, alias: str, *, standby: bool = True, beside_worker: bool = False) -> int:
    """Lead, and stand by while another scheduler leads, until `stop` is set; the exit code.

    Without `standby` it does not wait for a leadership that it cannot take or has lost. `beside_worker`: a worker of
    the same process says if crash detection is off.
    """
    error_backoff = ErrorBackoff("taking the leadership", alias)
    said = beside_worker
    while not stop.is_set():
        try:
            with Waiter(alias, stop) as waiter:
                if not said:
                    say_if_leases_decide(waiter.liveness.reason)
                    said = True
                return _lead_or_stand_by(waiter, error_backoff, standby=standby)
        except DatabaseError as error:
            stop.wait(error_backoff.after(error))
    return EXIT_OK


def _lead_or_stand_by(waiter: Waiter, error_backoff: ErrorBackoff, *, standby: bool) -> int:
    while not waiter.stop.is_set():
        try:
            lead(waiter, error_backoff.reset)
        except LeadershipLost as lost:
            error_backoff.reset()
            if not standby:
                signals.emit(signals.leader_absent, reason=str(lost))
                return EXIT_NOT_LEADING
            _Standby(waiter).wait()
    return EXIT_OK


class _Standby:
    """Waits until the leadership can be taken.

    It is told at once of a release and, where the death of a process can be seen, of the leader's death. Otherwise the
    lease decides.
    """

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter
        self.error_backoff = ErrorBackoff("standing by", waiter.alias)
        self.announced: str | None = None

    def wait(self) -> None:
        while not self.waiter.stop.is_set():
            try:
                if self._look():
                    return
            except StopRequested:
                break
            except DatabaseReplaced:
                raise  # the watch is of no use any more
            except DatabaseError as error:
                self.waiter.stop.wait(self.error_backoff.after(error))
        signals.emit(signals.standby_ended)

    def _look(self) -> bool:
        """True if the leadership can be taken now. If not, wait for a reason to look again."""
        seen = self.waiter.watch.version()
        held = self._read_leadership()
        self.error_backoff.reset()
        if held is None or self.waiter.liveness.is_dead(held.owner, held.liveness):
            return True
        if _left(held) <= 0:
            return self._is_left_to_lapse(held)
        if held.owner != self.announced:
            signals.emit(signals.standing_by, owner=held.owner, expires_at=held.expires_at)
            self.announced = held.owner
        recovery = self.waiter.recovery
        self.waiter.in_slices(recovery.step)
        # The clock may be moved meanwhile.
        lease_end = min(_left(held) + _MARGIN, LEADERSHIP_TTL)
        if self.waiter.wait(seen, min(lease_end, recovery.due_in())):
            self.waiter.stop.wait(SETTLE)
        return False

    def _is_left_to_lapse(self, held: Lock) -> bool:
        """True if the leader does not renew its lease though it can: the writer lock is free, and it has some time."""
        alias = self.waiter.alias
        self.waiter.in_slices(lambda: write_transaction(alias, lambda _: None))
        self.waiter.stop.wait(HEAD_START)
        now = self._read_leadership()
        return now is None or (now.token == held.token and _left(now) <= 0)

    def _read_leadership(self) -> Lock | None:
        row = Lock.objects.using(self.waiter.alias).filter(name=names.LEADERSHIP_LOCK)
        return self.waiter.read(row.first)


def _left(held: Lock) -> float:
    """Seconds until the lease ends; not above 0 if it has ended."""
    left: timedelta = held.expires_at - clock.now()
    return left.total_seconds()
