"""The memory of a worker."""

from bench.ours import QUEUE
from bench.results import Line, at_most
from bench.runner import LONGEST, OURS, Bench

WAITING = 1_000_000
EARLY, LATE = 10_000, 200_000
MIB = 2**20


def memory(bench: Bench) -> list[Line]:
    """Once: it hardly differs from run to run, and takes long."""
    waiting, early, late = (bench.count(number) for number in (WAITING, EARLY, LATE))
    queue = {QUEUE: "memory"}
    sample = bench.fresh(OURS)
    sample.play("stock_behind", waiting, environment=queue)
    worker = sample.start_worker({**queue, "BENCH_WEIGH_AFTER": f"1,{early},{late}"})
    sample.wait_until(lambda: any(what.startswith(f"{late}:") for what in sample.moments()), LONGEST, worker)
    worker.stop()
    sizes = {int(number): int(size) / MIB for number, size in (what.split(":") for what in sample.moments())}
    sample.remove()
    grown = sizes[late] - sizes[early]
    note = ", ".join(f"{size:.1f} MB after {number:,}" for number, size in sorted(sizes.items()))
    return [
        Line(
            "memory",
            f"a worker's resident memory, {waiting:,} waiting, after {late:,}",
            " MB",
            [sizes[late]],
            judged=[sizes[late]],
            judged_unit=" MB",
            goal=at_most(70, " MB"),
            note=note,
        ),
        Line(
            "memory-growth",
            f"its growth after the first {early:,}",
            " MB",
            [grown],
            judged=[grown],
            judged_unit=" MB",
            goal=at_most(1, " MB"),
        ),
    ]
