"""Why a job or a schedule has not run, or how it ended: a word or two for a list, a verdict for its page."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db.models import Q

from django_alkstore import clock, names
from django_alkstore.admin.show import NOTHING, age, count, duration, plain_first_line, when
from django_alkstore.admin.workers import RunningJob, Workers
from django_alkstore.failures import EXPIRED
from django_alkstore.models import Job, Lock, Schedule, State

MAX_AHEAD = 1_000
"""How many jobs ahead of one are counted."""
MAX_NAMED = 5
"""How many running jobs a page names."""
CLAIM_TIME = timedelta(seconds=2)
"""A free thread of a worker claims a due job well within this time."""


class Glance(NamedTuple):
    """A job's situation in a word or two."""

    text: str
    alarming: bool = False
    """True if the job will not go on without somebody's help, or if its worker failed it."""


class Verdict(NamedTuple):
    """A job's or schedule's situation on its page."""

    kind: str
    """The badge that has the same colour."""
    headline: str
    details: Sequence[str] = ()
    """Sentences."""
    running: Sequence[RunningJob] = ()
    """The jobs that occupy the threads."""

    @property
    def shown_running(self) -> Sequence[RunningJob]:
        return self.running[:MAX_NAMED]

    @property
    def running_more(self) -> int:
        return max(0, len(self.running) - MAX_NAMED)


def glance_at(job: Job, workers: Workers) -> Glance:
    """A job's situation, as the list shows it beside the state."""
    match job.state:
        case State.PENDING:
            return _glance_at_pending(job, workers)
        case State.PROCESSING:
            return _glance_at_processing(job, workers)
    if job.last_error == EXPIRED and job.state == State.DEAD:
        return Glance("expired")
    run_time = _run_time(job) if job.state == State.COMPLETED else ""
    return Glance(f"took {run_time}" if run_time else "")


def _glance_at_processing(job: Job, workers: Workers) -> Glance:
    if job.pk in workers.orphaned:
        return Glance("worker dead", alarming=True)
    if _has_lapsed(job, workers.now):
        return Glance("lease lapsed", alarming=True)
    return Glance("" if job.last_attempted_at is None else f"for {_between(job.last_attempted_at, workers.now)}")


def _glance_at_pending(job: Job, workers: Workers) -> Glance:
    now = workers.now
    if job.expires_at is not None and job.expires_at <= now:
        return Glance("expired", alarming=True)
    if job.run_at > now:
        distance = f"in {_between(now, job.run_at)}"
        return Glance(f"retries {distance}" if _is_retry(job) else distance)
    if job.queue not in workers.served:
        return Glance(_lack(job.queue, workers), alarming=True)
    if now - job.run_at > CLAIM_TIME and workers.busy_with(job.queue):
        return Glance("threads busy")
    return Glance("retries now" if _is_retry(job) else "due")


def _lack(queue: str, workers: Workers) -> str:
    """What a queue lacks that is not served."""
    if queue in workers.suspended:
        return "worker suspended"
    return "no worker" if queue in workers.registered else "no handler"


def explain_job(job: Job, workers: Workers) -> Verdict:
    """The verdict on a job, for its page."""
    match job.state:
        case State.PENDING:
            return _explain_pending(job, workers)
        case State.PROCESSING:
            return _explain_processing(job, workers)
        case State.COMPLETED:
            run_time = _run_time(job)
            took = [f"Attempt {job.attempts} of {job.max_attempts} took {run_time}."] if run_time else []
            return Verdict("completed", f"Completed {_on(job.finished_at)}.", took)
        case State.CANCELLED:
            return Verdict("cancelled", f"Cancelled {_on(job.finished_at)}.")
    if job.last_error == EXPIRED:
        return Verdict("dead", "Dead: it expired before a worker took it.", [f"It expired {_on(job.expires_at)}."])
    after = f"after {job.attempts} of {count(job.max_attempts, 'attempt')}"
    return Verdict("dead", f"Dead: {headline_of(job.last_error)}", [f"It died {_on(job.finished_at)}, {after}."])


def headline_of(error: str | None) -> str:
    """What a headline says of an error."""
    line = plain_first_line(error)
    return "no reason was given." if line == NOTHING else line


def explain_schedule(schedule: Schedule, now: datetime) -> Verdict:
    """The verdict on a schedule, for its page."""
    if not schedule.enabled:
        if schedule.last_error:
            advice = "Declare it again with schedule(), then resume it."
            return Verdict("broken", "Paused: the library cannot read its row.", [advice])
        return Verdict("paused", "Paused.", ["It fires again after somebody resumes it."])
    from django_alkstore.services.presence import look

    alias = _alias(schedule)
    leader = look(alias).leader
    if schedule.next_fire_at <= now:
        headline = f"Due since {when(schedule.next_fire_at)}."
        details = ["The scheduler fires it in its next round."]
    else:
        headline = f"Fires next on {when(schedule.next_fire_at)} (in {_between(now, schedule.next_fire_at)})."
        details = []
    kind = "on"
    if leader is None:
        kind = "broken"
        details = ["No scheduler is running. To start one: manage.py run_schedules"]
    return Verdict(kind, headline, [*details, *_advice_without_worker(schedule.queue, Workers(alias))])


def explain_lock(lock: Lock, now: datetime) -> Verdict:
    """The verdict on a lock, for its page."""
    until = when(lock.expires_at)
    if lock.expires_at > now:
        return Verdict(
            "held", f"Held until {until}.", [f"Its holder is {lock.owner}, which may renew or release it before."]
        )
    return Verdict("lapsed", f"Lapsed {_on(lock.expires_at)}.", ["It is free: anybody can take it."])


def _explain_pending(job: Job, workers: Workers) -> Verdict:
    now = workers.now
    missing = _advice_without_worker(job.queue, workers)
    if job.expires_at is not None and job.expires_at <= now:
        expired = f"Expired {_on(job.expires_at)}."
        return Verdict("dead", expired, ["It becomes dead when a worker next looks at its queue.", *missing])
    failed = [f"The last attempt failed: {headline_of(job.last_error)}"] if _is_retry(job) else []
    if job.run_at > now:
        moment = f"{when(job.run_at)} (in {_between(now, job.run_at)})"
        if failed:
            attempt = f"Attempt {job.attempts + 1} of {job.max_attempts}"
            return Verdict("pending", f"Waiting: it is tried again on {moment}.", [f"{attempt}.", *failed, *missing])
        return Verdict("pending", f"Waiting: not due until {moment}.", missing)
    since = f"Due since {when(job.run_at)}"
    if missing:
        return Verdict("dead", f"Waiting: {_missing(job.queue, workers)}.", [f"{since}.", *missing[1:], *failed])
    place = f"{since}, {_place_in_line(job, now)}."
    running = workers.busy_with(job.queue)
    if running and now - job.run_at > CLAIM_TIME:
        ids = {run.worker_id for run in running}
        who = f"The worker {running[0].worker_id} is" if len(ids) == 1 else f"The {len(ids)} workers are"
        busy = f"{who} running {count(len(running), 'job')}."
        return Verdict("processing", "Waiting: all threads are busy.", [place, busy, *failed], running)
    there = f"A worker is running for {names.describe_queue(job.queue)}."
    return Verdict("pending", "Due now.", [place, there, *failed])


def _explain_processing(job: Job, workers: Workers) -> Verdict:
    now = workers.now
    dead = job.pk in workers.orphaned
    if not dead and not _has_lapsed(job, now):
        if job.last_attempted_at is None:
            headline = "Running."
        else:
            headline = f"Running for {_between(job.last_attempted_at, now)}."
        attempt = f"Attempt {job.attempts} of {job.max_attempts}, by the worker {job.worker_id}."
        return Verdict("processing", headline, [attempt, f"Its lease ends on {when(job.lease_expires_at)}."])
    headline = "Its worker is dead." if dead else f"Its lease ran out {_on(job.lease_expires_at)}."
    attempt = f"Attempt {job.attempts} of {job.max_attempts} was made by the worker {job.worker_id}."
    fate = "be tried again" if job.attempts < job.max_attempts else "be dead, since no attempt is left,"
    then = f"It will {fate} when a worker next looks at its queue."
    return Verdict("dead", headline, [attempt, then, *_advice_without_worker(job.queue, workers)])


def _run_time(job: Job) -> str:
    """How long the latest attempt of a finished job took; empty if that is not known."""
    if job.last_attempted_at is None or job.finished_at is None:
        return ""
    return duration((job.finished_at - job.last_attempted_at).total_seconds())


def _is_retry(job: Job) -> bool:
    """True if an attempt of the present budget has failed."""
    return job.attempts > 0 and bool(job.last_error)


def _has_lapsed(job: Job, now: datetime) -> bool:
    return job.lease_expires_at is not None and job.lease_expires_at <= now


def _place_in_line(job: Job, now: datetime) -> str:
    """How many jobs are claimed before it."""
    earlier = Q(run_at__lt=job.run_at) | Q(run_at=job.run_at, pk__lt=job.pk)
    due = Job.objects.using(_alias(job)).filter(queue=job.queue, state=State.PENDING, run_at__lte=now)
    before = due.exclude(expires_at__lte=now).filter(Q(priority__gt=job.priority) | Q(priority=job.priority) & earlier)
    ahead = before.order_by()[:MAX_AHEAD].count()
    if not ahead:
        return "and next in line"
    if ahead == MAX_AHEAD:
        return f"behind {MAX_AHEAD:,} or more others"
    return f"behind {count(ahead, 'other')}"


def _missing(queue: str, workers: Workers) -> str:
    """What is missing for this queue."""
    described = names.describe_queue(queue)
    match _lack(queue, workers):
        case "worker suspended":
            return f"the worker for {described} is suspended"
        case "no worker":
            return f"no worker is running for {described}"
    return f"no installed app has a handler for {described}, and no worker is running for it"


def _advice_without_worker(queue: str, workers: Workers) -> list[str]:
    """Sentences that say that no worker is running for this queue, and what to do; none if one is running."""
    if queue in workers.served:
        return []
    missing = _missing(queue, workers)
    said = f"{missing[0].upper()}{missing[1:]}."
    match _lack(queue, workers):
        case "worker suspended":
            return [said, "Its process lives, but has given no sign of life for a while. It may have been stopped."]
        case "no worker":
            outbox = names.outbox_of(queue)
            command = f"run_queue {queue}" if outbox is None else f"run_outbox {outbox}"
            return [said, f"To start one: manage.py {command}"]
    return [said]


def _alias(row: Job | Schedule) -> str:
    assert row._state.db is not None, "the row of a page has been read"
    return row._state.db


def _between(start: datetime, end: datetime) -> str:
    return age((end - start).total_seconds())


def _on(moment: datetime | None) -> str:
    return "at an unknown moment" if moment is None else f"on {when(moment)} ({_between(moment, clock.now())} ago)"
