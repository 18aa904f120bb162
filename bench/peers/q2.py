"""django-q2 on its ORM broker: four processes, 50 tasks at each look, no results stored."""

from collections import deque
from typing import Any

from bench import notes
from bench.peers.django_program import DjangoProgram
from bench.program import main


def noop(payload: object = None) -> None:
    notes.begun(payload)


class Q2(DjangoProgram):
    peer = "django_q"
    command = ("qcluster",)

    def open(self) -> None:
        super().open()
        self._taken: deque[Any] = deque()

    def enqueue(self, payload: object, *, priority: int = 0) -> object:
        from django_q.tasks import async_task

        return async_task("bench.peers.q2.noop", payload)

    def claim_and_ack(self) -> bool:
        """By its broker; it takes as many at once as its worker would, and acks one by one."""
        from django_q.brokers import get_broker

        broker = get_broker()
        if not self._taken:
            self._taken.extend(broker.dequeue() or ())
        if not self._taken:
            return False
        broker.acknowledge(self._taken.popleft()[0])
        return True

    def left(self) -> int:
        from django_q.models import OrmQ

        return int(OrmQ.objects.count())


if __name__ == "__main__":
    main(Q2)
