"""Schedules: declared, removed, paused, resumed and fired by hand. `ticks.py` turns their boundaries into jobs."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, TypedDict, Unpack

from django.utils.timezone import get_default_timezone_name

from django_alkstore import clock, conf, signals
from django_alkstore.clock import LAST_US, from_us, to_us
from django_alkstore.dialects import Operations
from django_alkstore.dialects.transactions import after_commit, resolve_alias, write_transaction
from django_alkstore.durations import Duration, aware_moment, moment_after, seconds
from django_alkstore.exceptions import InvalidOption, InvalidPayload, InvalidSpec, shown
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
    refuse_unknown_options,
)
from django_alkstore.services.queues import add
from django_alkstore.specs import Spec, due, parse_spec

NO_MORE_BOUNDARIES = "its next boundary is past the year 9999"


class CalendarOptions(TypedDict, total=False):
    """When a schedule fires, beside its spec."""

    timezone: str | None
    """The zone of the wall clock, such as "Europe/Berlin". Default: the project's `TIME_ZONE`."""
    starting: datetime | None
    """An aware datetime: the first boundary of an `@every` grid, or, if it is past, a moment of the grid."""
    starts_at: datetime | None
    """An aware datetime: no boundary before it."""
    ends_at: datetime | None
    """An aware datetime: no boundary after it."""
    catch_up: Literal["all", "latest", "none"] | None
    """What becomes of missed boundaries. Default: "all" (the earliest 64) of `@every`, "latest" of the other specs."""
    grace: Duration | None
    """Seconds after a boundary in which it fires. Default: unlimited; with "none" 60."""
    overlap: Literal["allow", "skip"]
    """"skip": a boundary does not fire while the job of an earlier one is live."""
    jitter: Duration
    """Seconds by which a job is put off at most, the same for each boundary however often it is asked."""


class ScheduleOptions(FireOptions, CalendarOptions, total=False):
    """The options of `schedule`."""


CATCH_UP = ("all", "latest", "none")
OVERLAP = ("allow", "skip")


def schedule(
    name: str,
    spec: str,
    queue: str,
    payload: Any = None,
    *,
    using: str | None = None,
    **options: Unpack[ScheduleOptions],
) -> Schedule:
    """Declare a schedule, or change it: it enqueues one job into `queue` at each boundary of `spec`.

    A schedule with the same spec keeps its place. Another spec starts anew from now. A paused schedule stays paused.
    Returns the complete `Schedule`; its `next_fire_at` is None if no boundary follows. Raises `InvalidName`,
    `InvalidSpec`, `InvalidPayload` or `InvalidOption` before anything is written.
    """
    validate_name("queue", queue)
    return declare(name, spec, queue, payload, using, options)


def declare(
    name: str,
    spec: str,
    queue: str,
    payload: Any,
    using: str | None,
    options: Mapping[str, Any],
    *,
    task: str = "",
    from_code: bool = False,
) -> Schedule:
    """As `schedule`. `task`: the dotted path of the task to fire. `from_code`: declared by a decorator."""
    validate_name("schedule", name)
    columns, parsed, calendar = columns_of(spec, queue, payload, options, task)
    declared = {**columns, "from_code": from_code, "undeclared_at": None}
    alias = resolve_alias(using)

    def upsert(_: Operations) -> Schedule:
        now = clock.now()
        row = Schedule.objects.using(alias).filter(name=name).first()
        if row is None:
            row = Schedule(name=name, created_at=now)
            following = _first_boundary(parsed, calendar, to_us(now))
        else:
            following = _next_on_redeclaring(row, parsed, calendar, to_us(now))
        row.next_fire_at = None if following is None else from_us(following)
        for key, value in declared.items():
            setattr(row, key, value)
        row.updated_at = now
        row.save(using=alias)
        return row

    row = write_transaction(alias, upsert)
    if row.next_fire_at is None:
        after_commit(alias, lambda: signals.emit(signals.schedule_ended, name=name))
    return told(row, alias, signals.schedule_declared, name=name)


def columns_of(
    spec: str, queue: str, payload: Any, options: Mapping[str, Any], task: str
) -> tuple[dict[str, Any], Spec, dict[str, Any]]:
    """The columns that a declaration sets; the parsed spec; and the checked options of the calendar."""
    refuse_unknown_options(options, ScheduleOptions)
    chosen = check_fire_options(options)
    if chosen["expires_in"] not in (None, NEVER):
        moment_after("expires_in", clock.now_us(), chosen["expires_in"])  # raises if no date can hold the expiry
    calendar = _check_calendar(spec, options)
    parsed = parse_spec(spec, calendar["timezone"])
    _first_boundary(parsed, calendar, clock.now_us())  # raises if there can be none
    settings = conf.settings()
    _, read_back = encode_and_read(payload, max_bytes=settings.max_payload_bytes, encoder=settings.json_encoder)
    columns = {
        "spec": spec,
        "queue": queue,
        "task": task,
        "payload": read_back,
        **{key: from_us(value) if key in _MOMENTS and value is not None else value for key, value in calendar.items()},
        **fire_options_to_store(chosen),
    }
    return columns, parsed, calendar


_MOMENTS = ("starting", "starts_at", "ends_at")


def _check_calendar(spec: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the options in `CalendarOptions`; moments in microseconds."""
    checked: dict[str, Any] = {
        key: None if options.get(key) is None else aware_moment(key, options[key]) for key in _MOMENTS
    }
    if (
        checked["starts_at"] is not None
        and checked["ends_at"] is not None
        and checked["starts_at"] > checked["ends_at"]
    ):
        raise InvalidOption("starts_at must not be after ends_at")
    for key, values, default in (("catch_up", CATCH_UP, None), ("overlap", OVERLAP, "allow")):
        value = options.get(key)
        if value is not None and value not in values:
            raise InvalidOption(f"{key} must be one of {', '.join(map(repr, values))}, not {shown(value)}")
        checked[key] = default if value is None else value
    grace, jitter, zone = options.get("grace"), options.get("jitter"), options.get("timezone")
    checked["grace"] = None if grace is None else seconds("grace", grace, zero=True)
    checked["jitter"] = 0.0 if jitter is None else seconds("jitter", jitter, zero=True)
    has_wall_clock = not str(spec).lstrip().startswith("@every")
    checked["timezone"] = get_default_timezone_name() if zone is None and has_wall_clock else zone
    parse_spec(spec, checked["timezone"])
    if zone is not None:
        parse_spec("@daily", zone)  # raises for an unknown zone, whatever the spec is
    return checked


def _first_boundary(spec: Spec, calendar: Mapping[str, Any], now: int) -> int | None:
    """The first boundary after `now` of a schedule that is declared now; None if there is none."""
    first = spec.first(now, calendar["starting"])
    starts_at = calendar["starts_at"]
    if first is not None and starts_at is not None and first < starts_at:
        first = spec.after(first, starts_at - 1)
    return within(first, calendar["ends_at"])


def within(boundary: int | None, ends_at: int | None) -> int | None:
    """The boundary, or None if it lies after the end."""
    return None if boundary is None or (ends_at is not None and boundary > ends_at) else boundary


def _next_on_redeclaring(row: Schedule, spec: Spec, calendar: Mapping[str, Any], now: int) -> int | None:
    """The next boundary of a schedule that is declared again: the stored one if the spec is the same.

    If it lies further ahead than the spec's next boundary after now, the clock ran ahead when it was stored.
    """
    fresh = _first_boundary(spec, calendar, now)
    try:
        same = parse_spec(row.spec, row.timezone) == spec
    except InvalidSpec:
        same = False
    places = (row.starting, row.starts_at)
    declared = tuple(None if calendar[key] is None else from_us(calendar[key]) for key in ("starting", "starts_at"))
    if not same or places != declared or row.next_fire_at is None:
        return fresh
    if any(calendar[key] is not None and calendar[key] > now for key in ("starting", "starts_at")):
        return fresh  # it has not begun
    stored = to_us(row.next_fire_at)
    following = spec.after(stored, now)
    return within(stored if following is None else min(stored, following), calendar["ends_at"])


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
        spec, now = parse_spec(row.spec, row.timezone), clock.now()
        row.next_fire_at, row.enabled, row.last_error, row.updated_at = _resumed(row, spec, now), True, None, now
        row.save(using=alias, update_fields=["next_fire_at", "enabled", "last_error", "updated_at"])
        return True

    return told(write_transaction(alias, resume), alias, signals.schedule_resumed, name=name)


def _resumed(row: Schedule, spec: Spec, now: datetime) -> datetime | None:
    """The first boundary after now."""
    if row.next_fire_at is None:
        return None
    stored, moment = to_us(row.next_fire_at), to_us(now)
    following = spec.after(stored, moment)
    if following is None:
        if spec.catches_up == "all":
            raise InvalidSpec(NO_MORE_BOUNDARIES)
        return None
    starts_at = None if row.starts_at is None else to_us(row.starts_at)
    if starts_at is not None and following < starts_at:
        following = stored
    ends_at = None if row.ends_at is None else to_us(row.ends_at)
    found = within(following, ends_at)
    return None if found is None else from_us(found)


def next_boundaries(name: str, n: int = 5, *, using: str | None = None) -> list[datetime]:
    """The next boundaries of a schedule, `n` at most, as if nothing were missed or paused. Empty if there are none.

    Raises `InvalidSpec` if the stored spec cannot be read. The list is empty for an unknown name, too.
    """
    validate_name("schedule", name)
    row = Schedule.objects.using(resolve_alias(using)).filter(name=name).first()
    return [] if row is None else boundaries_of(row, conf.positive_int("n", n))


def boundaries_of(row: Schedule, n: int) -> list[datetime]:
    """As `next_boundaries`."""
    if row.next_fire_at is None:
        return []
    spec = parse_spec(row.spec, row.timezone)
    first = to_us(row.next_fire_at)
    last = LAST_US if row.ends_at is None else to_us(row.ends_at)
    return [from_us(boundary) for boundary in due(spec, first, last, n)]


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
        return add(alias, row.queue, payload, options, conf.settings(), schedule=name, task=row.task)

    job = write_transaction(alias, fire)
    return told(job, alias, signals.schedule_fired_now, name=name, job_id=job and job.pk)


def _readable(payload: Any) -> Any:
    if isinstance(payload, UnreadablePayload):
        raise InvalidPayload(str(payload))
    return payload


def soonest(*, using: str | None = None) -> datetime | None:
    """The earliest next boundary of all enabled schedules; `None` if there is none."""
    rows = Schedule.objects.using(resolve_alias(using))
    enabled = rows.filter(enabled=True, undeclared_at=None, next_fire_at__isnull=False)
    return enabled.order_by("next_fire_at").values_list("next_fire_at", flat=True).first()
