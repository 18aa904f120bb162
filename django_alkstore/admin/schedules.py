"""Schedules: what fires when, and pausing, resuming and firing it."""

from collections.abc import Iterable, Sequence
from typing import Any
from zoneinfo import ZoneInfo

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString
from django.utils.timezone import get_current_timezone

from django_alkstore import clock
from django_alkstore.admin import show
from django_alkstore.admin.base import Button, ReadOnlyAdmin
from django_alkstore.admin.explain import Verdict, explain_schedule
from django_alkstore.admin.lists import DropdownFilter
from django_alkstore.exceptions import InvalidSpec
from django_alkstore.models import STORED_NEVER, Schedule


class StateFilter(DropdownFilter):
    title = parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        return [("on", "On"), ("paused", "Paused"), ("broken", "Broken")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        match self.value():
            case "on":
                return queryset.filter(enabled=True)
            case "paused":
                return queryset.filter(enabled=False, last_error__isnull=True)
            case "broken":
                return queryset.filter(enabled=False, last_error__isnull=False)
        return queryset


def _text_or_nothing(value: str | None) -> SafeString | str:
    return show.NOTHING if value is None else show.text(value)


def _lifetime(value: float | None) -> str:
    return "never" if value == STORED_NEVER else show.duration_or_default(value)


def _duration_or_nothing(value: float | None) -> str:
    return show.NOTHING if value is None else show.duration(value)


@admin.register(Schedule)
class ScheduleAdmin(ReadOnlyAdmin[Schedule]):
    list_display = ("title", "badge", "next_fire", "rule", "target", "last_fire")
    list_filter = (StateFilter,)
    search_fields = ("name", "queue")
    ordering = ("name",)
    read_by_actions = ("name",)
    actions = ("pause", "resume", "fire_now")
    buttons = {
        "pause": Button("pause", "Pause"),
        "resume": Button("resume", "Resume"),
        "fire_now": Button("fire_now", "Fire now"),
    }
    fieldsets = (
        (
            None,
            {
                "fields": (
                    ("badge", "grammar", "zone", "target"),
                    ("next_fire_full", "last_fire_full"),
                    "boundaries",
                    "counts",
                )
            },
        ),
        ("When it fires", {"fields": (("missed", "late", "beside", "spread"), ("begins", "ends"))}),
        ("Error", {"fields": ("error",), "classes": ("alkstore-wide",)}),
        ("Payload", {"fields": ("payload_json",), "classes": ("alkstore-wide",)}),
        (
            "Options of its jobs",
            {"fields": (("priority_number", "most_attempts"), ("lease_length", "first_wait", "lifetime"))},
        ),
        ("Moments", {"fields": (("declared", "changed"),)}),
    )

    rule = show.column("spec", "spec", show.text)
    grammar = show.column("spec", "spec", show.text)
    zone = show.column("timezone", "time zone", _text_or_nothing)
    missed = show.column("catch_up", "missed boundaries", _text_or_nothing)
    late = show.column("grace", "grace", _duration_or_nothing)
    beside = show.column("overlap", "overlap", show.text)
    spread = show.column("jitter", "jitter", show.duration)
    begins = show.column("starts_at", "starts at", show.moment)
    ends = show.column("ends_at", "ends at", show.moment)
    target = show.column("queue", "queue", lambda queue: show.text(show.queue_name(queue)))
    last_fire = show.column("last_fire_at", "last fire", show.short_moment)
    last_fire_full = show.column("last_fire_at", "last fire", show.moment)
    error = show.column("last_error", "last error", show.optional_block)
    declared = show.column("created_at", "declared", show.moment)
    changed = show.column("updated_at", "changed", show.moment)
    priority_number = show.column("priority", "priority", show.plain)
    most_attempts = show.column("max_attempts", "most attempts", show.plain_or_default)
    lease_length = show.column("visibility_timeout", "visibility timeout", show.duration_or_default)
    first_wait = show.column("backoff_base", "backoff base", show.duration_or_default)
    lifetime = show.column("expires_in", "expires in", _lifetime)

    @admin.display(description="name", ordering="name")
    def title(self, schedule: Schedule) -> SafeString:
        return show.two_lines(schedule.name, schedule.last_error)

    @admin.display(description="state")
    def badge(self, schedule: Schedule) -> SafeString:
        if schedule.undeclared_at is not None:
            return show.badge("paused", "No longer declared")
        if schedule.enabled:
            return show.badge("on", "On" if schedule.next_fire_at is not None else "Over")
        return show.badge("broken", "Broken") if schedule.last_error else show.badge("paused", "Paused")

    @admin.display(description="next fire")
    def next_fire(self, schedule: Schedule) -> SafeString | str:
        return show.short_moment(schedule.next_fire_at) if self._fires(schedule) else show.NOTHING

    @admin.display(description="next fire")
    def next_fire_full(self, schedule: Schedule) -> SafeString | str:
        return show.moment(schedule.next_fire_at) if self._fires(schedule) else show.NOTHING

    @staticmethod
    def _fires(schedule: Schedule) -> bool:
        return schedule.enabled and schedule.undeclared_at is None and schedule.next_fire_at is not None

    @admin.display(description="next boundaries")
    def boundaries(self, schedule: Schedule) -> SafeString | str:
        from django_alkstore.services.schedules import boundaries_of

        try:
            found = boundaries_of(schedule, 5) if self._fires(schedule) else []
        except InvalidSpec:
            found = []
        zone = ZoneInfo(schedule.timezone) if schedule.timezone else get_current_timezone()
        shown = [moment.astimezone(zone).strftime("%Y-%m-%d %H:%M:%S %Z") for moment in found]
        return show.text(", ".join(shown)) if shown else show.NOTHING

    @admin.display(description="boundaries so far")
    def counts(self, schedule: Schedule) -> str:
        counts = {
            "fired": schedule.fired,
            "covered by a later one": schedule.coalesced,
            "too late": schedule.too_late,
            "beside an earlier job": schedule.overlapped,
        }
        return ", ".join(f"{number} {what}" for what, number in counts.items() if number) or show.NOTHING

    @admin.display(description="JSON")
    def payload_json(self, schedule: Schedule) -> SafeString:
        return show.json_block(show.stored_bytes(schedule, "payload"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Schedule]:
        return super().get_queryset(request).defer("payload")

    def verdict(self, request: HttpRequest, row: Schedule) -> Verdict:
        return explain_schedule(row, clock.now())

    def possible(self, row: Schedule) -> Sequence[str]:
        return ("fire_now", "pause") if row.enabled else ("fire_now", "resume")

    @admin.action(description="Pause schedules", permissions=["operate"])
    def pause(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> HttpResponse:
        from django_alkstore import services

        return self.act(request, queryset, "paused", lambda row, using: services.pause_schedule(row.name, using=using))

    @admin.action(description="Resume schedules", permissions=["operate"])
    def resume(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> HttpResponse:
        from django_alkstore import services

        return self.act(
            request, queryset, "resumed", lambda row, using: services.resume_schedule(row.name, using=using)
        )

    @admin.action(description="Fire now, in addition to the boundaries", permissions=["operate"])
    def fire_now(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> HttpResponse:
        from django_alkstore import services

        return self.act(request, queryset, "fired", lambda row, using: services.fire_schedule(row.name, using=using))
