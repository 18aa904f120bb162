"""Async twins of the public functions: each runs its function in Django's thread for sync code.

A twin whose task is cancelled leaves a whole change or none: the function runs to its end in its thread.
"""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import sync_to_async

P = ParamSpec("P")
T = TypeVar("T")


def twin(function: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The same as a coroutine function, whose name begins with `a`.

    It joins a transaction that is open on the thread-sensitive thread, as the ORM's own async methods do.
    """
    in_thread = sync_to_async(function, thread_sensitive=True)

    @wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return await in_thread(*args, **kwargs)

    call.__name__ = f"a{function.__name__}"
    call.__qualname__ = ".".join([*function.__qualname__.split(".")[:-1], call.__name__])
    return call
