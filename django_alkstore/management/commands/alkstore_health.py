"""Say whether the work of a database is being done, by exit code and in one line for each finding.

`--json` prints one object:

    {
      "healthy": bool,
      "findings": [{"level": "error" | "warning", "what": str, "text": str, "about": str | null}, ...],
      "database": {
        "alias": str | null, "name": str | null, "journal_mode": str | null, "transaction_mode": str | null,
        "busy_timeout": seconds | null, "wal_bytes": int | null, "free_bytes": int | null, "writable": bool | null
      }
    }

`what` is one of: no_worker, overdue, lapsed (`about` the queue), no_leader, dead, clock (`about` a schedule or null),
crash_detection, wal, full, locked, read_only, missing, corrupt, unreachable, tables, journal_mode, busy_timeout,
transaction_mode, in_memory, not_supported, settings, broken. What could not be learnt is null.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from django_alkstore import names
from django_alkstore.exceptions import InvalidName
from django_alkstore.handled import unknown_tasks
from django_alkstore.management.base import ReportCommand, duration, positive_int
from django_alkstore.services.health import Health, Limits, examine

EXIT_UNHEALTHY = 1
MEBIBYTE = 2**20


class Command(ReportCommand):
    help = "Says whether the work is being done, for people and as a probe: status 0 healthy, 1 unhealthy."
    requires_system_checks = []  # they import the project's modules and warn; this is to be quick, and a line each

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        limits = Limits()
        parser.add_argument("--json", action="store_true", help="One JSON object instead of lines.")
        parser.add_argument(
            "--grace",
            type=duration,
            default=limits.grace,
            metavar="SECONDS",
            help="How long work or a schedule may be due with nobody there for it. Default: %(default)g.",
        )
        parser.add_argument(
            "--max-age",
            type=duration,
            default=limits.max_age,
            metavar="SECONDS",
            help="How long a due job may have waited. Default: %(default)g.",
        )
        parser.add_argument(
            "--max-dead",
            type=_count,
            metavar="N",
            help="More than N jobs that died in the last hour are unhealthy. Default: a warning, however many.",
        )
        parser.add_argument(
            "--max-wal",
            type=positive_int,
            default=limits.max_wal // MEBIBYTE,
            metavar="MIB",
            help="How much of the write-ahead log a reader may hold up. Default: %(default)d.",
        )
        parser.add_argument(
            "--queue",
            type=_name(partial(names.validate_name, "queue")),
            action="append",
            dest="queues",
            metavar="NAME",
            help="Of the queues, look at this one alone; may be repeated. Default: at all of them, and all outboxes.",
        )
        parser.add_argument(
            "--outbox",
            type=_name(names.outbox_queue),
            action="append",
            dest="queues",
            metavar="NAME",
            help="The same for an outbox.",
        )
        parser.add_argument("--thorough", action="store_true", help="Read the whole file and look for damage. Slow.")

    def handle(self, *args: Any, **options: Any) -> str | None:
        try:
            return super().handle(*args, **options)
        except CommandError:
            raise  # a wrong argument
        except ImproperlyConfigured as error:
            health = Health(options["database"])
            health.error("settings", str(error))
        except Exception as error:  # noqa: BLE001  whatever it is, a probe wants a line and a status
            health = Health(options["database"])
            health.error("broken", f"the check itself failed: {type(error).__name__}: {error}")
        self._say(health, options)
        return None

    def see_tables(self, alias: str) -> None:
        """Nothing: that they cannot be seen is a finding."""

    def work(self, alias: str, options: dict[str, Any]) -> str | None:
        limits = Limits(
            grace=options["grace"],
            max_age=options["max_age"],
            max_dead=options["max_dead"],
            max_wal=options["max_wal"] * MEBIBYTE,
        )
        health = examine(alias, limits, queues=options["queues"] or (), thorough=options["thorough"])
        if health.healthy:
            for task, reason in unknown_tasks(alias).items():
                health.warning("unknown_task", f"jobs of the task {task} wait, and no worker can run them: {reason}")
        self._say(health, options)
        return None

    def _say(self, health: Health, options: dict[str, Any]) -> None:
        if options["json"]:
            self.stdout.write(json.dumps(_as_object(health), indent=2))
        else:
            self.stdout.write("healthy" if health.healthy else "unhealthy")
            for finding in health.findings:
                self.stdout.write(f"{finding.level} {finding.what}: {_one_line(finding.text)}")
        if not health.healthy:
            raise SystemExit(EXIT_UNHEALTHY)


def _name(queue_of: Callable[[str], str]) -> Callable[[str], str]:
    """An argument's type: the queue that a name stands for."""

    def convert(text: str) -> str:
        try:
            return queue_of(text)
        except InvalidName as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _count(text: str) -> int:
    return 0 if text == "0" else positive_int(text)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)


def _as_object(health: Health) -> dict[str, Any]:
    database = asdict(health)
    findings = database.pop("findings")
    return {"healthy": health.healthy, "findings": findings, "database": database}
