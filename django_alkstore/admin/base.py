"""What the three admins share: nothing is edited by form, and every action calls a service."""

from __future__ import annotations  # Django's classes take no type arguments when they run

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.views.main import ChangeList
from django.contrib.auth import get_permission_codename
from django.core import signing
from django.core.exceptions import SuspiciousOperation
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from django_alkstore import clock
from django_alkstore.admin.explain import Verdict
from django_alkstore.admin.readable import readable
from django_alkstore.admin.show import count
from django_alkstore.admin.workers import attach, workers_for
from django_alkstore.exceptions import AlkstoreError, DuplicateJob

M = TypeVar("M", bound=Model)

BATCH = 100
"""Rows changed in one transaction: some milliseconds of the writer lock."""
ACTION_SECONDS = 2.0
"""How long one request works on an action. The next request goes on from there."""
MAX_REASONS = 3
"""How many refusals a message gives the reason of."""

CHANGED = "changed"
UNMATCHED = "unmatched"
DUPLICATE = "duplicate"
REFUSED = "refused"

FROM_PAGE = "alkstore_from_page"
"""The name of a form's field: the action was chosen on the row's own page."""
PROGRESS = "alkstore_progress"
"""The name of a form's field: what the requests before this one have done of the same action."""
CONFIRMED = "alkstore_confirmed"
"""The name of a form's field: the person has confirmed the action."""

Batch = Callable[[str, list[Any]], Counter[str]]
"""Changes some rows of a database, by their ids; returns how many had which outcome."""


class Progress(NamedTuple):
    """What has been done of an action that takes several requests."""

    after: int | None = None
    """The id up to which all rows are done."""
    until: int | None = None
    """The greatest id when the action began: rows that came later are not meant."""
    total: int = 0
    """How many rows were selected."""
    outcomes: dict[str, int] = {}
    reasons: list[str] = []

    @property
    def done(self) -> int:
        return sum(self.outcomes.values())


class Button(NamedTuple):
    """An action that is offered on a row's page."""

    action: str
    label: str
    is_dangerous: bool = False


class ReadOnlyChangeList(ChangeList):
    """A list that shows neither a bar of actions nor a count of results if it is empty."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.hide_what_says_nothing()

    def hide_what_says_nothing(self) -> None:
        self.show_admin_actions = self.result_count > 0
        if not self.query and not self.has_active_filters:
            # The template shows "N results (Show all)" if these two differ.
            self.full_result_count = self.result_count


class ReadOnlyAdmin(admin.ModelAdmin, Generic[M]):  # type: ignore[type-arg]  # it has no parameter at run time
    """Shows rows, and changes them through services only."""

    operate_permission = "change"
    """The model's permission that its actions need."""
    read_by_actions: Sequence[str] = ()
    """The fields that the actions, and the log, read of a row."""
    buttons: ClassVar[dict[str, Button]] = {}
    """The actions that a row's page may offer, by name."""

    change_form_template = "admin/django_alkstore/change_form.html"
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # each facet would count the table

    class Media:
        css = {"all": ("django_alkstore/admin.css",)}

    def get_queryset(self, request: HttpRequest) -> QuerySet[M]:
        from django_alkstore.dialects.transactions import resolve_alias

        return readable(super().get_queryset(request).using(resolve_alias(None)))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return ReadOnlyChangeList

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: M | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: M | None = None) -> bool:
        # Deleting the row of a running job takes nothing back from its worker. Cancelling does.
        return False

    def has_view_permission(self, request: HttpRequest, obj: M | None = None) -> bool:
        return super().has_view_permission(request, obj) or self.has_operate_permission(request)

    def has_operate_permission(self, request: HttpRequest) -> bool:
        return self._has(request, self.operate_permission)

    def _has(self, request: HttpRequest, permission: str) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.{get_permission_codename(permission, self.opts)}")

    # A row's own page

    def verdict(self, request: HttpRequest, row: M) -> Verdict:
        """The row's situation, as its page shows it at the top."""
        raise NotImplementedError

    def possible(self, row: M) -> Sequence[str]:
        """The actions that would change this row."""
        raise NotImplementedError

    def heading(self, row: M) -> str:
        """What the row's page is called."""
        return str(row).capitalize()

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> M | None:
        row: M | None = super().get_object(request, object_id, from_field)
        if row is not None:
            attach(row, workers_for(request))
        return row

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: M | None = None,
    ) -> HttpResponse:
        if obj is not None:
            allowed = self.get_actions(request)
            context.update(
                title=self.heading(obj),
                subtitle=None,
                alkstore_verdict=self.verdict(request, obj),
                alkstore_buttons=[self.buttons[name] for name in self.possible(obj) if name in allowed],
                alkstore_action_url=self._url("changelist"),
                alkstore_names={"checkbox": ACTION_CHECKBOX_NAME, "from_page": FROM_PAGE},
            )
        return super().render_change_form(request, context, add, change, form_url, obj)

    def _url(self, what: str, *args: object) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{what}"
        return reverse(name, args=args, current_app=self.admin_site.name)

    # Actions

    def act(
        self, request: HttpRequest, queryset: QuerySet[M], done: str, change: Callable[[M, str], object]
    ) -> HttpResponse:
        """Call `change` (a service, on a row and a database) for each selected row; log, and say what came of it."""
        reasons: list[str] = []

        def change_batch(alias: str, ids: list[Any]) -> Counter[str]:
            results = self._change_rows(alias, ids, change, reasons)
            self._log(request, [row for row, outcome in results if outcome == CHANGED], done)
            outcomes = Counter(outcome for _, outcome in results)
            outcomes[UNMATCHED] += len(ids) - len(results)
            return outcomes

        return self.run_batches(request, queryset, done, change_batch, reasons)

    def run_batches(
        self, request: HttpRequest, queryset: QuerySet[M], done: str, batch: Batch, reasons: list[str] | None = None
    ) -> HttpResponse:
        """Change the selected rows in batches, for a while; then say how far it came, or go on with another request."""
        from django_alkstore.dialects.transactions import resolve_alias

        alias = resolve_alias(None)
        before = _progress(request)
        # All at once, and the ids alone: changing the rows moves them out of the filter that found them.
        ids = self.selected_ids(request, queryset)
        if before.until is None:
            total = _selected(request, len(ids))
            outcomes = Counter({UNMATCHED: total - len(ids)})
            before = Progress(total=total, until=ids[-1] if ids else 0)
        else:
            ids = [pk for pk in ids if pk <= before.until and (before.after is None or pk > before.after)]
            outcomes = Counter(before.outcomes)
        finished = self._work_for_a_while(alias, ids, batch, outcomes)
        all_reasons = [*before.reasons, *(reasons or ())][:MAX_REASONS]
        progress = before._replace(after=finished, outcomes=dict(outcomes), reasons=all_reasons)
        if ids and finished != ids[-1]:
            return self._ask_to_go_on(request, progress, done)
        self.finish(request, progress, done)
        return HttpResponseRedirect(self._next_url(request))

    def finish(self, request: HttpRequest, progress: Progress, done: str) -> None:
        """Say what came of an action, after its last batch."""
        self.message_user(request, self._sentence(progress, done), _level(progress))

    def selected_ids(self, request: HttpRequest, queryset: QuerySet[M]) -> list[int]:
        """The ids of the selected rows, in order."""
        return list(queryset.order_by("pk").values_list("pk", flat=True))

    def _work_for_a_while(self, alias: str, ids: list[int], batch: Batch, outcomes: Counter[str]) -> int | None:
        """Change rows until the time is over; returns the id of the last row that was done."""
        started = clock.waiting_from()
        last = None
        for start in range(0, len(ids), BATCH):
            part = ids[start : start + BATCH]
            outcomes.update(batch(alias, part))
            last = part[-1]
            if clock.waited_since(started) >= ACTION_SECONDS:
                break
        return last

    def _change_rows(
        self, alias: str, ids: list[Any], change: Callable[[M, str], object], reasons: list[str]
    ) -> list[tuple[M, str]]:
        """Change these rows in one transaction. They are read under the writer lock, so nobody changes them between."""
        from django_alkstore.dialects.transactions import write_transaction

        selected = self.model._default_manager.using(alias).filter(pk__in=ids).only("pk").order_by("pk")
        rows = readable(selected, self.read_by_actions)

        def attempt(row: M) -> str:
            try:
                return CHANGED if change(row, alias) else UNMATCHED
            except DuplicateJob:
                return DUPLICATE
            except AlkstoreError as error:
                reasons.append(f"{row}: {error}")
                return REFUSED

        return write_transaction(alias, lambda _: [(row, attempt(row)) for row in list(rows.all())])

    def _ask_to_go_on(self, request: HttpRequest, progress: Progress, done: str) -> HttpResponse:
        """A page that sends the action again, by itself where scripts run, for the rows that are left."""
        return self.render_action_page(
            request,
            "admin/django_alkstore/progress.html",
            title=f"{progress.done:,} of {self._rows(progress.total)} are done",
            fields={PROGRESS: signing.dumps(progress, salt=PROGRESS), CONFIRMED: "yes"},
            progress=progress,
            so_far=self._sentence(progress, done),
        )

    def render_action_page(
        self, request: HttpRequest, template: str, *, title: str, fields: dict[str, str], **context: Any
    ) -> HttpResponse:
        """A page whose form sends the same action again, with these fields."""
        sent = [(key, value) for key, values in request.POST.lists() for value in values]
        kept = [(key, value) for key, value in sent if key not in (*fields, "csrfmiddlewaretoken")]
        return TemplateResponse(
            request,
            template,
            {
                **self.admin_site.each_context(request),
                "opts": self.opts,
                "media": self.media,
                "title": title,
                "fields": [*kept, *fields.items()],
                "back_url": request.get_full_path(),
                **context,
            },
        )

    def _next_url(self, request: HttpRequest) -> str:
        """Where an action leads: back to the row's page if it was chosen there, else to the list as it was."""
        chosen = request.POST.getlist(ACTION_CHECKBOX_NAME)
        if request.POST.get(FROM_PAGE) and chosen:
            return self._url("change", chosen[0])
        return request.get_full_path()

    def _rows(self, number: int) -> str:
        return count(number, str(self.opts.verbose_name), str(self.opts.verbose_name_plural))

    def _sentence(self, progress: Progress, done: str) -> str:
        outcomes = Counter(progress.outcomes)
        parts = [f"{self._rows(outcomes[CHANGED])} {done}"]
        if outcomes[UNMATCHED]:
            parts.append(f"{outcomes[UNMATCHED]:,} no longer matched")
        if outcomes[DUPLICATE]:
            parts.append(f"{outcomes[DUPLICATE]:,} left alone, since a live job has the same unique key")
        if outcomes[REFUSED]:
            parts.append(f"{outcomes[REFUSED]:,} refused ({'; '.join(progress.reasons)})")
        return f"{'; '.join(parts)}."

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


def _progress(request: HttpRequest) -> Progress:
    sent = request.POST.get(PROGRESS)
    if sent is None:
        return Progress()
    try:
        return Progress(*signing.loads(sent, salt=PROGRESS))
    except signing.BadSignature:
        raise SuspiciousOperation("the progress of an action has been tampered with") from None


def _level(progress: Progress) -> int:
    changed = progress.outcomes.get(CHANGED, 0)
    return messages.SUCCESS if progress.done == changed else messages.WARNING
