"""A real worker and jobs that do nothing."""

from bench.floor import KEEP
from bench.ours import QUEUE
from bench.processes import ONE_CPU, Failed
from bench.program import FIRST, LAST
from bench.results import Goal, Line, at_least
from bench.runner import FLOOR, LONGEST, OURS, Bench, Contender, line_of, say


def deleted(bench: Bench) -> list[Line]:
    what = "a real `run_queue` draining 50,000 no-op jobs, completed ones deleted; the floor: claim and ack one by one"
    return [_drain(bench, "drain", what, 50_000, at_least(2), {KEEP: "0"})]


def kept(bench: Bench) -> list[Line]:
    what = "the same, completed jobs kept (the default)"
    return [_drain(bench, "drain-kept", what, 50_000, at_least(1.8), {}, "real worker, no-op jobs", *bench.peers)]


def coroutine(bench: Bench) -> list[Line]:
    return [_drain(bench, "drain-async", "the same, an async handler", 20_000, at_least(1), {QUEUE: "async"})]


def atomic(bench: Bench) -> list[Line]:
    what = "the same, an `atomic=True` handler that inserts one row"
    return [_drain(bench, "drain-atomic", what, 10_000, None, {QUEUE: "atomic"})]


def _drain(
    bench: Bench,
    name: str,
    what: str,
    number: int,
    goal: Goal | None,
    environment: dict[str, str],
    peer_line: str = "",
    *peers: Contender,
) -> Line:
    figures: dict[str, list[float]] = {}
    cpu: list[float] = []
    for contender in bench.rounds(FLOOR, OURS, *peers):
        if contender is FLOOR:
            sample = bench.fresh(FLOOR)
            rate = sample.play("loop", bench.count(20_000), cpus=ONE_CPU, environment=environment)["rate"]
            figures.setdefault(FLOOR.name, []).append(rate)
            sample.remove()
            continue
        count = bench.count(number, contender)
        bench.attempt(contender, lambda: drain(bench, contender, count, environment, cpu), figures)  # noqa: B023
    note = f"{min(cpu):.0f} µs of processor for each job" if cpu else ""
    return line_of(name, what, figures, goal=goal, peer_line=peer_line, note=note)


def drain(
    bench: Bench,
    contender: Contender,
    count: int,
    environment: dict[str, str],
    cpu: list[float],
    *stock: str | int,
) -> float:
    """The rate of one worker between the first handler's start and the last's; adds its processor's cost to `cpu`."""
    sample = bench.fresh(contender, *stock)
    sample.play("fill", count, environment=environment)
    behind = int(stock[1]) if stock else 0
    worker = sample.start_worker(environment)
    try:
        sample.wait_for_note(LAST, LONGEST, worker)
        if contender is OURS:
            cpu.append(worker.cpu_seconds() / count * 1e6)
    finally:
        worker.stop()
    if not behind:
        left = sample.play("left", environment=environment)
        if left:
            say(f"  {contender.name}: {left} of {count} jobs were not done when the last one began")
    moments = sample.moments()
    if FIRST not in moments:
        raise Failed(f"{contender.name}: the first job was never noted")
    sample.remove()
    return count / ((moments[LAST] - moments[FIRST]) / 1e9)
