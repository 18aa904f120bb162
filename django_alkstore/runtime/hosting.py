"""An event loop for a handler's thread, for as long as the thread lives.

`async_to_sync` makes a thread and a loop for each call, which costs more than most of a worker's round. Called
in a thread that a loop waits for by `sync_to_async`, it uses that loop; and what the coroutine hands to
`sync_to_async` in its turn (each query of the ORM) still runs in the calling thread, on its connection. So each
handler's thread has a loop of its own beside it: one that blocks its loop holds up no other.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, cast

from asgiref.sync import sync_to_async


def hosted(work: Callable[[], None], name: str) -> None:
    """Run `work` to its end in a thread of this name, with a loop in this thread at its service."""
    # It asks for a pool and uses what every executor has; a pool's threads would keep the process from ending.
    executor = cast("ThreadPoolExecutor", _DaemonThread(name))
    asyncio.run(sync_to_async(work, thread_sensitive=False, executor=executor)())


class _DaemonThread(Executor):
    """Runs what it is given in a new thread, which does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = call(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  it is raised where the future is awaited
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return future
