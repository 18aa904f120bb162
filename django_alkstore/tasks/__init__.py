"""Django's tasks, stored as jobs: the backend for `TASKS`, and the decorator with the options of this library."""

from collections.abc import Callable
from typing import Any, Unpack, overload

from django_alkstore.tasks.apis import primary
from django_alkstore.tasks.backend import AlkstoreBackend
from django_alkstore.tasks.finishing import listen
from django_alkstore.tasks.options import TaskOptions, task_class_of

__all__ = ["AlkstoreBackend", "task"]

listen()


@overload
def task(function: Callable[..., Any], /) -> Any: ...
@overload
def task(
    *,
    priority: int = 0,
    queue_name: str = "default",
    backend: str = "default",
    takes_context: bool = False,
    **options: Unpack[TaskOptions],
) -> Callable[[Callable[..., Any]], Any]: ...
def task(
    function: Callable[..., Any] | None = None,
    /,
    *,
    priority: int = 0,
    queue_name: str = "default",
    backend: str = "default",
    takes_context: bool = False,
    **options: Unpack[TaskOptions],
) -> Any:
    """Django's decorator `task`, with the options of this library. It is the same on every version of Django.

    The returned task can also be enqueued with another backend, in tests for example, which ignores these options.
    Raises the API's `InvalidTask` for a wrong option.
    """
    make = task_class_of(primary())

    def decorate(target: Callable[..., Any]) -> Any:
        return make(
            func=target,
            priority=priority,
            queue_name=queue_name,
            backend=backend,
            takes_context=takes_context,
            run_after=None,  # Django 6.0 has no default
            **options,
        )

    return decorate if function is None else decorate(function)
