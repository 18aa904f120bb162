"""The options of tasks that Django does not have, and the task class that carries them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from inspect import iscoroutinefunction
from typing import Any, TypedDict

from django_alkstore import conf
from django_alkstore.conf import JobDefaults, Settings
from django_alkstore.durations import Duration, seconds
from django_alkstore.exceptions import InvalidOption, shown
from django_alkstore.registrations import DEFAULT_TIME_LIMIT
from django_alkstore.services.options import NEVER, check_fire_options
from django_alkstore.services.twins import twin
from django_alkstore.tasks.apis import Api

Backoff = Duration | Callable[[BaseException, Any], Duration | None]
"""Seconds before the second attempt, doubled with each one; or a function of the exception and the task's result.

The function returns the seconds until the next attempt, or None if there is to be no further attempt.
"""


class TaskOptions(TypedDict, total=False):
    """The options of a task, for the decorator and, as defaults of all tasks of a backend, for `OPTIONS`."""

    max_attempts: int | None
    """The largest number of attempts, the first included. Default 3."""
    backoff: Backoff | None
    """Default: 5 seconds, doubled with each attempt."""
    time_limit: Duration | None
    """Seconds after which an attempt counts as failed. Default 3,600."""
    expires_in: Any
    """Seconds from the moment at which it is due, after which it is not run any more; or `NEVER`. Default: never."""
    visibility_timeout: Duration | None
    """Seconds for which a claim is leased; the worker renews it. Default 300."""
    atomic: bool | None
    """True: run the function and record its end in one transaction. Default False."""


OPTIONS = tuple(TaskOptions.__optional_keys__)


@cache
def task_class_of(api: Api) -> Any:
    """The API's `Task` with our options. Its attributes are None if the option was not given."""
    base = api.task

    @dataclass(frozen=True, slots=True, kw_only=True)
    class AlkstoreTask(base):  # type: ignore[misc, valid-type]
        max_attempts: int | None = None
        backoff: Any = None
        time_limit: Duration | None = None
        expires_in: Any = None
        visibility_timeout: Duration | None = None
        atomic: bool | None = None
        # By `using`, which has priority over `ALKSTORE["QUEUES"]`:
        attempts_of_call: int | None = None
        delay: Duration | None = None
        unique_key: str | None = None

        def using(
            self,
            *,
            priority: int | None = None,
            queue_name: str | None = None,
            run_after: datetime | None = None,
            backend: str | None = None,
            unique_key: str | None = None,
            delay: Duration | None = None,
            max_attempts: int | None = None,
        ) -> Any:
            """The task with other values. `delay`: seconds from the enqueue until the task is due."""
            changes: dict[str, Any] = {
                "priority": priority,
                "queue_name": queue_name,
                "run_after": run_after,
                "backend": backend,
                "unique_key": unique_key,
                "delay": delay,
                "attempts_of_call": max_attempts,
            }
            return replace(self, **{name: value for name, value in changes.items() if value is not None})

        def enqueue_many(self, calls: Iterable[tuple[Iterable[Any], Mapping[str, Any]]]) -> list[Any]:
            """Enqueue the task once for each pair of arguments and keyword arguments, all of them or none."""
            return list(self.get_backend().enqueue_many(self, calls))

        aenqueue_many = twin(enqueue_many)

    AlkstoreTask.__module__, AlkstoreTask.__qualname__ = __name__, "AlkstoreTask"
    return AlkstoreTask


def check_options(options: Mapping[str, Any], function: Callable[..., Any] | None = None) -> None:
    """Raise `InvalidOption` if an option has a wrong value."""
    _fire_options(options)
    if options.get("time_limit") is not None:
        seconds("time_limit", options["time_limit"], zero=False)
    atomic = options.get("atomic")
    if atomic is not None and not isinstance(atomic, bool):
        raise InvalidOption(f"atomic must be True or False, not {shown(atomic)}")
    if atomic and function is not None and iscoroutinefunction(function):
        raise InvalidOption("a coroutine cannot be atomic: a transaction belongs to one thread")


def _fire_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that jobs have, too; those that are given."""
    backoff = options.get("backoff")
    given = {
        "max_attempts": options.get("max_attempts"),
        "visibility_timeout": options.get("visibility_timeout"),
        "expires_in": options.get("expires_in"),
        "backoff_base": None if callable(backoff) else backoff,
    }
    checked = {name: value for name, value in check_fire_options(given).items() if value is not None}
    if checked.get("expires_in") is NEVER:
        checked["expires_in"] = None
    return checked


def options_of(task: Any) -> dict[str, Any]:
    """The options that the decorator of a task has given."""
    values = {name: getattr(task, name, None) for name in OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def defaults_of(task: Any, backend_options: Mapping[str, Any], settings: Settings) -> JobDefaults:
    """The options of the task's jobs: from `QUEUES`, the decorator, `OPTIONS` or the library, in this order."""
    chosen = {**_fire_options(backend_options), **_fire_options(options_of(task))}
    return conf.PLAIN_DEFAULTS._replace(**chosen)._replace(**settings.queues.get(task.queue_name, {}))


def effective(task: Any, backend_options: Mapping[str, Any], name: str) -> Any:
    """One option of the decorator, else of `OPTIONS`; None if neither has it."""
    value = getattr(task, name, None)
    return backend_options.get(name) if value is None else value


def time_limit_of(task: Any, backend_options: Mapping[str, Any]) -> float:
    """Seconds."""
    limit = effective(task, backend_options, "time_limit")
    return DEFAULT_TIME_LIMIT if limit is None else seconds("time_limit", limit, zero=False)
