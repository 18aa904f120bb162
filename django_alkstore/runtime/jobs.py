"""One claimed job in a worker, what becomes of it, and the limits that it is subject to."""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from django_alkstore import failures
from django_alkstore.registry import Registration
from django_alkstore.services import JobHandle
from django_alkstore.services.outcomes import Outcome

QUICK = 0.002
"""Seconds. A thread that leads keeps the leadership while it runs a handler that takes less on average."""
SLOW = 0.005
"""Seconds after which a handler, or a receiver of an event, turns out not to be quick: another thread leads."""
BATCH_SECONDS = 0.05
"""Seconds of work that one claim takes for quick handlers."""
LARGEST_BATCH = 64
LONGEST_WAIT_TO_START = 1.0
"""Seconds that a claimed job may wait for a thread. Then it is given back."""
LONGEST_UNWRITTEN = 0.05
"""Seconds that a result may wait for the leader. Then the keeper writes it."""
RENEWALS_PER_LEASE = 3
SHORTEST_RENEWAL = 0.02
"""Seconds between two renewals, however short the lease is."""
LOOK_FOR_LOSS = 1.0
"""Seconds between two looks for running jobs that were cancelled, deleted or taken."""
_SUSPICIOUS = (failures.WORKER_DIED, failures.LEASE_EXPIRED)


CANCEL_TIMEOUT = 5.0
"""Seconds that a cancelled coroutine may take to end. Then the worker ends with status 4."""
OVERSLEPT = 1.0
"""Seconds. If the keeper wakes later than this after a deadline, the process was suspended or starved."""


class Runner(Protocol):
    """A handler thread or the event loop, as far as the keeper uses it."""

    def cancel(self, run: "Run") -> None: ...
    def has_open_transaction(self, run: "Run") -> bool: ...
    def cut_off(self, run: "Run") -> None: ...


@dataclass(slots=True, eq=False)
class Run:
    """One claimed job in this worker."""

    job: JobHandle
    registration: Registration
    claimed_at: float
    """Monotonic seconds, like every moment here."""
    renew_at: float
    in_loop: bool = False
    """True if the event loop runs it, and no handler thread."""
    thread: Runner | None = None
    """The thread that started it."""
    started_at: float | None = None
    fails_at: float = inf
    """When its time limit is over. That of an atomic handler counts from the moment at which it has the writer lock."""
    lost: bool = False
    """True once the lease is known to be lost."""
    ends_by: float = inf
    """When a cancelled coroutine must have ended. Inf before it is cancelled."""

    @property
    def holds_lease(self) -> bool:
        """True unless the lease is known to be lost, or the handler has settled the job itself."""
        return not (self.lost or self.job._settled)


def is_suspected(job: JobHandle) -> bool:
    """True if the last attempt ended with its process or with its lease: perhaps the job has caused that."""
    return job.last_error in _SUSPICIOUS


def renewal_after(began_at: float, job: JobHandle) -> float:
    """When to renew a lease that began to count at `began_at`."""
    return began_at + max(job._visibility_timeout / RENEWALS_PER_LEASE, SHORTEST_RENEWAL)


class Result(NamedTuple):
    """What is to be written about a job that this worker is done with."""

    run: Run
    outcome: Outcome
    seconds: float
    ended_at: float


class Plan(NamedTuple):
    """What the leader is to do next."""

    results: list[Result]
    free: int
    """Jobs of sync handlers that could start now; 0 if no more of them are to be claimed."""
    coroutines: int
    """Coroutines that the event loop has room for."""
    batches: dict[str, int]
    """How many jobs to claim from each queue whose handler is known to be quick."""
    renewals: list[Run]
    """Jobs whose leases are to be renewed."""
