"""The tick: the jobs of due boundaries are enqueued, in short steps.

One step is one transaction. It ends after about 50 ms or 1,000 jobs, so that no other writer waits for long if many
schedules are due or many boundaries were missed. A boundary's job and its schedule's new place are always written in
the same step, so a tick that is interrupted keeps its progress and fires nothing twice.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import NamedTuple

from django.db import connections

from django_alkstore import clock, conf, signals
from django_alkstore.clock import LAST_US, from_us, to_us
from django_alkstore.dialects import Operations
from django_alkstore.dialects.base import NewJob, StoredSchedule
from django_alkstore.dialects.transactions import after_commit, is_open, resolve_alias, write_transaction
from django_alkstore.durations import aware_moment
from django_alkstore.exceptions import AlkstoreError
from django_alkstore.names import validate_name
from django_alkstore.payloads import decode_payload
from django_alkstore.services.options import check_fire_options, defaults_for, options_of_schedule, stamp
from django_alkstore.services.schedules import NO_MORE_BOUNDARIES
from django_alkstore.specs import parse_spec

MAX_CATCH_UP = 64
"""Boundaries of one schedule that one tick fires at most."""

LONGEST_STEP = 0.05
"""Seconds after which a step enqueues no further job. The commit is not included."""
JOBS_IN_STEP = 1_000
"""Jobs that one step enqueues at most. A commit takes longer the more there is to write."""
PAUSE = 0.025
"""Seconds between two steps. SQLite's own wait for a lock tries again at most 25 ms after its last try (for the first
0.13 s), so a writer that has waited for one step gets the writer lock before the next."""
_READ_AT_ONCE = 16
"""Schedules read by one statement. Each may have a payload of 1 MiB."""


class Fire(NamedTuple):
    """One boundary turned into one job."""

    name: str
    queue: str
    fire_at: datetime
    """The boundary."""
    job_id: int


def tick(now: datetime | None = None, *, using: str | None = None) -> list[Fire]:
    """Enqueue the job of each due boundary and move the schedules on; what was fired.

    At most 64 boundaries of a schedule, the earliest. The rest is skipped, and the schedule goes on from its first
    boundary after `now` (default: the clock). A schedule that cannot be read is paused with its error.

    Works in steps of one short transaction each. In the caller's open transaction it is all part of that.
    """
    moment = None if now is None else aware_moment("now", now)
    alias = resolve_alias(using)
    bounded = not is_open(connections[alias])
    fires: list[Fire] = []
    unfinished: Mapping[int, int] = {}
    while True:
        step = write_transaction(
            alias,
            lambda db, at=moment, left=unfinished: tick_step(  # type: ignore[misc]
                db, clock.now_us() if at is None else at, left, bounded=bounded
            ),
        )
        after_commit(alias, step.announce)
        fires += step.fires
        if not step.more:
            return fires
        moment, unfinished = step.now, step.unfinished
        clock.sleep(PAUSE)


class Step:
    """What one step has done, and what it has left for the next."""

    def __init__(self, now: int, unfinished: Mapping[int, int] = MappingProxyType({}), *, bounded: bool = True) -> None:
        self.now = now
        self.fires: list[Fire] = []
        self.broken: list[tuple[str, str]] = []
        """Name and error of each schedule that was paused."""
        self.more = False
        """True if other boundaries may be due."""
        self.unfinished = dict(unfinished)
        """For a schedule (by id) that has fired a part of its boundaries: how many of them this tick may still fire."""
        self._bounded = bounded
        self._started = clock.waiting_from()
        self._jobs = 0

    def count_job(self) -> None:
        self._jobs += 1

    def is_full(self) -> bool:
        """True if the step must end, so that others can write."""
        if not self._bounded:
            return False
        return self._jobs >= JOBS_IN_STEP or clock.waited_since(self._started) >= LONGEST_STEP

    def announce(self, between: Callable[[], object] = lambda: None) -> None:
        """Send the events of this step, which is committed; call `between` after each of them."""
        for fire in self.fires:
            signals.emit(signals.schedule_fired, fire=fire)
            between()
        for name, reason in self.broken:
            signals.emit(signals.schedule_broken, name=name, reason=reason)
            between()


def tick_step(db: Operations, now: int, unfinished: Mapping[int, int], *, bounded: bool = True) -> Step:
    """One step, inside a transaction that holds the writer lock. It fires at least one boundary if one is due.

    `unfinished`: what the step before has left. Not `bounded`: the step does not end before nothing more is due.
    """
    step = Step(now, unfinished, bounded=bounded)
    while rows := db.due_schedules(now, _READ_AT_ONCE):
        for stored in rows:
            _fire_due(db, stored, step)
            if step.is_full():
                step.more = True
                return step
    return step


def _fire_due(db: Operations, stored: StoredSchedule, step: Step) -> None:
    """Fire the schedule's due boundaries until the step is full, and move the schedule on."""
    limit = step.unfinished.pop(stored.id, MAX_CATCH_UP)
    # Only the reading is guarded. A database error says nothing about the row, and rolls the step back.
    try:
        due = _Due.read(stored, step.now, limit)
    except (AlkstoreError, ValueError, TypeError, RecursionError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        if db.pause_broken(stored.id, stored.next_fire_at, step.now, reason):
            step.broken.append((stored.name.decode(errors="replace"), reason))
        return
    fired = _insert_jobs(db, due, step)
    last = due.boundaries[fired - 1]
    if fired < len(due.boundaries):
        if db.move_schedule(stored.id, stored.next_fire_at, step.now, due.boundaries[fired], last):
            # Not only those that are due by now: another may become due before the next step.
            step.unfinished[stored.id] = limit - fired
    elif due.goes_on <= LAST_US:
        db.move_schedule(stored.id, stored.next_fire_at, step.now, due.goes_on, last)
    elif db.move_schedule(stored.id, stored.next_fire_at, step.now, last, last):
        db.pause_broken(stored.id, last, step.now, NO_MORE_BOUNDARIES)
        step.broken.append((due.name, NO_MORE_BOUNDARIES))


def _insert_jobs(db: Operations, due: "_Due", step: Step) -> int:
    """Enqueue the jobs of the first boundaries until the step is full; how many boundaries."""
    for number, boundary in enumerate(due.boundaries, 1):
        job_id = db.insert_job(due.job._replace(fire_at=boundary))
        # `None`: the boundary has its job already, and is not fired again.
        if job_id is not None:
            step.fires.append(Fire(due.name, due.job.queue, from_us(boundary), job_id))
        step.count_job()
        if step.is_full():
            return number
    return len(due.boundaries)


class _Due(NamedTuple):
    """A due schedule, read and checked."""

    name: str
    job: NewJob
    boundaries: Sequence[int]
    """Those to fire, the earliest first. There is at least one."""
    goes_on: int
    """The next boundary once all of them are fired."""

    @classmethod
    def read(cls, stored: StoredSchedule, now: int, limit: int) -> "_Due":
        """Check the row, in which another program may have written anything. At most `limit` boundaries are fired."""
        name = validate_name("schedule", stored.name.decode())
        queue = validate_name("queue", stored.queue.decode())
        every = parse_spec(stored.spec.decode())
        decode_payload(stored.payload)
        payload = stored.payload.decode()
        options = check_fire_options(options_of_schedule(stored))
        job = stamp(queue, payload, options, defaults_for(queue, conf.settings()), now)
        first = to_us(from_us(stored.next_fire_at))  # raises if no date can hold it
        fired = min(every.due(first, now), limit)
        return cls(
            name=name,
            job=job._replace(schedule=name),
            boundaries=range(first, first + fired * every.interval, every.interval),
            goes_on=every.first_after(first, now),
        )
