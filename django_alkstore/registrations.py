"""The handlers that the modules named `alkstore` in the installed apps have registered.

The database names queues and nothing else: what runs for a queue is found here, never imported from a row.
"""

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from asgiref.sync import iscoroutinefunction
from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import module_has_submodule

from django_alkstore import signals
from django_alkstore.names import describe_queue, outbox_of

MODULE = "alkstore"
TASKS_MODULE = "tasks"
DEFAULT_TIME_LIMIT = 3_600.0


class Registration(NamedTuple):
    """One queue's handler."""

    queue: str
    """The queue's full name: for an outbox, the derived one."""
    target: Callable[[Any], Any]
    """Takes the `JobHandle`."""
    time_limit: float
    """Seconds after which an attempt counts as failed."""
    atomic: bool
    """True if the handler and its ack run in one transaction."""
    module: str
    """The module that registered it."""
    options: Mapping[str, Any] = MappingProxyType({})
    """The default options of the queue's jobs, as the decorator gives them."""
    resolve: Callable[[Any], "Registration"] | None = None
    """For a queue of tasks: takes a `JobHandle`, and returns the registration of that job's task."""
    after_failure: Callable[[Any, BaseException, Any], Any] | None = None
    """Takes the `JobHandle`, the error and the outcome of a failed attempt, and returns the outcome to use."""

    @property
    def name(self) -> str:
        """As the project names it: the queue, or the outbox."""
        return outbox_of(self.queue) or self.queue

    @property
    def is_async(self) -> bool:
        """True if calling the handler makes a coroutine."""
        return makes_coroutine(self.target)

    @property
    def is_outbox(self) -> bool:
        return outbox_of(self.queue) is not None


class Declaration(NamedTuple):
    """A schedule that `@scheduled` declares."""

    name: str
    spec: str
    queue: str
    payload: Any
    task: str
    """The dotted path of a task; empty for a handler."""
    options: Mapping[str, Any]
    module: str


class BrokenModule(NamedTuple):
    """An `alkstore` module that could not be imported."""

    module: str
    error: str
    traceback: str


_registered: dict[str, Registration] = {}
_declared: dict[str, Declaration] = {}
_broken: list[BrokenModule] = []
_discovered = False
_importing = False
"""True while a thread imports the modules. Read and changed with `_discovering` held."""
_has_tasks = False
_discovering = threading.RLock()
_LONGEST_DISCOVERY = 10.0
"""Seconds that an enqueue waits for another thread that imports the modules. Perhaps that thread waits for this one."""
version = 0
"""Grows whenever a handler is added or removed: what is remembered about the handlers is out of date."""


def register(registration: Registration) -> None:
    """Add a handler. `ImproperlyConfigured` if its queue has one already."""
    taken = _registered.get(registration.queue)
    if taken is not None:
        raise ImproperlyConfigured(
            f"{describe_queue(registration.queue)} has two handlers: {where(taken.target)} and "
            f"{where(registration.target)}"
        )
    _registered[registration.queue] = registration
    _changed()


def makes_coroutine(target: Callable[..., Any]) -> bool:
    """True if calling `target` makes a coroutine."""
    while isinstance(target, partial):
        target = target.func
    return iscoroutinefunction(target) or iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004


def declare(declaration: Declaration) -> None:
    """Add a schedule. `ImproperlyConfigured` if two have one name."""
    taken = _declared.get(declaration.name)
    if taken is not None:
        raise ImproperlyConfigured(
            f"the schedule {declaration.name!r} is declared twice: in {taken.module} and in {declaration.module}"
        )
    _declared[declaration.name] = declaration


def declarations() -> list[Declaration]:
    """The schedules that `@scheduled` declares in the `alkstore` and `tasks` modules of the installed apps, by name."""
    autodiscover()
    with _discovering:
        _import_tasks()
    return [_declared[name] for name in sorted(_declared)]


def _import_tasks() -> None:
    """Import the `tasks` module of every installed app, if tasks of the project are this library's."""
    global _has_tasks  # noqa: PLW0603  a process imports them once
    if _has_tasks or not uses_tasks():
        return
    _has_tasks = True
    for app in apps.get_app_configs():
        if app.module is not None and module_has_submodule(app.module, TASKS_MODULE):
            _import(f"{app.name}.{TASKS_MODULE}")


def uses_tasks() -> bool:
    """True if the setting `TASKS` names a backend that is neither Django's own nor the package's."""
    named = [str(params.get("BACKEND", "")) for params in (getattr(settings, "TASKS", None) or {}).values()]
    return any(not name.startswith(("django.tasks.", "django_tasks.")) for name in named)


def where(target: Callable[..., Any]) -> str:
    """The dotted path of a handler."""
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}.{named.__qualname__}"


def autodiscover() -> None:
    """Import the `alkstore` module of every installed app, once in a process.

    A module that cannot be imported raises nothing here. It is logged with its traceback, none of its handlers is
    registered, the system check reports it, and a worker does not start without `--tolerant`.
    """
    global _discovered, _importing  # noqa: PLW0603  a process discovers once
    with _discovering:
        # A module that asks for the registrations while it is imported gets those that there are.
        if _discovered or _importing:
            return
        _importing = True
        try:
            for app in apps.get_app_configs():
                if app.module is not None and module_has_submodule(app.module, MODULE):
                    _import(f"{app.name}.{MODULE}")
        finally:
            _importing = False
        _discovered = True
        _changed()


def _import(module: str) -> None:
    try:
        import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  somebody else's module may raise anything
        # What it registered before it failed is half a module: a worker must not run it.
        for queue in [queue for queue, registration in _registered.items() if registration.module == module]:
            del _registered[queue]
        for name in [name for name, declaration in _declared.items() if declaration.module == module]:
            del _declared[name]
        _changed()
        broken = BrokenModule(module, f"{type(error).__name__}: {error}", traceback.format_exc())
        _broken.append(broken)
        signals.emit(
            signals.module_broken, module=module, error=broken.error, traceback=broken.traceback, exception=error
        )


def registrations() -> list[Registration]:
    """Everything that is registered, after discovery, by queue."""
    autodiscover()
    return sorted(_registered.values(), key=lambda registration: registration.queue)


def broken_modules() -> list[BrokenModule]:
    """The modules that discovery could not import."""
    autodiscover()
    return list(_broken)


def registration_for(queue: str) -> Registration | None:
    """The registration of a queue, for an enqueue; None if there is none.

    The modules are imported first if all apps are ready. Never raises for a module that cannot be imported.
    """
    if not _discovered and apps.ready and _discovering.acquire(timeout=_LONGEST_DISCOVERY):
        try:
            autodiscover()
        finally:
            _discovering.release()
    return _registered.get(queue)


def is_discovered() -> bool:
    """True once the modules are imported."""
    return _discovered


def registered() -> list[Registration]:
    """What is registered so far. Imports nothing, and waits for no other thread."""
    return list(_registered.values())


def _changed() -> None:
    global version  # noqa: PLW0603  it counts for the whole process
    version += 1


@contextmanager
def isolated() -> Iterator[None]:
    """Inside the block nothing is registered but what the block registers, and nothing is discovered. For tests."""
    global _discovered, _has_tasks  # noqa: PLW0603  put back below
    before = dict(_registered), list(_broken), _discovered, dict(_declared), _has_tasks
    _registered.clear()
    _declared.clear()
    _broken.clear()
    _discovered = _has_tasks = True
    _changed()
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(before[0])
        _broken[:] = before[1]
        _discovered = before[2]
        _declared.clear()
        _declared.update(before[3])
        _has_tasks = before[4]
        _changed()
