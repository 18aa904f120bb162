"""Many processes on one file: four that store, two that run."""

import re
from collections import Counter

from bench import notes
from bench.processes import Failed
from bench.results import Line, at_least, at_most
from bench.runner import FLOOR, LONGEST, OURS, Bench, Contender, Sample, line_of, say

PRODUCERS = 4
JOBS = 20_000
RIVAL = "huey"
LOCK_ERROR = re.compile(r"locked|SQLITE_BUSY|OperationalError|database trouble", re.IGNORECASE)


def contention(bench: Bench) -> list[Line]:
    figures: dict[str, list[float]] = {}
    faults: Counter[str] = Counter()
    for contender in bench.rounds(FLOOR, OURS, *bench.peers):
        bench.attempt(contender, lambda: _contend(bench, contender, faults), figures)  # noqa: B023
    line = line_of(
        "contention",
        f"{PRODUCERS} producers, one job for each commit, against 2 workers, {bench.count(JOBS):,} jobs",
        figures,
        peer_line="4 producers, 2 consumers",
    )
    line.note = "; ".join(f"{fault}: {count}" for fault, count in sorted(faults.items()))
    rival = line.peers.get(RIVAL, [])
    ours = float(sum(count for fault, count in faults.items() if fault.startswith(OURS.name)))
    what = "jobs lost, run twice or left, and lock errors in any output, all runs"
    found = [line, Line("contention-faults", what, "", [ours], judged=[ours], judged_unit="", goal=at_most(0, ""))]
    if len(rival) == len(line.ours):
        found.append(
            Line(
                "contention-huey",
                "the same, against huey",
                "/s",
                line.ours,
                judged=[one / other for one, other in zip(line.ours, rival, strict=True)],
                goal=at_least(1.2),
            )
        )
    return found


def _contend(bench: Bench, contender: Contender, faults: Counter[str]) -> float:
    """Jobs a second, from the word to start to the last handler's start."""
    sample = bench.fresh(contender)
    share = bench.count(JOBS, contender) // PRODUCERS
    count = share * PRODUCERS
    workers = [sample.start_worker() for _ in range(contender.consumers)]
    producers = [sample.start("produce", number * share, share, told=True) for number in range(PRODUCERS)]
    for producer in producers:
        producer.wait_for("ready", 60.0)
    sample.wait_until(lambda: notes.count(sample.notes) >= PRODUCERS, 60.0, *workers)
    for producer in producers:
        producer.tell("go")
    started = min(int(producer.result(LONGEST)["started"]) for producer in producers)
    sample.wait_until(lambda: notes.count(sample.notes) >= count + PRODUCERS, LONGEST, *workers, look_every=0.2)
    for worker in workers:
        worker.stop()
    noted = [(int(what), moment) for what, moment in notes.read(sample.notes) if int(what) >= 0]
    times = Counter(number for number, _ in noted)
    lost = count - len(times)
    if lost:
        raise Failed(f"{contender.name}: {lost} of {count} jobs were lost; see {sample.logs}")
    _count(faults, contender, sample, sum(times.values()) - count)
    last = max(moment for _, moment in noted)
    sample.remove()
    return count / ((last - started) / 1e9)


def _count(faults: Counter[str], contender: Contender, sample: Sample, doubled: int) -> None:
    for fault, number in (
        ("run twice", doubled),
        ("lock errors", len(LOCK_ERROR.findall(sample.output()))),
        ("left", sample.play("left")),
    ):
        if number:
            faults[f"{contender.name}, {fault}"] += number
            say(f"  {contender.name}: {fault}: {number}")
