"""Locks: who holds what until when, and taking a lock away."""

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from django_alkstore import clock
from django_alkstore.admin import show
from django_alkstore.admin.base import ReadOnlyAdmin
from django_alkstore.models import Lock


@admin.register(Lock)
class LockAdmin(ReadOnlyAdmin[Lock]):
    list_display = ("title", "badge", "holder", "token", "age", "expires")
    search_fields = ("name", "owner")
    ordering = ("name",)
    operate_permission = "delete"  # which is what becomes of the row
    read_by_actions = ("name",)
    actions = ("force_release",)
    fieldsets = ((None, {"fields": (("title", "badge"), ("holder", "token"), ("acquired", "expires"))}),)

    title = show.column("name", "name", show.text)
    holder = show.column("owner", "holder", show.text)
    acquired = show.column("acquired_at", "acquired", show.moment)
    expires = show.column("expires_at", "expires", show.moment)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Lock]:
        from django_alkstore.services import presence

        # A worker's signs of life are rows of this table too, and nothing that anybody holds.
        return presence.without_signs(super().get_queryset(request))

    @admin.display(description="state")
    def badge(self, lock: Lock) -> SafeString:
        held = lock.expires_at > clock.now()
        return show.badge("held", "Held") if held else show.badge("lapsed", "Lapsed")

    @admin.display(description="age")
    def age(self, lock: Lock) -> str:
        return show.age((clock.now() - lock.acquired_at).total_seconds())

    @admin.action(description="Release by force, whoever holds it", permissions=["operate"])
    def force_release(self, request: HttpRequest, queryset: QuerySet[Lock]) -> None:
        from django_alkstore import services

        self.act(request, queryset, "released", lambda lock, using: services.force_release(lock.name, using=using))
