"""What the three admins share: nothing is edited by form, and every action calls a service."""

from __future__ import annotations  # Django's classes take no type arguments when they run

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import model_ngettext
from django.contrib.auth import get_permission_codename
from django.db.models import Model, QuerySet
from django.http import HttpRequest

from django_alkstore.admin.readable import readable
from django_alkstore.exceptions import AlkstoreError, DuplicateJob

M = TypeVar("M", bound=Model)

BATCH = 100
"""Rows changed in one transaction: some milliseconds of the writer lock."""

_CHANGED = "changed"
_UNMATCHED = "no longer matched"
_DUPLICATE = "with a live duplicate"


class ReadOnlyAdmin(admin.ModelAdmin, Generic[M]):  # type: ignore[type-arg]  # it has no parameter at run time
    """Looks, and acts through services only."""

    operate_permission = "change"
    """The model's permission that its actions need."""
    read_by_actions: Sequence[str] = ()
    """The fields that the actions, and the log, read of a row."""

    actions_on_bottom = True
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # each facet would count the table

    class Media:
        css = {"all": ("django_alkstore/admin.css",)}

    def get_queryset(self, request: HttpRequest) -> QuerySet[M]:
        from django_alkstore.dialects.transactions import resolve_alias

        return readable(super().get_queryset(request).using(resolve_alias(None)))

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: M | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: M | None = None) -> bool:
        # A row that is deleted takes nothing back from the worker that holds it. Cancelling does.
        return False

    def has_view_permission(self, request: HttpRequest, obj: M | None = None) -> bool:
        return super().has_view_permission(request, obj) or self.has_operate_permission(request)

    def has_operate_permission(self, request: HttpRequest) -> bool:
        codename = get_permission_codename(self.operate_permission, self.opts)
        return request.user.has_perm(f"{self.opts.app_label}.{codename}")

    def act(self, request: HttpRequest, queryset: QuerySet[M], done: str, change: Callable[[M, str], object]) -> None:
        """Call `change` (a service, on a row and a database) for each selected row; log, and say what came of it."""
        from django_alkstore.dialects.transactions import resolve_alias

        alias = resolve_alias(None)
        # All at once, and the ids alone: changing the rows moves them out of the filter that found them.
        ids = list(queryset.order_by("pk").values_list("pk", flat=True))
        outcomes: Counter[str] = Counter({_UNMATCHED: _selected(request, len(ids)) - len(ids)})
        for batch in _batches(ids):
            results = self._change_batch(alias, batch, change)
            outcomes.update(outcome for _, outcome in results)
            outcomes[_UNMATCHED] += len(batch) - len(results)
            self._log(request, [row for row, outcome in results if outcome == _CHANGED], done)
        self.message_user(request, self._sentence(outcomes, done), _level(outcomes))

    def _change_batch(self, alias: str, ids: list[Any], change: Callable[[M, str], object]) -> list[tuple[M, str]]:
        """Change these rows in one transaction. They are read under the writer lock, so nobody is in between."""
        from django_alkstore.dialects.transactions import write_transaction

        selected = self.model._default_manager.using(alias).filter(pk__in=ids).only("pk").order_by("pk")
        rows = readable(selected, self.read_by_actions)
        return write_transaction(alias, lambda _: [(row, _attempt(change, row, alias)) for row in list(rows.all())])

    def _sentence(self, outcomes: Counter[str], done: str) -> str:
        changed = outcomes[_CHANGED]
        parts = [f"{changed} {model_ngettext(self.opts, changed)} {done}", f"{outcomes[_UNMATCHED]} {_UNMATCHED}"]
        others = [f"{n} {what}" for what, n in outcomes.items() if n and what not in (_CHANGED, _UNMATCHED)]
        return f"{'; '.join(parts + others)}."

    def _log(self, request: HttpRequest, rows: list[M], done: str) -> None:
        if rows:
            LogEntry.objects.log_actions(
                user_id=cast("int", request.user.pk),
                queryset=rows,
                action_flag=CHANGE,
                change_message=f"{done.capitalize()}.",
            )


def _selected(request: HttpRequest, found: int) -> int:
    """How many rows were asked for: those that have left the list since it was shown are not found any more."""
    if request.POST.get("select_across") == "1":
        return found
    return max(found, len(set(request.POST.getlist(ACTION_CHECKBOX_NAME))))


def _batches(ids: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(ids), BATCH):
        yield ids[start : start + BATCH]


def _attempt(change: Callable[[M, str], object], row: M, alias: str) -> str:
    try:
        return _CHANGED if change(row, alias) else _UNMATCHED
    except DuplicateJob:
        return _DUPLICATE
    except AlkstoreError as error:
        return f"refused ({type(error).__name__})"


def _level(outcomes: Counter[str]) -> int:
    return messages.SUCCESS if outcomes.total() == outcomes[_CHANGED] else messages.WARNING
