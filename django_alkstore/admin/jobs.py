"""Jobs: the list, the page that says why one has not run, and the three actions."""

from __future__ import annotations  # Django's classes take no type arguments when they run

from datetime import datetime
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import flatten_fieldsets
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from django_alkstore import clock
from django_alkstore.admin import show
from django_alkstore.admin.base import ReadOnlyAdmin
from django_alkstore.admin.lists import FILTERS, JobChangeList, JobPaginator, Wanted, search_condition
from django_alkstore.models import FINISHED_STATES, Job, State
from django_alkstore.services import cancel, requeue, run_now


@admin.register(Job)
class JobAdmin(ReadOnlyAdmin[Job]):
    list_display = ("number", "queue_name", "state_badge", "attempts_of", "due_or_finished", "age", "error_line")
    list_display_links = ("number",)
    list_filter = FILTERS
    list_max_show_all = 500
    sortable_by = ("number",)
    search_fields = ("queue",)
    search_help_text = "A job's id, or the beginning of a queue, an outbox or a unique key."
    ordering = ("-pk",)
    actions = ("requeue_jobs", "cancel_jobs", "run_jobs_now")
    fieldsets = (
        (None, {"fields": ("why", "number", "queue_name", "state_badge", "attempts_of", "payload_json", "failures")}),
        ("When", {"fields": ("created", "due", "expires", "lease_ends", "finished")}),
        (
            "Options",
            {
                "fields": (
                    "priority",
                    "visibility_timeout",
                    "backoff_base",
                    "unique_key_text",
                    "schedule_text",
                    "boundary",
                    "worker",
                    "fence",
                )
            },
        ),
    )

    class Media:
        css = {"all": ("django_alkstore/admin.css",)}

    def get_readonly_fields(self, request: HttpRequest, obj: Job | None = None) -> list[str]:
        return flatten_fieldsets(self.fieldsets)

    # The list

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return JobChangeList

    def get_paginator(
        self, request: HttpRequest, queryset: QuerySet[Any], per_page: int, *args: Any, **kwargs: Any
    ) -> Paginator[Any]:
        asked = request.GET
        wanted = Wanted(asked.get("state"), asked.get("queue"), asked.get("due"), asked.get("q", "").strip())
        oldest_first = asked.get("o") == "1"
        return JobPaginator(wanted, self.get_queryset(request), per_page, newest_first=not oldest_first)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Job], search_term: str
    ) -> tuple[QuerySet[Job], bool]:
        term = search_term.strip()
        return (queryset.filter(search_condition(term)) if term else queryset), False

    @admin.display(description="job", ordering="pk")
    def number(self, job: Job) -> int:
        return job.pk

    @admin.display(description="queue")
    def queue_name(self, job: Job) -> SafeString | str:
        return show.text(show.queue_name(job.queue))

    @admin.display(description="state")
    def state_badge(self, job: Job) -> SafeString:
        return show.badge(job.state, State(job.state).label)

    @admin.display(description="attempts")
    def attempts_of(self, job: Job) -> str:
        return f"{job.attempts} / {job.max_attempts}"

    @admin.display(description="due or finished")
    def due_or_finished(self, job: Job) -> SafeString | str:
        return show.moment(job.finished_at if job.state in FINISHED_STATES else job.run_at)

    @admin.display(description="age")
    def age(self, job: Job) -> str:
        return show.age((clock.now() - job.created_at).total_seconds())

    @admin.display(description="last error")
    def error_line(self, job: Job) -> SafeString | str:
        # The list fetches its beginning alone.
        return show.first_line(getattr(job, "error_start", None))

    # The page

    @admin.display(description="why")
    def why(self, job: Job) -> SafeString | str:
        return show.text(explanation(job, clock.now()))

    @admin.display(description="payload")
    def payload_json(self, job: Job) -> SafeString:
        return show.json_block(show.stored_text(job, "payload"))

    @admin.display(description="failed attempts")
    def failures(self, job: Job) -> SafeString | str:
        return show.failures(job.errors)

    @admin.display(description="unique key")
    def unique_key_text(self, job: Job) -> SafeString | str:
        return show.text(job.unique_key)

    @admin.display(description="schedule")
    def schedule_text(self, job: Job) -> SafeString | str:
        return show.text(job.schedule)

    @admin.display(description="worker")
    def worker(self, job: Job) -> SafeString | str:
        return show.text(job.worker_id)

    created = show.column("created_at", "enqueued", show.moment)
    due = show.column("run_at", "due", show.moment)
    expires = show.column("expires_at", "expires", show.moment)
    lease_ends = show.column("lease_expires_at", "lease ends", show.moment)
    finished = show.column("finished_at", "finished", show.moment)
    boundary = show.column("fire_at", "boundary", show.moment)

    # The actions

    @admin.action(description="Requeue dead or cancelled jobs", permissions=["operate"])
    def requeue_jobs(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        self.act(request, queryset, "requeued", lambda job, alias: requeue(job.pk, using=alias))

    @admin.action(description="Cancel pending or processing jobs", permissions=["operate"])
    def cancel_jobs(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        self.act(request, queryset, "cancelled", lambda job, alias: cancel(job.pk, using=alias))

    @admin.action(description="Run delayed jobs now", permissions=["operate"])
    def run_jobs_now(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        self.act(request, queryset, "made due now", lambda job, alias: run_now(job.pk, using=alias))


def explanation(job: Job, now: datetime) -> str:
    """Why the job has not run, or what became of it, in a sentence."""
    if job.state == State.PENDING:
        return _why_pending(job, now)
    if job.state == State.PROCESSING:
        ends = job.lease_expires_at
        if ends is not None and ends <= now:
            return f"Its worker {job.worker_id} has not renewed the lease, which ran out {show.distance(ends, now)}."
        return f"Worker {job.worker_id} is running it; the lease ends {show.distance(ends or now, now)}."
    if job.state == State.COMPLETED:
        return f"It was done at attempt {job.attempts}."
    if job.state == State.CANCELLED:
        return "Somebody cancelled it. It can be requeued."
    return f"It failed for good after {job.attempts} of {job.max_attempts} attempts: {job.last_error}"


def _why_pending(job: Job, now: datetime) -> str:
    if job.expires_at is not None and job.expires_at <= now:
        return "It expired before a worker took it, and is dead as soon as one looks."
    if job.run_at > now:
        waits = "Its last attempt failed; it is tried again" if job.attempts else "It is not due yet: it is due"
        return f"{waits} {show.distance(job.run_at, now)}."
    return (
        f"It has been due since {show.distance(job.run_at, now)} and waits for a worker that knows "
        f"{show.queue_name(job.queue)!r}. Is one running? (manage.py run_alkstore)"
    )
