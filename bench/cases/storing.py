"""Storing jobs: what an enqueue adds to a request."""

from bench.processes import ONE_CPU
from bench.results import Line, at_least, at_most
from bench.runner import FLOOR, OURS, Bench, column, compare


def single(bench: Bench) -> list[Line]:
    results = bench.rates("single", 10_000, contenders=(FLOOR, OURS, *bench.peers))
    cpu = column(results[OURS.name], "cpu_us")
    return [
        compare(
            "enqueue",
            "`enqueue`, one for each commit",
            results,
            goal=at_least(0.85),
            peer_line="single enqueue",
            note=f"{min(cpu):.0f} µs of processor each, the floor {min(column(results[FLOOR.name], 'cpu_us')):.0f}",
        )
    ]


def many(bench: Bench) -> list[Line]:
    results = bench.rates("bulk", 10_000, contenders=(FLOOR, OURS, *bench.peers))
    return [compare("many", "`enqueue_many`, 10,000 at once", results, goal=at_least(0.8), peer_line="bulk enqueue")]


def outbox(bench: Bench) -> list[Line]:
    found = []
    for _ in bench.rounds(OURS):
        sample = bench.fresh(OURS)
        found.append(sample.play("outbox", bench.count(4_000), cpus=ONE_CPU))
        sample.remove()
    return [
        Line(
            "outbox",
            "a transaction that inserts two rows by the ORM, with `outbox_enqueue_tx`; the floor: without",
            " µs",
            column(found, "with"),
            column(found, "without"),
            judged=column(found, "percent"),
            judged_unit=" % more",
            goal=at_most(15, " % more"),
        )
    ]
