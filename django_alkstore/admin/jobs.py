"""Jobs: the list, one job with its payload and failed attempts, and what can be done to a job."""

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.db.models.functions import Substr
from django.http import HttpRequest
from django.utils.safestring import SafeString

from django_alkstore import clock
from django_alkstore.admin import show
from django_alkstore.admin.base import ReadOnlyAdmin
from django_alkstore.admin.explain import explain_job
from django_alkstore.admin.lists import FILTERS, NOT_LISTED, JobChangeList, search_condition
from django_alkstore.admin.readable import in_place_of
from django_alkstore.models import Job, State


@admin.register(Job)
class JobAdmin(ReadOnlyAdmin[Job]):
    list_display = ("id", "queue_name", "badge", "tries", "due_or_finished", "age", "error_line")
    list_filter = FILTERS
    search_fields = ("id", "queue", "unique_key")
    search_help_text = "A job's id, or the beginning of the name of a queue or outbox, or of a unique key."
    ordering = ("-id",)
    read_by_actions = ("queue",)
    actions = ("requeue", "cancel", "run_now")
    fieldsets = (
        (None, {"fields": ("explanation", ("badge", "queue_name", "tries"))}),
        ("Payload", {"fields": ("payload_json",)}),
        ("Failed attempts", {"fields": ("failures",)}),
        ("Moments", {"fields": (("created", "due", "finished"), ("worker", "leased_until", "expires"))}),
        ("Options", {"fields": (("priority", "visibility_timeout", "backoff_base"), ("key", "fired_by", "boundary"))}),
    )

    queue_name = show.column("queue", "queue", show.queue_name)
    created = show.column("created_at", "created", show.moment)
    due = show.column("run_at", "due", show.moment)
    worker = show.column("worker_id", "worker", show.text)
    leased_until = show.column("lease_expires_at", "leased until", show.moment)
    expires = show.column("expires_at", "expires", show.moment)
    finished = show.column("finished_at", "finished", show.moment)
    key = show.column("unique_key", "unique key", show.text)
    fired_by = show.column("schedule", "schedule", show.text)
    boundary = show.column("fire_at", "boundary", show.moment)
    failures = show.column("errors", "attempts", show.failures)
    error_line = show.column("last_error", "last error", show.first_line)

    @admin.display(description="state")
    def badge(self, job: Job) -> SafeString:
        return show.badge(job.state, job.get_state_display())

    @admin.display(description="attempts")
    def tries(self, job: Job) -> str:
        return f"{job.attempts} / {job.max_attempts}"

    @admin.display(description="due or finished")
    def due_or_finished(self, job: Job) -> SafeString | str:
        if job.state == State.PROCESSING:
            return show.moment(job.lease_expires_at, "leased until")
        return show.moment(job.run_at if job.finished_at is None else job.finished_at)

    @admin.display(description="age")
    def age(self, job: Job) -> str:
        return show.age((clock.now() - job.created_at).total_seconds())

    @admin.display(description="in short")
    def explanation(self, job: Job) -> SafeString | str:
        return show.text(explain_job(job, clock.now()))

    @admin.display(description="JSON")
    def payload_json(self, job: Job) -> SafeString:
        return show.json_block(show.stored_bytes(job, "payload"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        beginning = in_place_of(last_error=Substr("last_error", 1, show.MAX_ERROR))
        return super().get_queryset(request).defer(*NOT_LISTED).annotate(**beginning)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[JobChangeList]:
        return JobChangeList

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        # Any other would walk the table.
        return lookup in {spec.parameter_name for spec in FILTERS}

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Job], search_term: str
    ) -> tuple[QuerySet[Job], bool]:
        term = search_term.strip()
        return (queryset.filter(search_condition(term)) if term else queryset), False

    @admin.action(description="Requeue dead or cancelled jobs", permissions=["operate"])
    def requeue(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        from django_alkstore import services

        self.act(request, queryset, "requeued", lambda job, using: services.requeue(job.pk, using=using))

    @admin.action(description="Cancel pending or processing jobs", permissions=["operate"])
    def cancel(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        from django_alkstore import services

        self.act(request, queryset, "cancelled", lambda job, using: services.cancel(job.pk, using=using))

    @admin.action(description="Run delayed jobs now", permissions=["operate"])
    def run_now(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        from django_alkstore import services

        self.act(request, queryset, "made due now", lambda job, using: services.run_now(job.pk, using=using))
