"""The tick: the jobs of due boundaries are enqueued, in short steps.

One step is one transaction. It ends after about 50 ms or 1,000 jobs, so that no other writer waits for long if many
schedules are due or many boundaries were missed. A boundary's job and its schedule's new place are always written in
the same step, so a tick that is interrupted keeps its progress and fires nothing twice.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import NamedTuple

from django.db import connections

from django_alkstore import clock, conf, signals
from django_alkstore.clock import LAST_US, SECOND, from_us
from django_alkstore.dialects import Operations
from django_alkstore.dialects.base import BoundaryCounts, NewJob, StoredSchedule
from django_alkstore.dialects.transactions import after_commit, is_open, resolve_alias, write_transaction
from django_alkstore.durations import aware_moment, seconds
from django_alkstore.exceptions import AlkstoreError
from django_alkstore.names import validate_name
from django_alkstore.payloads import decode_payload
from django_alkstore.services.options import check_fire_options, defaults_for, options_of_schedule, stamp
from django_alkstore.services.schedules import NO_MORE_BOUNDARIES, within
from django_alkstore.specs import Spec, count, parse_spec
from django_alkstore.specs import due as due_boundaries

MAX_CATCH_UP = 64
"""Boundaries of one schedule that one tick fires at most."""

LONGEST_STEP = 0.05
"""Seconds after which a step enqueues no further job. The commit is not included."""
JOBS_IN_STEP = 1_000
"""Jobs that one step enqueues at most. A commit takes longer the more there is to write."""
PAUSE = 0.025
"""Seconds between two steps. SQLite's own wait for a lock tries again at most 25 ms after its last try (for the first
0.13 s), so a writer that has waited for one step gets the writer lock before the next."""
DEFAULT_GRACE = 60
"""Seconds after a boundary in which it fires, with `catch_up="none"`."""
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
    """Enqueue the job of each due boundary and move the schedules on. Returns what was fired.

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
        self.passed: list[tuple[str, BoundaryCounts]] = []
        """Schedules with boundaries that did not fire."""
        self.more = False
        """True if other boundaries may be due."""
        self.unfinished = dict(unfinished)
        """For a schedule (by id) that has fired a part of its boundaries: how many of them this tick may still fire."""
        self._bounded = bounded
        self._started = clock.waiting_from()
        self._jobs = 0

    def count_job(self) -> None:
        self._jobs += 1

    def note_passed(self, name: str, counts: BoundaryCounts) -> None:
        if counts.coalesced or counts.too_late or counts.overlapped:
            self.passed.append((name, counts))

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
        for name, counts in self.passed:
            signals.emit(
                signals.boundaries_passed,
                name=name,
                coalesced=counts.coalesced,
                too_late=counts.too_late,
                overlapped=counts.overlapped,
            )
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
    if due.skips_overlap:
        due = due.without_overlap(has_live=bool(due.boundaries) and db.has_live_fire(due.name))
    passed, fires = _insert_jobs(db, due, step)
    last = due.boundaries[passed - 1] if passed else None
    counts = due.counts._replace(fired=fires)
    if passed < len(due.boundaries):
        if db.move_schedule(stored.id, stored.next_fire_at, step.now, due.boundaries[passed], last, counts):
            # Not only those that are due by now: another may become due before the next step.
            step.unfinished[stored.id] = limit - passed
        return
    counts = counts._replace(too_late=counts.too_late + due.beyond_limit)
    step.note_passed(due.name, counts)
    if due.goes_on is not None or not due.is_endless:
        db.move_schedule(stored.id, stored.next_fire_at, step.now, due.goes_on, last, counts)
    elif db.move_schedule(stored.id, stored.next_fire_at, step.now, stored.next_fire_at, last, counts):
        db.pause_broken(stored.id, stored.next_fire_at, step.now, NO_MORE_BOUNDARIES)
        step.broken.append((due.name, NO_MORE_BOUNDARIES))


def _insert_jobs(db: Operations, due: "_Due", step: Step) -> tuple[int, int]:
    """Enqueue the jobs of the first boundaries until the step is full: how many boundaries, and how many jobs."""
    fires = 0
    for number, boundary in enumerate(due.boundaries, 1):
        job_id = db.insert_job(due.job_at(boundary))
        # `None` means that the boundary has its job already.
        if job_id is not None:
            fires += 1
            step.fires.append(Fire(due.name, due.job.queue, from_us(boundary), job_id))
        step.count_job()
        if step.is_full():
            return number, fires
    return len(due.boundaries), fires


class _Due(NamedTuple):
    """A due schedule, read and checked."""

    name: str
    job: NewJob
    boundaries: Sequence[int]
    """Those to fire, the earliest first."""
    goes_on: int | None
    """The next boundary once all of them are fired; None if there is none."""
    is_endless: bool
    """True if the spec has always a next boundary, so that none means the end of all dates."""
    counts: BoundaryCounts
    """What became of the boundaries before the first that fires."""
    beyond_limit: int
    """Boundaries after the last that fires, which are skipped."""
    skips_overlap: bool
    jitter: float

    @classmethod
    def read(cls, stored: StoredSchedule, now: int, limit: int) -> "_Due":
        """Check the row, in which another program may have written anything. At most `limit` boundaries are fired."""
        name = validate_name("schedule", stored.name.decode())
        queue = validate_name("queue", stored.queue.decode())
        spec = parse_spec(stored.spec.decode(), None if stored.timezone is None else stored.timezone.decode())
        decode_payload(stored.payload)
        payload = stored.payload.decode()
        options = check_fire_options(options_of_schedule(stored))
        job = stamp(queue, payload, options, defaults_for(queue, conf.settings()), now)
        first = stored.next_fire_at
        catch_up = spec.catches_up if stored.catch_up is None else stored.catch_up.decode()
        until = now if stored.ends_at is None else min(now, stored.ends_at)
        boundaries, counts = _chosen(spec, first, until, now, catch_up, _grace(stored.grace, catch_up), limit)
        beyond = 0
        if catch_up == "all" and len(boundaries) == limit:
            following = spec.after(first, boundaries[-1])
            beyond = 0 if following is None else count(spec, following, until + 1)
        return cls(
            name=name,
            job=job._replace(schedule=name, task=stored.task.decode()),
            boundaries=boundaries,
            goes_on=within(spec.after(first, now), stored.ends_at),
            is_endless=spec.catches_up == "all" and stored.ends_at is None,
            counts=counts,
            beyond_limit=beyond,
            skips_overlap=stored.overlap == b"skip",
            jitter=seconds("jitter", stored.jitter, zero=True),
        )

    def without_overlap(self, *, has_live: bool) -> "_Due":
        """The same, if a boundary does not fire beside the job of an earlier one."""
        kept = [] if has_live else self.boundaries[:1]
        overlapped = len(self.boundaries) - len(kept)
        return self._replace(boundaries=kept, counts=self.counts._replace(overlapped=overlapped))

    def job_at(self, boundary: int) -> NewJob:
        """The job of a boundary. Its jitter is the same however often the boundary is asked for."""
        job = self.job._replace(fire_at=boundary)
        if not self.jitter:
            return job
        put_off = round(random.Random(f"{self.name}:{boundary}").uniform(0, self.jitter) * SECOND)
        expires_at = None if job.expires_at is None else min(job.expires_at + put_off, LAST_US)
        return job._replace(run_at=min(job.run_at + put_off, LAST_US), expires_at=expires_at)


def _grace(stored: float | None, catch_up: str) -> int | None:
    """Microseconds after a boundary in which it fires; None if it always does."""
    if stored is None:
        return DEFAULT_GRACE * SECOND if catch_up == "none" else None
    return round(seconds("grace", stored, zero=True) * SECOND)


def _chosen(
    spec: Spec, first: int, until: int, now: int, catch_up: str, grace: int | None, limit: int
) -> tuple[list[int], BoundaryCounts]:
    """The boundaries up to `until` to fire, and what became of those before them. `first` is due."""
    if first > until:
        return [], BoundaryCounts()
    if catch_up == "latest":
        latest = spec.latest(first, until)
        missed = count(spec, first, latest)
        if grace is not None and latest < now - grace:
            return [], BoundaryCounts(coalesced=missed, too_late=1)
        return [latest], BoundaryCounts(coalesced=missed)
    begin: int | None = first
    too_late = 0
    if grace is not None and first < now - grace:
        begin = spec.after(first, now - grace - 1)
        too_late = count(spec, first, min(now - grace, until + 1))
    if begin is None:
        return [], BoundaryCounts(too_late=too_late)
    return list(due_boundaries(spec, begin, until, limit)), BoundaryCounts(too_late=too_late)
