"""Schedules: what fires when, and pausing, resuming and firing it."""

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from django_alkstore import clock
from django_alkstore.admin import show
from django_alkstore.admin.base import ReadOnlyAdmin
from django_alkstore.admin.explain import explain_schedule
from django_alkstore.models import Schedule


@admin.register(Schedule)
class ScheduleAdmin(ReadOnlyAdmin[Schedule]):
    list_display = ("title", "grammar", "target", "badge", "next_fire", "last_fire", "error_line")
    list_filter = ("enabled",)
    search_fields = ("name", "queue")
    ordering = ("name",)
    read_by_actions = ("name",)
    actions = ("pause", "resume", "fire_now")
    fieldsets = (
        (
            None,
            {"fields": ("explanation", ("title", "grammar", "target"), ("badge", "next_fire", "last_fire"), "error")},
        ),
        ("Payload", {"fields": ("payload_json",)}),
        ("Options", {"fields": (("priority", "max_attempts"), ("visibility_timeout", "backoff_base", "expires_in"))}),
        ("Moments", {"fields": (("declared", "changed"),)}),
    )

    title = show.column("name", "name", show.text)
    grammar = show.column("spec", "spec", show.text)
    target = show.column("queue", "queue", show.queue_name)
    last_fire = show.column("last_fire_at", "last fire", show.moment)
    error_line = show.column("last_error", "last error", show.first_line)
    error = show.column("last_error", "last error", show.optional_block)
    declared = show.column("created_at", "declared", show.moment)
    changed = show.column("updated_at", "changed", show.moment)

    @admin.display(description="state")
    def badge(self, schedule: Schedule) -> SafeString:
        if schedule.enabled:
            return show.badge("on", "On")
        return show.badge("broken", "Broken") if schedule.last_error else show.badge("paused", "Paused")

    @admin.display(description="in short")
    def explanation(self, schedule: Schedule) -> SafeString | str:
        return show.text(explain_schedule(schedule, clock.now()))

    @admin.display(description="next fire")
    def next_fire(self, schedule: Schedule) -> SafeString | str:
        return show.moment(schedule.next_fire_at) if schedule.enabled else show.NOTHING

    @admin.display(description="JSON")
    def payload_json(self, schedule: Schedule) -> SafeString:
        return show.json_block(show.stored_bytes(schedule, "payload"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Schedule]:
        return super().get_queryset(request).defer("payload")

    @admin.action(description="Pause schedules", permissions=["operate"])
    def pause(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> None:
        from django_alkstore import services

        self.act(request, queryset, "paused", lambda row, using: services.pause_schedule(row.name, using=using))

    @admin.action(description="Resume schedules", permissions=["operate"])
    def resume(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> None:
        from django_alkstore import services

        self.act(request, queryset, "resumed", lambda row, using: services.resume_schedule(row.name, using=using))

    @admin.action(description="Fire now, beside the boundaries", permissions=["operate"])
    def fire_now(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> None:
        from django_alkstore import services

        self.act(request, queryset, "fired", lambda row, using: services.fire_schedule(row.name, using=using))
