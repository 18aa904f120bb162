"""Django's result objects, made of jobs."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django_alkstore.clock import from_us
from django_alkstore.dialects.transactions import resolve_alias
from django_alkstore.exceptions import AlkstoreError
from django_alkstore.models import Job, State
from django_alkstore.payloads import UnreadablePayload
from django_alkstore.services import JobHandle
from django_alkstore.tasks.apis import Api
from django_alkstore.tasks.finding import UnknownTask, find_task

_STATUSES = {
    State.PENDING.value: "READY",
    State.PROCESSING.value: "RUNNING",
    State.COMPLETED.value: "SUCCESSFUL",
    State.DEAD.value: "FAILED",
    State.CANCELLED.value: "FAILED",
}
_ID = re.compile(r"[1-9][0-9]{0,18}", re.ASCII)
_GREATEST_ID = 2**63 - 1
_UNNAMED = f"{AlkstoreError.__module__}.{AlkstoreError.__qualname__}"
"""The class of an error that a program gave as a text."""


class Call(NamedTuple):
    """The arguments of a task, as a job's payload has them."""

    args: list[Any]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, payload: Any) -> "Call":
        """`ValueError` if the payload is not that of a task."""
        if not isinstance(payload, Mapping) or payload.keys() != {"args", "kwargs"}:
            raise ValueError("the payload of a task is a dict of args and kwargs")
        return cls(list(payload["args"]), dict(payload["kwargs"]))


def find_job(result_id: Any, using: str | None) -> Job | None:
    """The job of a task with this id; None if there is none, or if the id is malformed."""
    if not isinstance(result_id, str) or not _ID.fullmatch(result_id) or int(result_id) > _GREATEST_ID:
        return None
    job = Job.objects.using(resolve_alias(using)).filter(pk=int(result_id)).first()
    return job if job is not None and job.task else None


def result_of_job(api: Api, task: Any, job: Job) -> Any:
    """The result object of a job."""
    call = Call([], {}) if isinstance(job.payload, UnreadablePayload) else Call.of(job.payload)
    result = api.result(
        task=_task_of_job(api, task, job.queue, job.priority),
        id=str(job.pk),
        status=api.status(_STATUSES[job.state]),
        enqueued_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        last_attempted_at=job.last_attempted_at,
        args=call.args,
        kwargs=call.kwargs,
        backend=task.backend,
        errors=errors_of(api, job.errors),
        worker_ids=list(job.worker_ids),
    )
    object.__setattr__(result, "_return_value", job.result)
    return result


def result_of_handle(api: Api, task: Any, job: JobHandle) -> Any:
    """The result object of the attempt that is running."""
    row = job._row
    call = Call.of(job.payload)
    return api.result(
        task=_task_of_job(api, task, job.queue, job.priority),
        id=str(job.id),
        status=api.status("RUNNING"),
        enqueued_at=job.enqueued_at,
        started_at=_moment(row.started_at),
        finished_at=None,
        last_attempted_at=_moment(row.last_attempted_at),
        args=call.args,
        kwargs=call.kwargs,
        backend=task.backend,
        errors=errors_of(api, job._errors()),
        worker_ids=job._worker_ids(),
    )


def _moment(us: int) -> datetime:
    return from_us(us)


def errors_of(api: Api, entries: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The failed attempts."""
    return [
        api.error(
            exception_class_path=entry.get("exception") or _UNNAMED,
            traceback=entry.get("traceback") or entry.get("error", ""),
        )
        for entry in entries
    ]


def _task_of_job(api: Api, task: Any, queue: str, priority: int) -> Any:
    """The task as it was enqueued, as far as the job tells. `run_after` is not known any more."""
    if (task.queue_name, task.priority) == (queue, priority):
        return task
    try:
        return task.using(queue_name=queue, priority=priority)
    except api.invalid_task:  # the settings have changed since, or the priority comes from them
        return task


def find_result(api: Api, result_id: Any, using: str | None) -> Any:
    """The result with this id. Raises the API's `TaskResultDoesNotExist`."""
    job = find_job(result_id, using)
    if job is None:
        raise api.result_does_not_exist(result_id)
    try:
        return result_of_job(api, find_task(job.task), job)
    except (UnknownTask, ValueError) as error:
        raise api.result_does_not_exist(result_id) from error
