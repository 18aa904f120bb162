"""Jobs: the list, one job with its failed attempts and its payload, and what can be done to a job."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import DELETION, LogEntry
from django.contrib.admin.views.main import ChangeList
from django.contrib.contenttypes.models import ContentType
from django.db.models import QuerySet
from django.db.models.functions import Substr
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString

from django_alkstore import clock, names
from django_alkstore.admin import show
from django_alkstore.admin.base import CHANGED, CONFIRMED, FROM_PAGE, UNMATCHED, Button, Progress, ReadOnlyAdmin
from django_alkstore.admin.explain import Verdict, explain_job, glance_at
from django_alkstore.admin.history import has_history, history
from django_alkstore.admin.lists import FILTERS, NOT_LISTED, SEARCH_FIELDS, IndexedSearch, JobChangeList
from django_alkstore.admin.readable import in_place_of
from django_alkstore.admin.workers import workers_for, workers_of
from django_alkstore.models import Job, State

OPTIONAL = (
    *("finished", "started", "attempted", "wait", "run_time", "worker", "leased_until", "workers"),
    *("expires", "key", "fired_by", "boundary", "task_path", "result_json"),
)
"""Fields that a job's page leaves out if they are empty."""
MAX_IDS = 20
"""How many deleted jobs the admin's log names."""


@admin.register(Job)
class JobAdmin(IndexedSearch, ReadOnlyAdmin[Job]):
    list_display = ("number", "status", "work", "tries", "moment", "created_ago")
    list_filter = FILTERS
    search_fields = SEARCH_FIELDS
    search_help_text = "A job's id, or the beginning of the name of a queue or outbox, or of a unique key."
    ordering = ("-id",)
    read_by_actions = ("queue",)
    actions = ("requeue", "cancel", "run_now", "delete_finished")
    buttons = {
        "requeue": Button("requeue", "Requeue"),
        "run_now": Button("run_now", "Run now"),
        "cancel": Button("cancel", "Cancel", is_dangerous=True),
        "delete_finished": Button("delete_finished", "Delete", is_dangerous=True),
    }
    fieldsets = (
        (None, {"fields": (("badge", "queue_name", "tries"), "task_path", ("created", "due", "finished"))}),
        ("History", {"fields": ("past",), "classes": ("alkstore-wide",)}),
        ("Payload", {"fields": ("payload_json",), "classes": ("alkstore-wide",)}),
        ("Result", {"fields": ("result_json",), "classes": ("alkstore-wide",)}),
        (
            "Attempts",
            {
                "fields": (
                    ("started", "attempted"),
                    ("wait", "run_time"),
                    ("worker", "leased_until", "expires"),
                    "workers",
                )
            },
        ),
        (
            "Options",
            {
                "fields": (
                    ("priority_number", "most_attempts", "lease_length", "first_wait"),
                    ("key", "fired_by", "boundary"),
                )
            },
        ),
    )

    number = show.column("pk", "id", show.plain, sorts=True)
    queue_name = show.column("queue", "queue", lambda queue: show.text(show.queue_name(queue)))
    created = show.column("created_at", "created", show.moment)
    created_ago = show.column("created_at", "created", show.short_moment)
    due = show.column("run_at", "due", show.moment)
    started = show.column("started_at", "first attempt", show.moment)
    attempted = show.column("last_attempted_at", "latest attempt", show.moment)
    worker = show.column("worker_id", "worker", show.text)
    workers = show.column("worker_ids", "worker of each attempt", show.names)
    leased_until = show.column("lease_expires_at", "leased until", show.moment)
    expires = show.column("expires_at", "expires", show.moment)
    finished = show.column("finished_at", "finished", show.moment)
    key = show.column("unique_key", "unique key", show.text)
    fired_by = show.column("schedule", "schedule", show.text)
    boundary = show.column("fire_at", "boundary", show.moment)
    priority_number = show.column("priority", "priority", show.plain)
    most_attempts = show.column("max_attempts", "most attempts", show.plain)
    lease_length = show.column("visibility_timeout", "visibility timeout", show.duration)
    first_wait = show.column("backoff_base", "backoff base", show.duration)

    @admin.display(description="state")
    def badge(self, job: Job) -> SafeString:
        return show.badge(job.state, job.get_state_display())

    @admin.display(description="state")
    def status(self, job: Job) -> SafeString:
        situation = glance_at(job, workers_of(job))
        return show.status(job.state, job.get_state_display(), situation.text, alarming=situation.alarming)

    @admin.display(description="queue")
    def work(self, job: Job) -> SafeString:
        queue = show.queue_name(job.queue)
        if not job.task:
            return show.two_lines(queue, job.last_error)
        return show.two_lines(f"{queue}: {job.task.rpartition('.')[2]}", job.last_error, title=job.task)

    @admin.display(description="attempts")
    def tries(self, job: Job) -> str:
        return f"{job.attempts} of {job.max_attempts}"

    @admin.display(description="when")
    def moment(self, job: Job) -> SafeString | str:
        return show.short_moment(job.run_at if job.finished_at is None else job.finished_at)

    @admin.display(description="run time")
    def run_time(self, job: Job) -> str:
        if job.last_attempted_at is None or job.state == State.PENDING:
            return show.NOTHING
        return show.duration(((job.finished_at or clock.now()) - job.last_attempted_at).total_seconds())

    @admin.display(description="wait")
    def wait(self, job: Job) -> str:
        """How long a due job has waited for a thread, or how long its latest attempt did."""
        if job.state == State.PENDING:
            waited = (clock.now() - job.run_at).total_seconds()
            return show.duration(waited) if waited >= 0 else show.NOTHING
        if job.last_attempted_at is None or job.started_at is None:
            return show.NOTHING
        # An attempt that a crash or a lapse ended left run_at as it was: for the attempt after it, it says nothing.
        if job.attempts > 1 and job.run_at < job.started_at:
            return show.NOTHING
        return show.duration((job.last_attempted_at - job.run_at).total_seconds())

    @admin.display(description="history")
    def past(self, job: Job) -> SafeString | str:
        """The failed attempts, and what was done to the job in the admin."""
        verdict = explain_job(job, workers_of(job))
        return history(job, [verdict.headline, *verdict.details])

    @admin.display(description="JSON")
    def payload_json(self, job: Job) -> SafeString:
        return show.json_block(show.stored_bytes(job, "payload"))

    @admin.display(description="JSON")
    def result_json(self, job: Job) -> SafeString | str:
        stored = show.stored_bytes(job, "result")
        return show.json_block(stored) if stored else show.NOTHING

    @admin.display(description="task")
    def task_path(self, job: Job) -> SafeString | str:
        return show.text(job.task) if job.task else show.NOTHING

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        beginning = in_place_of(last_error=Substr("last_error", 1, show.MAX_ERROR))
        return super().get_queryset(request).defer(*NOT_LISTED).annotate(**beginning)

    def get_fieldsets(self, request: HttpRequest, obj: Job | None = None) -> Any:
        """The fieldsets without the fields that say nothing about this job."""
        fieldsets = super().get_fieldsets(request, obj)
        if obj is None:
            return fieldsets
        told = [(name, {**options, "fields": self._told(options["fields"], obj)}) for name, options in fieldsets]
        return [fieldset for fieldset in told if fieldset[1]["fields"]]

    def _told(self, fields: Iterable[Any], job: Job) -> list[Any]:
        lines = (line if isinstance(line, (list, tuple)) else (line,) for line in fields)
        kept = (tuple(name for name in line if self._is_told(name, job)) for line in lines)
        return [line if len(line) > 1 else line[0] for line in kept if line]

    def _is_told(self, name: Any, job: Job) -> bool:
        if name == "past":
            return has_history(job)
        return name not in OPTIONAL or getattr(self, name)(job) != show.NOTHING

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return JobChangeList

    def get_changelist_instance(self, request: HttpRequest) -> ChangeList:
        """The list that this request is about. An action asks for it again: it is not counted twice."""
        instance: ChangeList | None = getattr(request, "_alkstore_changelist", None)
        if instance is None:
            instance = super().get_changelist_instance(request)
            request._alkstore_changelist = instance  # type: ignore[attr-defined]
        return instance

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        # Only what the list offers: any other condition would walk the table.
        return lookup in {spec.parameter_name for spec in FILTERS} or (
            _is_offered(lookup, self.get_list_filter(request)) and super().lookup_allowed(lookup, value, request)
        )

    def selected_ids(self, request: HttpRequest, queryset: QuerySet[Job]) -> list[int]:
        if request.POST.get("select_across") == "1":
            return cast("JobChangeList", self.get_changelist_instance(request)).all_ids()
        return super().selected_ids(request, queryset)

    def verdict(self, request: HttpRequest, row: Job) -> Verdict:
        return explain_job(row, workers_for(request))

    def possible(self, row: Job) -> Sequence[str]:
        match row.state:
            case State.PENDING:
                return ("run_now", "cancel") if row.run_at > clock.now() else ("cancel",)
            case State.PROCESSING:
                return ("cancel",)
            case State.COMPLETED:
                return ("delete_finished",)
        return ("requeue", "delete_finished")

    def heading(self, row: Job) -> str:
        return f"Job {row.pk} in {names.describe_queue(row.queue)}"

    def has_view_permission(self, request: HttpRequest, obj: Job | None = None) -> bool:
        return super().has_view_permission(request, obj) or self.has_remove_permission(request)

    def has_remove_permission(self, request: HttpRequest) -> bool:
        return self._has(request, "delete")

    @admin.action(description="Requeue dead or cancelled jobs", permissions=["operate"])
    def requeue(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponse:
        from django_alkstore import services

        return self.act(request, queryset, "requeued", lambda job, using: services.requeue(job.pk, using=using))

    @admin.action(description="Cancel pending or processing jobs", permissions=["operate"])
    def cancel(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponse:
        from django_alkstore import services

        return self.act(request, queryset, "cancelled", lambda job, using: services.cancel(job.pk, using=using))

    @admin.action(description="Run delayed jobs now", permissions=["operate"])
    def run_now(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponse:
        from django_alkstore import services

        return self.act(request, queryset, "made due now", lambda job, using: services.run_now(job.pk, using=using))

    @admin.action(description="Delete finished jobs", permissions=["remove"])
    def delete_finished(self, request: HttpRequest, queryset: QuerySet[Job]) -> HttpResponse:
        from django_alkstore.services.maintenance import delete_batch

        if request.POST.get(CONFIRMED) != "yes":
            return self._ask_to_confirm(request, len(self.selected_ids(request, queryset)))

        def delete(alias: str, ids: list[int]) -> Counter[str]:
            deleted = delete_batch(alias, ids)
            return Counter({CHANGED: deleted, UNMATCHED: len(ids) - deleted})

        return self.run_batches(request, queryset, "deleted", delete)

    def finish(self, request: HttpRequest, progress: Progress, done: str) -> None:
        super().finish(request, progress, done)
        deleted = progress.outcomes.get(CHANGED, 0)
        if done == "deleted" and deleted:
            self._log_deletion(request, deleted)

    def _log_deletion(self, request: HttpRequest, deleted: int) -> None:
        """One entry for all of them: each job's own history goes with it."""
        chosen = request.POST.getlist(ACTION_CHECKBOX_NAME)
        if request.POST.get("select_across") == "1" or len(chosen) > MAX_IDS:
            which = f"those of the list {request.get_full_path()}"
        else:
            which = f"among the jobs {', '.join(chosen)}"
        LogEntry.objects.create(
            user_id=cast("int", request.user.pk),
            content_type=ContentType.objects.get_for_model(Job),
            object_repr=f"{self._rows(deleted)}, finished",
            action_flag=DELETION,
            change_message=f"Deleted {self._rows(deleted)}: {which}.",
        )

    def _ask_to_confirm(self, request: HttpRequest, selected: int) -> HttpResponse:
        return self.render_action_page(
            request,
            "admin/django_alkstore/confirm.html",
            title=f"Delete {self._rows(selected)}?",
            fields={CONFIRMED: "yes"},
        )

    def _next_url(self, request: HttpRequest) -> str:
        if request.POST.get(FROM_PAGE) and request.POST.get("action") == "delete_finished":
            return self._url("changelist")
        return super()._next_url(request)


def _is_offered(lookup: str, filters: Sequence[Any]) -> bool:
    """True if one of these filters, a project's own, may have put `lookup` into the address."""
    for chosen in filters:
        if isinstance(chosen, type):
            name = getattr(chosen, "parameter_name", None)
        else:
            name = chosen if isinstance(chosen, str) else chosen[0]
        if name and (lookup == name or lookup.startswith(f"{name}__")):
            return True
    return False
