"""Section 8: `@handler` and `@delivery`, and finding the modules that use them."""

import asyncio
import math
from collections.abc import Iterator
from datetime import timedelta
from functools import partial, wraps
from typing import Any
from unittest.mock import Mock, patch

import pytest
from asgiref.sync import markcoroutinefunction
from django.core.exceptions import ImproperlyConfigured

from django_alkstore.exceptions import InvalidName, InvalidOption, ReservedName
from django_alkstore.registry import delivery, handler, registrations
from django_alkstore.services import JobHandle, enqueue, get_job, outbox
from django_alkstore.testing import isolated_registry, run_pending
from tests.ledger.models import Entry
from tests.ledger.tools import variant
from tests.processes import start_process


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    with isolated_registry():
        yield


def noop(job: JobHandle) -> None:
    pass


def names() -> list[tuple[str, bool]]:
    return [(registration.name, registration.is_outbox) for registration in registrations()]


# Registering


@pytest.mark.parametrize("register", [handler, delivery])
def test_the_decorated_callable_comes_back_and_can_be_called(register: Any) -> None:
    calls: list[object] = []

    def takes_a_job(job: object) -> str:
        """Takes a job."""
        calls.append(job)
        return "done"

    decorated = register("q")(takes_a_job)
    assert decorated("a job") == "done"
    assert calls == ["a job"]
    assert decorated.function is takes_a_job
    assert (decorated.__name__, decorated.__doc__, decorated.__module__) == ("takes_a_job", "Takes a job.", __name__)


def test_the_defaults_are_an_hour_and_not_atomic() -> None:
    handler("q")(noop)
    delivery("o")(noop)
    assert [(each.time_limit, each.atomic) for each in registrations()] == [(3_600.0, False)] * 2


def test_the_options_are_kept() -> None:
    handler("q", time_limit=timedelta(minutes=1), atomic=True)(noop)
    delivery("o", time_limit=0.5, atomic=True)(noop)
    assert sorted((each.name, each.time_limit, each.atomic) for each in registrations()) == [
        ("o", 0.5, True),
        ("q", 60.0, True),
    ]


def test_a_queue_and_an_outbox_of_one_name_are_two() -> None:
    handler("same")(noop)
    delivery("same")(noop)
    assert sorted(names()) == [("same", False), ("same", True)]


def test_one_callable_may_serve_several_queues() -> None:
    handler("a")(handler("b")(delivery("c")(noop)))
    assert sorted(names()) == [("a", False), ("b", False), ("c", True)]


@pytest.mark.parametrize("register", [handler, delivery])
@pytest.mark.parametrize("second", [noop, lambda job: None])
def test_two_for_one_name_are_improperly_configured_and_the_first_stands(register: Any, second: Any) -> None:
    register("twice")(noop)
    with pytest.raises(ImproperlyConfigured, match="twice"):
        register("twice")(second)
    (found,) = registrations()
    assert found.target is noop


@pytest.mark.parametrize("register", [handler, delivery])
@pytest.mark.parametrize(
    "name", ["", "with space", "-dash", "é", "x" * 129, "nul\0", "line\n", None, 3, b"bytes", noop]
)
def test_a_name_that_is_not_valid_is_refused_where_it_is_written(register: Any, name: Any) -> None:
    with pytest.raises(InvalidName):
        register(name)
    assert registrations() == []


@pytest.mark.parametrize("register", [handler, delivery])
@pytest.mark.parametrize("name", ["__alkstore_scheduler", "__alkstore_outbox:mail", "__alkstore_"])
def test_a_name_of_the_library_s_own_is_reserved(register: Any, name: str) -> None:
    with pytest.raises(ReservedName):
        register(name)
    assert registrations() == []


@pytest.mark.parametrize("register", [handler, delivery])
@pytest.mark.parametrize(
    "options",
    [{"time_limit": value} for value in (0, -1, math.nan, math.inf, "60", None, True, timedelta(0), 10**400)]
    + [{"atomic": value} for value in (None, 1, 0, "yes")],
)
def test_an_option_out_of_range_is_refused_where_it_is_written(register: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        register("q", **options)
    assert registrations() == []


@pytest.mark.parametrize("register", [handler, delivery])
def test_an_option_that_does_not_exist_is_an_error(register: Any) -> None:
    with pytest.raises(TypeError):
        register("q", retries=3)
    with pytest.raises(TypeError):
        register("q", 60)


@pytest.mark.parametrize("target", [None, 3, "dotted.path"])
def test_what_cannot_be_called_is_refused(target: Any) -> None:
    with pytest.raises((InvalidOption, TypeError, ImproperlyConfigured)):
        handler("q")(target)
    assert registrations() == []


def takes_nothing() -> None: ...
def takes_two(job: Any, more: Any) -> None: ...
def takes_a_named_one(*, job: Any) -> None: ...
async def awaits_nothing() -> None: ...


@pytest.mark.parametrize("target", [takes_nothing, takes_two, takes_a_named_one, awaits_nothing])
def test_what_cannot_be_called_with_a_job_is_refused(target: Any) -> None:
    with pytest.raises(InvalidOption, match=rf"queue q must take one argument, the job: .*{target.__name__}\("):
        handler("q")(target)
    assert registrations() == []


def injecting(target: Any) -> Any:
    @wraps(target)
    def call(job: JobHandle) -> None:
        target(job, "more")

    return call


class Unsigned:
    __signature__ = 5

    def __call__(self, job: JobHandle) -> None: ...


@pytest.mark.parametrize("target", [injecting(takes_two), patch("os.getcwd")(takes_two), Unsigned(), Mock()])
def test_what_a_decorated_function_takes_is_what_its_decorator_does(target: Any) -> None:
    assert handler("q")(target).function is target


@pytest.mark.parametrize(
    "target", [lambda *args: None, lambda job, more=1: None, partial(takes_two, more=1), print, dict]
)
def test_what_can_be_called_with_a_job_or_does_not_say_is_registered(target: Any) -> None:
    assert handler("q")(target).function is target
    assert names() == [("q", False)]


def test_inside_an_isolated_registry_nothing_else_is_registered_and_afterwards_it_is_as_before() -> None:
    handler("outer")(noop)
    with isolated_registry():
        assert registrations() == []
        handler("inner")(noop)
        handler("outer")(noop)
    assert names() == [("outer", False)]


# Callables of every kind


class Sync:
    def __call__(self, job: JobHandle) -> None:
        Entry.objects.create(job_id=job.id)

    def method(self, job: JobHandle) -> None:
        self(job)

    @staticmethod
    def static(job: JobHandle) -> None:
        Entry.objects.create(job_id=job.id)


class Async:
    async def __call__(self, job: JobHandle) -> None:
        await Entry.objects.acreate(job_id=job.id)

    async def method(self, job: JobHandle) -> None:
        await self(job)


async def with_option(job: JobHandle, *, text: str) -> None:
    await asyncio.sleep(0)
    await Entry.objects.acreate(job_id=job.id, text=text)


def decorated(function: Any) -> Any:
    """As many decorators are written: a plain function that returns what the decorated one returns."""

    @wraps(function)
    def wrapper(job: JobHandle) -> Any:
        return function(job)

    return wrapper


KINDS = {
    "function": lambda job: Entry.objects.create(job_id=job.id),
    "object": Sync(),
    "method": Sync().method,
    "static method": Sync.static,
    "async object": Async(),
    "async method": Async().method,
    "partial of an async function": partial(with_option, text="partial"),
    "marked wrapper": markcoroutinefunction(decorated(Async().method)),
    "plain wrapper of an async function": decorated(Async().method),
    "plain wrapper of a function": decorated(Sync()),
}

COROUTINES = ("async object", "async method", "partial of an async function", "marked wrapper")
"""The kinds that say that they are coroutines."""


def test_what_runs_in_the_event_loop_is_what_makes_a_coroutine() -> None:
    for kind, target in KINDS.items():
        handler(kind.replace(" ", "-"))(target)
    found = {r.queue.replace("-", " ") for r in registrations() if r.is_async}
    assert found == set(COROUTINES)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("atomic", [False, True])
def test_a_callable_of_any_kind_is_run_to_its_end_before_its_job_is_acked(kind: str, atomic: bool) -> None:
    if atomic and kind in COROUTINES:
        with pytest.raises(ImproperlyConfigured, match="is a coroutine, and cannot handle queue q"):
            handler("q", atomic=atomic)(KINDS[kind])
        with pytest.raises(ImproperlyConfigured, match="is a coroutine, and cannot handle outbox o"):
            delivery("o", atomic=atomic)(KINDS[kind])
        return
    handler("q", atomic=atomic)(KINDS[kind])
    delivery("o", atomic=atomic)(KINDS[kind])
    jobs = enqueue("q", None), outbox("o").enqueue(None)
    run_pending()
    for job in jobs:
        found = get_job(job.pk)
        assert found is not None
        assert (found.state, found.errors) == ("completed", [])
    assert sorted(Entry.objects.values_list("job_id", flat=True)) == sorted(job.pk for job in jobs)


# Discovery: in processes of their own, since a process discovers once

REPORT = """
from django_alkstore import registry
from django_alkstore.registry import registrations
print("registered", sorted(r.name for r in registrations()))
print("again", len(registrations()) == len(registrations()))
"""


def discovered(environment: dict[str, str], code: str = REPORT) -> list[str]:
    process = start_process(("-c", code), environment)
    try:
        assert process.wait() == 0, process.output
        return process.lines
    finally:
        process.end()


@pytest.fixture(scope="module")
def whole() -> list[str]:
    """What is found where nothing is broken."""
    return discovered({})


def test_the_modules_of_all_installed_apps_are_found(whole: list[str]) -> None:
    assert len(whole) == 2
    for name in ("noop", "record", "mail", "exact"):
        assert f"'{name}'" in whole[0]
    assert whole[1] == "again True"


@pytest.mark.parametrize(
    ("breakage", "place"),
    [
        ("error", "FIRST_APPS"),
        ("error", "EXTRA_APPS"),
        ("exit", "FIRST_APPS"),
        ("syntax", "EXTRA_APPS"),
        ("missing", "EXTRA_APPS"),
        ("duplicate", "FIRST_APPS"),
    ],
)
def test_f051_a_broken_module_is_logged_with_its_traceback_and_the_others_are_registered(
    whole: list[str], breakage: str, place: str
) -> None:
    lines = discovered({"ALKSTORE_TEST_BREAKAGE": breakage, **variant(**{place: ["tests.ledger.broken"]})})
    assert whole[0] in lines  # and so not what the broken one registered before it failed
    assert lines.count("Traceback (most recent call last):") == 1
    assert any("tests.ledger.broken.alkstore" in line for line in lines)


@pytest.mark.parametrize("place", ["FIRST_APPS", "EXTRA_APPS"])
def test_a_broken_module_takes_nothing_from_a_good_one_that_it_imports(whole: list[str], place: str) -> None:
    assert whole[0] in discovered(variant(**{place: ["tests.ledger.importer"]}))


def test_a_module_that_is_imported_before_discovery_is_registered_once(whole: list[str]) -> None:
    assert discovered({}, "import tests.ledger.alkstore\n" + REPORT) == whole


def test_a_module_that_asks_for_the_registrations_while_it_is_imported_hangs_nothing() -> None:
    lines = discovered(variant(FIRST_APPS=["tests.ledger.reentrant"]))
    assert any(line.startswith("registered") and "'noop'" in line and "'mail'" in line for line in lines)
