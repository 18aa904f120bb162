"""The backend for the setting `TASKS`."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.utils import timezone

from django_alkstore import conf
from django_alkstore.dialects.transactions import is_open, resolve_default
from django_alkstore.exceptions import InvalidName, InvalidOption, shown
from django_alkstore.models import Job
from django_alkstore.names import validate_name
from django_alkstore.services.queues import add, add_many
from django_alkstore.tasks.apis import api_of_backend, api_of_task, primary
from django_alkstore.tasks.finding import StoresTasks, UnknownTask, find_task
from django_alkstore.tasks.options import OPTIONS, check_options, defaults_of, options_of, task_class_of
from django_alkstore.tasks.results import find_result, result_of_job

OPTIONS_OF_BACKEND = ("database", "modules")


class AlkstoreBackend(StoresTasks, primary().base_backend):  # type: ignore[misc]
    """Stores tasks as jobs. `run_alkstore` and `run_queue` run them.

    A task is enqueued in the caller's open transaction: if that is rolled back, the task never was.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        self.database = self.options.get("database")
        self.modules = frozenset(self.options.get("modules", ()))
        """Modules of tasks beside those of the installed apps."""
        self.task_options = {name: value for name, value in self.options.items() if name not in OPTIONS_OF_BACKEND}
        """The default options of all tasks of this backend."""

    @property
    def task_class(self) -> Any:
        """Django's `Task` with the options of this library."""
        return task_class_of(api_of_backend(self))

    def check_options(self) -> None:
        """Raise `InvalidOption` if an option of the backend is unknown or has a wrong value."""
        unknown = self.task_options.keys() - set(OPTIONS)
        if unknown:
            raise InvalidOption(f"unknown option {', '.join(map(repr, sorted(unknown)))}")
        if self.database is not None and self.database not in connections:
            raise InvalidOption(f"database must be an alias in DATABASES, not {shown(self.database)}")
        check_options(self.task_options)

    def validate_task(self, task: Any) -> None:
        api = api_of_task(task) or primary()
        # Under the other API this object is no instance of its base class, and the method asks for none.
        api.base_backend.validate_task(self, task)
        try:
            validate_name("queue", task.queue_name)
            check_options(options_of(task), task.func)
            check_options({"max_attempts": getattr(task, "attempts_of_call", None)})
        except (InvalidName, InvalidOption) as error:
            raise api.invalid_task(f"{task.module_path}: {error}") from error
        if task.run_after is not None and getattr(task, "delay", None) is not None:
            raise api.invalid_task(f"{task.module_path}: give run_after or delay, not both")

    def enqueue(self, task: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
        """Store one job, in the caller's transaction if one is open. Returns the result, which is READY.

        Raises `InvalidTask` if a worker would not import the function, and `DuplicateJob` if a live job of the queue
        has the task's unique key.
        """
        path = self._path_of(task)
        settings = conf.settings()
        defaults = defaults_of(task, self.task_options, settings)
        database = self.database or resolve_default(settings)
        payload = self._payload(task, args, kwargs)
        job = add(database, task.queue_name, payload, _options(task), settings, task=path, defaults=defaults)
        return self._announce(database, task, [job])[0]

    def enqueue_many(self, task: Any, calls: Iterable[tuple[Iterable[Any], Mapping[str, Any]]]) -> list[Any]:
        """As `enqueue`, once for each pair of arguments and keyword arguments, all of them or none."""
        path = self._path_of(task)
        settings = conf.settings()
        defaults = defaults_of(task, self.task_options, settings)
        database = self.database or resolve_default(settings)
        payloads = [self._payload(task, args, kwargs) for args, kwargs in calls]
        with transaction.atomic(using=database):
            ids = add_many(task.queue_name, payloads, None, database, _options(task), path, defaults)
            jobs = Job.objects.using(database).in_bulk(ids)
            return self._announce(database, task, [jobs[job_id] for job_id in ids])

    async def aenqueue_many(self, task: Any, calls: Iterable[tuple[Iterable[Any], Mapping[str, Any]]]) -> list[Any]:
        """As `enqueue_many`."""
        return await sync_to_async(self.enqueue_many, thread_sensitive=True)(task, calls)

    def get_result(self, result_id: str) -> Any:
        """The result with this id, from any process. Raises `TaskResultDoesNotExist`."""
        return find_result(api_of_backend(self), result_id, self.database)

    def _path_of(self, task: Any) -> str:
        """The path by which a worker finds the task."""
        self.validate_task(task)
        path: str = task.module_path
        api = api_of_task(task) or primary()
        try:
            found = find_task(path)
        except UnknownTask as error:
            raise api.invalid_task(
                f"{error}, so no worker would run it. Move the function into a module of an installed app, or list its "
                f"module in TASKS[{self.alias!r}]['OPTIONS']['modules']"
            ) from error
        if found.func is not task.func:
            raise api.invalid_task(f"{path} is another task, so a worker would run that one")
        return path

    def _payload(self, task: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        api = api_of_task(task) or primary()
        return {"args": api.normalize_json(list(args)), "kwargs": api.normalize_json(dict(kwargs))}

    def _announce(self, database: str, task: Any, jobs: list[Job]) -> list[Any]:
        """The results; `task_enqueued` is sent for each after the commit."""
        api = api_of_task(task) or primary()
        results = [result_of_job(api, task, job) for job in jobs]

        def send() -> None:
            for result in results:
                api.task_enqueued.send_robust(AlkstoreBackend, task_result=result)

        if is_open(connections[database]):
            transaction.on_commit(send, using=database, robust=True)
        else:
            send()
        return results


def _options(task: Any) -> dict[str, Any]:
    """The options that the call gives."""
    run_after: datetime | None = task.run_after
    if run_after is not None and timezone.is_naive(run_after):
        run_after = timezone.make_aware(run_after)  # without USE_TZ
    return {
        "priority": task.priority or None,
        "run_at": run_after,
        "delay": getattr(task, "delay", None),
        "unique_key": getattr(task, "unique_key", None),
        "max_attempts": getattr(task, "attempts_of_call", None),
    }
