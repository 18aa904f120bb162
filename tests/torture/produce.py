"""The processes that write: `python -m tests.torture.produce ROLE NAME`, ROLE one of `orders` and `notes`.

Each says in its journal what it has committed, and what it has rolled back, once it knows.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import django

django.setup()

from django.db import OperationalError, transaction  # noqa: E402  models can be imported only now
from django.db.models import F  # noqa: E402

from django_alkstore.exceptions import DuplicateJob  # noqa: E402
from django_alkstore.models import Job  # noqa: E402
from django_alkstore.services import (  # noqa: E402
    enqueue,
    enqueue_many,
    enqueue_tx,
    get_or_enqueue,
    outbox,
    outbox_enqueue_tx,
    schedule,
)
from tests.torture import journal  # noqa: E402
from tests.torture.models import Counter, Note, Order  # noqa: E402
from tests.torture.settings import LEASE, SCHEDULES  # noqa: E402

BACKLOG = 300
"""Live jobs from which on producers wait for the workers."""
PLAIN = ("plain", "plain", "async", "atomic", "atomic", "own", "own", "moody", "self-ack", "self-ack", "limited")
FOR_OUTBOX = {"visibility_timeout": LEASE, "backoff_base": 0.1, "max_attempts": 40}
KEYED = ("plain", "atomic", "own")


class RollBack(Exception):
    """The business says no."""


class Producer:
    """Writes orders and their jobs, in each way that there is."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.name = name
        self.chance = chance
        self.count = 0
        self.written: list[str] = []
        """References of the open transaction's orders."""
        self.taken_back: list[str] = []
        """Those of its rolled back savepoints."""

    def once(self) -> None:
        if Job.objects.live().count() > BACKLOG:
            time.sleep(0.1)
            return
        way: Callable[[], None] = self.chance.choices(
            (self.one, self.delayed, self.several, self.keyed, self.with_savepoints, self.to_outbox),
            (30, 10, 10, 15, 15, 20),
        )[0]
        self.written, self.taken_back = [], []
        try:
            with transaction.atomic():
                way()
                if self.chance.random() < 0.2:
                    raise RollBack
        except (RollBack, OperationalError):
            journal.note("rolled back", orders=self.written + self.taken_back)
        else:
            journal.note("committed", orders=self.written)
            journal.note("rolled back", orders=self.taken_back)
        time.sleep(self.chance.uniform(0, 0.03))

    def order(self, queue: str, **data: Any) -> Order:
        self.count += 1
        reference = f"{self.name}-{self.count}"
        self.written.append(reference)
        order = Order.objects.create(reference=reference, queue=queue, **data)
        # Time to be killed in, between the business row and its job.
        time.sleep(self.chance.choices((0, 0.005, 0.05), (80, 15, 5))[0])
        return order

    def link(self, order: Order, job_id: int) -> None:
        order.job_id = job_id
        order.save(update_fields=["job_id"])

    def queue(self) -> str:
        return self.chance.choice(PLAIN) if self.chance.random() < 0.98 else "doomed"

    def one(self) -> None:
        order = self.order(self.queue())
        add = self.chance.choice((enqueue, enqueue_tx))
        options: dict[str, Any] = {"priority": self.chance.choice((0, 0, 5))}
        if self.chance.random() < 0.2:
            options["max_attempts"] = 1  # a lapse is its end
        self.link(order, add(order.queue, {"order": order.reference}, **options).id)

    def delayed(self) -> None:
        order = self.order(self.queue())
        self.link(order, enqueue(order.queue, {"order": order.reference}, delay=self.chance.uniform(0.1, 4)).id)

    def several(self) -> None:
        queue = self.queue()
        orders = [self.order(queue) for _ in range(self.chance.randint(2, 6))]
        for order, job_id in zip(orders, enqueue_many(queue, [{"order": o.reference} for o in orders]), strict=True):
            self.link(order, job_id)

    def keyed(self) -> None:
        queue, key = self.chance.choice(KEYED), f"key {self.chance.randint(1, 8)}"
        order = self.order(queue, unique_key=key)
        payload = {"order": order.reference}
        if self.chance.random() < 0.5:
            self.link(order, get_or_enqueue(queue, key, payload)[0].id)
            return
        try:
            self.link(order, enqueue(queue, payload, unique_key=key).id)
        except DuplicateJob as taken:
            self.link(order, taken.job_id)

    def with_savepoints(self) -> None:
        self.one()
        kept = len(self.written)
        with suppress(RollBack), transaction.atomic():
            self.chance.choice((self.one, self.to_outbox, self.keyed))()
            raise RollBack
        self.taken_back += self.written[kept:]
        del self.written[kept:]
        with transaction.atomic():
            self.to_outbox()

    def to_outbox(self) -> None:
        name = self.chance.choice(("mail", "exact"))
        order = self.order(outbox(name).queue)
        payload = {"order": order.reference}
        if self.chance.random() < 0.5:
            self.link(order, outbox_enqueue_tx(name, payload, **FOR_OUTBOX).id)
        else:
            self.link(order, outbox(name).enqueue_tx(payload, **FOR_OUTBOX).id)


class NoteTaker:
    """An app with rows of its own, which also declares its schedules again, as each deploy does."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.name = name
        self.chance = chance
        self.count = 0

    def once(self) -> None:
        self.count += 1
        try:
            with transaction.atomic():
                Note.objects.create(writer=self.name, number=self.count)
                Counter.objects.update(value=F("value") + 1)
                time.sleep(self.chance.choices((0, 0.03), (90, 10))[0])
        except OperationalError:
            journal.note("note refused", number=self.count)
        else:
            journal.note("note written", writer=self.name, number=self.count)
        if self.chance.random() < 0.02:
            name, spec, queue = self.chance.choice(SCHEDULES)
            with suppress(OperationalError):
                schedule(name, spec, queue)
        time.sleep(self.chance.uniform(0, 0.06))


def main(role: str, name: str) -> None:
    stopping: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.append(number)

    signal.signal(signal.SIGTERM, stop)
    chance = random.Random(f"{os.environ['TORTURE_SEED']}:{name}")
    writer = {"orders": Producer, "notes": NoteTaker}[role](name, chance)
    journal.note("up")
    while not stopping:
        try:
            writer.once()
        except OperationalError:
            time.sleep(0.1)  # the count of the backlog, which others may shut out


if __name__ == "__main__":
    main(*sys.argv[1:])
