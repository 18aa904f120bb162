"""Assertions about what was enqueued."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from django_alkstore import conf
from django_alkstore.dialects.transactions import resolve_alias
from django_alkstore.exceptions import InvalidOption, shown
from django_alkstore.models import Job
from django_alkstore.names import describe_queue, outbox_queue, validate_name
from django_alkstore.payloads import encode_and_read

_OUTBOX = "outbox:"
_LISTED = 20
_LONGEST_PAYLOAD = 200


class _Any:
    """The default of what is not compared."""

    def __repr__(self) -> str:
        return "<any>"


ANY = _Any()


def assert_enqueued(
    queue_or_task: object,
    *,
    payload: object = ANY,
    args: Iterable[object] | _Any = ANY,
    kwargs: Mapping[str, object] | _Any = ANY,
    count: int | None = None,
    using: str | None = None,
) -> list[Job]:
    """Fail unless a job was enqueued in this queue, or for this task, with this payload. Returns the jobs found.

    `queue_or_task`: a queue's name, `"outbox:NAME"`, what `outbox()` returns, a registered handler, or a task.
    `payload`: the whole payload of the job. `args`, `kwargs`: those of a task. `count`: exactly so many (default: one
    or more). Jobs that have run are counted too, as long as they are kept. The failure lists what was enqueued.
    """
    __tracebackhide__ = True  # pytest shows the test's line
    wanted = _Wanted.of(queue_or_task, payload, args, kwargs)
    jobs = list(Job.objects.using(resolve_alias(using)).order_by("pk"))
    found = [job for job in jobs if wanted.fits(job)]
    if len(found) != count if count is not None else not found:
        expected = "at least one" if count is None else str(count)
        raise AssertionError(f"expected {expected} of {wanted}, found {len(found)}. {_listed(jobs)}")
    return found


def assert_nothing_enqueued(*queues_or_tasks: object, using: str | None = None) -> None:
    """Fail if a job was enqueued: in one of these queues, for one of these tasks, or (default) at all."""
    __tracebackhide__ = True
    wanted = [_Wanted.of(each, ANY, ANY, ANY) for each in queues_or_tasks]
    jobs = list(Job.objects.using(resolve_alias(using)).order_by("pk"))
    found = [job for job in jobs if not wanted or any(each.fits(job) for each in wanted)]
    if found:
        raise AssertionError(f"expected no job{''.join(f', {each}' for each in wanted)}. {_listed(found)}")


@dataclass(frozen=True)
class _Wanted:
    """What a job must be like."""

    queue: str | None
    """None for a task, which may be in any queue."""
    task: str | None
    payload: object
    args: object
    kwargs: object

    @classmethod
    def of(cls, queue_or_task: object, payload: object, args: object, kwargs: object) -> "_Wanted":
        queue, task = resolve_target(queue_or_task)
        if task is None and not (args is ANY and kwargs is ANY):
            raise InvalidOption("args and kwargs are those of a task; for a queue give payload")
        return cls(queue, task, _as_stored(payload), _as_stored(args), _as_stored(kwargs))

    def __str__(self) -> str:
        parts = [f"task {self.task}" if self.queue is None else describe_queue(self.queue)]
        named = {"payload": self.payload, "args": self.args, "kwargs": self.kwargs}
        parts += [f"{name} {value!r}" for name, value in named.items() if value is not ANY]
        return " with ".join([parts[0], " and ".join(parts[1:])]) if parts[1:] else parts[0]

    def fits(self, job: Job) -> bool:
        if job.queue != self.queue if self.task is None else getattr(job, "task", None) != self.task:
            return False
        if self.payload is not ANY and not _same(job.payload, self.payload):
            return False
        parts = job.payload if isinstance(job.payload, dict) else {}
        return all(
            wanted is ANY or _same(parts.get(name), wanted)
            for name, wanted in (("args", self.args), ("kwargs", self.kwargs))
        )


def resolve_target(queue_or_task: object) -> tuple[str | None, str | None]:
    """The queue, or for a task its dotted path."""
    if isinstance(queue_or_task, str):
        if queue_or_task.startswith(_OUTBOX):  # as in ALKSTORE["QUEUES"]
            return outbox_queue(queue_or_task.removeprefix(_OUTBOX)), None
        return validate_name("queue", queue_or_task), None
    path = getattr(queue_or_task, "module_path", None)
    if isinstance(path, str):
        return None, path
    queue = getattr(queue_or_task, "queue", None)
    if isinstance(queue, str):
        return queue, None
    raise InvalidOption(
        f"give the name of a queue, an outbox, a registered handler or a task, not {shown(queue_or_task)}"
    )


def _as_stored(value: object) -> Any:
    """As it reads back from the database: a tuple is a list."""
    if value is ANY:
        return value
    settings = conf.settings()
    return encode_and_read(value, max_bytes=settings.max_payload_bytes, encoder=settings.json_encoder)[1]


def _same(stored: object, wanted: object) -> bool:
    """Equal as JSON: 1 is not true, which Python says it is."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        return stored.keys() == wanted.keys() and all(_same(stored[key], wanted[key]) for key in stored)
    if isinstance(stored, list) and isinstance(wanted, list):
        return len(stored) == len(wanted) and all(map(_same, stored, wanted))
    return isinstance(stored, bool) == isinstance(wanted, bool) and stored == wanted


def _listed(jobs: list[Job]) -> str:
    if not jobs:
        return "Nothing was enqueued."
    lines = [f"  {_line(job)}" for job in jobs[:_LISTED]]
    if len(jobs) > _LISTED:
        lines.append(f"  and {len(jobs) - _LISTED} more")
    return "\n".join(["Enqueued:", *lines])


def _line(job: Job) -> str:
    payload = repr(job.payload)
    if len(payload) > _LONGEST_PAYLOAD:
        payload = payload[:_LONGEST_PAYLOAD] + "…"
    task = getattr(job, "task", None)
    named = f", task {task}" if task else ""
    return f"job {job.pk} in {describe_queue(job.queue)}{named}, {job.state}: {payload}"
