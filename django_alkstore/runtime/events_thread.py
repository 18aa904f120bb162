"""The thread that sends the keeper's events, so that a slow receiver or log handler delays no renewal."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from django.db import connections

from django_alkstore import clock, signals


class EventsThread(threading.Thread):
    """Sends events one after the other, in their order."""

    def __init__(self) -> None:
        super().__init__(name="alkstore-events", daemon=True)
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def run(self) -> None:
        while (send := self._queue.get()) is not None:
            with signals.shown_if_it_fails():
                send()
                if self._queue.empty():
                    connections.close_all()  # those that receivers have opened

    def post(self, send: Callable[[], object]) -> None:
        """Let this thread call `send`, which sends an event."""
        self._queue.put(send)

    @contextmanager
    def sends_for_this_thread(self) -> Iterator[None]:
        """Inside, every event of the calling thread is sent by this one."""
        with signals.passed_to(self.post):
            yield

    def flush(self, timeout: float) -> None:
        """Send what was put in so far, and flush the log; wait at most `timeout` seconds for it."""
        sent = threading.Event()
        self._queue.put(sent.set)
        deadline = clock.waiting_from() + timeout
        sent.wait(timeout)
        signals.flush(max(0.0, deadline - clock.waiting_from()))

    def finish(self, timeout: float) -> None:
        """End after what was put in so far; wait at most `timeout` seconds for it."""
        self._queue.put(None)
        self.join(timeout)
