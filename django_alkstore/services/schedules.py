"""Schedules: declared, removed, paused, resumed and fired by hand. `ticks.py` turns their boundaries into jobs."""

from datetime import datetime
from typing import Any, Unpack

from django_alkstore import clock, conf, signals
from django_alkstore.clock import LAST_US, from_us, to_us
from django_alkstore.dialects import Operations
from django_alkstore.dialects.transactions import resolve_alias, write_transaction
from django_alkstore.durations import moment_after
from django_alkstore.exceptions import InvalidPayload, InvalidSpec
from django_alkstore.models import Job, Schedule
from django_alkstore.names import validate_name
from django_alkstore.payloads import UnreadablePayload, encode_and_read
from django_alkstore.services.events import told
from django_alkstore.services.options import (
    NEVER,
    FireOptions,
    check_fire_options,
    fire_options_to_store,
    options_of_schedule,
    refuse_unknown_schedule_options,
)
from django_alkstore.services.queues import add
from django_alkstore.specs import Every, first_boundary, parse_spec

NO_MORE_BOUNDARIES = "its next boundary is past the year 9999"


def schedule(
    name: str,
    spec: str,
    queue: str,
    payload: Any = None,
    *,
    using: str | None = None,
    **options: Unpack[FireOptions],
) -> Schedule:
    """Declare a schedule, or change it: it enqueues one job into `queue` at each boundary of `spec`.

    A schedule with the same interval keeps its place on the grid. Another interval starts a new grid at now + interval.
    A paused schedule stays paused. Returns the complete `Schedule`. Raises `InvalidName`, `InvalidSpec`,
    `InvalidPayload` or `InvalidOption` before anything is written.
    """
    validate_name("schedule", name)
    validate_name("queue", queue)
    every = parse_spec(spec)
    first_boundary(every, clock.now_us())
    refuse_unknown_schedule_options(options)
    chosen = check_fire_options(options)
    if chosen["expires_in"] not in (None, NEVER):
        moment_after("expires_in", clock.now_us(), chosen["expires_in"])  # raises if no date can hold the expiry
    settings = conf.settings()
    _, read_back = encode_and_read(payload, max_bytes=settings.max_payload_bytes, encoder=settings.json_encoder)
    declared: dict[str, Any] = {
        "spec": spec,
        "queue": queue,
        "payload": read_back,
        **fire_options_to_store(chosen),
    }
    alias = resolve_alias(using)

    def upsert(_: Operations) -> Schedule:
        now = clock.now()
        row = Schedule.objects.using(alias).filter(name=name).first()
        if row is None:
            row = Schedule(name=name, created_at=now, next_fire_at=from_us(first_boundary(every, to_us(now))))
        else:
            row.next_fire_at = from_us(_next_on_redeclaring(row, every, to_us(now)))
        for key, value in declared.items():
            setattr(row, key, value)
        row.updated_at = now
        row.save(using=alias)
        return row

    return told(write_transaction(alias, upsert), alias, signals.schedule_declared, name=name)


def _next_on_redeclaring(row: Schedule, every: Every, now: int) -> int:
    """The next boundary of a schedule that is declared again: the stored one if the interval is the same.

    If it lies more than an interval ahead, the clock ran ahead when it was stored, so the grid's first boundary after
    now is next.
    """
    try:
        same_grid = parse_spec(row.spec).interval == every.interval
    except InvalidSpec:
        same_grid = False
    if not same_grid:
        return first_boundary(every, now)
    stored = to_us(row.next_fire_at)
    return every.first_after(stored, now) if stored > now + every.interval else stored


def unschedule(name: str, *, using: str | None = None) -> bool:
    """Remove a schedule; `False` if there is none of the name. Jobs that it has fired stay."""
    alias = resolve_alias(using)
    validate_name("schedule", name)
    removed = write_transaction(alias, lambda _: Schedule.objects.using(alias).filter(name=name).delete()[0])
    return told(removed > 0, alias, signals.schedule_removed, name=name)


def pause_schedule(name: str, *, using: str | None = None) -> bool:
    """Stop firing; `False` if there is no such schedule or it is already paused."""
    alias = resolve_alias(using)
    validate_name("schedule", name)

    def pause(_: Operations) -> bool:
        running = Schedule.objects.using(alias).filter(name=name, enabled=True)
        return running.update(enabled=False, updated_at=clock.now()) == 1

    return told(write_transaction(alias, pause), alias, signals.schedule_paused, name=name)


def resume_schedule(name: str, *, using: str | None = None) -> bool:
    """Go on from the first boundary after now. Boundaries that were missed in the pause are not fired.

    `False` if there is no such schedule or it is not paused. Raises `InvalidSpec` if its spec cannot be read.
    """
    alias = resolve_alias(using)
    validate_name("schedule", name)

    def resume(_: Operations) -> bool:
        row = Schedule.objects.using(alias).filter(name=name, enabled=False).first()
        if row is None:
            return False
        every, now, stored = parse_spec(row.spec), clock.now(), to_us(row.next_fire_at)
        if stored <= to_us(now) or stored > to_us(now) + every.interval:
            stored = _representable(every.first_after(stored, to_us(now)))
        row.next_fire_at, row.enabled, row.last_error, row.updated_at = from_us(stored), True, None, now
        row.save(using=alias, update_fields=["next_fire_at", "enabled", "last_error", "updated_at"])
        return True

    return told(write_transaction(alias, resume), alias, signals.schedule_resumed, name=name)


def fire_schedule(name: str, *, using: str | None = None) -> Job | None:
    """Enqueue a schedule's job once, now, also if it is paused; `None` if there is no schedule of the name.

    The job names the schedule and has no `fire_at`, because it belongs to no boundary. Raises `InvalidName`,
    `InvalidPayload` or `InvalidOption` if the stored row cannot be read.
    """
    alias = resolve_alias(using)
    validate_name("schedule", name)

    def fire(_: Operations) -> Job | None:
        row = Schedule.objects.using(alias).filter(name=name).first()
        if row is None:
            return None
        validate_name("queue", row.queue)
        options = options_of_schedule(row)
        payload = _readable(row.payload)
        return add(alias, row.queue, payload, options, conf.settings(), schedule=name)

    job = write_transaction(alias, fire)
    return told(job, alias, signals.schedule_fired_now, name=name, job_id=job and job.pk)


def _readable(payload: Any) -> Any:
    if isinstance(payload, UnreadablePayload):
        raise InvalidPayload(str(payload))
    return payload


def _representable(moment: int) -> int:
    if moment > LAST_US:
        raise InvalidSpec(NO_MORE_BOUNDARIES)
    return moment


def soonest(*, using: str | None = None) -> datetime | None:
    """The earliest next boundary of all enabled schedules; `None` if there is none."""
    enabled = Schedule.objects.using(resolve_alias(using)).filter(enabled=True)
    return enabled.order_by("next_fire_at").values_list("next_fire_at", flat=True).first()
