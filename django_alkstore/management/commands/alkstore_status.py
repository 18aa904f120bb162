"""Show what is in the queues, the schedules and the locks."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser
from django.db import connections

from django_alkstore import clock
from django_alkstore.management.base import AlkstoreCommand, age, since
from django_alkstore.models import Lock, Schedule
from django_alkstore.names import LEADERSHIP_LOCK, describe_queue
from django_alkstore.services import QueueStats, queue_stats


class Command(AlkstoreCommand):
    help = "Shows the queues, schedules and locks, and who leads the scheduler."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--json", action="store_true", help="One JSON object instead of tables.")

    def work(self, alias: str, options: dict[str, Any]) -> str | None:
        database = str(connections[alias].settings_dict["NAME"])
        queues = queue_stats(using=alias)
        schedules = list(Schedule.objects.using(alias).defer("payload").order_by("name"))
        locks = list(Lock.objects.using(alias).order_by("name"))
        if options["json"]:
            self.stdout.write(json.dumps(_as_object(database, queues, schedules, locks), indent=2))
        else:
            self._show(database, queues, schedules, locks)
        return None

    def _show(self, database: str, queues: list[QueueStats], schedules: list[Schedule], locks: list[Lock]) -> None:
        leader = _leader(locks)
        self.stdout.write(f"Database  {database}")
        self.stdout.write(f"Scheduler {f'led by {leader.owner}' if leader else 'no leader'}")
        header = ["", "due", "pending", "processing", "completed", "dead", "cancelled", "oldest due"]
        rows = [
            [
                describe_queue(q.queue),
                *map(str, (q.due, q.pending, q.processing, q.completed, q.dead, q.cancelled)),
                age(q.oldest_due_age),
            ]
            for q in queues
        ]
        self._table("Queues", header, rows)
        header = ["", "spec", "into", "state", "next", "last"]
        self._table("Schedules", header, [_schedule_row(s) for s in schedules])
        now = clock.now()
        rows = [
            [lock.name, lock.owner, str(lock.token), since(lock.expires_at) if lock.expires_at > now else "lapsed"]
            for lock in locks
        ]
        self._table("Locks", ["", "owner", "token", "ends"], rows)

    def _table(self, title: str, header: list[str], rows: Sequence[Sequence[str]]) -> None:
        if not rows:
            self.stdout.write(f"\n{title}: none")
            return
        header = [title, *header[1:]]
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        self.stdout.write("")
        for row in (header, *rows):
            cells = [
                cell.rjust(width) if column and cell.isdigit() else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            self.stdout.write("  ".join(cells).rstrip())


def _schedule_row(schedule: Schedule) -> list[str]:
    state = "on" if schedule.enabled else "paused"
    if schedule.last_error:
        state += f": {_one_line(schedule.last_error)}"
    following = since(schedule.next_fire_at) if schedule.enabled else "-"
    return [schedule.name, schedule.spec.strip(), schedule.queue, state, following, since(schedule.last_fire_at)]


def _one_line(text: str) -> str:
    """The first line, cut, without what would move the cursor."""
    first = text.strip().split("\n", 1)[0][:60]
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in first)


def _leader(locks: list[Lock]) -> Lock | None:
    now = clock.now()
    return next((lock for lock in locks if lock.name == LEADERSHIP_LOCK and lock.expires_at > now), None)


def _as_object(database: str, queues: list[QueueStats], schedules: list[Schedule], locks: list[Lock]) -> dict[str, Any]:
    leader = _leader(locks)
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
    }


def _lock_object(lock: Lock) -> dict[str, Any]:
    return {
        "name": lock.name,
        "owner": lock.owner,
        "token": lock.token,
        "acquired_at": lock.acquired_at.isoformat(),
        "expires_at": lock.expires_at.isoformat(),
    }
