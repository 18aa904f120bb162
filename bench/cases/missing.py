"""What other writers bear while a scheduler catches up with many schedules."""

from bench.processes import Failed
from bench.results import Line, at_most
from bench.runner import OURS, Bench

SCHEDULES = 10_000
CAUGHT_UP = 64
"""Missed boundaries of each schedule: as many as one tick fires."""


def missed(bench: Bench) -> list[Line]:
    size = bench.count(SCHEDULES)
    return [
        _missed(bench, "missed-1", f"{size:,} schedules are due at once", size, 1),
        _missed(bench, "missed-64", f"{size:,} schedules have missed {CAUGHT_UP} boundaries each", size, CAUGHT_UP),
    ]


def _missed(bench: Bench, name: str, what: str, schedules: int, boundaries: int) -> Line:
    waits, seconds = [], []
    for _ in bench.rounds(OURS):
        sample = bench.fresh(OURS)
        sample.play("miss_boundaries", schedules, boundaries)
        writer = sample.start("write_while_behind")
        writer.wait_for("writing", 60.0)
        scheduler = sample.start("schedule")
        result = writer.result(300.0)
        scheduler.stop()
        if sample.output().count("scheduler leads") != 1 or "stopped" not in sample.output():
            raise Failed(f"the scheduler lost its leadership; see {sample.logs}")
        if result["jobs"] < schedules * boundaries:
            raise Failed(f"only {result['jobs']} jobs were fired")
        waits.append(result["longest_ms"])
        seconds.append(result["seconds"])
        sample.remove()
    return Line(
        name,
        f"the longest that another process waits for a commit while {what}",
        " ms",
        waits,
        judged=waits,
        judged_unit=" ms",
        goal=at_most(100, " ms"),
        note=f"caught up in {max(seconds):.1f} s at most, with one leadership",
    )
