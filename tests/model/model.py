"""The contract as a small program in plain Python: what is kept where the library keeps rows.

It is written from the contract and not from the code, and it knows no database: a transaction is a copy that is put
back. Where the contract says nothing, a docstring here says what is taken as right. Moments are aware datetimes, and
durations what a caller may give: seconds or a timedelta.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

Duration = float | timedelta

LIVE = ("pending", "processing")
RETRIABLE = ("dead", "cancelled")
OUTBOX_PREFIX = "__alkstore_outbox:"
MAX_ERRORS = 20
MAX_FIRES = 64
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def span(duration: Duration) -> timedelta:
    return duration if isinstance(duration, timedelta) else timedelta(seconds=duration)


def float_seconds(duration: Duration) -> float:
    return span(duration).total_seconds()


def interval_of(spec: str) -> timedelta:
    amount = spec.rsplit(maxsplit=1)[-1]
    return timedelta(**{_UNITS[amount[-1]]: int(amount[:-1])})


@dataclass(frozen=True)
class Defaults:
    """What is stamped on a job of a queue."""

    visibility_timeout: float = 300.0
    max_attempts: int = 3
    backoff_base: float = 5.0
    expires_in: float | None = None


OUTBOX_DEFAULTS = Defaults(visibility_timeout=60.0, max_attempts=5)


@dataclass(frozen=True)
class Rules:
    """The `ALKSTORE` setting."""

    keep_completed: Duration | None = timedelta(days=1)
    keep_dead: Duration | None = None
    max_backoff: float = 3_600.0
    queues: Mapping[str, Defaults] = field(default_factory=dict)

    def defaults_for(self, queue: str) -> Defaults:
        return self.queues.get(queue) or (OUTBOX_DEFAULTS if queue.startswith(OUTBOX_PREFIX) else Defaults())


@dataclass(frozen=True)
class Failure:
    """An entry of a job's `errors`, but for its traceback."""

    attempt: int
    at: datetime
    error: str


@dataclass(frozen=True)
class Job:
    """A job's row, field by field, and beside it which claim of the job is the current one."""

    id: int
    queue: str
    payload: Any
    state: str
    priority: int
    run_at: datetime
    attempts: int
    max_attempts: int
    visibility_timeout: float
    backoff_base: float
    expires_at: datetime | None
    worker_id: str | None
    lease_expires_at: datetime | None
    unique_key: str | None
    schedule: str | None
    fire_at: datetime | None
    errors: tuple[Failure, ...]
    last_error: str | None
    created_at: datetime
    finished_at: datetime | None
    claims: int = 0

    @property
    def claim(self) -> "Claim":
        return Claim(self.id, self.claims)

    def failed(self, at: datetime, error: str) -> "Job":
        errors = (*self.errors, Failure(self.attempts, at, error))[-MAX_ERRORS:]
        return replace(self, errors=errors, last_error=error)

    def let_go(self, state: str, **changes: Any) -> "Job":
        return replace(self, state=state, worker_id=None, lease_expires_at=None, **changes)


@dataclass(frozen=True)
class Claim:
    """Which claim of which job a handle is."""

    job_id: int
    number: int


@dataclass(frozen=True)
class Lock:
    """A lock that is held, or has lapsed and was not taken since."""

    name: str
    owner: str
    token: int
    acquired_at: datetime
    expires_at: datetime


@dataclass(frozen=True)
class Schedule:
    """A schedule's row."""

    name: str
    spec: str
    queue: str
    payload: Any
    priority: int
    max_attempts: int | None
    visibility_timeout: float | None
    backoff_base: float | None
    expires_in: float | None
    enabled: bool
    next_fire_at: datetime
    last_fire_at: datetime | None
    last_error: str | None
    created_at: datetime
    updated_at: datetime

    def first_after(self, now: datetime) -> datetime:
        """The first boundary of the grid that lies after `now`."""
        interval = interval_of(self.spec)
        return self.next_fire_at + ((now - self.next_fire_at) // interval + 1) * interval

    @property
    def options(self) -> dict[str, Any]:
        names = ("priority", "max_attempts", "visibility_timeout", "backoff_base", "expires_in")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Stats:
    """What `queue_stats` says of one queue."""

    queue: str
    pending: int = 0
    processing: int = 0
    completed: int = 0
    dead: int = 0
    cancelled: int = 0
    due: int = 0
    oldest_due_age: float | None = None


@dataclass
class Model:
    """All rows, and the time. `copy` and `restore` are what savepoints and rollbacks come to."""

    now: datetime
    rules: Rules = field(default_factory=Rules)
    jobs: dict[int, Job] = field(default_factory=dict)
    locks: dict[str, Lock] = field(default_factory=dict)
    schedules: dict[str, Schedule] = field(default_factory=dict)
    last_id: int = 0
    """The greatest id there ever was: none comes back after a delete, and the claim's order follows them."""
    added: int = 0
    removed: int = 0

    # Transactions

    def copy(self) -> "Model":
        return replace(self, jobs=dict(self.jobs), locks=dict(self.locks), schedules=dict(self.schedules))

    def restore(self, before: "Model") -> None:
        """Take back everything since `before`, but for the time."""
        now, rules = self.now, self.rules
        vars(self).update(vars(before.copy()))
        self.now, self.rules = now, rules

    # Jobs in

    def holder(self, queue: str, key: str | None) -> int | None:
        """The live job of the queue that has the key."""
        if key is None:
            return None
        return next(
            (j.id for j in self.jobs.values() if (j.queue, j.unique_key) == (queue, key) and j.state in LIVE), None
        )

    def add(
        self,
        job_id: int,
        queue: str,
        payload: Any,
        *,
        at: datetime | None = None,
        schedule: str | None = None,
        fire_at: datetime | None = None,
        **options: Any,
    ) -> Job:
        """A new job, to which the database has given `job_id`. `at`: when it counts as enqueued (default: now)."""
        assert job_id > self.last_id, "an id came back"
        now = self.now if at is None else at
        defaults = self.rules.defaults_for(queue)
        chosen = {name: value for name, value in options.items() if value is not None}
        run_at = max(now, chosen.get("run_at", now)) + span(chosen.get("delay", 0))
        expires_in = chosen.get("expires_in", defaults.expires_in)
        self.last_id = job_id
        self.added += 1
        return self._put(
            Job(
                id=job_id,
                queue=queue,
                payload=payload,
                state="pending",
                priority=chosen.get("priority", 0),
                run_at=run_at,
                attempts=0,
                max_attempts=chosen.get("max_attempts", defaults.max_attempts),
                visibility_timeout=float_seconds(chosen.get("visibility_timeout", defaults.visibility_timeout)),
                backoff_base=float_seconds(chosen.get("backoff_base", defaults.backoff_base)),
                expires_at=None if expires_in is None else run_at + span(expires_in),
                worker_id=None,
                lease_expires_at=None,
                unique_key=chosen.get("unique_key"),
                schedule=schedule,
                fire_at=fire_at,
                errors=(),
                last_error=None,
                created_at=now,
                finished_at=None,
            )
        )

    def _put(self, job: Job) -> Job:
        self.jobs[job.id] = job
        return job

    def _remove(self, job: Job) -> None:
        del self.jobs[job.id]
        self.removed += 1

    # Claims

    def sweep(self, queue: str | None = None) -> int:
        """Put lapsed and expired jobs right. A lapsed job keeps its `run_at`; a lease lapses, and a job expires, at
        that very moment; `expired` is kept among the errors as a lapse is."""
        changed = 0
        for job in list(self.jobs.values()):
            if queue is not None and job.queue != queue:
                continue
            swept = job
            if swept.lease_expires_at is not None and swept.lease_expires_at <= self.now:
                swept = swept.failed(self.now, "lease expired")
                if swept.attempts < swept.max_attempts:
                    swept = swept.let_go("pending")
                else:
                    swept = swept.let_go("dead", finished_at=self.now)
            if swept.state == "pending" and swept.expires_at is not None and swept.expires_at <= self.now:
                swept = swept.failed(self.now, "expired").let_go("dead", finished_at=self.now)
            if swept is not job:
                self._put(swept)
                changed += 1
        return changed

    def claim(self, queue: str, worker: str, limit: int) -> list[Job]:
        """The jobs as claimed, in order."""
        self.sweep(queue)
        due = [j for j in self.jobs.values() if j.queue == queue and j.state == "pending" and j.run_at <= self.now]
        due.sort(key=lambda job: (-job.priority, job.run_at, job.id))
        return [
            self._put(
                replace(
                    job,
                    state="processing",
                    attempts=job.attempts + 1,
                    worker_id=worker,
                    lease_expires_at=self.now + span(job.visibility_timeout),
                    claims=job.claims + 1,
                )
            )
            for job in due[:limit]
        ]

    # What a handle can do

    def held(self, claim: Claim) -> Job | None:
        """The job whose current lease is this claim's."""
        job = self.jobs.get(claim.job_id)
        if job is None or job.claim != claim or job.lease_expires_at is None or job.lease_expires_at <= self.now:
            return None
        return job

    def ack(self, claim: Claim) -> bool:
        job = self.held(claim)
        if job is None:
            return False
        if self.rules.keep_completed is not None and not span(self.rules.keep_completed):
            self._remove(job)
        else:
            self._put(job.let_go("completed", finished_at=self.now))
        return True

    def retry(self, claim: Claim, error: str, delay: Duration | None) -> bool:
        job = self.held(claim)
        if job is None:
            return False
        failed = job.failed(self.now, error)
        if job.attempts >= job.max_attempts:
            self._put(failed.let_go("dead", finished_at=self.now))
        else:
            wait = min(job.backoff_base * 2 ** (job.attempts - 1), self.rules.max_backoff) if delay is None else delay
            self._put(failed.let_go("pending", run_at=self.now + span(wait)))
        return True

    def fail(self, claim: Claim, error: str) -> bool:
        job = self.held(claim)
        if job is not None:
            self._put(job.failed(self.now, error).let_go("dead", finished_at=self.now))
        return job is not None

    def release(self, claim: Claim, delay: Duration | None = None) -> bool:
        """Given back with its `run_at` as it was; `delay` is what `Snooze` asks for."""
        job = self.held(claim)
        if job is not None:
            run_at = job.run_at if delay is None else self.now + span(delay)
            self._put(job.let_go("pending", attempts=job.attempts - 1, run_at=run_at))
        return job is not None

    def heartbeat(self, claim: Claim, extend: Duration | None) -> bool:
        job = self.held(claim)
        if job is not None:
            lasting = job.visibility_timeout if extend is None else extend
            self._put(replace(job, lease_expires_at=self.now + span(lasting)))
        return job is not None

    # What anybody can do

    def cancel(self, job_id: int) -> bool:
        job = self.jobs.get(job_id)
        if job is None or job.state not in LIVE:
            return False
        if job.state == "processing":
            job = job.failed(self.now, "cancelled")
        self._put(job.let_go("cancelled", finished_at=self.now))
        return True

    def in_the_way(self, job_id: int) -> int | None:
        """The live job that has the unique key of one to be requeued."""
        job = self.jobs.get(job_id)
        return self.holder(job.queue, job.unique_key) if job is not None and job.state in RETRIABLE else None

    def requeue(self, job_id: int) -> bool:
        """Where nothing is in the way."""
        job = self.jobs.get(job_id)
        if job is None or job.state not in RETRIABLE:
            return False
        self._put(replace(job, state="pending", run_at=self.now, attempts=0, expires_at=None, finished_at=None))
        return True

    def run_now(self, job_id: int) -> bool:
        """Not in the contract's list but in the admin's: a pending job that is not due becomes due."""
        job = self.jobs.get(job_id)
        if job is None or job.state != "pending" or job.run_at <= self.now:
            return False
        self._put(replace(job, run_at=self.now))
        return True

    def reschedule(self, job_id: int, run_at: datetime) -> bool:
        """A pending job that has not expired. Its expiry keeps its distance from `run_at`, unless it lies before it."""
        job = self.jobs.get(job_id)
        if job is None or job.state != "pending" or (job.expires_at is not None and job.expires_at <= self.now):
            return False
        run_at, expires_at = max(run_at, self.now), job.expires_at
        if expires_at is not None and expires_at > job.run_at:
            expires_at += run_at - job.run_at
        self._put(replace(job, run_at=run_at, expires_at=expires_at))
        return True

    def prune(self) -> dict[str, int]:
        """A job may go once it has been finished for exactly as long as it is kept."""
        removed = {"completed": 0, "dead": 0, "cancelled": 0}
        for job in list(self.jobs.values()):
            keep = self.rules.keep_completed if job.state == "completed" else self.rules.keep_dead
            if job.finished_at is not None and keep is not None and job.finished_at <= self.now - span(keep):
                self._remove(job)
                removed[job.state] += 1
        return removed

    # What can be asked

    def next_claim_at(self, queue: str) -> datetime | None:
        mine = [job for job in self.jobs.values() if job.queue == queue]
        moments = [job.run_at for job in mine if job.state == "pending"]
        moments += [job.lease_expires_at for job in mine if job.lease_expires_at is not None]
        return min(moments, default=None)

    def queue_stats(self) -> dict[str, Stats]:
        stats: dict[str, Stats] = {}
        for job in self.jobs.values():
            before = stats.get(job.queue, Stats(job.queue))
            counted = replace(before, **{job.state: getattr(before, job.state) + 1})
            if job.state == "pending" and job.run_at <= self.now:
                age = (self.now - job.run_at).total_seconds()
                oldest = age if counted.oldest_due_age is None else max(age, counted.oldest_due_age)
                counted = replace(counted, due=counted.due + 1, oldest_due_age=oldest)
            stats[job.queue] = counted
        return stats

    def soonest(self) -> datetime | None:
        return min((s.next_fire_at for s in self.schedules.values() if s.enabled), default=None)

    # Locks

    def lock_holder(self, name: str) -> Lock | None:
        lock = self.locks.get(name)
        return None if lock is None or lock.expires_at <= self.now else lock

    def take_lock(self, name: str, owner: str, ttl: Duration, token: int) -> None:
        """Take a lock that nobody holds, under the token that the database has given."""
        self.locks[name] = Lock(name, owner, token, self.now, self.now + span(ttl))

    def renew_lock(self, name: str, token: int | None, ttl: Duration) -> bool:
        lock = self.lock_holder(name)
        if lock is None or lock.token != token:
            return False
        self.locks[name] = replace(lock, expires_at=self.now + span(ttl))
        return True

    def release_lock(self, name: str, token: int | None) -> bool:
        lock = self.lock_holder(name)
        if lock is None or lock.token != token:
            return False
        del self.locks[name]
        return True

    def force_release(self, name: str) -> bool:
        """Not in the contract's list but in the admin's; a lapsed lock that is still there counts as released."""
        return self.locks.pop(name, None) is not None

    # Schedules

    def declare(self, name: str, spec: str, queue: str, payload: Any, options: Mapping[str, Any]) -> Schedule:
        before = self.schedules.get(name)
        interval = interval_of(spec)
        if before is None or interval_of(before.spec) != interval:
            next_fire_at = self.now + interval
        elif before.next_fire_at > self.now + interval:
            next_fire_at = before.first_after(self.now)
        else:
            next_fire_at = before.next_fire_at

        def seconds_of(option: str) -> float | None:
            value = options.get(option)
            return None if value is None else float_seconds(value)

        self.schedules[name] = Schedule(
            name=name,
            spec=spec,
            queue=queue,
            payload=payload,
            priority=options.get("priority", 0),
            max_attempts=options.get("max_attempts"),
            visibility_timeout=seconds_of("visibility_timeout"),
            backoff_base=seconds_of("backoff_base"),
            expires_in=seconds_of("expires_in"),
            enabled=before is None or before.enabled,
            next_fire_at=next_fire_at,
            last_fire_at=None if before is None else before.last_fire_at,
            last_error=None if before is None else before.last_error,
            created_at=self.now if before is None else before.created_at,
            updated_at=self.now,
        )
        return self.schedules[name]

    def pause(self, name: str) -> bool:
        schedule = self.schedules.get(name)
        if schedule is None or not schedule.enabled:
            return False
        self.schedules[name] = replace(schedule, enabled=False, updated_at=self.now)
        return True

    def resume(self, name: str) -> bool:
        schedule = self.schedules.get(name)
        if schedule is None or schedule.enabled:
            return False
        self.schedules[name] = replace(
            schedule,
            enabled=True,
            last_error=None,
            next_fire_at=schedule.first_after(self.now),
            updated_at=self.now,
        )
        return True

    def unschedule(self, name: str) -> bool:
        return self.schedules.pop(name, None) is not None

    def due_boundaries(self, now: datetime) -> list[tuple[str, datetime]]:
        """The boundaries that a tick at `now` fires. One that has its job already is moved past and not fired."""
        fired = {(job.schedule, job.fire_at) for job in self.jobs.values()}
        return [
            (schedule.name, boundary)
            for schedule in self.schedules.values()
            if schedule.enabled
            for boundary in self._earliest(schedule, now)
            if (schedule.name, boundary) not in fired
        ]

    def _earliest(self, schedule: Schedule, now: datetime) -> list[datetime]:
        interval = interval_of(schedule.spec)
        count = min((now - schedule.next_fire_at) // interval + 1, MAX_FIRES)
        return [schedule.next_fire_at + n * interval for n in range(count)]

    def tick(self, now: datetime, fires: Iterable[tuple[str, datetime, int]]) -> None:
        """Fire `due_boundaries`, whose jobs' ids the database has given. All counts from `now`."""
        for name, boundary, job_id in fires:
            schedule = self.schedules[name]
            self.add(
                job_id, schedule.queue, schedule.payload, at=now, schedule=name, fire_at=boundary, **schedule.options
            )
        for schedule in list(self.schedules.values()):
            boundaries = self._earliest(schedule, now) if schedule.enabled else []
            if boundaries:
                self.schedules[schedule.name] = replace(
                    schedule, next_fire_at=schedule.first_after(now), last_fire_at=boundaries[-1], updated_at=now
                )
