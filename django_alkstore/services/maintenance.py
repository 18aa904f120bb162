"""What workers and schedulers do each minute: delete the finished jobs whose time is over, and say that they live."""

from collections import Counter
from collections.abc import Iterable

from django.db import DatabaseError

from django_alkstore import clock, conf, signals
from django_alkstore.clock import SECOND
from django_alkstore.dialects.transactions import is_contention, resolve_alias, write_statement
from django_alkstore.models import State
from django_alkstore.services import presence
from django_alkstore.services.claims import sweep_whole_queue

PRUNE_BATCH = 500
"""Rows deleted in one transaction: some milliseconds of the writer lock."""

UPKEEP_INTERVAL = 60.0
"""Seconds between the upkeep rounds of a running worker or scheduler."""


def retention() -> dict[str, float | None]:
    """Seconds that a finished job is kept, by state; `None`: for ever."""
    settings = conf.settings()
    return {
        State.COMPLETED.value: settings.keep_completed,
        State.DEAD.value: settings.keep_dead,
        State.CANCELLED.value: settings.keep_dead,
    }


def prune(*, using: str | None = None) -> dict[str, int]:
    """Delete every finished job that is older than the settings keep it: how many, by state.

    Works in short transactions, so that others write in between; one that is interrupted keeps its progress.
    """
    alias = resolve_alias(using)
    removed: Counter[str] = Counter(dict.fromkeys(retention(), 0))
    while batch := prune_batch(alias):
        removed.update(batch)
    return dict(removed)


def prune_batch(alias: str) -> dict[str, int]:
    """Delete one batch of one state: how many, by state; empty where nothing is left to prune."""
    now = clock.now_us()
    for state, keep in retention().items():
        if keep is None:
            continue
        before = now - round(keep * SECOND)
        count = write_statement(
            alias,
            lambda db, s=state, b=before: db.prune(s, b, PRUNE_BATCH),  # type: ignore[misc]
        )
        if count:
            return {state: count}
    return {}


class Upkeep:
    """When a worker or scheduler prunes and sweeps: at its start, each minute, and at once while there is more.

    A worker leaves its sign of life with it.
    """

    def __init__(
        self, alias: str, queues: Iterable[str] = (), worker_id: str | None = None, liveness: str | None = None
    ) -> None:
        """`queues`: those to sweep. A worker sweeps its own only: other workers may know handlers that it does not.

        `worker_id` and `liveness`: the worker's `Liveness.holder` and `.file`; without an id no sign is left.
        """
        self.alias = alias
        self._queues = tuple(queues)
        self._worker_id = worker_id
        self._liveness = liveness
        self._due_at = self._sign_due_at = clock.monotonic()
        self._removed: Counter[str] = Counter()

    def due_in(self) -> float:
        """Seconds until the next step; 0 where it is due."""
        return max(0.0, self._due_at - clock.monotonic())

    def step(self, as_of: int | None = None) -> None:
        """Prune one batch, if it is time; at the end sweep, and announce what it has removed.

        `as_of`: the moment (microseconds; default: now) at which a job must have lapsed to be swept.
        """
        if self.due_in() > 0:
            return
        if clock.monotonic() >= self._sign_due_at:
            self._sign()
        batch = prune_batch(self.alias)
        self._removed.update(batch)
        if batch:
            return
        # A worker whose threads are all busy claims nothing, and so sweeps nothing on the way.
        for queue in self._queues:
            sweep_whole_queue(self.alias, queue, as_of)
        self._due_at = clock.monotonic() + UPKEEP_INTERVAL
        if self._removed:
            signals.emit(signals.jobs_pruned, removed=dict(self._removed))
            self._removed.clear()

    def end(self) -> None:
        """Take back the sign of life. It lapses by itself if that cannot be written."""
        if self._worker_id is not None:
            presence.take_back(self.alias, self._worker_id)

    def _sign(self) -> None:
        """Leave the sign of life, and take away what the dead have left. It is no reason not to work."""
        try:
            if self._worker_id is not None:
                presence.leave(self.alias, self._worker_id, self._queues, self._liveness)
            presence.remove_lapsed(self.alias)
        except DatabaseError as error:
            if is_contention(self.alias, error):
                raise  # tried again soon, like the rest of the upkeep, which could not be written either
            pause = UPKEEP_INTERVAL
            signals.emit(signals.database_trouble, doing="leaving a sign of life", error=error, pause=pause)
        self._sign_due_at = clock.monotonic() + UPKEEP_INTERVAL
