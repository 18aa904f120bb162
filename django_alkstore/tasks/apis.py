"""The API of tasks: `django.tasks` from Django 6.0 on, and the package `django_tasks`, which has the same classes.

Both may be in use in one project on Django 6, with one setting `TASKS`: each makes a backend of its own from it.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import django
from django.core.exceptions import ImproperlyConfigured
from django.dispatch import Signal

DJANGO = "django.tasks"
PACKAGE = "django_tasks"


class Api(NamedTuple):
    """The classes, errors and signals of one of the two."""

    backends: Any
    """The backends by alias."""
    base_backend: Any
    task: Any
    result: Any
    context: Any
    error: Any
    status: Any
    normalize_json: Callable[[Any], Any]
    invalid_task: type[Exception]
    result_does_not_exist: type[Exception]
    task_enqueued: Signal
    task_started: Signal
    task_finished: Signal


@cache
def _load(name: str) -> Api:
    root, base, backends, errors, signals = (
        import_module(f"{name}{part}") for part in ("", ".base", ".backends.base", ".exceptions", ".signals")
    )
    json = import_module("django.utils.json" if name == DJANGO else f"{name}.utils")
    return Api(
        backends=root.task_backends,
        base_backend=backends.BaseTaskBackend,
        task=base.Task,
        result=base.TaskResult,
        context=base.TaskContext,
        error=base.TaskError,
        status=base.TaskResultStatus,
        normalize_json=json.normalize_json,
        invalid_task=getattr(errors, "InvalidTask", None) or errors.InvalidTaskError,
        result_does_not_exist=errors.TaskResultDoesNotExist,
        task_enqueued=signals.task_enqueued,
        task_started=signals.task_started,
        task_finished=signals.task_finished,
    )


def is_available() -> bool:
    """True if this project can have tasks."""
    return django.VERSION >= (6, 0) or find_spec(PACKAGE) is not None


def primary() -> Api:
    """Django's own API, or on Django 5.2 that of the package."""
    if django.VERSION >= (6, 0):
        return _load(DJANGO)
    if find_spec(PACKAGE) is None:
        raise ImproperlyConfigured(
            "django_alkstore.tasks needs Django 6.0 or newer, or the package django-tasks: pip install django-tasks"
        )
    return _load(PACKAGE)


def in_use() -> list[Api]:
    """The APIs that this process has imported; the primary one is first."""
    apis = [primary()]
    if django.VERSION >= (6, 0) and PACKAGE in sys.modules:
        apis.append(_load(PACKAGE))
    return apis


def api_of_backend(backend: Any) -> Api:
    """The API that has made this backend object."""
    first, *others = in_use()
    for other in others:
        if backend.alias in other.backends and other.backends[backend.alias] is backend:
            return other
    return first


def api_of_task(task: Any) -> Api | None:
    """The API of a task; None if the object is no task."""
    return next((api for api in in_use() if isinstance(task, api.task)), None)
