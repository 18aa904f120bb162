"""Run the scheduler."""

from typing import Any

from django.core.management.base import CommandParser

from django_alkstore.management.base import RunCommand
from django_alkstore.runtime.commands import run_scheduler


class Command(RunCommand):
    help = "Fires the schedules until it is stopped. One scheduler leads; the others stand by and take over."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--no-standby", action="store_true", help="Exit with status 3 instead of waiting while another leads."
        )

    def run(self, alias: str, options: dict[str, Any]) -> int:
        return run_scheduler(alias, self.stop_signals, standby=not options["no_standby"])
