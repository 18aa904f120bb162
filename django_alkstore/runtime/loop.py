"""What the commands share: signals, log output, the choice of handlers, and running to an exit code."""

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_alkstore import registry, signals
from django_alkstore.dialects import dialect_of
from django_alkstore.registry import Registration
from django_alkstore.runtime.scheduler import schedule_until
from django_alkstore.runtime.worker import EXIT_OK, Worker

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


def show_log(verbosity: int) -> None:
    """Let the library's log lines be seen under Django's default logging, which shows warnings at most.

    What the project has configured stands: its level, and its handlers, to which nothing is added.
    """
    logger = signals.logger
    if logger.level == logging.NOTSET:
        logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG))
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)


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
    stop = threading.Event()
    with stopped_by_signals(lambda _: stop.set()):
        return schedule_until(stop, alias, standby=standby)


def run_everything(alias: str, concurrency: int, grace: float) -> int:
    """Run the scheduler and one worker for all that is registered, in one process; the exit code."""
    worker = Worker(alias, registry.registrations(), concurrency=concurrency, grace=grace)
    scheduler = _SchedulerThread(alias, worker)
    with stopped_by_signals(worker.stop):
        scheduler.start()
        try:
            code = worker.run()
        finally:
            scheduler.finish()
    return code or (EXIT_SCHEDULER_BROKE if scheduler.broke else EXIT_OK)


class _SchedulerThread(threading.Thread):
    """The scheduler beside a worker. Where it breaks, the whole process stops, for its supervisor to see."""

    def __init__(self, alias: str, worker: Worker) -> None:
        super().__init__(name="alkstore-scheduler", daemon=True)
        self._alias = alias
        self._worker = worker
        self._stop_event = threading.Event()
        self.broke = False

    def run(self) -> None:
        try:
            schedule_until(self._stop_event, self._alias)
        except Exception:  # noqa: BLE001  logged whole, and the process ends for it
            self.broke = True
            signals.logger.exception("the scheduler broke")
            self._worker.stop("the scheduler broke")
        finally:
            connections.close_all()

    def finish(self) -> None:
        self._stop_event.set()
        self.join()
