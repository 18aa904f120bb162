"""The decorators that register handlers, and what they return: a handler that can be called and enqueued."""

import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import update_wrapper
from inspect import Signature, signature
from typing import Any, Generic, Literal, ParamSpec, TypeVar, Unpack, cast, overload

from asgiref.sync import markcoroutinefunction
from django.core.exceptions import ImproperlyConfigured

from django_alkstore import conf
from django_alkstore.dialects.transactions import require_open, resolve_default
from django_alkstore.durations import Duration, seconds
from django_alkstore.exceptions import InvalidOption, shown
from django_alkstore.models import Job
from django_alkstore.names import describe_queue, outbox_of, outbox_queue, validate_name
from django_alkstore.registrations import (
    DEFAULT_TIME_LIMIT,
    BrokenModule,
    Declaration,
    Registration,
    autodiscover,
    broken_modules,
    declare,
    isolated,
    makes_coroutine,
    register,
    registrations,
    where,
)
from django_alkstore.services.declared import check_declaration, task_options, task_payload
from django_alkstore.services.handles import JobHandle
from django_alkstore.services.options import NEVER, FireOptions, JobOptions, UnkeyedOptions, check_fire_options
from django_alkstore.services.queues import add, add_many, get_or_add
from django_alkstore.services.schedules import ScheduleOptions
from django_alkstore.services.twins import twin

__all__ = [
    "BrokenModule",
    "Handler",
    "Registration",
    "autodiscover",
    "broken_modules",
    "delivery",
    "handler",
    "isolated",
    "registrations",
    "scheduled",
]

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")


class HandlerOptions(FireOptions, total=False):
    """The options of `@handler` and `@delivery`. Those of `FireOptions` are defaults of the queue's jobs.

    An option of the call, and one in `ALKSTORE["QUEUES"]`, has priority over the decorator's.
    """

    time_limit: Duration
    """Seconds (above 0) after which an attempt counts as failed. Default 3,600."""
    atomic: bool
    """True: run the handler and its ack in one transaction, which holds SQLite's writer lock as long as it runs."""


_JOB_IN_PAYLOAD = '{}["job"] is the argument by which {} is given the job'


class Handler(Generic[P, R]):
    """A registered handler. Call it with a job's handle, or enqueue jobs for it."""

    def __init__(self, function: Callable[P, R], queue: str, *, unpack: bool) -> None:
        update_wrapper(self, function, updated=())
        self.queue = queue
        """The full name of the queue: for an outbox, the derived one."""
        self.function = function
        self.signature = _signature(function) if unpack else None
        """With `unpack` the signature that a payload must fit; else None."""
        if makes_coroutine(function):
            markcoroutinefunction(self)

    def __repr__(self) -> str:
        return f"<handler of the {describe_queue(self.queue)}: {where(self.function)}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.signature is None:
            return self.function(*args, **kwargs)
        return self._call_unpacked(*args, **kwargs)

    def _call_unpacked(self, job: Any) -> R:
        arguments = dict(_keywords(job.payload))
        if self.signature is not None and "job" in self.signature.parameters:
            if "job" in arguments:
                raise TypeError(_JOB_IN_PAYLOAD.format("payload", where(self.function)))
            arguments["job"] = job
        function: Callable[..., R] = self.function
        return function(**arguments)

    def enqueue(self, payload: Any, *, using: str | None = None, **options: Unpack[JobOptions]) -> Job:
        """Add a job: in the caller's transaction if one is open, else committed at once. As `services.enqueue`.

        With `unpack=True` a payload that does not fit the handler's signature is a `TypeError`.
        """
        self._check(payload)
        settings = conf.settings()
        return add(using or resolve_default(settings), self.queue, payload, options, settings)

    def enqueue_tx(self, payload: Any, *, using: str | None = None, **options: Unpack[JobOptions]) -> Job:
        """Add a job in the caller's transaction only: `TransactionRequired` if none is open on the database."""
        self._check(payload)
        settings = conf.settings()
        alias = using or resolve_default(settings)
        require_open(alias, "enqueue_tx")
        return add(alias, self.queue, payload, options, settings)

    def enqueue_many(
        self,
        payloads: Iterable[Any],
        *,
        run_ats: Iterable[datetime] | None = None,
        using: str | None = None,
        **options: Unpack[JobOptions],
    ) -> list[int]:
        """Add a job for each payload, all of them or none; their ids, in order. As `services.enqueue_many`."""
        if self.signature is not None and not isinstance(payloads, (str, bytes, Mapping)):
            payloads = list(payloads)
            for index, payload in enumerate(payloads):
                self._check(payload, f"payloads[{index}]")
        return add_many(self.queue, payloads, run_ats, using, options)

    def get_or_enqueue(
        self, unique_key: str, payload: Any, *, using: str | None = None, **options: Unpack[UnkeyedOptions]
    ) -> tuple[Job, bool]:
        """The live job with this unique key and `False`, or a new one and `True`."""
        self._check(payload)
        return get_or_add(self.queue, unique_key, payload, using, options)

    aenqueue = twin(enqueue)
    aenqueue_tx = twin(enqueue_tx)
    aenqueue_many = twin(enqueue_many)
    aget_or_enqueue = twin(get_or_enqueue)

    def _check(self, payload: Any, name: str = "payload") -> None:
        """Raise `TypeError` unless the handler can be called with the payload."""
        if self.signature is None:
            return
        arguments = dict(_keywords(payload, name))
        if "job" in self.signature.parameters:
            if "job" in arguments:
                raise TypeError(_JOB_IN_PAYLOAD.format(name, where(self.function)))
            arguments["job"] = None
        try:
            self.signature.bind(**arguments)
        except TypeError as error:
            raise TypeError(f"{name} does not fit {where(self.function)}{self.signature}: {error}") from None


def _signature(function: Callable[..., Any]) -> Signature:
    try:
        return signature(function)
    except (TypeError, ValueError) as error:
        raise InvalidOption(f"unpack needs a callable with a signature, and {shown(function)} has none") from error


def _keywords(payload: Any, name: str = "payload") -> Mapping[str, Any]:
    if not isinstance(payload, Mapping):
        raise TypeError(f"{name} must be a dict, whose items are the arguments of the handler, not {shown(payload)}")
    return payload


@overload
def handler(
    queue: str, *, unpack: Literal[True], **options: Unpack[HandlerOptions]
) -> Callable[[Callable[..., R]], Handler[[JobHandle], R]]: ...
@overload
def handler(
    queue: str, *, unpack: Literal[False] = False, **options: Unpack[HandlerOptions]
) -> Callable[[Callable[P, R]], Handler[P, R]]: ...
def handler(queue: str, *, unpack: bool = False, **options: Unpack[HandlerOptions]) -> Callable[..., Any]:
    """Register the decorated callable, sync or async, for the jobs of `queue`. Returns it as a `Handler`.

    `unpack`: call it with the items of the payload as keyword arguments, and with `job=` if it has that argument.
    Raises `InvalidName`, `InvalidOption`, and `ImproperlyConfigured` if the queue has a handler already.
    """
    return _registrar(validate_name("queue", queue), unpack, options)


@overload
def delivery(
    outbox: str, *, unpack: Literal[True], **options: Unpack[HandlerOptions]
) -> Callable[[Callable[..., R]], Handler[[JobHandle], R]]: ...
@overload
def delivery(
    outbox: str, *, unpack: Literal[False] = False, **options: Unpack[HandlerOptions]
) -> Callable[[Callable[P, R]], Handler[P, R]]: ...
def delivery(outbox: str, *, unpack: bool = False, **options: Unpack[HandlerOptions]) -> Callable[..., Any]:
    """Register the decorated callable for the jobs of the outbox `outbox`. As `handler`."""
    return _registrar(outbox_queue(outbox), unpack, options)


def scheduled(
    spec: str,
    name: str | None = None,
    *,
    payload: Any = None,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[ScheduleOptions],
) -> Callable[[D], D]:
    """Declare a schedule for the handler or the task below, which is returned as it was.

    `name`: default, the dotted path of the function. `payload`: of a handler's jobs; `args` and `kwargs`: of a task.
    The scheduler brings the rows in line with the code when it begins to lead: a schedule that is new is added, one
    that has changed is changed, and one that is no longer declared fires nothing any more. Raises as
    `services.schedule`, and `ImproperlyConfigured` if another schedule of the code has the name.
    """
    module = sys._getframe(1).f_globals.get("__name__", "")

    def decorate(target: D) -> D:
        if isinstance(target, Handler):
            queue, task, given = target.queue, "", payload
        elif hasattr(target, "module_path"):
            queue, task, given = target.queue_name, target.module_path, task_payload(args, kwargs)  # type: ignore[attr-defined]
        else:
            raise InvalidOption(f"@scheduled stands above @handler or @task, not above {shown(target)}")
        if outbox_of(queue) is not None:
            raise InvalidOption("@scheduled is for handlers and tasks; a delivery is for what a transaction enqueues")
        chosen = {**task_options(target), **options} if task else dict(options)
        declaration = Declaration(
            name or task or where(cast("Callable[..., Any]", target)), spec, queue, given, task, chosen, module
        )
        check_declaration(declaration)
        declare(declaration)
        return target

    return decorate


def _registrar(queue: str, unpack: bool, options: Mapping[str, Any]) -> Callable[[Callable[..., Any]], Any]:
    unknown = options.keys() - HandlerOptions.__optional_keys__
    if unknown:
        raise TypeError(
            f"unknown option {', '.join(map(repr, sorted(unknown)))} of the handler of the {describe_queue(queue)}; "
            f"known are {', '.join(sorted(HandlerOptions.__optional_keys__))}"
        )
    limit = seconds("time_limit", options.get("time_limit", DEFAULT_TIME_LIMIT), zero=False)
    atomic = options.get("atomic", False)
    for name, value in (("atomic", atomic), ("unpack", unpack)):
        if not isinstance(value, bool):
            raise InvalidOption(f"{name} must be True or False, not {shown(value)}")
    given = {name: value for name, value in check_fire_options(options).items() if value is not None}
    if given.get("expires_in") is NEVER:
        given["expires_in"] = None
    module = sys._getframe(2).f_globals.get("__name__", "")

    def decorate(target: Callable[..., Any]) -> Handler[..., Any]:
        if not callable(target):
            raise InvalidOption(f"the handler of {describe_queue(queue)} must be callable, not {shown(target)}")
        if atomic and makes_coroutine(target):
            raise ImproperlyConfigured(
                f"{where(target)} is a coroutine, and cannot handle {describe_queue(queue)} with atomic=True: "
                "a transaction belongs to one thread. Make it a sync function, or await one that opens a transaction"
            )
        misfit = None if unpack else _misfit(target)
        if misfit is not None:
            raise InvalidOption(
                f"the handler of {describe_queue(queue)} must take one argument, the job: {where(target)}{misfit}. "
                "To be called with the items of the payload, add unpack=True"
            )
        wrapped: Handler[..., Any] = Handler(target, queue, unpack=unpack)
        register(Registration(queue, wrapped if unpack else target, limit, atomic, module, given))
        return wrapped

    return decorate


def _misfit(target: Callable[..., Any]) -> Signature | None:
    """Its signature, if that takes no call with one argument. None also if the callable has no readable signature."""
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
