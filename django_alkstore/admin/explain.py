"""Why something has not run, or what became of it, in a sentence or two."""

from datetime import datetime

from django.db.models import Q

from django_alkstore import names
from django_alkstore.admin.show import NOTHING, plain_first_line, when
from django_alkstore.failures import EXPIRED
from django_alkstore.models import Job, Schedule, State

MOST_AHEAD = 1_000
"""How many jobs before one are counted."""


def explain_job(job: Job, now: datetime) -> str:
    match job.state:
        case State.PENDING:
            return _explain_pending(job, now)
        case State.PROCESSING:
            return _explain_processing(job, now)
        case State.COMPLETED:
            return f"Completed on {_when_or_nothing(job.finished_at)}."
        case State.CANCELLED:
            return f"Cancelled on {_when_or_nothing(job.finished_at)}."
    if job.last_error == EXPIRED:
        return f"Dead: it expired on {_when_or_nothing(job.expires_at)}, before a worker took it."
    reason = plain_first_line(job.last_error)
    return (
        f"Dead since {_when_or_nothing(job.finished_at)}, after {job.attempts} of {job.max_attempts} attempts: {reason}"
    )


def explain_schedule(schedule: Schedule, now: datetime) -> str:
    if not schedule.enabled:
        if schedule.last_error:
            return "Paused, since it cannot be read: declare it again with schedule(), then resume it."
        return "Paused: it fires again once it is resumed."
    from django_alkstore.services.locks import holder

    leads = holder(names.LEADERSHIP_LOCK, using=_alias(schedule)) is not None
    due = schedule.next_fire_at <= now
    said = f"{'Due since' if due else 'Fires next on'} {when(schedule.next_fire_at)}"
    if leads:
        said += ", with the scheduler's next look." if due else "."
    else:
        said += f"{', and' if due else ', but'} no scheduler leads: manage.py run_schedules starts one."
    return f"{said}{_nobody_works_on(schedule.queue, _alias(schedule))}"


def _explain_pending(job: Job, now: datetime) -> str:
    nobody = _nobody_works_on(job.queue, _alias(job))
    if job.expires_at is not None and job.expires_at <= now:
        return f"Expired on {when(job.expires_at)}. It will be dead when a worker next looks at its queue.{nobody}"
    if job.run_at > now:
        retry = " Its last attempt failed." if job.attempts else ""
        return f"Not due until {when(job.run_at)}.{retry}{nobody}"
    since = f"Due since {when(job.run_at)}"
    if nobody:
        return f"{since}.{nobody}"
    return f"{since}, {_place_in_line(job, now)}. A worker is there for {names.describe_queue(job.queue)}."


def _explain_processing(job: Job, now: datetime) -> str:
    if job.lease_expires_at is not None and job.lease_expires_at > now:
        return f"Leased to {job.worker_id} until {when(job.lease_expires_at)}."
    fate = "be tried again" if job.attempts < job.max_attempts else "be dead, its attempts being spent,"
    return (
        f"The lease of {job.worker_id} ran out on {_when_or_nothing(job.lease_expires_at)}. "
        f"It will {fate} when a worker next looks at its queue.{_nobody_works_on(job.queue, _alias(job))}"
    )


def _place_in_line(job: Job, now: datetime) -> str:
    """How many are claimed before it."""
    earlier = Q(run_at__lt=job.run_at) | Q(run_at=job.run_at, pk__lt=job.pk)
    due = Job.objects.using(_alias(job)).filter(queue=job.queue, state=State.PENDING, run_at__lte=now)
    before = due.exclude(expires_at__lte=now).filter(Q(priority__gt=job.priority) | Q(priority=job.priority) & earlier)
    ahead = before.order_by()[:MOST_AHEAD].count()
    if not ahead:
        return "and next in line"
    return f"behind {ahead:,}{' or more' if ahead == MOST_AHEAD else ''} other{'s' if ahead > 1 else ''}"


def _nobody_works_on(queue: str, alias: str) -> str:
    """A sentence that says so, with the space before it; or nothing."""
    from django_alkstore.registry import registrations
    from django_alkstore.services import presence

    if queue in presence.look(alias).served:
        return ""
    nobody = f" No worker is alive for {names.describe_queue(queue)}"
    if any(registration.queue == queue for registration in registrations()):
        outbox = names.outbox_of(queue)
        command = f"run_queue {queue}" if outbox is None else f"run_outbox {outbox}"
        return f"{nobody}: manage.py {command} starts one."
    return f"{nobody}, and no handler for it is registered in the installed apps."


def _alias(row: Job | Schedule) -> str:
    assert row._state.db is not None, "the row of a page has been read"
    return row._state.db


def _when_or_nothing(moment: datetime | None) -> str:
    return NOTHING if moment is None else when(moment)
