"""What the commands share: signals, the choice of handlers, and running to an exit code."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_alkstore import registry, signals
from django_alkstore.dialects import dialect_of
from django_alkstore.registry import Registration
from django_alkstore.runtime.scheduler import schedule_until
from django_alkstore.runtime.worker import Worker

EXIT_SCHEDULER_BROKE = 1


class NotRegistered(ImproperlyConfigured):
    """A command was given a name that no module registers, or nothing is registered at all."""


@contextmanager
def stopped_by_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """Call `stop` with the signal's name at SIGTERM and SIGINT. Outside the main thread there are no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def receive(number: int, frame: FrameType | None) -> None:
        stop(signal.Signals(number).name)

    before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def refuse_in_memory(alias: str) -> None:
    """`ImproperlyConfigured` where the database is in memory, and so this process's own."""
    connection = connections[alias]
    dialect_of(connection)
    if connection.is_in_memory_db():  # type: ignore[attr-defined]
        raise ImproperlyConfigured(
            f"the database {alias!r} is in memory, where no other process can enqueue and no thread may write "
            "beside another; give it a file. In tests, django_alkstore.testing.run_pending runs jobs in place"
        )


def chosen(names: Sequence[str], *, outboxes: bool) -> list[Registration]:
    """The registered queues (or outboxes) of these names; without names, all. `NotRegistered` lists what there is."""
    kind = "outbox" if outboxes else "queue"
    known = {r.name: r for r in registry.registrations() if r.is_outbox == outboxes}
    listed = ", ".join(known) or "none"
    unknown = [name for name in names if name not in known]
    if unknown:
        raise NotRegistered(f"no handler is registered for the {kind} {', '.join(unknown)}; registered: {listed}")
    if not known:
        decorator = "delivery" if outboxes else "handler"
        raise NotRegistered(
            f"no {kind} is registered: decorate a function with @{decorator} in an alkstore.py of an installed app"
        )
    return [known[name] for name in dict.fromkeys(names)] if names else list(known.values())


def run_worker(alias: str, registrations: Sequence[Registration], concurrency: int, grace: float) -> int:
    """Run a worker until a signal stops it; the exit code."""
    worker = Worker(alias, registrations, concurrency=concurrency, grace=grace)
    with stopped_by_signals(worker.stop):
        return worker.run()


def run_scheduler(alias: str, *, standby: bool) -> int:
    """Run the scheduler until a signal stops it; the exit code."""
    # The scheduler has a thread of its own, since its stop event must not be set by a signal handler that may
    # have interrupted that very event's own methods. A SimpleQueue may be put to at any moment.
    news: SimpleQueue[str] = SimpleQueue()
    scheduler = _SchedulerThread(alias, standby=standby, at_end=lambda: news.put("ended"))
    with stopped_by_signals(news.put):
        scheduler.start()
        news.get()
        scheduler.stop()
        scheduler.join()
    return scheduler.code


def run_everything(alias: str, concurrency: int, grace: float) -> int:
    """Run the scheduler and one worker for all that is registered, in one process; the exit code."""
    worker = Worker(alias, registry.registrations(), concurrency=concurrency, grace=grace)
    scheduler = _SchedulerThread(alias, standby=True, at_end=lambda: worker.wind_down("the scheduler ended"))
    worker.at_stop = scheduler.stop
    with stopped_by_signals(worker.stop):
        scheduler.start()
        try:
            code = worker.run()
        finally:
            scheduler.stop()
            scheduler.join()
    return code or scheduler.code


class _SchedulerThread(threading.Thread):
    """The scheduler, beside whatever waits for it to end."""

    def __init__(self, alias: str, *, standby: bool, at_end: Callable[[], None]) -> None:
        super().__init__(name="alkstore-scheduler", daemon=True)
        self._alias = alias
        self._standby = standby
        self._at_end = at_end
        self._stop_event = threading.Event()
        self.code = EXIT_SCHEDULER_BROKE
        """Its exit code, once it has ended."""

    def run(self) -> None:
        try:
            self.code = schedule_until(self._stop_event, self._alias, standby=self._standby)
        except Exception:  # noqa: BLE001  logged whole, and the process ends for it
            signals.logger.exception("the scheduler broke")
        finally:
            connections.close_all()
            if not self._stop_event.is_set():
                self._at_end()

    def stop(self, patience: float = 0.0) -> None:
        """Let it free the leadership and end; wait for that at most `patience` seconds."""
        self._stop_event.set()
        if patience:
            self.join(patience)
