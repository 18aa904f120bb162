"""What the commands share: the choice of handlers, and running to an exit code."""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from queue import Empty, SimpleQueue
from typing import NoReturn, TypedDict, Unpack

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections
from django.db.models import Count

from django_alkstore import clock, registry, signals
from django_alkstore.dialects import dialect_of
from django_alkstore.dialects.watch import Bell
from django_alkstore.handled import handled, queue_of_tasks, takes_every_task
from django_alkstore.models import Job
from django_alkstore.registrations import Registration
from django_alkstore.runtime.scheduler import schedule_until
from django_alkstore.runtime.stop_signals import StopSignals
from django_alkstore.runtime.worker import SAME_SIGNAL, Worker
from django_alkstore.services.waiting import StopEvent

EXIT_SCHEDULER_BROKE = 1
EXIT_CUT_OFF = 1


class WorkerOptions(TypedDict):
    """What the commands pass on to a worker."""

    concurrency: int
    async_concurrency: int
    grace: float


class NotRegistered(ImproperlyConfigured):
    """A command was given a name that no module registers, or nothing is registered at all."""


def refuse_in_memory(alias: str) -> None:
    """`ImproperlyConfigured` if the database is in memory: no other process can see it."""
    connection = connections[alias]
    dialect_of(connection)
    if connection.is_in_memory_db():  # type: ignore[attr-defined]
        raise ImproperlyConfigured(
            f"the database {alias!r} is in memory, where no other process can enqueue and no thread may write "
            "beside another; give it a file. In tests, django_alkstore.testing.run_pending runs jobs in place"
        )


def chosen(alias: str, names: Sequence[str], *, outboxes: bool) -> list[Registration]:
    """The queues (or outboxes) of these names that have a handler or tasks; without names, all.

    `NotRegistered` lists what there is.
    """
    kinds: dict[bool, dict[str, Registration]] = {True: {}, False: {}}
    for registration in handled(alias):
        kinds[registration.is_outbox][registration.name] = registration
    known, others = kinds[outboxes], kinds[not outboxes]
    if not outboxes and takes_every_task(alias):
        return [known[name] if name in known else queue_of_tasks(name) for name in names] or list(known.values())
    kind, decorator = ("outbox", "delivery") if outboxes else ("queue", "handler")
    faults = [
        _other_kind(others[name]) if name in others else f"no handler is registered for the {kind} {name!r}"
        for name in dict.fromkeys(names)
        if name not in known
    ]
    if faults:
        raise NotRegistered(f"{'; '.join(faults)}. Registered: {', '.join(known) or 'none'}{_broken()}")
    if not known:
        raise NotRegistered(
            f"no {kind} is registered: decorate a function with @{decorator} in an alkstore.py of an installed app"
            f"{_broken()}"
        )
    return [known[name] for name in dict.fromkeys(names)] if names else list(known.values())


def _other_kind(registration: Registration) -> str:
    kind, command = ("an outbox", "run_outbox") if registration.is_outbox else ("a queue", "run_queue")
    return f"{registration.name!r} is {kind}: {command} {registration.name}"


def _broken() -> str:
    modules = ", ".join(broken.module for broken in registry.broken_modules())
    return f". Cannot be imported: {modules} (the log says why)" if modules else ""


def _warn_of_unhandled(alias: str) -> None:
    """Say which queues and outboxes hold due jobs that nothing in this project is registered for."""
    queues = [registration.queue for registration in handled(alias)]
    waiting = Job.objects.using(alias).due(clock.now()).exclude(queue__in=queues)
    with suppress(DatabaseError):  # no reason not to start
        # Not `queue_stats`, which counts what is finished as well.
        due = dict(waiting.values_list("queue").annotate(Count("pk")).order_by("queue"))
        if due:
            signals.emit(signals.jobs_unhandled, due=due)


def run_worker(
    alias: str,
    registrations: Sequence[Registration],
    stop_signals: StopSignals,
    *,
    every_task: bool,
    **options: Unpack[WorkerOptions],
) -> int:
    """Run a worker until a signal stops it; the exit code. `every_task`: see `Worker`."""
    _warn_of_unhandled(alias)
    worker = Worker(alias, registrations, pause=stop_signals.sleep, every_task=every_task, **options)
    stop_signals.pass_to(worker.stop)
    return worker.run()


def run_scheduler(alias: str, stop_signals: StopSignals, *, standby: bool) -> int:
    """Run the scheduler until a signal stops it; the exit code. A later second signal ends the process at once."""
    # The scheduler has a thread of its own. A signal handler must not set its stop event: the handler may have
    # interrupted one of that event's own methods. It may put into a SimpleQueue at any moment.
    # The main thread's connection would keep files of the database open that somebody repairs after a fault.
    connections[alias].close()
    with closing(_News()) as news:
        scheduler = _SchedulerThread(alias, standby=standby, at_end=lambda: news.put(_ENDED))
        with news.rung_by_signals():
            stop_signals.pass_to(news.put)
            scheduler.start()
            return _see_end(scheduler, news)


def run_everything(alias: str, stop_signals: StopSignals, **options: Unpack[WorkerOptions]) -> int:
    """Run the scheduler and one worker for all that is registered, in one process; the exit code."""
    registrations = handled(alias)
    if not registrations and not takes_every_task(alias):
        signals.emit(signals.nothing_registered)
    _warn_of_unhandled(alias)
    worker = Worker(alias, registrations, pause=stop_signals.sleep, every_task=True, **options)
    news = _News()

    def at_end() -> None:
        if not scheduler.stopping:
            worker.wind_down("the scheduler ended")
        news.put(_ENDED)

    def receive(name: str) -> None:
        worker.stop(name)
        news.put(name)

    def end_process(code: int) -> None:
        """Handlers keep threads: nothing can be waited for, so the scheduler's code counts as it is."""
        os._exit(code or (0 if scheduler.is_alive() else scheduler.code))

    scheduler = _SchedulerThread(alias, at_end=at_end, beside_worker=True)
    worker.at_stop, worker.end_process = scheduler.stop, end_process
    with closing(news):
        stop_signals.pass_to(receive)
        scheduler.start()
        try:
            code = worker.run()
        finally:
            scheduler.stop()
            with news.rung_by_signals():
                ended = _see_end(scheduler, news)
    return code or ended


_ENDED = "ended"


class _News:
    """What signals and threads tell the main thread, each with its moment."""

    def __init__(self) -> None:
        self._told: SimpleQueue[tuple[str, float]] = SimpleQueue()
        self._bell = Bell()
        self.rung_by_signals = self._bell.rung_by_signals
        self.close = self._bell.close

    def put(self, news: str) -> None:
        self._told.put((news, clock.waiting_from()))
        self._bell.ring()

    def get(self) -> tuple[str, float]:
        while True:
            with suppress(Empty):
                return self._told.get_nowait()
            self._bell.wait()


def _see_end(scheduler: "_SchedulerThread", news: _News) -> int:
    """Wait until the scheduler has ended; its exit code. The first signal stops it, a later one ends the process."""
    stopped_at: float | None = None
    while (told := news.get())[0] != _ENDED:
        _, moment = told
        if stopped_at is None:
            stopped_at = moment
            scheduler.stop()
        elif moment - stopped_at >= SAME_SIGNAL:
            _cut_off()
    scheduler.join()
    return scheduler.code


def _cut_off() -> NoReturn:
    """End the process at a second signal: something holds up the scheduler's thread, which Python cannot end."""
    signals.emit(signals.scheduler_cut_off)
    signals.flush()
    os._exit(EXIT_CUT_OFF)


class _SchedulerThread(threading.Thread):
    """The scheduler, in a thread beside the main one."""

    def __init__(
        self, alias: str, *, at_end: Callable[[], None], standby: bool = True, beside_worker: bool = False
    ) -> None:
        super().__init__(name="alkstore-scheduler", daemon=True)
        self._alias = alias
        self._standby = standby
        self._beside_worker = beside_worker
        self._at_end = at_end
        self._stop_event = StopEvent()
        self.code = EXIT_SCHEDULER_BROKE
        """Its exit code, once it has ended."""

    def run(self) -> None:
        try:
            self.code = schedule_until(
                self._stop_event, self._alias, standby=self._standby, beside_worker=self._beside_worker
            )
        except Exception:  # noqa: BLE001  logged with its traceback; the process ends with status 1
            signals.logger.exception("the scheduler broke, and the process ends for it")
        finally:
            connections.close_all()
            self._at_end()

    @property
    def stopping(self) -> bool:
        """True once it has been told to stop."""
        return self._stop_event.is_set()

    def stop(self, patience: float = 0.0) -> None:
        """Let it free the leadership and end; wait for that at most `patience` seconds."""
        self._stop_event.set()
        if patience:
            self.join(patience)
