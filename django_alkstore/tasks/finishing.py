"""Django's signal `task_finished`, sent once a task's job is completed, dead or cancelled."""

from collections.abc import Callable
from typing import Any

from django.dispatch import Signal

from django_alkstore import clock, signals
from django_alkstore.services import JobHandle
from django_alkstore.services.outcomes import Kind, Outcome
from django_alkstore.tasks.apis import api_of_backend, api_of_task
from django_alkstore.tasks.backend import AlkstoreBackend
from django_alkstore.tasks.finding import backends
from django_alkstore.tasks.results import find_result
from django_alkstore.tasks.running import failed_result


def listen() -> None:
    """Connect the receivers, once in a process."""
    for signal, receiver in _RECEIVERS.items():
        signal.connect(receiver, dispatch_uid="django_alkstore.tasks")


def _completed(job: JobHandle, **_: Any) -> None:
    if job._task_result is not None:
        _send(job._task_result, "SUCCESSFUL")


def _died(job: JobHandle, error: str, traceback: str, exception: BaseException | None, **_: Any) -> None:
    result = job._task_result
    if result is None:
        return
    api = api_of_task(result.task)
    assert api is not None
    kind = type(exception)
    path = "" if exception is None else f"{kind.__module__}.{kind.__qualname__}"
    failed_result(api, job, Outcome(Kind.FAIL, error, traceback, path))
    _send(result, "FAILED")


def _send(result: Any, status: str) -> None:
    api = api_of_task(result.task)
    assert api is not None
    object.__setattr__(result, "status", api.status(status))
    object.__setattr__(result, "finished_at", clock.now())
    api.task_finished.send_robust(AlkstoreBackend, task_result=result)


def _dead(job_id: int, dead: bool = True, using: str | None = None, **_: Any) -> None:
    """A job was made dead or cancelled that no handler of this process runs."""
    if not dead:
        return
    for backend in backends():
        if using is not None and using != backend.database and backend.database is not None:
            continue
        api = api_of_backend(backend)
        try:
            result = find_result(api, str(job_id), using or backend.database)
        except api.result_does_not_exist:
            continue
        owner = api_of_task(result.task) or api
        owner.task_finished.send_robust(AlkstoreBackend, task_result=result)
        return


_RECEIVERS: dict[Signal, Callable[..., None]] = {
    signals.job_completed: _completed,
    signals.job_died: _died,
    signals.job_lapsed: _dead,
    signals.job_abandoned: _dead,
    signals.job_expired: _dead,
    signals.job_unreadable: _dead,
    signals.job_cancelled: _dead,
}
