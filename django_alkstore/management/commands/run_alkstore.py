"""Run the scheduler and every registered queue and outbox in one process."""

from typing import Any

from django_alkstore.management.base import WorkerCommand
from django_alkstore.runtime.commands import run_everything


class Command(WorkerCommand):
    help = "Fires the schedules and runs every registered queue and outbox, in one process, until it is stopped."

    def run(self, alias: str, options: dict[str, Any]) -> int:
        return run_everything(alias, self.stop_signals, **self.worker_options(options))
