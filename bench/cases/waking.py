"""From a commit in one process to the handler's start in an idle worker in another."""

import statistics

from bench.results import Line, at_most
from bench.runner import OURS, Bench, Contender

JOBS = 200
LONGEST_GAP_MS = 100


def told(bench: Bench) -> list[Line]:
    found = _wake(bench, {}, *bench.peers)
    return [
        _line("wake", "commit to handler's start, idle worker, p50", found, 50, 0.95, "wake-up p50"),
        _line("wake-p99", "the same, p99", found, 99, 10.0, "wake-up p99"),
    ]


def polling(bench: Bench) -> list[Line]:
    found = _wake(bench, {"BENCH_POLLING": "1"})
    return [
        _line("wake-polling", "the same where only polling works, p50", found, 50, 10.0),
        _line("wake-polling-p99", "the same, p99", found, 99, None),
    ]


def _wake(bench: Bench, environment: dict[str, str], *peers: Contender) -> dict[str, list[list[float]]]:
    """Each contender's delays in milliseconds, run by run."""
    found: dict[str, list[list[float]]] = {}
    for number, contender in enumerate(bench.rounds(OURS, *peers)):
        delays: list[list[float]] = []
        bench.attempt(contender, lambda: _delays(bench, contender, number // (1 + len(peers)), environment, delays), {})  # noqa: B023
        found.setdefault(contender.name, []).extend(delays)
    return found


def _delays(
    bench: Bench, contender: Contender, seed: int, environment: dict[str, str], delays: list[list[float]]
) -> None:
    sample = bench.fresh(contender)
    worker = sample.start_worker(environment)
    try:
        committed = sample.play("ping", bench.count(JOBS, contender), LONGEST_GAP_MS, seed)
    finally:
        worker.stop()
    begun = sample.moments()
    warm = len(committed) // 20
    delays.append([(begun[str(number)] - moment) / 1e6 for number, moment in enumerate(committed) if number >= warm])
    sample.remove()


def _line(
    name: str,
    what: str,
    found: dict[str, list[list[float]]],
    percent: int,
    bound: float | None,
    peer_line: str = "",
) -> Line:
    figures = {
        contender: [statistics.quantiles(delays, n=100, method="inclusive")[percent - 1] for delays in runs]
        for contender, runs in found.items()
    }
    ours = figures.pop(OURS.name)
    goal = at_most(bound, " ms") if bound else None
    pooled = [delay for delays in found[OURS.name] for delay in delays]
    note = f"of {len(pooled)} jobs: least {min(pooled):.2f}, greatest {max(pooled):.1f} ms"
    return Line(
        name,
        what,
        " ms",
        ours,
        judged=ours,
        judged_unit=" ms",
        goal=goal,
        note=note,
        peers=figures,
        peer_line=peer_line,
    )
