"""The three tables. Rows are read here and written by the services alone."""

from datetime import datetime
from typing import TYPE_CHECKING

from django.db import models
from django.db.models import CheckConstraint, Index, Q, UniqueConstraint
from django.db.models.functions import Cast

from django_alkstore import names
from django_alkstore.clock import FIRST_MOMENT, LAST_MOMENT, LAST_US, SECOND
from django_alkstore.fields import InstantField, JSONTextField

if TYPE_CHECKING:
    from django_stubs_ext.db.models import TypedModelMeta
else:
    TypedModelMeta = object


class State(models.TextChoices):
    """Where a job is in its life. docs/lifecycle.md says who moves it."""

    PENDING = "pending", "Pending"  # waits for its run_at, then for a worker
    PROCESSING = "processing", "Processing"  # leased to a worker
    COMPLETED = "completed", "Completed"  # acked
    DEAD = "dead", "Dead"  # out of attempts, given up by its handler, or expired
    CANCELLED = "cancelled", "Cancelled"  # cancelled by somebody


LONGEST = LAST_US / SECOND
"""Seconds: the longest duration."""
LIVE_STATES = (State.PENDING, State.PROCESSING)


class JobQuerySet(models.QuerySet["Job"]):
    """Reading only; state changes are services."""

    def live(self) -> "JobQuerySet":
        return self.filter(state__in=LIVE_STATES)

    def due(self, now: datetime) -> "JobQuerySet":
        return self.filter(state=State.PENDING, run_at__lte=now)


_LEASED = Q(lease_expires_at__isnull=False, worker_id__isnull=False)
_NOT_LEASED = Q(lease_expires_at__isnull=True, worker_id__isnull=True)
_FINISHED = Q(finished_at__isnull=False) & _NOT_LEASED
# A lease exactly while processing, an end exactly once finished. In ORs, the state of an insert first: SQLite builds a
# table for an IN each time, which was a third of an insert's cost.
_WELL_FORMED = (
    (Q(state=State.PENDING, finished_at__isnull=True) & _NOT_LEASED)
    | (Q(state=State.PROCESSING, finished_at__isnull=True) & _LEASED)
    | (Q(state=State.COMPLETED) & _FINISHED)
    | (Q(state=State.DEAD) & _FINISHED)
    | (Q(state=State.CANCELLED) & _FINISHED)
)


def _is_whole(name: str) -> Q:
    """A whole number: SQLite keeps a text or a fraction in a column of integers."""
    return Q(**{name: Cast(name, models.BigIntegerField())})


def _is_moment(name: str) -> Q:
    return Q(**{f"{name}__range": (FIRST_MOMENT, LAST_MOMENT)}) & Q(**{name: Cast(name, InstantField())})


def _is_duration(name: str, least: str) -> Q:
    """Seconds, no more than a date can hold. An infinity and a text are more."""
    return Q(**{f"{name}__{least}": 0.0, f"{name}__lte": LONGEST})


class Job(models.Model):
    """One piece of work, for its whole life. Durations are in seconds."""

    id = models.BigAutoField(primary_key=True)
    queue = models.CharField(max_length=names.MAX_QUEUE_LENGTH)
    payload = JSONTextField(blank=True)
    state = models.CharField(max_length=10, choices=State.choices, default=State.PENDING)
    priority = models.IntegerField(default=0, help_text="Higher goes first.")
    run_at = InstantField(help_text="Due from this moment on.")
    attempts = models.PositiveIntegerField(default=0, help_text="Claims that count against the maximum.")
    max_attempts = models.PositiveIntegerField()
    visibility_timeout = models.FloatField(help_text="How long a claim is leased, in seconds.")
    backoff_base = models.FloatField(help_text="The first wait after a failure, in seconds.")
    expires_at = InstantField(null=True, blank=True, help_text="Not delivered from this moment on.")
    fence = models.PositiveBigIntegerField(default=0, help_text="Grows with each claim; names the claim.")
    worker_id = models.CharField(max_length=255, null=True, blank=True, help_text="Who holds the lease.")
    lease_expires_at = InstantField(null=True, blank=True)
    liveness = models.CharField(
        max_length=64, null=True, blank=True, help_text="The liveness file under which the latest claim was made."
    )
    unique_key = models.CharField(
        max_length=255, null=True, blank=True, help_text="At most one live job of the queue has it."
    )
    schedule = models.CharField(
        max_length=names.MAX_LENGTH, null=True, blank=True, help_text="The schedule that fired it."
    )
    fire_at = InstantField(null=True, blank=True, help_text="The boundary that it was fired for.")
    errors = JSONTextField(default=list, blank=True)
    last_error = models.TextField(null=True, blank=True)
    created_at = InstantField()
    finished_at = InstantField(null=True, blank=True)
    started_at = InstantField(null=True, blank=True, help_text="The claim of the first attempt.")
    last_attempted_at = InstantField(
        null=True,
        blank=True,
        help_text="The claim of the latest attempt, given back or not; empty if none counts.",
    )
    task = models.TextField(
        default="", blank=True, help_text="The dotted path of the task that it runs; empty for a handler's job."
    )
    result = JSONTextField(null=True, blank=True, help_text="What the task returned; empty if that was None.")
    worker_ids = JSONTextField(
        default=list, blank=True, help_text="Who made each counted attempt; the last 20 at most."
    )
    lock_errors = models.SmallIntegerField(
        default=0, help_text="Lock errors of the database in a row, whose attempts were given back."
    )

    objects = JobQuerySet.as_manager()

    class Meta(TypedModelMeta):
        constraints = [
            CheckConstraint(condition=_WELL_FORMED, name="alkstore_job_state"),
            # What reads these columns relies on them. A constraint for each: an update checks those that it touches.
            CheckConstraint(condition=_is_whole("priority"), name="alkstore_job_priority"),
            CheckConstraint(condition=_is_moment("run_at"), name="alkstore_job_run_at"),
            CheckConstraint(condition=_is_whole("attempts"), name="alkstore_job_attempts"),
            CheckConstraint(
                condition=Q(max_attempts__gte=1) & _is_whole("max_attempts"), name="alkstore_job_max_attempts"
            ),
            CheckConstraint(
                condition=_is_duration("visibility_timeout", "gt"),
                name="alkstore_job_visibility_timeout",
            ),
            CheckConstraint(condition=_is_duration("backoff_base", "gte"), name="alkstore_job_backoff_base"),
            CheckConstraint(condition=_is_moment("expires_at"), name="alkstore_job_expires_at"),
            CheckConstraint(condition=_is_moment("lease_expires_at"), name="alkstore_job_lease_expires_at"),
            CheckConstraint(condition=_is_whole("fence"), name="alkstore_job_fence"),
            UniqueConstraint(
                fields=["queue", "unique_key"],
                condition=Q(state__in=LIVE_STATES, unique_key__isnull=False),
                name="alkstore_job_live_unique_key",
            ),
            UniqueConstraint(
                fields=["schedule", "fire_at"],
                condition=Q(schedule__isnull=False, fire_at__isnull=False),
                name="alkstore_job_schedule_boundary",
            ),
        ]
        indexes = [
            # The claim's order. The row id closes it, as it closes every index.
            Index(
                fields=["queue", "-priority", "run_at"],
                condition=Q(state=State.PENDING),
                name="alkstore_job_claim",
            ),
            Index(
                fields=["queue", "lease_expires_at"],
                condition=Q(state=State.PROCESSING),
                name="alkstore_job_lease",
            ),
            Index(
                fields=["queue", "expires_at"],
                condition=Q(state=State.PENDING, expires_at__isnull=False),
                name="alkstore_job_expiry",
            ),
            # The jobs that have failed, whatever became of them. A job that never failed costs nothing here.
            Index(fields=["state", "queue"], condition=Q(last_error__isnull=False), name="alkstore_job_failed"),
            # The queues that hold tasks, and which tasks. A handler's job costs nothing here.
            Index(
                fields=["queue", "task"],
                condition=Q(state__in=LIVE_STATES, task__gt=""),
                name="alkstore_job_task",
            ),
            # For looking a key up whatever became of its job. A job without one costs nothing here.
            Index(fields=["unique_key"], condition=Q(unique_key__isnull=False), name="alkstore_job_unique_key"),
            # For pruning; with the queue, counting the finished needs no table.
            Index(
                fields=["state", "finished_at", "queue"],
                condition=Q(finished_at__isnull=False),
                name="alkstore_job_finished",
            ),
        ]

    def __str__(self) -> str:
        return f"job {self.pk} in {names.describe_queue(self.queue)}"

    @property
    def idempotency_key(self) -> str:
        """The same on every delivery of this job, and different for any other job of the database."""
        return names.idempotency_key(self.pk, self.created_at)


class Lock(models.Model):
    """A held lock, or one that has lapsed. Releasing deletes the row.

    The token is the key, and SQLite's AUTOINCREMENT remembers the greatest that there ever was: it grows with
    each acquisition, past every deletion, with no row left behind for a free lock.

    The workers' signs of life are rows here too, under names that no lock can have (docs/adr/0008).
    """

    token = models.BigAutoField(primary_key=True)
    name = models.CharField(max_length=names.MAX_LOCK_LENGTH, unique=True)
    owner = models.CharField(max_length=255)
    acquired_at = InstantField()
    expires_at = InstantField()
    liveness = models.CharField(
        max_length=64, null=True, blank=True, help_text="The liveness file of the scheduler or worker that holds it."
    )

    class Meta(TypedModelMeta):
        constraints = [CheckConstraint(condition=_is_moment("expires_at"), name="alkstore_lock_expires_at")]

    def __str__(self) -> str:
        return f"lock {self.name}"


STORED_NEVER = -1.0
"""`NEVER` as `expires_in` of a schedule."""


class ScheduleManager(models.Manager["Schedule"]):
    """Finds a schedule by its natural key."""

    def get_by_natural_key(self, name: str) -> "Schedule":
        return self.get(name=name)


class Schedule(models.Model):
    """What is due when. An option that is NULL takes the queue's default when a job is fired."""

    id = models.BigAutoField(primary_key=True)
    name = models.CharField(max_length=names.MAX_LENGTH, unique=True)
    spec = models.TextField()
    timezone = models.CharField(
        max_length=64, null=True, blank=True, help_text="The zone of its wall clock; not for '@every'."
    )
    queue = models.CharField(max_length=names.MAX_LENGTH)
    task = models.TextField(
        default="", blank=True, help_text="The dotted path of the task that it fires; empty for a handler."
    )
    payload = JSONTextField(blank=True)
    starting = InstantField(null=True, blank=True, help_text="A boundary of the grid.")
    starts_at = InstantField(null=True, blank=True, help_text="No boundary before this moment.")
    ends_at = InstantField(null=True, blank=True, help_text="No boundary after this moment.")
    catch_up = models.CharField(max_length=6, null=True, blank=True, help_text="What becomes of missed boundaries.")
    grace = models.FloatField(null=True, blank=True, help_text="Seconds after which a boundary is too late to fire.")
    overlap = models.CharField(max_length=5, default="allow")
    jitter = models.FloatField(default=0.0, help_text="Seconds by which a job is put off at most.")
    priority = models.IntegerField(default=0)
    max_attempts = models.PositiveIntegerField(null=True, blank=True)
    visibility_timeout = models.FloatField(null=True, blank=True, help_text="Seconds.")
    backoff_base = models.FloatField(null=True, blank=True, help_text="Seconds.")
    expires_in = models.FloatField(null=True, blank=True, help_text="Seconds from its tick; -1: never.")
    enabled = models.BooleanField(default=True)
    from_code = models.BooleanField(default=False, help_text="Declared by @scheduled.")
    undeclared_at = InstantField(
        null=True, blank=True, help_text="When the code no longer declared it. It fires nothing since."
    )
    fired = models.PositiveBigIntegerField(default=0)
    coalesced = models.PositiveBigIntegerField(default=0, help_text="Missed, and covered by a later boundary.")
    too_late = models.PositiveBigIntegerField(default=0, help_text="Missed, and not fired any more.")
    overlapped = models.PositiveBigIntegerField(default=0, help_text="Not fired beside the job of an earlier one.")
    next_fire_at = InstantField(null=True, blank=True)
    last_fire_at = InstantField(null=True, blank=True, help_text="The last boundary that was fired.")
    last_error = models.TextField(null=True, blank=True, help_text="Why the library paused it.")
    created_at = InstantField()
    updated_at = InstantField()

    objects = ScheduleManager()

    class Meta(TypedModelMeta):
        constraints = [CheckConstraint(condition=_is_moment("next_fire_at"), name="alkstore_schedule_next_fire_at")]
        indexes = [
            Index(fields=["next_fire_at"], condition=Q(enabled=True), name="alkstore_schedule_due"),
        ]

    def __str__(self) -> str:
        return f"schedule {self.name}"

    def natural_key(self) -> tuple[str]:
        """What `dumpdata --natural-primary` names it by."""
        return (self.name,)
