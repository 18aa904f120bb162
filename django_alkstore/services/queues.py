"""Jobs are added, changed by their id, and counted."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Unpack

from django.db.models.base import ModelState

from django_alkstore import clock, conf, failures, signals
from django_alkstore.clock import SECOND, from_us
from django_alkstore.conf import JobDefaults, Settings
from django_alkstore.dialects import Operations
from django_alkstore.dialects.base import NewJob, SweptJob
from django_alkstore.dialects.transactions import (
    read,
    require_open,
    resolve_alias,
    resolve_default,
    write_operations,
    write_statement,
    write_transaction,
)
from django_alkstore.durations import aware_moment, moment_after
from django_alkstore.exceptions import DuplicateJob, InvalidOption, InvalidPayload
from django_alkstore.models import Job, State
from django_alkstore.names import validate_name
from django_alkstore.payloads import encode_and_read, encode_payload
from django_alkstore.services.events import tell, told
from django_alkstore.services.options import (
    JobOptions,
    UnkeyedOptions,
    defaults_for,
    expect_handler,
    expires_after,
    stamp,
)


def enqueue(queue: str, payload: Any, *, using: str | None = None, **options: Unpack[JobOptions]) -> Job:
    """Add a job to `queue`: in the caller's transaction if one is open, else committed at once.

    Returns the complete `Job`. Raises `InvalidName`, `InvalidPayload`, `InvalidOption` before anything is
    written, and `DuplicateJob` if a live job of the queue has the unique key.
    """
    validate_name("queue", queue)
    settings = conf.settings()
    expect_handler(queue, settings)
    return add(using or resolve_default(settings), queue, payload, options, settings)


def enqueue_tx(queue: str, payload: Any, *, using: str | None = None, **options: Unpack[JobOptions]) -> Job:
    """As `enqueue`, in the caller's transaction only: `TransactionRequired` if none is open on the database."""
    validate_name("queue", queue)
    settings = conf.settings()
    alias = using or resolve_default(settings)
    require_open(alias, "enqueue_tx")
    expect_handler(queue, settings)
    return add(alias, queue, payload, options, settings)


def enqueue_many(
    queue: str,
    payloads: Iterable[Any],
    *,
    run_ats: Iterable[datetime] | None = None,
    using: str | None = None,
    **options: Unpack[JobOptions],
) -> list[int]:
    """Add one job for each payload, all of them or none, with the same options. Returns their ids, in order.

    `run_ats` has one aware datetime for each payload, in the same order: the moment at which that job is due. It
    excludes `delay` and `run_at`. A `unique_key` is refused, since it could name only one of the jobs. Raises as
    `enqueue`. If `payloads` is empty, nothing is written and the list is empty.
    """
    validate_name("queue", queue)
    expect_handler(queue, conf.settings())
    return add_many(queue, payloads, run_ats, using, options)


def add_many(
    queue: str,
    payloads: Iterable[Any],
    run_ats: Iterable[datetime] | None,
    using: str | None,
    options: Mapping[str, Any],
    task: str = "",
    defaults: JobDefaults | None = None,
) -> list[int]:
    """As `enqueue_many`, for any queue; the name has been checked. `task` and `defaults`: as for `add`."""
    if options.get("unique_key") is not None:
        raise InvalidOption("enqueue_many takes no unique_key: a key names one job")
    if isinstance(payloads, (str, bytes, Mapping)):
        raise InvalidPayload(
            f"payloads must be a list or another iterable of payloads, not a {type(payloads).__name__}"
        )
    settings = conf.settings()
    alias = using or resolve_default(settings)
    defaults = defaults or defaults_for(queue, settings)
    template = stamp(queue, "", options, defaults, clock.now_us())._replace(task=task)
    if run_ats is not None and (options.get("delay") is not None or options.get("run_at") is not None):
        raise InvalidOption("give run_ats, or delay or run_at, not both")
    texts = list(_encode_each(payloads, settings))
    if run_ats is None:
        before, after = template[:_PAYLOAD], template[_PAYLOAD + 1 :]
        jobs: list[tuple[Any, ...]] = [(*before, text, *after) for text in texts]
    else:
        jobs = _due_each(template, texts, run_ats, expires_after(options, defaults))
    if not jobs:
        return []
    job_ids = write_operations(alias, lambda db: db.insert_jobs(jobs))
    return told(job_ids, alias, signals.jobs_enqueued, queue=queue, job_ids=job_ids)


def _due_each(
    template: NewJob, texts: list[str], run_ats: Iterable[datetime], expires_in: float | None
) -> list[tuple[Any, ...]]:
    """`template` once for each payload, due at its own moment."""
    if isinstance(run_ats, (str, bytes, Mapping)) or not isinstance(run_ats, Iterable):
        raise InvalidOption(f"run_ats must be a list or another iterable of datetimes, not a {type(run_ats).__name__}")
    moments = list(run_ats)
    if len(moments) != len(texts):
        raise InvalidOption(f"run_ats must have one moment for each payload: {len(moments)} for {len(texts)} payloads")
    now = template.created_at
    # Each is a tuple built by hand: `_replace` would cost more than the statement that stores the job.
    queue, _, priority, _, max_attempts, timeout, base, _, *rest = template
    jobs: list[tuple[Any, ...]] = []
    for index, (text, moment) in enumerate(zip(texts, moments, strict=True)):
        run_at = max(now, aware_moment(f"run_ats[{index}]", moment))
        expires_at = None if expires_in is None else moment_after("expires_in", run_at, expires_in)
        jobs.append((queue, text, priority, run_at, max_attempts, timeout, base, expires_at, *rest))
    return jobs


def _encode_each(payloads: Iterable[Any], settings: Settings) -> Iterator[str]:
    max_bytes, encoder = settings.max_payload_bytes, settings.json_encoder
    for index, payload in enumerate(payloads):
        try:
            yield encode_payload(payload, max_bytes=max_bytes, encoder=encoder)
        except InvalidPayload as error:
            raise InvalidPayload(f"payloads[{index}]{str(error).removeprefix('payload')}") from error.__cause__


def get_or_enqueue(
    queue: str, unique_key: str, payload: Any, *, using: str | None = None, **options: Unpack[UnkeyedOptions]
) -> tuple[Job, bool]:
    """The live job of `queue` with this unique key and `False`, or a new one and `True`. Raises as `enqueue`."""
    validate_name("queue", queue)
    expect_handler(queue, conf.settings())
    return get_or_add(queue, unique_key, payload, using, options)


def get_or_add(
    queue: str, unique_key: str, payload: Any, using: str | None, options: Mapping[str, Any]
) -> tuple[Job, bool]:
    """As `get_or_enqueue`, for any queue; the name has been checked."""
    settings = conf.settings()
    alias = using or resolve_default(settings)
    if unique_key is None:
        raise InvalidOption("get_or_enqueue needs a unique_key")
    keyed: dict[str, Any] = {**options, "unique_key": unique_key}
    job, stored = _new_job(queue, payload, keyed, settings)

    def get_or_insert(db: Operations) -> tuple[Job, bool]:
        job_id = db.insert_job(job)
        if job_id is not None:
            return _instance(alias, job_id, job, stored), True
        return Job.objects.using(alias).get(pk=_holder(db, queue, unique_key)), False

    job_instance, created = write_transaction(alias, get_or_insert)
    if created:
        tell(alias, signals.jobs_enqueued, queue=queue, job_ids=[job_instance.pk])
    return job_instance, created


def add(
    alias: str,
    queue: str,
    payload: Any,
    options: Mapping[str, Any],
    settings: Settings,
    schedule: str | None = None,
    task: str = "",
    defaults: JobDefaults | None = None,
) -> Job:
    """Store one job in any queue. Shared by queues, outboxes, schedules and tasks, which have checked the names.

    `defaults`: the options that apply if `options` has none. Default: those of the queue.
    """
    job, stored = _new_job(queue, payload, options, settings, defaults)
    if schedule is not None or task:
        job = job._replace(schedule=schedule, task=task)
    if job.unique_key is None:
        job_id = write_statement(alias, lambda db: db.insert_job(job))
        assert job_id is not None, "only a unique key or a boundary can be taken"
    else:
        job_id = _insert_keyed(alias, job, job.unique_key)
    if signals.jobs_enqueued.receivers:
        tell(alias, signals.jobs_enqueued, queue=queue, job_ids=[job_id])
    return _instance(alias, job_id, job, stored)


def _insert_keyed(alias: str, job: NewJob, unique_key: str) -> int:

    def insert(db: Operations) -> int:
        job_id = db.insert_job(job)
        if job_id is None:
            raise DuplicateJob(job.queue, unique_key, _holder(db, job.queue, unique_key))
        return job_id

    return write_operations(alias, insert)


def _holder(db: Operations, queue: str, unique_key: str) -> int:
    """The live job that has a unique key. Called in the transaction that found the key taken, so it is still there."""
    job_id = db.live_job(queue, unique_key)
    assert job_id is not None, "the key was taken a moment ago, and nobody else has written since"
    return job_id


def _new_job(
    queue: str, payload: Any, options: Mapping[str, Any], settings: Settings, defaults: JobDefaults | None = None
) -> tuple[NewJob, Any]:
    """The job as it will be stored, and its payload as it will be read."""
    text, stored = encode_and_read(payload, max_bytes=settings.max_payload_bytes, encoder=settings.json_encoder)
    return stamp(queue, text, options, defaults or defaults_for(queue, settings), clock.now_us()), stored


_PAYLOAD = NewJob._fields.index("payload")
_PENDING = State.PENDING.value


def _instance(alias: str, job_id: int, job: NewJob, payload: Any) -> Job:
    """The model instance of a row just stored, without a query; `payload` as it will be read.

    The fields are set as unpickling sets them: twenty `setattr`s in `Model.__init__` would cost more than the
    statement that stored the row.
    """
    instance = Job.__new__(Job)
    created_at = from_us(job.created_at)
    state = ModelState()
    state.adding = False
    state.db = alias
    instance.__dict__ = {
        "_state": state,
        "id": job_id,
        "queue": job.queue,
        "payload": payload,
        "state": _PENDING,
        "priority": job.priority,
        "run_at": created_at if job.run_at == job.created_at else from_us(job.run_at),
        "attempts": 0,
        "max_attempts": job.max_attempts,
        "visibility_timeout": job.visibility_timeout,
        "backoff_base": job.backoff_base,
        "expires_at": None if job.expires_at is None else from_us(job.expires_at),
        "fence": 0,
        "worker_id": None,
        "lease_expires_at": None,
        "liveness": None,
        "unique_key": job.unique_key,
        "schedule": job.schedule,
        "fire_at": None,
        "errors": [],
        "last_error": None,
        "created_at": created_at,
        "finished_at": None,
        "started_at": None,
        "last_attempted_at": None,
        "task": job.task,
        "result": None,
        "worker_ids": [],
        "lock_errors": 0,
    }
    return instance


_LAST_ID = 2**63 - 1


def _is_id(value: object) -> bool:
    """True if a job can have this id. Any other value is nobody's id, and no error. A bool is no id either, although
    Python counts it among the integers."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LAST_ID


def get_job(id: int, *, using: str | None = None) -> Job | None:  # noqa: A002  the contract's name for it
    """The job, in any state, or `None`."""
    return Job.objects.using(resolve_alias(using)).filter(pk=id).first() if _is_id(id) else None


def cancel(id: int, *, using: str | None = None) -> bool:  # noqa: A002
    """Cancel a live job; `False` if there is none. An attempt that is running has failed with `cancelled`.

    If its handler is running, `lease_lost` of the handle is set within 2 s, and the handle's calls return `False`.
    """
    alias = resolve_alias(using)

    def end(db: Operations) -> bool:
        now = clock.now_us()
        if db.cancel_pending(id, now):
            return True
        running = db.running(id)
        if running is None:
            return False
        entry = failures.failure(running.attempts, from_us(now), failures.describe_reason(failures.CANCELLED))
        errors = failures.append(running.errors, entry)
        return db.cancel_running(now, SweptJob(errors, failures.CANCELLED, running.id, running.fence))

    cancelled = _is_id(id) and write_operations(alias, end)
    return told(cancelled, alias, signals.job_cancelled, job_id=id)


def requeue(id: int, *, using: str | None = None) -> bool:  # noqa: A002
    """Make a dead or cancelled job pending: due now, a fresh attempt budget, no expiry, its history kept.

    `False` if there is no such job. `DuplicateJob` if another live job has taken its unique key meanwhile.
    """
    alias = resolve_alias(using)

    def reopen(db: Operations) -> bool:
        if db.requeue(id, clock.now_us()):
            return True
        jobs = Job.objects.using(alias)
        kept = jobs.filter(pk=id, state__in=(State.DEAD, State.CANCELLED), unique_key__isnull=False).first()
        if kept is None or kept.unique_key is None:
            return False
        raise DuplicateJob(kept.queue, kept.unique_key, _holder(db, kept.queue, kept.unique_key))

    return told(_is_id(id) and write_transaction(alias, reopen), alias, signals.job_requeued, job_id=id)


def run_now(id: int, *, using: str | None = None) -> bool:  # noqa: A002
    """Make a pending job that is not due yet due now; `False` if there is none."""
    alias = resolve_alias(using)
    made_due = _is_id(id) and write_statement(alias, lambda db: db.run_now(id, clock.now_us()))
    return told(made_due, alias, signals.job_run_now, job_id=id)


def reschedule(id: int, run_at: datetime, *, using: str | None = None) -> bool:  # noqa: A002
    """Make a pending job due at `run_at` instead; `False` if there is no such job, or it is not pending.

    A moment in the past means now. An expiry keeps its distance from the moment at which the job is due.
    `InvalidOption` for anything but an aware datetime.
    """
    moment = aware_moment("run_at", run_at)
    alias = resolve_alias(using)

    def move(db: Operations) -> bool:
        now = clock.now_us()
        return db.reschedule(id, max(now, moment), now)

    moved = _is_id(id) and write_statement(alias, move)
    return told(moved, alias, signals.job_rescheduled, job_id=id, run_at=run_at)


def next_claim_at(queue: str, *, using: str | None = None) -> datetime | None:
    """The earliest `run_at` of a pending job or lease end of a processing one; `None` if there is neither."""
    validate_name("queue", queue)
    moment = read(resolve_alias(using), lambda db: db.next_claims([queue]))[queue]
    return None if moment is None else from_us(moment)


@dataclass(frozen=True, slots=True)
class QueueStats:
    """One queue's jobs by state."""

    queue: str
    pending: int
    processing: int
    completed: int
    """Those that have not been pruned."""
    dead: int
    cancelled: int
    due: int
    """Pending jobs whose `run_at` has come."""
    oldest_due_age: float | None
    """Seconds since the earliest `run_at` of a due job; `None` if none is due."""


def queue_stats(*, using: str | None = None) -> list[QueueStats]:
    """Every queue (and outbox queue) that holds a job, by name."""
    now = clock.now_us()
    counted = read(resolve_alias(using), lambda db: db.count_queues(now))
    return [
        QueueStats(*row[:-1], None if row.oldest_due is None else (now - row.oldest_due) / SECOND) for row in counted
    ]
