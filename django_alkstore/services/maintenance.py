"""What workers and schedulers do each minute: delete the finished jobs whose time is over, and say that they live."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from django_alkstore import clock, conf, signals
from django_alkstore.clock import FIRST_US, SECOND, from_us
from django_alkstore.dialects.transactions import after_commit, resolve_alias, write_statement, write_transaction
from django_alkstore.durations import Duration, seconds
from django_alkstore.exceptions import InvalidOption, shown
from django_alkstore.models import Job, State
from django_alkstore.names import queue_named
from django_alkstore.services import presence
from django_alkstore.services.claims import sweep_once

T = TypeVar("T")

FINISHED_STATES = (State.COMPLETED.value, State.DEAD.value, State.CANCELLED.value)
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
    """Delete one batch of one state: how many, by state; empty if nothing is left to prune."""
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


def delete_finished(
    *,
    queue: str | None = None,
    state: str | None = None,
    older_than: Duration = 0,
    using: str | None = None,
) -> dict[str, int]:
    """Delete finished jobs whatever the settings keep: how many, by state.

    `queue`: only those of this queue; `outbox:NAME` names an outbox. `state`: `completed`, `dead` or `cancelled`;
    default all three. `older_than`: those that finished at least so many seconds ago. Live jobs are never deleted.
    Works in short transactions, as `prune`.
    """
    alias = resolve_alias(using)
    name = None if queue is None else queue_named(queue)
    age = seconds("older_than", older_than, zero=True)
    if state is not None and state not in FINISHED_STATES:
        raise InvalidOption(f"state must be one of {', '.join(FINISHED_STATES)}, not {shown(state)}")
    before = from_us(max(clock.now_us() - round(age * SECOND), FIRST_US))
    removed = {}
    for chosen in FINISHED_STATES if state is None else (state,):
        jobs = Job.objects.using(alias).filter(state=chosen, finished_at__lte=before)
        if name is not None:
            jobs = jobs.filter(queue=name)
        # Read first, without the writer lock: among many jobs of other queues, finding a batch may take long.
        ids = list(jobs.order_by("finished_at").values_list("pk", flat=True))
        removed[chosen] = sum(delete_batch(alias, batch) for batch in batches(ids, PRUNE_BATCH))
    if any(removed.values()):
        after_commit(alias, partial(signals.emit, signals.jobs_pruned, removed=removed))
    return removed


def delete_batch(alias: str, ids: Sequence[int]) -> int:
    """Delete the finished ones of these jobs in one transaction. Returns how many. Live jobs stay."""
    finished = Job.objects.using(alias).filter(pk__in=ids, state__in=FINISHED_STATES)
    return write_transaction(alias, lambda _: finished.delete()[0])


def batches(ids: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """`ids` in parts of at most `size`."""
    for start in range(0, len(ids), size):
        yield ids[start : start + size]


class Upkeep:
    """When a worker or scheduler prunes and sweeps: at its start, each minute, and at once while there is more.

    A worker leaves its sign of life with it.
    """

    def __init__(
        self, alias: str, queues: Iterable[str] = (), worker_id: str | None = None, liveness: str | None = None
    ) -> None:
        """`queues`: those to sweep, since a worker whose threads are all busy claims nothing, and so sweeps nothing.
        A worker sweeps its own queues only: other workers may know handlers that it does not.

        `worker_id` and `liveness`: the worker's `Liveness.holder` and `.file`; without an id no sign is left.
        """
        self.alias = alias
        self._queues = tuple(queues)
        self._worker_id = worker_id
        self._liveness = liveness
        self._due_at = self._sign_due_at = clock.monotonic()
        self._removed: Counter[str] = Counter()
        self._is_pruned = False
        """True once this round has found nothing more to prune."""
        self._unswept = list(self._queues)
        """The queues in which this round may find more to sweep."""

    def due_in(self) -> float:
        """Seconds until the next step; 0 if it is due."""
        return max(0.0, self._due_at - clock.monotonic())

    def step(self, as_of: int | None = None) -> None:
        """If it is time: prune one batch, or sweep one batch of one queue. Due again at once until the round is over.

        `as_of`: the moment (microseconds; default: now) at which a job must have lapsed to be swept.
        """
        if self.due_in() > 0:
            return
        if clock.monotonic() >= self._sign_due_at:
            self._sign()
        if not self._is_pruned:
            batch = prune_batch(self.alias)
            self._removed.update(batch)
            self._is_pruned = not batch
        elif not sweep_once(self.alias, self._unswept[-1], as_of):
            self._unswept.pop()
        if self._is_pruned and not self._unswept:
            self._end_round()

    def _end_round(self) -> None:
        self._due_at = clock.monotonic() + UPKEEP_INTERVAL
        self._is_pruned = False
        self._unswept = list(self._queues)
        if self._removed:
            signals.emit(signals.jobs_pruned, removed=dict(self._removed))
            self._removed.clear()

    def end(self) -> None:
        """Take back the sign of life. It lapses by itself if that cannot be written."""
        if self._worker_id is not None:
            presence.take_back(self.alias, self._worker_id)

    def _sign(self) -> None:
        """Leave the sign of life, and take away what dead workers have left."""
        if self._worker_id is not None:
            presence.leave(self.alias, self._worker_id, self._queues, self._liveness)
        presence.remove_lapsed(self.alias)
        self._sign_due_at = clock.monotonic() + UPKEEP_INTERVAL
