"""How many jobs a worker claims at once, and which of them it keeps."""

from collections.abc import Callable, Container

from django_alkstore.dialects import Operations
from django_alkstore.dialects.base import UNTAKEN
from django_alkstore.runtime.jobs import LARGEST_BATCH, Plan, is_suspected
from django_alkstore.services import JobHandle


class Room:
    """How many jobs may still be claimed in one transaction."""

    def __init__(
        self, plan: Plan, of_coroutines: Container[str], mixed: Container[str], one_by_one: Container[str]
    ) -> None:
        self._batches = plan.batches
        self._of_coroutines = of_coroutines
        self._mixed = mixed
        self._one_by_one = one_by_one
        self._free, self._room, self._coroutines = plan.free, LARGEST_BATCH, plan.coroutines

    def limit(self, queue: str) -> int:
        """How many jobs of the queue may be claimed. It may be less than 0."""
        if queue in self._of_coroutines:
            return self._coroutines
        if self._free <= 0:
            return 0
        batch = self._batches.get(queue, self._free)
        if queue in self._mixed:
            batch = min(batch, self._coroutines)
        return min(self._room, 1 if queue in self._batches and queue in self._one_by_one else batch)

    def take(self, queue: str, count: int) -> None:
        """So many jobs of the queue were claimed."""
        if queue in self._of_coroutines:
            self._coroutines -= count
        else:
            if queue in self._mixed:
                self._coroutines -= count
            # The leader runs a batch by itself.
            self._free -= 1 if queue in self._batches else count
            self._room -= count


def kept(claimed: list[JobHandle], db: Operations, is_alone: Callable[[JobHandle], bool]) -> list[JobHandle]:
    """The jobs of a claim that the worker keeps. The same transaction gives the others back, with their attempts.

    The first job starts at once. Another is only kept if it loses little by a crash that a job before it causes:
    neither it nor the first is to be claimed alone.
    """
    first, *others = claimed
    kept = [] if is_alone(first) else [job for job in others if not is_alone(job)]
    for job in others:
        if job not in kept:
            db.give_back((job.id, job._fence, UNTAKEN), None)
    return [first, *kept]


def starts_alone(job: JobHandle) -> bool:
    """True if the job is not claimed ahead of a free thread: it has its last attempt, or is suspected of a crash."""
    return job.attempt >= job.max_attempts or is_suspected(job)
