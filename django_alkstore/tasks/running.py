"""Running tasks: what a worker registers for the queues of tasks, and what it calls for a job of a task."""

from inspect import iscoroutinefunction
from typing import Any

from asgiref.sync import markcoroutinefunction

from django_alkstore import conf, signals
from django_alkstore.dialects.transactions import read, resolve_alias
from django_alkstore.exceptions import InvalidReturnValue
from django_alkstore.payloads import encode_payload
from django_alkstore.registrations import DEFAULT_TIME_LIMIT, Registration
from django_alkstore.services import JobHandle
from django_alkstore.services.outcomes import ACK, Kind, Outcome, give_back_after
from django_alkstore.tasks.apis import Api, api_of_task, primary
from django_alkstore.tasks.backend import AlkstoreBackend
from django_alkstore.tasks.contexts import context_of
from django_alkstore.tasks.finding import StoresTasks, UnknownTask, backends, find_task
from django_alkstore.tasks.options import effective, time_limit_of
from django_alkstore.tasks.results import result_of_handle

LOOK_AGAIN = 30.0
"""Seconds until a job whose task is unknown is looked at again. Perhaps a deploy is half done."""


def task_queues(using: str) -> list[str]:
    """The queues of tasks that this project has on a database: those that `TASKS` lists.

    If a backend has `"QUEUES": []`, each queue with a live job of a task is one.
    """
    queues: set[str] = set()
    for backend in task_backends(using):
        queues |= backend.queues
        if not backend.queues:
            queues |= {queue for queue, _ in read(using, lambda db: db.live_tasks())}
    return sorted(queues)


def takes_every_queue(using: str) -> bool:
    """True if a backend has `"QUEUES": []`, so that new queues may come."""
    return any(not backend.queues for backend in task_backends(using))


def task_backends(using: str) -> list[StoresTasks]:
    """The backends of `TASKS` that store their tasks on a database."""
    return [backend for backend in backends() if (backend.database or resolve_alias(None)) == using]


def task_registrations(using: str) -> list[Registration]:
    """A registration for each queue of tasks."""
    return [registration_of(queue) for queue in task_queues(using)]


def unknown(using: str) -> dict[str, str]:
    """The tasks of live jobs that this process may not run or cannot import, each with the reason."""
    reasons: dict[str, str] = {}
    for _, path in read(using, lambda db: db.live_tasks()):
        try:
            find_task(path)
        except UnknownTask as error:
            reasons[path] = str(error)
    return reasons


def registration_of(queue: str) -> Registration:
    """The registration of a queue of tasks. Each job has one of its own."""
    return Registration(queue, _refuse, DEFAULT_TIME_LIMIT, atomic=False, module=__name__, resolve=resolve)


def _refuse(job: JobHandle) -> None:
    raise TypeError("a queue of tasks has no handler: each of its jobs names a task")


def resolve(job: JobHandle) -> Registration:
    """The registration of one job: of its task, or of a function that gives the job back if the task is unknown."""
    try:
        task = find_task(job._task)
        runner = TaskRunner(task, job.payload)
    except (UnknownTask, ValueError) as error:
        return Registration(job.queue, GiveBack(str(error)), DEFAULT_TIME_LIMIT, atomic=False, module=__name__)
    options = task.get_backend().task_options
    return Registration(
        job.queue,
        runner,
        time_limit_of(task, options),
        atomic=bool(effective(task, options, "atomic")),
        module=task.func.__module__,
        after_failure=runner.after_failure,
    )


class GiveBack:
    """Gives a job back whose task is unknown. No attempt is spent."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __call__(self, job: JobHandle) -> Outcome:
        signals.emit(signals.task_unknown, job=job, task=job._task, reason=self.reason, delay=LOOK_AGAIN)
        return give_back_after(LOOK_AGAIN)


class TaskRunner:
    """Calls the function of a task for one job."""

    def __init__(self, task: Any, payload: Any) -> None:
        self.task = task
        self.api: Api = api_of_task(task) or primary()
        self.is_async = iscoroutinefunction(task.func)
        if self.is_async:
            markcoroutinefunction(self)

    def __call__(self, job: JobHandle) -> Any:
        if self.is_async:
            return self._acall(job)
        args, kwargs = self._begin(job)
        return self._outcome(job, self.task.func(*args, **kwargs))

    async def _acall(self, job: JobHandle) -> Outcome:
        args, kwargs = self._begin(job)
        return self._outcome(job, await self.task.func(*args, **kwargs))

    def _begin(self, job: JobHandle) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the call; `task_started` is sent."""
        result = job._task_result = result_of_handle(self.api, self.task, job)
        self.api.task_started.send_robust(AlkstoreBackend, task_result=result)
        args = list(result.args)
        if self.task.takes_context:
            args.insert(0, context_of(self.api)(task_result=result, job=job))
        return args, result.kwargs

    def _outcome(self, job: JobHandle, value: Any) -> Outcome:
        """The outcome of a call that has returned `value`. `InvalidReturnValue` if JSON cannot hold it."""
        if value is None:
            return ACK
        settings = conf.settings()
        try:
            normal = self.api.normalize_json(value)
            text = encode_payload(normal, max_bytes=settings.max_payload_bytes, encoder=None)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidReturnValue(
                f"{self.task.module_path} returned a {type(value).__name__}, which JSON cannot hold: {error}"
            ) from error
        object.__setattr__(job._task_result, "_return_value", normal)
        return ACK._replace(result=text)

    def after_failure(self, job: JobHandle, error: BaseException, outcome: Outcome) -> Outcome:
        """The outcome after the task's own function for the backoff was asked."""
        backoff = effective(self.task, self.task.get_backend().task_options, "backoff")
        is_curve = outcome.kind is Kind.RETRY and outcome.delay is None and not outcome.asked_for
        if not callable(backoff) or not is_curve or job._task_result is None:
            return outcome
        try:
            wait = backoff(error, failed_result(self.api, job, outcome))
            if wait is None:
                return outcome._replace(kind=Kind.FAIL)
            return outcome._replace(delay=give_back_after(wait).delay)
        except Exception:  # noqa: BLE001  the attempt has failed already, and waits by the curve
            signals.logger.exception("the backoff function of %s failed, so the wait is that of the curve", job._task)
            return outcome


def failed_result(api: Api, job: JobHandle, outcome: Outcome) -> Any:
    """The result object of the attempt, with its error."""
    result = job._task_result
    error = api.error(exception_class_path=outcome.exception, traceback=outcome.traceback or outcome.error)
    if not result.errors or result.errors[-1] != error:
        result.errors.append(error)
    return result
