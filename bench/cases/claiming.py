"""Claiming and acking through the public functions, without a worker."""

from bench.processes import ONE_CPU
from bench.results import Line
from bench.runner import FLOOR, OURS, Bench, compare, line_of

WAITING = 100_000


def loop(bench: Bench) -> list[Line]:
    results = bench.rates("loop", 5_000, contenders=(FLOOR, OURS, *bench.peers))
    return [compare("loop", "claim one, ack it", results, peer_line="claim + ack loop")]


def batches(bench: Bench) -> list[Line]:
    results = bench.rates("batches", 20_000, 100, contenders=(FLOOR, OURS, *bench.peers))
    return [compare("batches", "claim 100, ack them in one transaction", results, peer_line="batches of 100")]


def waiting(bench: Bench) -> list[Line]:
    figures: dict[str, list[float]] = {}
    size = bench.count(WAITING)
    for contender in bench.rounds(FLOOR, OURS, *bench.peers):

        def claim() -> float | None:
            sample = bench.fresh(contender, "stock", size)  # noqa: B023  called at once
            try:
                result = sample.play("claims", bench.count(3_000, contender), cpus=ONE_CPU)  # noqa: B023
            finally:
                sample.remove()
            return None if result is None else float(result["rate"])

        bench.attempt(contender, claim, figures)
    bench.forget()
    return [line_of("waiting", f"claim one, ack it, with {size:,} waiting", figures, peer_line="with 100,000 waiting")]
