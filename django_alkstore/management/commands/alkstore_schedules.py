"""List the schedules with their next boundaries, compare them with the code, and operate them."""

import json
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from django.core.management.base import CommandError, CommandParser
from django.utils import timezone

from django_alkstore import services
from django_alkstore.exceptions import InvalidSpec
from django_alkstore.management.base import EXIT_USAGE, ReportCommand
from django_alkstore.models import Job, Schedule
from django_alkstore.registrations import broken_modules
from django_alkstore.services.declared import differences
from django_alkstore.services.schedules import boundaries_of

SHOWN = 5
EXIT_DIFFERENT = 1
_ACTIONS = {
    "pause": (services.pause_schedule, "paused", "is paused already"),
    "resume": (services.resume_schedule, "resumed", "is not paused"),
    "fire": (services.fire_schedule, "fired", ""),
    "delete": (services.unschedule, "deleted", ""),
}


class Command(ReportCommand):
    help = "Shows the schedules with their next boundaries, operates one of them, or compares them with the code."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("action", nargs="?", choices=["list", *_ACTIONS], default="list", help="Default: list.")
        parser.add_argument("name", nargs="?", help="The schedule.")
        parser.add_argument(
            "--check",
            action="store_true",
            help="Show what differs from the code, and end with status 1 if anything does.",
        )
        parser.add_argument("--json", action="store_true", help="The list as JSON.")

    def work(self, alias: str, options: dict[str, Any]) -> str | None:
        if options["check"]:
            self._check(alias)
        elif options["action"] == "list":
            self._list(alias, as_json=options["json"])
        else:
            self._act(alias, options["action"], options["name"])
        return None

    def _act(self, alias: str, action: str, name: str | None) -> None:
        if name is None:
            raise CommandError(f"{action} needs the name of a schedule", returncode=EXIT_USAGE)
        act, done, refused = _ACTIONS[action]
        if not Schedule.objects.using(alias).filter(name=name).exists():
            raise CommandError(f"there is no schedule {name!r}", returncode=EXIT_USAGE)
        changed = act(name, using=alias)
        if not changed:
            raise CommandError(f"the schedule {name!r} {refused or 'is gone'}")
        job = f": job {changed.pk}" if isinstance(changed, Job) else ""
        self.stdout.write(f"{done} schedule {name}{job}")

    def _check(self, alias: str) -> None:
        broken = [module.module for module in broken_modules()]
        if broken:
            raise CommandError(
                f"cannot compare: {', '.join(broken)} cannot be imported; see the log", returncode=EXIT_DIFFERENT
            )
        found = list(differences(alias))
        for difference in found:
            self.stdout.write(f"{difference.change.value:<9} {difference.name}")
        if found:
            raise CommandError(
                f"{len(found)} differ from the code. The scheduler brings them in line when it begins to lead",
                returncode=EXIT_DIFFERENT,
            )
        self.stdout.write("The schedules are those of the code.")

    def _list(self, alias: str, *, as_json: bool) -> None:
        rows = [_described(row, alias) for row in Schedule.objects.using(alias).defer("payload").order_by("name")]
        if as_json:
            self.stdout.write(json.dumps(rows, indent=2))
            return
        if not rows:
            self.stdout.write("There are no schedules.")
        for row in rows:
            self.stdout.write(f"{row['name']}: {row['spec']} into {row['target']}, {row['state']}")
            for title in ("next", "last fire", "last result", "error"):
                if row[title]:
                    self.stdout.write(f"  {title:<12} {', '.join(row[title]) if title == 'next' else row[title]}")
            counts = ", ".join(f"{number} {what}" for what, number in row["counts"].items() if number)
            self.stdout.write(f"  {'counted':<12} {counts or 'nothing yet'}")


def _described(row: Schedule, alias: str) -> dict[str, Any]:
    zone = ZoneInfo(row.timezone) if row.timezone else timezone.get_default_timezone()
    last = Job.objects.using(alias).filter(schedule=row.name).order_by("-pk").defer("payload", "errors").first()
    return {
        "name": row.name,
        "spec": row.spec,
        "timezone": row.timezone,
        "target": row.task or row.queue,
        "state": _state(row),
        "next": [_shown(moment, zone) for moment in _next(row)],
        "last fire": None if row.last_fire_at is None else _shown(row.last_fire_at, zone),
        "last result": None if last is None else f"job {last.pk} is {last.state}",
        "error": row.last_error,
        "counts": {
            "fired": row.fired,
            "coalesced": row.coalesced,
            "too late": row.too_late,
            "overlapped": row.overlapped,
        },
    }


def _next(row: Schedule) -> list[datetime]:
    try:
        return boundaries_of(row, SHOWN)
    except InvalidSpec:
        return []


def _state(row: Schedule) -> str:
    if row.undeclared_at is not None:
        return "no longer declared"
    if not row.enabled:
        return "broken" if row.last_error else "paused"
    return "on" if row.next_fire_at is not None else "over"


def _shown(moment: datetime, zone: Any) -> str:
    return moment.astimezone(zone).strftime("%a %Y-%m-%d %H:%M:%S %Z")
