"""What it costs to wait: the processor's share, and whether anything is written or read meanwhile."""

import sqlite3
import time
from typing import NamedTuple

from bench.floor import DATABASE
from bench.processes import Child
from bench.results import Line, at_most
from bench.runner import OURS, Bench, Sample

SETTLED = 3.0
"""Seconds after its start from which a process counts as idle."""
WINDOW = 30
PEERS_WINDOW = 10


class Rest(NamedTuple):
    """What a process did in a window."""

    cpu_percent: float
    bytes_written: float
    """A second, to whatever file."""
    reads: float
    """Calls a second that read from whatever file, the kernel's events among them."""
    changed: bool
    """Did anybody commit to the database?"""


def idle(bench: Bench) -> list[Line]:
    window = max(5.0, WINDOW * bench.scale)
    workers: list[Rest] = []
    schedulers: list[Rest] = []
    peers: dict[str, list[float]] = {}
    for contender in bench.rounds(OURS, *bench.peers):
        if contender is OURS:
            workers.append(_rest(bench.fresh(OURS), "work", window))
            schedulers.append(_rest(bench.fresh(OURS), "schedule", window))
            continue
        bench.attempt(
            contender,
            lambda: _rest(bench.fresh(contender), "work", PEERS_WINDOW).cpu_percent,  # noqa: B023
            peers,
        )
    lines = []
    for name, found, others in (("worker", workers, peers), ("scheduler", schedulers, {})):
        cpu, written = [rest.cpu_percent for rest in found], [rest.bytes_written for rest in found]
        changed, reads = sum(rest.changed for rest in found), max(rest.reads for rest in found)
        lines.append(
            Line(
                f"idle-{name}",
                f"processor's share of an idle {name}, {window:g} s",
                " %",
                cpu,
                judged=cpu,
                judged_unit=" %",
                goal=at_most(0.3, " %"),
                peers=others,
                peer_line="idle CPU" if name == "worker" else "",
            )
        )
        lines.append(
            Line(
                f"idle-{name}-writes",
                f"what an idle {name} writes",
                " B/s",
                written,
                judged=written,
                judged_unit=" B/s",
                goal=at_most(0, " B/s"),
                note=(
                    f"the database changed in {changed} of {len(found)} windows; "
                    f"at most {reads:.1f} reading calls a second"
                ),
            )
        )
    return lines


def foreign(bench: Bench) -> list[Line]:
    window = max(5.0, 10 * bench.scale)
    cpu = []
    for _ in bench.rounds(OURS):
        sample = bench.fresh(OURS)
        worker = sample.start_worker()
        writer = sample.start("write_rows", 200, round(window) + 4)
        writer.wait_for("writing", 60.0)
        time.sleep(SETTLED)
        cpu.append(_weigh(worker, sample, window).cpu_percent)
        writer.result(60.0)
        worker.stop()
        sample.remove()
    what = "an idle worker's share while an app writes 200 rows a second to the same file"
    return [Line("foreign", what, " %", cpu, judged=cpu, judged_unit=" %", goal=at_most(3, " %"))]


def _rest(sample: Sample, role: str, window: float) -> Rest:
    child = sample.start(role)
    child.wait_for(sample.contender.started if role == "work" else "scheduler leads", 60.0)
    time.sleep(SETTLED)
    rest = _weigh(child, sample, window)
    child.stop()
    sample.remove()
    return rest


def _weigh(child: Child, sample: Sample, window: float) -> Rest:
    database = sample.data / DATABASE
    watcher = sqlite3.connect(database) if database.exists() else None
    version = _version(watcher)
    cpu, io, started = child.cpu_seconds(), child.io(), time.monotonic()
    time.sleep(window)
    seconds = time.monotonic() - started
    used, after = child.cpu_seconds() - cpu, child.io()
    changed = _version(watcher) != version
    if watcher is not None:
        watcher.close()
    return Rest(
        used / seconds * 100,
        (after.get("wchar", 0) - io.get("wchar", 0)) / seconds,
        (after.get("syscr", 0) - io.get("syscr", 0)) / seconds,
        changed,
    )


def _version(watcher: sqlite3.Connection | None) -> object:
    return watcher.execute("PRAGMA data_version").fetchone() if watcher else None
