"""Run the deliveries of outboxes."""

from typing import Any

from django.core.management.base import CommandParser

from django_alkstore.management.base import WorkerCommand
from django_alkstore.runtime.commands import chosen, run_worker


class Command(WorkerCommand):
    help = "Runs the deliveries of the named outboxes (default: all that are registered) until it is stopped."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("names", nargs="*", metavar="NAME", help="Outboxes.")

    def run(self, alias: str, options: dict[str, Any]) -> int:
        outboxes = chosen(alias, options["names"], outboxes=True)
        return run_worker(alias, outboxes, self.stop_signals, every_task=False, **self.worker_options(options))
