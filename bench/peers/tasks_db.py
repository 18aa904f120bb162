"""django-tasks-db: one worker process, which runs one task at a time."""

from typing import Any

from bench.peers.django_program import DjangoProgram
from bench.program import main


class TasksDb(DjangoProgram):
    peer = "django_tasks_db"
    command = ("db_worker", "--no-startup-delay")

    def enqueue(self, payload: object, *, priority: int = 0) -> object:
        from bench.peers.jobs import noop

        return (noop.using(priority=priority) if priority else noop).enqueue(payload)

    def claim_and_ack(self) -> bool:
        """As its worker does, without running the task."""
        from django.db import transaction

        with transaction.atomic():
            result = self._results().ready().get_locked()
            if result is not None:
                result.claim("bench")
        if result is not None:
            result.set_successful(None)
        return result is not None

    def left(self) -> int:
        return int(self._results().ready().count() + self._results().running().count())

    def _results(self) -> Any:
        from django_tasks_db.models import DBTaskResult

        return DBTaskResult.objects


if __name__ == "__main__":
    main(TasksDb)
