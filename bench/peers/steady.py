"""steady-queue: one worker process with four threads, beside its dispatcher and scheduler."""

from bench.peers.django_program import DjangoProgram
from bench.program import main


class Steady(DjangoProgram):
    peer = "steady_queue"
    command = ("steady_queue",)
    _process_id: int | None = None

    def enqueue(self, payload: object, *, priority: int = 0) -> object:
        """It runs them in order, and its backend takes no priority by the task."""
        from bench.peers.jobs import noop

        return noop.enqueue(payload)

    def claim_and_ack(self) -> bool:
        """As its worker does, without running the task."""
        from steady_queue.models import ReadyExecution

        claimed = ReadyExecution.objects.claim(["default"], 1, self._process())
        for execution in claimed:
            execution.finished()
            execution.unblock_next_job()
        return bool(claimed)

    def _process(self) -> int:
        from django.utils import timezone
        from steady_queue.models import Process

        if self._process_id is None:
            process = Process.objects.create(
                kind="worker", name="bench", pid=1, metadata={}, last_heartbeat_at=timezone.now()
            )
            self._process_id = int(process.pk)
        return self._process_id

    def left(self) -> int:
        from steady_queue.models import Job

        return int(Job.objects.filter(finished_at=None).count())


if __name__ == "__main__":
    main(Steady)
