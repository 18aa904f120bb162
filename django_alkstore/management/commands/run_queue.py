"""Run the handlers of queues."""

from typing import Any

from django.core.management.base import CommandParser

from django_alkstore.management.base import WorkerCommand
from django_alkstore.runtime.commands import chosen, run_worker


class Command(WorkerCommand):
    help = "Runs the handlers of the named queues (default: all that are registered) until it is stopped."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("names", nargs="*", metavar="NAME", help="Queues.")

    def run(self, alias: str, options: dict[str, Any]) -> int:
        queues = chosen(alias, options["names"], outboxes=False)
        return run_worker(
            alias, queues, self.stop_signals, every_task=not options["names"], **self.worker_options(options)
        )
