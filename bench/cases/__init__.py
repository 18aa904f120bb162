"""The cases by name, in the order of the table. Each takes the run and gives its lines."""

from collections.abc import Callable

from bench.cases import claiming, contending, draining, growing, idling, missing, starting, storing, waking, weighing
from bench.results import Line
from bench.runner import Bench

Case = Callable[[Bench], list[Line]]

CASES: dict[str, Case] = {
    "enqueue": storing.single,
    "outbox": storing.outbox,
    "many": storing.many,
    "loop": claiming.loop,
    "batches": claiming.batches,
    "waiting": claiming.waiting,
    "drain": draining.deleted,
    "drain-kept": draining.kept,
    "drain-async": draining.coroutine,
    "drain-atomic": draining.atomic,
    "wake": waking.told,
    "wake-polling": waking.polling,
    "idle": idling.idle,
    "foreign": idling.foreign,
    "claims": growing.claims,
    "tick": growing.tick,
    "missed": missing.missed,
    "contention": contending.contention,
    "memory": weighing.memory,
    "start": starting.start,
    "sizes": growing.sizes,
}
