"""Whether anything changes as tables grow."""

from dataclasses import replace

from bench.cases.draining import drain
from bench.floor import KEEP
from bench.processes import ONE_CPU
from bench.results import Line, at_most
from bench.runner import FLOOR, OURS, Bench, Contender, column

FULL = Contender("full", "bench.full")
MILLION = 1_000_000
SHAPES = {
    "due": ("1,000,000 due", MILLION),
    "delayed": ("1,000,000 delayed, of a higher priority", MILLION),
    "finished": ("1,000,000 finished", MILLION),
    "other": ("1,000,000 in another queue", MILLION),
    "queues": ("1,000,000 in 1,000 queues", MILLION),
    "priorities": ("60,000 delayed, each of a higher priority of its own", 60_000),
}
SIZES = (10, 1_000, 10_000, 100_000, MILLION)


def claims(bench: Bench) -> list[Line]:
    return [
        _claims(bench, shape, f"a claim with {what}; the floor: with 10", size)
        for shape, (what, size) in SHAPES.items()
    ]


def _claims(bench: Bench, shape: str, what: str, size: int) -> Line:
    sample = bench.fresh(FULL)
    sample.play("shape", shape, bench.count(size))
    found = [
        sample.play("claim_costs", bench.count(500), cpus=ONE_CPU, environment={KEEP: "0"}) for _ in bench.rounds(FULL)
    ]
    sample.remove()
    return Line(
        f"claims-{shape}",
        what,
        " µs",
        column(found, "big"),
        column(found, "small"),
        judged=column(found, "ratio"),
        goal=at_most(1.3),
        note=f"processor's time: {max(column(found, 'cpu_ratio')):.2f} × at most",
    )


def tick(bench: Bench) -> list[Line]:
    due, size = 100, bench.count(10_000)
    sample = bench.fresh(FULL)
    sample.play("schedules", due, size)
    found = [sample.play("tick_costs", 10, cpus=ONE_CPU) for _ in bench.rounds(FULL)]
    sample.remove()
    return [
        Line(
            "tick",
            f"a tick with {size:,} schedules of which {due} are due; the floor: with these {due} alone",
            " ms",
            column(found, "big"),
            column(found, "small"),
            judged=column(found, "ratio"),
            goal=at_most(1.3),
        )
    ]


def sizes(bench: Bench) -> list[Line]:
    """For the charts: no goals of their own."""
    lines = []
    for size in SIZES:
        stock = bench.count(size) if size > 10 else size
        line = _claims(bench, "due", f"a claim with {stock:,} due; the floor: with 10", stock)
        lines.append(replace(line, name=f"sizes-claim-{stock}", goal=None))
        rates: dict[str, list[float]] = {FLOOR.name: [], OURS.name: []}
        for contender in bench.rounds(FLOOR, OURS):
            if contender is FLOOR:
                sample = bench.fresh(FLOOR, "stock_behind", stock)
                rate = sample.play("loop", bench.count(10_000), cpus=ONE_CPU, environment={KEEP: "0"})["rate"]
                sample.remove()
            else:
                rate = drain(bench, OURS, bench.count(10_000), {KEEP: "0"}, [], "stock_behind", stock)
            rates[contender.name].append(rate)
        bench.forget()
        what = f"a real worker with {stock:,} more waiting"
        lines.append(Line(f"sizes-drain-{stock}", what, "/s", rates[OURS.name], rates[FLOOR.name]))
    return lines
