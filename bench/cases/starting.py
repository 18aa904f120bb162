"""What the app adds to the start of a project that has it."""

import resource
import sys
import time

from bench.processes import ONE_CPU, ROOT
from bench.results import Line, at_most
from bench.runner import OURS, Bench, Sample

WITHOUT = {"BENCH_WITHOUT": "1"}
COMMANDS = {
    "start-import": ("`import` of the app and `django.setup()`", ["-c", "import django; django.setup()"]),
    "start-check": ("`manage.py check`", ["-m", "django", "check"]),
}
PAIRS = 3
"""Of starts in each run; what is added is their median."""


def start(bench: Bench) -> list[Line]:
    return [_start(bench, name, what, command) for name, (what, command) in COMMANDS.items()]


def _start(bench: Bench, name: str, what: str, command: list[str]) -> Line:
    sample = bench.fresh(OURS)
    for environment in ({}, WITHOUT):  # the compiled modules are written once
        _run(bench, sample, command, environment)
    walls: dict[bool, list[float]] = {True: [], False: []}
    cpus: dict[bool, list[float]] = {True: [], False: []}
    for _ in bench.rounds(*[OURS] * PAIRS):
        for with_it in (False, True):
            wall, cpu = _run(bench, sample, command, {} if with_it else WITHOUT)
            walls[with_it].append(wall)
            cpus[with_it].append(cpu)
    sample.remove()
    added, added_cpu = (
        [full - plain for full, plain in zip(found[True], found[False], strict=True)] for found in (walls, cpus)
    )
    return Line(
        name,
        f"{what}; the floor: the same project without the app",
        " ms",
        walls[True],
        walls[False],
        judged=added,
        judged_unit=" ms more",
        goal=at_most(30, " ms more"),
        note=f"{sorted(added_cpu)[len(added_cpu) // 2]:.0f} ms more of the processor's time",
    )


def _run(bench: Bench, sample: Sample, command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Milliseconds of one start: the wall's clock, and the processor's."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    child = bench.processes.start(
        [sys.executable, *command],
        {
            "PYTHONPATH": str(ROOT),
            "DJANGO_SETTINGS_MODULE": "bench.project.settings",
            "BENCH_FOLDER": str(sample.data),
            **environment,
        },
        sample.logs / "start.txt",
        ONE_CPU,
    )
    code = child.popen.wait()
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if code:
        raise RuntimeError(child.log.read_text())
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall * 1e3, cpu * 1e3
