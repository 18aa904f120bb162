"""Locks: who holds what until when, and taking a lock away."""

from collections.abc import Sequence

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString

from django_alkstore import clock
from django_alkstore.admin import show
from django_alkstore.admin.base import Button, ReadOnlyAdmin
from django_alkstore.admin.explain import Verdict, explain_lock
from django_alkstore.models import Lock


@admin.register(Lock)
class LockAdmin(ReadOnlyAdmin[Lock]):
    list_display = ("title", "badge", "expiry", "age", "holder")
    search_fields = ("name", "owner")
    ordering = ("name",)
    operate_permission = "delete"  # a release deletes the row
    read_by_actions = ("name",)
    actions = ("force_release",)
    buttons = {"force_release": Button("force_release", "Release by force", is_dangerous=True)}
    fieldsets = ((None, {"fields": (("badge", "holder", "number"), ("acquired", "expires"))}),)

    title = show.column("name", "name", show.text, sorts=True)
    holder = show.column("owner", "holder", show.text)
    number = show.column("token", "token", show.plain)
    acquired = show.column("acquired_at", "acquired", show.moment)
    expires = show.column("expires_at", "expires", show.moment)
    expiry = show.column("expires_at", "expires", show.short_moment)
    age = show.column("acquired_at", "acquired", show.short_moment)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Lock]:
        from django_alkstore.services import presence

        # The workers' signs of life are rows of this table too. They are not locks.
        return presence.without_signs(super().get_queryset(request))

    @admin.display(description="state")
    def badge(self, lock: Lock) -> SafeString:
        held = lock.expires_at > clock.now()
        return show.badge("held", "Held") if held else show.badge("lapsed", "Lapsed")

    def verdict(self, request: HttpRequest, row: Lock) -> Verdict:
        return explain_lock(row, clock.now())

    def possible(self, row: Lock) -> Sequence[str]:
        return ("force_release",)

    def _next_url(self, request: HttpRequest) -> str:
        # A lock that was released has no page any more.
        return request.get_full_path()

    @admin.action(description="Release by force", permissions=["operate"])
    def force_release(self, request: HttpRequest, queryset: QuerySet[Lock]) -> HttpResponse:
        from django_alkstore import services

        return self.act(
            request, queryset, "released", lambda lock, using: services.force_release(lock.name, using=using)
        )
