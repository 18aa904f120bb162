"""Keeping the table small: finished jobs are deleted once their time is over, in small batches."""

from collections import Counter
from collections.abc import Iterable

from django_alkstore import clock, conf, signals
from django_alkstore.clock import SECOND
from django_alkstore.dialects.transactions import resolve_alias, write_statement
from django_alkstore.models import State
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
    """When a worker or scheduler prunes and sweeps: at its start, each minute, and at once while there is more."""

    def __init__(self, alias: str, queues: Iterable[str] = ()) -> None:
        """`queues`: those to sweep; a worker's own, since the jobs of others are not its to touch."""
        self.alias = alias
        self._queues = tuple(queues)
        self._due_at = clock.monotonic()
        self._removed: Counter[str] = Counter()

    def due_in(self) -> float:
        """Seconds until the next step; 0 where it is due."""
        return max(0.0, self._due_at - clock.monotonic())

    def step(self) -> None:
        """Prune one batch, if it is time; at the round's end sweep, and announce what it has removed."""
        if self.due_in() > 0:
            return
        batch = prune_batch(self.alias)
        self._removed.update(batch)
        if batch:
            return
        # A worker whose threads are all busy claims nothing, and so sweeps nothing on the way.
        for queue in self._queues:
            sweep_whole_queue(self.alias, queue)
        self._due_at = clock.monotonic() + UPKEEP_INTERVAL
        if self._removed:
            signals.emit(signals.jobs_pruned, removed=dict(self._removed))
            self._removed.clear()
