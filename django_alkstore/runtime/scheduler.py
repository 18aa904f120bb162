"""Standing by for the leadership, and taking it over when it is free."""

import threading
from datetime import datetime

from django.db import DatabaseError

from django_alkstore import clock, names, signals
from django_alkstore.dialects.forks import guard
from django_alkstore.dialects.watch import Watch
from django_alkstore.exceptions import LeadershipLost
from django_alkstore.services.leader import LEADERSHIP_TTL, noticed, run_schedules
from django_alkstore.services.locks import holder
from django_alkstore.services.patience import Patience

EXIT_OK = 0
EXIT_NOT_LEADING = 3

SETTLE = 0.2
"""Seconds between two looks at the leadership while others keep committing."""
_MARGIN = 0.05
"""Seconds past the lease's end, so that it has ended by the database's microseconds too."""


def schedule_until(stop: threading.Event, alias: str, *, standby: bool = True) -> int:
    """Lead, and stand by while another leads, until `stop` is set; the exit code.

    Without `standby` it does not wait for a leadership that it has not got, or has lost.
    """
    patience = Patience("taking the leadership", alias)
    while not stop.is_set():
        try:
            run_schedules(stop, using=alias)
        except LeadershipLost as lost:
            patience.reset()
            if not standby:
                signals.emit(signals.leader_absent, reason=str(lost))
                return EXIT_NOT_LEADING
            try:
                _Standby(alias, stop).wait()
            except DatabaseError as error:
                stop.wait(patience.after(error))
        except DatabaseError as error:
            stop.wait(patience.after(error))
    return EXIT_OK


class _Standby:
    """Waits for the leadership to be free: told at once of a release, and by the lease's end of a crash."""

    def __init__(self, alias: str, stop: threading.Event) -> None:
        self.alias = alias
        self.stop = stop
        self.patience = Patience("standing by", alias)
        self._reading = guard()

    def wait(self) -> None:
        announced: str | None = None
        with Watch(self.alias) as watch, noticed(self.stop, watch) as longest_wait:
            while not self.stop.is_set():
                seen = watch.version()
                try:
                    with self._reading:
                        held = holder(names.LEADERSHIP_LOCK, using=self.alias)
                except DatabaseError as error:
                    self.stop.wait(self.patience.after(error))
                    continue
                self.patience.reset()
                if held is None:
                    return
                owner, expires_at = held
                if owner != announced:
                    signals.emit(signals.standing_by, owner=owner, expires_at=expires_at)
                    announced = owner
                self._wait_for_news(watch, seen, expires_at, longest_wait)
        signals.emit(signals.standby_ended)

    def _wait_for_news(self, watch: Watch, seen: object, expires_at: datetime, longest_wait: float) -> None:
        left = (expires_at - clock.now()).total_seconds() + _MARGIN
        deadline = clock.monotonic() + min(max(left, _MARGIN), LEADERSHIP_TTL)
        while (rest := deadline - clock.monotonic()) > 0 and not self.stop.is_set():
            if watch.wait(seen, min(rest, longest_wait)):
                self.stop.wait(SETTLE)
                return
