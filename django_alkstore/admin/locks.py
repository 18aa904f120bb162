"""Locks: who holds what for how long, and taking one away."""

from __future__ import annotations  # Django's classes take no type arguments when they run

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from django_alkstore import clock
from django_alkstore.admin import show
from django_alkstore.admin.base import ReadOnlyAdmin
from django_alkstore.models import Lock
from django_alkstore.services import force_release


@admin.register(Lock)
class LockAdmin(ReadOnlyAdmin[Lock]):
    operate_permission = "delete"
    shown_with = ("name",)
    list_display = ("name", "holder", "token", "age", "expires")
    search_fields = ("name", "owner")
    ordering = ("name",)
    actions = ("force_release_locks",)
    fields = ("name", "holder", "token", "acquired", "expires")

    class Media:
        css = {"all": ("django_alkstore/admin.css",)}

    def get_readonly_fields(self, request: HttpRequest, obj: Lock | None = None) -> tuple[str, ...]:
        return self.fields

    @admin.display(description="holder", ordering="owner")
    def holder(self, lock: Lock) -> SafeString | str:
        return show.text(lock.owner)

    @admin.display(description="held for", ordering="acquired_at")
    def age(self, lock: Lock) -> str:
        return show.age((clock.now() - lock.acquired_at).total_seconds())

    @admin.display(description="ends", ordering="expires_at")
    def expires(self, lock: Lock) -> SafeString | str:
        return show.badge("dead", "Lapsed") if lock.expires_at <= clock.now() else show.moment(lock.expires_at)

    acquired = show.column("acquired_at", "acquired", show.moment)

    @admin.action(description="Force release", permissions=["operate"])
    def force_release_locks(self, request: HttpRequest, queryset: QuerySet[Lock]) -> None:
        self.act(request, queryset, "released", lambda lock, alias: force_release(lock.name, using=alias))
