"""Who handles which queue: what the modules named `alkstore` in the installed apps have registered.

The database names queues and nothing else: what runs for a queue is found here, never imported from a row.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from inspect import Signature, signature
from typing import Any, NamedTuple, TypeVar

from asgiref.sync import iscoroutinefunction
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import module_has_submodule

from django_alkstore import signals
from django_alkstore.durations import Duration, seconds
from django_alkstore.exceptions import InvalidOption, shown
from django_alkstore.names import describe_queue, outbox_of, outbox_queue, validate_name

MODULE = "alkstore"
DEFAULT_TIME_LIMIT = 3_600.0

T = TypeVar("T", bound=Callable[..., Any])


class Registration(NamedTuple):
    """One queue's handler."""

    queue: str
    """The queue's full name: for an outbox, the derived one."""
    target: Callable[[Any], Any]
    """Takes the `JobHandle`."""
    time_limit: float
    """Seconds after which an attempt counts as failed."""
    atomic: bool
    """Run the handler and its ack in one transaction?"""
    module: str
    """The module that registered it."""

    @property
    def name(self) -> str:
        """As the project names it: the queue, or the outbox."""
        return outbox_of(self.queue) or self.queue

    @property
    def is_async(self) -> bool:
        """True if calling the handler makes a coroutine."""
        return _makes_coroutine(self.target)

    @property
    def is_outbox(self) -> bool:
        return outbox_of(self.queue) is not None


class BrokenModule(NamedTuple):
    """An `alkstore` module that could not be imported."""

    module: str
    error: str
    traceback: str


_registered: dict[str, Registration] = {}
_broken: list[BrokenModule] = []
_discovered = False
_discovering = threading.RLock()


def handler(queue: str, *, time_limit: Duration = DEFAULT_TIME_LIMIT, atomic: bool = False) -> Callable[[T], T]:
    """Register the decorated callable, sync or async, for the jobs of `queue`. It is returned as it was.

    `time_limit`: seconds (above 0) after which an attempt counts as failed. `atomic`: run the handler and its
    ack in one transaction, which holds the writer lock for as long as the handler runs. Raises `InvalidName`,
    `InvalidOption`, and `ImproperlyConfigured` where the queue has a handler already.
    """
    return _registrar(validate_name("queue", queue), time_limit, atomic)


def delivery(outbox: str, *, time_limit: Duration = DEFAULT_TIME_LIMIT, atomic: bool = False) -> Callable[[T], T]:
    """Register the decorated callable for the jobs of the outbox `outbox`. As `handler`."""
    return _registrar(outbox_queue(outbox), time_limit, atomic)


def _registrar(queue: str, time_limit: Duration, atomic: bool) -> Callable[[T], T]:
    limit = seconds("time_limit", time_limit, zero=False)
    if not isinstance(atomic, bool):
        raise InvalidOption(f"atomic must be True or False, not {shown(atomic)}")

    def register(target: T) -> T:
        if not callable(target):
            raise InvalidOption(f"the handler of {describe_queue(queue)} must be callable, not {shown(target)}")
        if atomic and _makes_coroutine(target):
            raise ImproperlyConfigured(
                f"{where(target)} is a coroutine, and cannot handle {describe_queue(queue)} with atomic=True: "
                "a transaction belongs to one thread. Make it a sync function, or await one that opens a transaction"
            )
        misfit = _misfit(target)
        if misfit is not None:
            raise InvalidOption(
                f"the handler of {describe_queue(queue)} must take one argument, the job: {where(target)}{misfit}"
            )
        taken = _registered.get(queue)
        if taken is not None:
            raise ImproperlyConfigured(
                f"{describe_queue(queue)} has two handlers: {where(taken.target)} and {where(target)}"
            )
        module = sys._getframe(1).f_globals.get("__name__", "")
        _registered[queue] = Registration(queue, target, limit, atomic, module)
        return target

    return register


def _misfit(target: Callable[..., Any]) -> Signature | None:
    """Its signature, if that takes no call with one argument. `None` too where it does not say what it takes."""
    try:
        # Its own: what it wraps may be called with other arguments than it is.
        takes = signature(target, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    try:
        takes.bind(None)
    except TypeError:
        return takes
    return None


def _makes_coroutine(target: Callable[..., Any]) -> bool:
    while isinstance(target, partial):
        target = target.func
    return iscoroutinefunction(target) or iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004


def where(target: Callable[..., Any]) -> str:
    """The dotted path of a handler."""
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}.{named.__qualname__}"


def autodiscover() -> None:
    """Import the `alkstore` module of every installed app, once in a process.

    A module that cannot be imported raises nothing here. It is logged with its traceback, none of its handlers is
    registered, the system check reports it, and a worker does not start without `--tolerant`.
    """
    global _discovered  # noqa: PLW0603  a process discovers once
    with _discovering:
        if _discovered:
            return
        # Set first: a module that asks for the registrations while it is imported gets what there is.
        _discovered = True
        for app in apps.get_app_configs():
            if app.module is not None and module_has_submodule(app.module, MODULE):
                _import(f"{app.name}.{MODULE}")


def _import(module: str) -> None:
    try:
        import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  somebody else's module may raise anything
        # What it registered before it failed is half a module: a worker must not run it.
        for queue in [queue for queue, registration in _registered.items() if registration.module == module]:
            del _registered[queue]
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


@contextmanager
def isolated() -> Iterator[None]:
    """Inside the block nothing is registered but what the block registers, and nothing is discovered. For tests."""
    global _discovered  # noqa: PLW0603  put back below
    before = dict(_registered), list(_broken), _discovered
    _registered.clear()
    _broken.clear()
    _discovered = True
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(before[0])
        _broken[:] = before[1]
        _discovered = before[2]
