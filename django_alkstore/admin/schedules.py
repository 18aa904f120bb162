"""Schedules: what fires when, and pausing, resuming and firing by hand."""

from __future__ import annotations  # Django's classes take no type arguments when they run

from django.contrib import admin
from django.contrib.admin.utils import flatten_fieldsets
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from django_alkstore.admin import show
from django_alkstore.admin.base import ReadOnlyAdmin
from django_alkstore.models import Schedule
from django_alkstore.services import fire_schedule, pause_schedule, resume_schedule


@admin.register(Schedule)
class ScheduleAdmin(ReadOnlyAdmin[Schedule]):
    shown_with = ("name",)
    list_display = ("name", "spec_text", "queue_name", "on_off", "next_fire", "last_fire", "error_line")
    list_filter = ("enabled",)
    search_fields = ("name", "queue")
    ordering = ("name",)
    actions = ("pause", "resume", "fire_now")
    fieldsets = (
        (None, {"fields": ("name", "spec_text", "queue_name", "on_off", "next_fire", "last_fire", "error")}),
        (
            "Its jobs",
            {
                "fields": (
                    "payload_json",
                    "priority",
                    "max_attempts",
                    "visibility_timeout",
                    "backoff_base",
                    "expires_in",
                )
            },
        ),
        ("Row", {"fields": ("created", "updated")}),
    )

    class Media:
        css = {"all": ("django_alkstore/admin.css",)}

    def get_readonly_fields(self, request: HttpRequest, obj: Schedule | None = None) -> list[str]:
        return flatten_fieldsets(self.fieldsets)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Schedule]:
        return super().get_queryset(request).defer("payload")

    @admin.display(description="spec")
    def spec_text(self, schedule: Schedule) -> SafeString | str:
        return show.text(schedule.spec)

    @admin.display(description="into")
    def queue_name(self, schedule: Schedule) -> SafeString | str:
        return show.text(schedule.queue)

    @admin.display(description="state", ordering="enabled")
    def on_off(self, schedule: Schedule) -> SafeString:
        return show.badge("completed", "On") if schedule.enabled else show.badge("cancelled", "Paused")

    @admin.display(description="next fire", ordering="next_fire_at")
    def next_fire(self, schedule: Schedule) -> SafeString | str:
        return show.moment(schedule.next_fire_at) if schedule.enabled else show.NOTHING

    @admin.display(description="last fire", ordering="last_fire_at")
    def last_fire(self, schedule: Schedule) -> SafeString | str:
        return show.moment(schedule.last_fire_at)

    @admin.display(description="why it was paused")
    def error_line(self, schedule: Schedule) -> SafeString | str:
        return show.first_line(schedule.last_error)

    @admin.display(description="why it was paused")
    def error(self, schedule: Schedule) -> SafeString | str:
        return show.block(schedule.last_error) if schedule.last_error else show.NOTHING

    @admin.display(description="payload")
    def payload_json(self, schedule: Schedule) -> SafeString:
        return show.json_block(show.stored_text(schedule, "payload"))

    created = show.column("created_at", "declared first", show.moment)
    updated = show.column("updated_at", "changed", show.moment)

    @admin.action(description="Pause", permissions=["operate"])
    def pause(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> None:
        self.act(request, queryset, "paused", lambda schedule, alias: pause_schedule(schedule.name, using=alias))

    @admin.action(description="Resume from the next boundary", permissions=["operate"])
    def resume(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> None:
        self.act(request, queryset, "resumed", lambda schedule, alias: resume_schedule(schedule.name, using=alias))

    @admin.action(description="Fire once now, beside the boundaries", permissions=["operate"])
    def fire_now(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> None:
        self.act(request, queryset, "fired", lambda schedule, alias: fire_schedule(schedule.name, using=alias))
