"""The list of jobs over a table of any size.

What the filters and the search ask for is put together from *arms*: conditions that exclude each other and that
are each answered by one partial index alone. Counting and paging read ids from the indexes; the rows of a page
are then fetched by id. The table itself is walked only where nothing is filtered, from the nearer end.
"""

from __future__ import annotations  # Django's classes take no type arguments when they run

from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import InvalidPage, Page, Paginator
from django.db.models import BinaryField, CharField, F, Func, Q, QuerySet
from django.db.models.functions import Cast
from django.http import HttpRequest

from django_alkstore import clock
from django_alkstore.admin.show import queue_name
from django_alkstore.models import LIVE_STATES, Job, State
from django_alkstore.names import OUTBOX_PREFIX

MAX_QUEUES = 100
"""Queues offered by the filter. Others are found by the search."""
_MAX_DIGITS = 18
"""All numbers of so many digits fit the column."""
_LAST_CHARACTER = "\U0010ffff"

NOT_LISTED = ("payload", "errors", "last_error")
"""Columns that may be long, and that a list does without."""

DUE = {
    "now": (State.PENDING, "run_at__lte"),
    "delayed": (State.PENDING, "run_at__gt"),
    "lapsed": (State.PROCESSING, "lease_expires_at__lte"),
}
"""Values of the filter by due: the state that it is about, and the moment that is compared with now."""


def _due_condition(due: str, now: datetime) -> Q:
    _, lookup = DUE[due]
    return Q((lookup, now))


def _part(state: State) -> Q:
    """The jobs of a state, as one partial index has them.

    The state is written out: with a parameter the index would still be used, but each row looked up to compare.
    """
    written = Func(template=f"'{state.value}'", output_field=CharField())
    part = Q(state=written)
    return part if state in LIVE_STATES else part & Q(finished_at__isnull=False)


def _prefixed(field: str, term: str) -> Q:
    """A range, and not LIKE, which folds case and so does without the index."""
    return Q((f"{field}__gte", term), (f"{field}__lt", term + _LAST_CHARACTER))


def _number(term: str) -> int | None:
    return int(term) if term.isascii() and term.isdigit() and len(term) <= _MAX_DIGITS else None


def _named(term: str) -> Q:
    return _prefixed("queue", term) | _prefixed("queue", OUTBOX_PREFIX + term)


def search_condition(term: str) -> Q:
    """A job's id, or the beginning of its queue's or outbox's name or of its unique key."""
    found = _named(term) | _prefixed("unique_key", term)
    number = _number(term)
    return found if number is None else found | Q(pk=number)


class Wanted(NamedTuple):
    """What the filters and the search ask for."""

    state: str | None = None
    queue: str | None = None
    due: str | None = None
    term: str = ""

    @property
    def everything(self) -> bool:
        return self == _EVERYTHING

    def condition(self, now: datetime) -> Q:
        """The filters as one condition, without the search."""
        condition = Q()
        if self.state is not None:
            condition &= Q(state=self.state)
        if self.queue is not None:
            condition &= Q(queue=self.queue)
        if self.due in DUE:
            condition &= Q(state=DUE[self.due][0]) & _due_condition(self.due, now)
        return condition

    def arms(self, now: datetime) -> list[Q]:
        """The same and the search, as conditions that exclude each other; each has its index."""
        parts = self._parts(now)
        if not self.term:
            return parts
        named, number = _named(self.term), _number(self.term)
        arms = [*(part & named for part in parts), self.condition(now) & _prefixed("unique_key", self.term) & ~named]
        if number is None:
            return arms
        return [self.condition(now) & Q(pk=number), *(arm & ~Q(pk=number) for arm in arms)]

    def _parts(self, now: datetime) -> list[Q]:
        states = [state for state in State if self.state in (None, state.value)]
        if self.due not in DUE:
            parts = [_part(state) for state in states]
        else:
            about, _ = DUE[self.due]
            parts = [_part(about) & _due_condition(self.due, now)] if about in states else []
        return parts if self.queue is None else [part & Q(queue=self.queue) for part in parts]


_EVERYTHING = Wanted()


if TYPE_CHECKING:
    _JobPaginator = Paginator[Job]
else:
    _JobPaginator = Paginator


class JobPaginator(_JobPaginator):
    """Pages over the arms of what is wanted."""

    def __init__(self, wanted: Wanted, jobs: QuerySet[Job], per_page: int, *, newest_first: bool) -> None:
        super().__init__(jobs, per_page)
        self._everything = wanted.everything
        self._jobs = jobs
        self._arms = wanted.arms(clock.now())
        self._newest_first = newest_first

    @cached_property
    def count(self) -> int:
        return self._union().count() if self._arms else 0

    def page(self, number: Any) -> "Page[Job]":  # noqa: UP037  nor has a page
        number = self.validate_number(number)
        start = (number - 1) * self.per_page
        return Page(self.rows(start, start + self.per_page), number, self)

    def rows(self, start: int, stop: int) -> QuerySet[Job]:
        """The rows of these places in the order."""
        rows = self._jobs.filter(pk__in=self._ids(start, min(stop, self.count)))
        return rows.order_by("-pk" if self._newest_first else "pk")

    def _ids(self, start: int, stop: int) -> Sequence[int]:
        if start >= stop:
            return []
        from_other_end = start > self.count - stop
        if from_other_end:
            start, stop = self.count - stop, self.count - start
        descending = self._newest_first != from_other_end
        if self._everything:
            ids: QuerySet[Any, Any] = self._jobs.order_by("pk").values_list("pk", flat=True)
        else:
            ids = self._union().order_by("number")
        return list((ids.reverse() if descending else ids)[start:stop])

    def _union(self) -> QuerySet[Any, int]:
        # A sum, so that no arm is answered by walking the table in the order of its ids.
        first, *others = [
            self._jobs.filter(arm).order_by().annotate(number=F("pk") + 0).values_list("number", flat=True)
            for arm in self._arms
        ]
        return first.union(*others, all=True) if others else first


class JobChangeList(ChangeList):
    """Counts and shows through a `JobPaginator`. The queryset, which asks the same, is what actions are given."""

    def get_results(self, request: HttpRequest) -> None:
        chosen: dict[str, Any] = {
            spec.parameter_name: spec.value() for spec in self.filter_specs if isinstance(spec, _Filter)
        }
        newest_first = self.queryset.query.order_by[0].startswith("-")
        wanted = Wanted(**chosen, term=self.query.strip())
        pages = JobPaginator(wanted, self.root_queryset, self.list_per_page, newest_first=newest_first)
        self.paginator = pages
        self.result_count = pages.count
        self.full_result_count = None
        self.show_full_result_count = False
        self.show_admin_actions = pages.count > 0
        self.can_show_all = pages.count <= self.list_max_show_all
        self.multi_page = pages.count > self.list_per_page
        if not self.multi_page or (self.show_all and self.can_show_all):
            self.result_list = pages.rows(0, pages.count)
            return
        try:
            self.result_list = pages.page(self.page_num).object_list
        except InvalidPage:
            raise IncorrectLookupParameters from None


class _Filter(admin.SimpleListFilter):
    """One field of `Wanted`, which is its parameter's name."""

    parameter_name: str

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen: dict[str, Any] = {self.parameter_name: self.value()}
        return queryset.filter(Wanted(**chosen).condition(clock.now()))


class StateFilter(_Filter):
    title = parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        return State.choices


class QueueFilter(_Filter):
    title = parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        from django_alkstore.dialects.transactions import resolve_alias

        names = _queue_names(resolve_alias(None))[:MAX_QUEUES]
        chosen = self.value()
        if chosen is not None and chosen not in names:
            names.append(chosen)
        return [(name, queue_name(name)) for name in names]


def _queue_names(alias: str) -> list[str]:
    """Every queue that holds a job. `queue_stats` knows them too, but counts."""
    from django_alkstore.dialects.transactions import read

    finished = Job.objects.using(alias).filter(finished_at__isnull=False)
    stored = finished.values_list(Cast("queue", BinaryField()), flat=True).distinct()
    names = {*read(alias, lambda db: db.live_queues()), *(name.decode(errors="replace") for name in stored)}
    return sorted(names, key=queue_name)


class DueFilter(_Filter):
    title = parameter_name = "due"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        return [("now", "Due now"), ("delayed", "Delayed"), ("lapsed", "Lease lapsed")]


FILTERS = (StateFilter, QueueFilter, DueFilter)
