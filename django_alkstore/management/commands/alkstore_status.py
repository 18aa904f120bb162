"""Show what is in the queues, the schedules and the locks."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from django.core.management.base import CommandParser
from django.db import connections

from django_alkstore import clock, signals
from django_alkstore.ages import age, distance
from django_alkstore.handled import handled as handled_on
from django_alkstore.handled import unknown_tasks
from django_alkstore.management.base import ReportCommand
from django_alkstore.models import Lock, Schedule
from django_alkstore.names import describe_queue
from django_alkstore.services import QueueStats, presence, queue_stats
from django_alkstore.services.presence import Presence, Worker, WorkerState


class Command(ReportCommand):
    help = "Shows the queues, workers, schedules and locks, and who leads the scheduler."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--json", action="store_true", help="One JSON object instead of tables.")

    def work(self, alias: str, options: dict[str, Any]) -> str | None:
        database = str(connections[alias].settings_dict["NAME"])
        queues = queue_stats(using=alias)
        schedules = list(Schedule.objects.using(alias).defer("payload").order_by("name"))
        locks = list(presence.locks(alias).order_by("name"))
        present = presence.look(alias)
        if options["json"]:
            self.stdout.write(json.dumps(_as_object(database, queues, schedules, locks, present), indent=2))
        else:
            self._show(alias, database, queues, schedules, locks, present)
        if present.crash_detection is not None:
            text = _one_line(present.crash_detection)
            out = self.stderr if options["json"] else self.stdout
            out.write(f"\n{text[:1].upper()}{text[1:]}.")
        return None

    def _show(
        self,
        alias: str,
        database: str,
        queues: list[QueueStats],
        schedules: list[Schedule],
        locks: list[Lock],
        present: Presence,
    ) -> None:
        now = clock.now()
        self.stdout.write(f"Database   {database}")
        self.stdout.write(f"Scheduler  {_scheduler(present.leader, now)}")
        self._table("Queues", _QUEUE_COLUMNS, [_queue_row(queue) for queue in queues])
        handled = {registration.queue for registration in handled_on(alias)}
        due = {queue.queue: queue.due for queue in queues if queue.due}
        unhandled = {queue: count for queue, count in due.items() if queue not in handled}
        if unhandled:
            self.stdout.write(f"\n{signals.unhandled(unhandled)}.")
        known = _known(present)
        unknown = {queue: count for queue, count in due.items() if queue in handled and queue not in known}
        if unknown and any(worker.state is WorkerState.ALIVE for worker in present.workers):
            self.stdout.write(f"\n{signals.unknown_to_workers(unknown)}.")
        for task, reason in unknown_tasks(alias).items():
            self.stdout.write(
                f"\nThere are jobs of the task {task}, which no worker of this project can run: {reason}."
            )
        self._table(
            "Workers", _WORKER_COLUMNS, [row for worker in present.workers for row in _worker_rows(worker, now)]
        )
        self._table("Schedules", _SCHEDULE_COLUMNS, [_schedule_row(schedule, now) for schedule in schedules])
        for schedule in schedules:
            if schedule.last_error:
                error = _one_line(schedule.last_error, _LONGEST_ERROR)
                self.stdout.write(f"\n{_one_line(schedule.name)} was paused for an error: {error}")
                self.stdout.write(
                    "Declare it again with schedule(), then resume it with resume_schedule() or in the admin."
                )
        self._table("Locks", _LOCK_COLUMNS, [_lock_row(lock, now) for lock in locks])

    def _table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.stdout.write("")
        if not rows:
            self.stdout.write(f"{title}: none")
            return
        # A long name has a line of its own, so that it moves no other row's columns.
        lines = [line for name, *cells in [(title, *columns), *rows] for line in _lines(name, cells)]
        widths = [max(map(len, column)) for column in zip(*(line for line in lines if len(line) > 1), strict=True)]
        numbers = [all(row[place].isdigit() for row in rows) for place in range(len(widths))]
        for line in lines:
            cells = [
                cell.rjust(width) if number else cell.ljust(width)
                for cell, width, number in zip(line, widths, numbers, strict=False)
            ]
            self.stdout.write("  ".join(cells).rstrip())


_QUEUE_COLUMNS = ("due", "not due yet", "processing", "completed", "dead", "cancelled", "oldest due")
_SCHEDULE_COLUMNS = ("spec", "fires into", "state", "next fire", "last fire")
_WORKER_COLUMNS = ("started", "state", "sign of life", "works on")
_LOCK_COLUMNS = ("owner", "token", "lease ends")
_LONGEST_NAME = 40
"""Characters of a name in its column."""
_LONGEST_CELL = 60
_LONGEST_ERROR = 200
_WIDEST_LIST = 60
"""Characters of a worker's queues in one line; the others follow in lines below."""


def _lines(name: str, cells: list[str]) -> Iterator[list[str]]:
    if len(name) > _LONGEST_NAME:
        yield [name]
        name = ""
    yield [name, *cells]


def _queue_row(queue: QueueStats) -> list[str]:
    numbers = (
        queue.due,
        queue.pending - queue.due,
        queue.processing,
        queue.completed,
        queue.dead,
        queue.cancelled,
    )
    waited = "-" if queue.oldest_due_age is None else age(queue.oldest_due_age)
    return [describe_queue(_one_line(queue.queue)), *map(str, numbers), waited]


def _schedule_row(schedule: Schedule, now: datetime) -> list[str]:
    following = last = "-"
    if schedule.undeclared_at is not None:
        state = "no longer declared"
    elif schedule.enabled and schedule.next_fire_at is None:
        state = "over"
    elif schedule.enabled and schedule.next_fire_at is not None:
        state, following = "on", distance(schedule.next_fire_at, now)
        if schedule.next_fire_at <= now:
            following = f"due {following}"
    else:
        state = "broken" if schedule.last_error else "paused"
    if schedule.last_fire_at is not None:
        last = distance(schedule.last_fire_at, now)
    spec, queue = (_one_line(text, _LONGEST_CELL) for text in (schedule.spec, schedule.queue))
    return [_one_line(schedule.name), spec, queue, state, following, last]


def _known(present: Presence) -> set[str]:
    """The queues that somebody works on, or did when he was suspended."""
    suspended = [worker for worker in present.workers if worker.state is WorkerState.SUSPENDED]
    return present.served.union(*(worker.queues for worker in suspended))


def _worker_rows(worker: Worker, now: datetime) -> Iterator[list[str]]:
    """One row, and more below it if the worker has more queues than fit a line."""
    cells = [
        _one_line(worker.id),
        distance(worker.started_at, now),
        worker.state.value,
        distance(worker.last_sign_at, now),
    ]
    for line in _wrapped([_one_line(describe_queue(queue)) for queue in worker.queues]):
        yield [*cells, line]
        cells = [""] * len(cells)


def _wrapped(texts: list[str]) -> Iterator[str]:
    """The texts with commas between them, in lines that are no longer than `_WIDEST_LIST` if that is possible."""
    line = ""
    for text in texts:
        if line and len(line) + len(text) + 3 > _WIDEST_LIST:
            yield f"{line},"
            line = text
        else:
            line = f"{line}, {text}" if line else text
    yield line


def _lock_row(lock: Lock, now: datetime) -> list[str]:
    ends = distance(lock.expires_at, now)
    return [
        _one_line(lock.name),
        _one_line(lock.owner, _LONGEST_CELL),
        str(lock.token),
        ends if lock.expires_at > now else f"lapsed {ends}",
    ]


def _scheduler(leader: Lock | None, now: datetime) -> str:
    if leader is None:
        return "nobody leads: neither run_alkstore nor run_schedules is running"
    return f"led by {_one_line(leader.owner)}, whose lease ends {distance(leader.expires_at, now)}"


def _one_line(text: str, longest: int | None = None) -> str:
    """The first line, cut, without what would move the cursor."""
    line = (text.strip().splitlines() or [""])[0]
    if longest is not None and len(line) > longest:
        line = f"{line[:longest]}…"
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)


def _as_object(
    database: str, queues: list[QueueStats], schedules: list[Schedule], locks: list[Lock], present: Presence
) -> dict[str, Any]:
    leader = present.leader
    return {
        "database": database,
        "queues": [asdict(queue) for queue in queues],
        "schedules": [
            {
                "name": schedule.name,
                "spec": schedule.spec,
                "queue": schedule.queue,
                "enabled": schedule.enabled,
                "next_fire_at": schedule.next_fire_at.isoformat(),
                "last_fire_at": schedule.last_fire_at and schedule.last_fire_at.isoformat(),
                "last_error": schedule.last_error,
            }
            for schedule in schedules
        ],
        "locks": [_lock_object(lock) for lock in locks],
        "leader": leader and _lock_object(leader),
        "workers": [
            {"id": worker.id, "queues": worker.queues, "state": worker.state.value} for worker in present.workers
        ],
    }


def _lock_object(lock: Lock) -> dict[str, Any]:
    return {
        "name": lock.name,
        "owner": lock.owner,
        "token": lock.token,
        "acquired_at": lock.acquired_at.isoformat(),
        "expires_at": lock.expires_at.isoformat(),
    }
