"""The list of jobs over a table of any size.

What the filters and the search ask for is put together from *arms*: conditions that exclude each other and that
are each answered by one partial index alone. Counting and paging read ids from the indexes; the rows of a page
are then fetched by id. The table itself is walked only where nothing is filtered, from the nearer end.
"""

from __future__ import annotations  # Django's classes take no type arguments when they run

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.paginator import InvalidPage, Page, Paginator
from django.db.models import BinaryField, CharField, F, Func, Q, QuerySet
from django.db.models.functions import Cast
from django.http import HttpRequest

from django_alkstore.admin.base import ReadOnlyChangeList
from django_alkstore.admin.readable import decoded
from django_alkstore.admin.show import queue_name
from django_alkstore.admin.workers import Workers, attach, workers_for
from django_alkstore.models import LIVE_STATES, Job, State
from django_alkstore.names import OUTBOX_PREFIX

MAX_QUEUES = 100
"""Queues offered by the filter. Others are found by the search."""
SEARCH_FIELDS = ("id", "queue", "unique_key")
_MAX_DIGITS = 18
"""All numbers of so many digits fit the column."""
_LAST_CHARACTER = "\U0010ffff"

NOT_LISTED = ("payload", "errors", "last_error", "worker_ids", "result")
"""Columns that may be long, and that a list does without."""


class Situation(NamedTuple):
    """One value of the filter by situation."""

    label: str
    states: Sequence[State]
    """The states of the jobs that can be in it."""
    condition: Callable[[Workers], Q]


_PENDING, _PROCESSING = (State.PENDING,), (State.PROCESSING,)

SITUATIONS = {
    "due": Situation("Due now", _PENDING, lambda workers: Q(run_at__lte=workers.now)),
    "no_worker": Situation(
        "No worker",
        _PENDING,
        lambda workers: Q(run_at__lte=workers.now, queue__in=sorted(workers.registered - workers.served)),
    ),
    "no_handler": Situation(
        "No handler",
        _PENDING,
        lambda workers: Q(run_at__lte=workers.now) & ~Q(queue__in=sorted(workers.registered | workers.served)),
    ),
    "delayed": Situation("Not due yet", _PENDING, lambda workers: Q(run_at__gt=workers.now)),
    "retrying": Situation("Retrying", _PENDING, lambda _: Q(last_error__isnull=False, attempts__gt=0)),
    "lapsed": Situation("Lease lapsed", _PROCESSING, lambda workers: Q(lease_expires_at__lte=workers.now)),
    "worker_dead": Situation("Worker dead", _PROCESSING, lambda workers: Q(pk__in=sorted(workers.orphaned))),
    "failed": Situation("Failed before", tuple(State), lambda _: Q(last_error__isnull=False)),
}
"""The values of the filter by situation."""
_FAILED = ("failed", "retrying")
"""Those that the index of failed jobs answers."""


def _part(state: State, *, failed: bool = False) -> Q:
    """The jobs of a state as one partial index has them, or (`failed`) as the index of failed jobs has them.

    The state is written out: with a parameter the index would still be used, but each row looked up to compare.
    """
    written = Func(template=f"'{state.value}'", output_field=CharField())
    part = Q(state=written)
    return part if failed or state in LIVE_STATES else part & Q(finished_at__isnull=False)


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


class IndexedSearch:
    """The search of the list, as a base class of the admin's."""

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Job], search_term: str
    ) -> tuple[QuerySet[Job], bool]:
        if tuple(self.get_search_fields(request)) != SEARCH_FIELDS:  # type: ignore[attr-defined]
            found: tuple[QuerySet[Job], bool] = super().get_search_results(  # type: ignore[misc]
                request, queryset, search_term
            )
            return found
        term = search_term.strip()
        return (queryset.filter(search_condition(term)) if term else queryset), False


def searches_by_index(model_admin: Any, fields: tuple[str, ...]) -> bool:
    """True unless a subclass of the admin has a search of its own."""
    return fields == SEARCH_FIELDS and type(model_admin).get_search_results is IndexedSearch.get_search_results


class Wanted(NamedTuple):
    """What the filters and the search ask for."""

    workers: Workers
    state: str | None = None
    queue: str | None = None
    situation: str | None = None
    term: str = ""

    @property
    def everything(self) -> bool:
        return not any(self[1:])

    def condition(self) -> Q:
        """The filters as one condition, without the search."""
        condition = Q()
        if self.state is not None:
            condition &= Q(state=self.state)
        if self.queue is not None:
            condition &= Q(queue=self.queue)
        if self.situation in SITUATIONS:
            situation = SITUATIONS[self.situation]
            condition &= Q(state__in=situation.states) & situation.condition(self.workers)
        return condition

    def arms(self) -> list[Q]:
        """The same and the search, as conditions that exclude each other; each has its index."""
        parts = self._parts()
        if not self.term:
            return parts
        named, number = _named(self.term), _number(self.term)
        arms = [*(part & named for part in parts), self.condition() & _prefixed("unique_key", self.term) & ~named]
        if number is None:
            return arms
        return [self.condition() & Q(pk=number), *(arm & ~Q(pk=number) for arm in arms)]

    def _parts(self) -> list[Q]:
        states = [state for state in State if self.state in (None, state.value)]
        if self.situation not in SITUATIONS:
            parts = [_part(state) for state in states]
        else:
            situation, failed = SITUATIONS[self.situation], self.situation in _FAILED
            narrowed = situation.condition(self.workers)
            parts = [_part(state, failed=failed) & narrowed for state in states if state in situation.states]
        return parts if self.queue is None else [part & Q(queue=self.queue) for part in parts]


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
        self._arms = wanted.arms()
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

    def all_ids(self) -> list[int]:
        """The ids of all that is wanted, in order."""
        return list(self._union().order_by("number")) if self._arms else []

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


class JobChangeList(ReadOnlyChangeList):
    """Counts and shows through a `JobPaginator`.

    A subclass of `JobAdmin` that has filters, an ordering or a search of its own gets Django's own way, at its cost.
    """

    def get_results(self, request: HttpRequest) -> None:
        workers = workers_for(request)
        pages = self._pages(workers)
        if pages is None:
            super().get_results(request)
            jobs = self.result_list
        else:
            jobs = self._take_from(pages)
        self.result_list = list(jobs)
        for job in self.result_list:
            attach(job, workers)

    def all_ids(self) -> list[int]:
        """The ids of all jobs of the list, in order."""
        if self._fast is None:
            return list(self.queryset.order_by("pk").values_list("pk", flat=True))
        return self._fast.all_ids()

    def _pages(self, workers: Workers) -> JobPaginator | None:
        """The paginator of the list, if it asks for nothing but what `Wanted` knows."""
        self._fast: JobPaginator | None = None
        own = all(isinstance(spec, _Filter) for spec in self.filter_specs)
        order = self.queryset.query.order_by
        by_id = bool(order) and order[0] in ("pk", "-pk", "id", "-id")
        if own and by_id and (not self.query or searches_by_index(self.model_admin, tuple(self.search_fields))):
            specs = [spec for spec in self.filter_specs if isinstance(spec, _Filter)]
            chosen: dict[str, Any] = {spec.parameter_name: spec.value() for spec in specs}
            wanted = Wanted(workers, **chosen, term=self.query.strip())
            newest_first = order[0].startswith("-")
            self._fast = JobPaginator(wanted, self.root_queryset, self.list_per_page, newest_first=newest_first)
        return self._fast

    def _take_from(self, pages: JobPaginator) -> Iterable[Job]:
        self.paginator = pages
        self.result_count = pages.count
        self.full_result_count = None
        self.show_full_result_count = False
        self.can_show_all = pages.count <= self.list_max_show_all
        self.multi_page = pages.count > self.list_per_page
        self.hide_what_says_nothing()
        if not self.multi_page or (self.show_all and self.can_show_all):
            return pages.rows(0, pages.count)
        try:
            return pages.page(self.page_num).object_list
        except InvalidPage:
            raise IncorrectLookupParameters from None


class DropdownFilter(admin.SimpleListFilter):
    """A filter that takes one word of room: it shows what is chosen, and opens when it is clicked."""

    template = "admin/django_alkstore/filter.html"


class _Filter(DropdownFilter):
    """One field of `Wanted`, which is its parameter's name."""

    parameter_name: str

    def __init__(self, request: HttpRequest, *args: Any) -> None:
        self._workers = workers_for(request)
        super().__init__(request, *args)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen: dict[str, Any] = {self.parameter_name: self.value()}
        return queryset.filter(Wanted(self._workers, **chosen).condition())


class StateFilter(_Filter):
    title = parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        return State.choices


class QueueFilter(_Filter):
    title = parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        names = _queue_names(request, self._workers.alias)[:MAX_QUEUES]
        chosen = self.value()
        if chosen is not None and chosen not in names:
            names = [*names, chosen]
        return [(name, queue_name(name)) for name in names]


def _queue_names(request: HttpRequest, alias: str) -> list[str]:
    """Every queue that holds a job, read once for each request: Django makes the filters several times."""
    names: list[str] | None = getattr(request, "_alkstore_queues", None)
    if names is None:
        names = request._alkstore_queues = _read_queue_names(alias)  # type: ignore[attr-defined]
    return names


def _read_queue_names(alias: str) -> list[str]:
    """Every queue that holds a job. Each arm reads one partial index and no row."""
    jobs = Job.objects.using(alias)
    name = Cast("queue", BinaryField())
    arms = (_part(State.PENDING), _part(State.PROCESSING), Q(finished_at__isnull=False))
    first, *others = [jobs.filter(arm).order_by().values_list(name, flat=True).distinct() for arm in arms]
    return sorted({decoded(stored) or "" for stored in first.union(*others)}, key=queue_name)


class SituationFilter(_Filter):
    title = parameter_name = "situation"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, str]]:
        return [(name, situation.label) for name, situation in SITUATIONS.items()]


FILTERS = (StateFilter, QueueFilter, SituationFilter)
