"""Run the benchmarks and print the tables: `make bench`, or `python -m bench`."""

import argparse
import json
import os
import platform
import signal
import sqlite3
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import django
import django_alkstore

from bench.cases import CASES
from bench.peers import install
from bench.processes import Failed, Processes
from bench.results import Line, goals_table, peers_table
from bench.runner import Bench, say


def main() -> int:
    options = _options()
    # Ended as by Ctrl-C: the processes and the folder are cleared away.
    signal.signal(signal.SIGTERM, _interrupt)
    os.environ.pop("DJANGO_SETTINGS_MODULE", None)
    machine = _machine()
    lines: list[Line] = []
    broken = []
    with (
        tempfile.TemporaryDirectory(prefix="alkstore-bench-", dir=options.folder, ignore_cleanup_errors=True) as name,
        Processes() as processes,
    ):
        folder = Path(name)
        wanted = options.peers is not None
        peers, missing = install(folder, options.peers, processes) if wanted else ([], {})
        bench = Bench(folder, processes, runs=options.runs, scale=options.scale, peers=peers)
        for case in options.cases or CASES:
            started = time.monotonic()
            say(f"{case} ...")
            try:
                found = CASES[case](bench)
            except Failed as error:
                say(f"  failed: {error}")
                broken.append(case)
                continue
            lines += found
            for line in found:
                say(f"  {line}")
            say(f"  {time.monotonic() - started:.0f} s")
    parts = [machine, goals_table(lines)]
    parts += ["\n".join(f"- `{line.name}`: {line.note}." for line in lines if line.note)]
    if wanted:
        parts.append(peers_table(lines, [peer.name for peer in peers]))
        parts += [", ".join(f"{peer.name} {peer.version}" for peer in peers) + "."] if peers else []
        parts += [f"{name} could not be installed: {reason}." for name, reason in missing.items()]
    print("\n\n".join(filter(None, parts)))
    if options.json:
        _store(options.json, options, machine, lines, {peer.name: peer.version for peer in peers})
    if broken:
        say(f"failed: {', '.join(broken)}")
    return 1 if broken else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"Default: all. {', '.join(CASES)}")
    parser.add_argument("--runs", type=int, default=5, help="Alternating runs of each case. Default: 5.")
    parser.add_argument("--scale", type=float, default=1.0, help="Times the numbers of jobs; below 1 only to try out.")
    parser.add_argument(
        "--peers", nargs="*", metavar="NAME", help="Install and measure these other queues too; without names, all."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Also write all figures there, each run's own.")
    parser.add_argument("--folder", type=Path, help="Where the databases are made. Default: the temporary folder.")
    options = parser.parse_args()
    unknown = [case for case in options.cases if case not in CASES]
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if options.runs < 1 or options.scale <= 0:
        parser.error("--runs is at least 1, --scale above 0")
    return options


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _machine() -> str:
    return (
        f"{datetime.now(UTC):%Y-%m-%d}: django-alkstore {django_alkstore.__version__}, Django {django.get_version()}, "
        f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, "
        f"{platform.system()} {platform.release()}, {os.cpu_count()} × {_processor()}, "
        f"load average at the start {os.getloadavg()[0]:.1f}."
    )


def _processor() -> str:
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return names[0].partition(":")[2].strip() if names else platform.machine()


def _store(path: Path, options: argparse.Namespace, machine: str, lines: list[Line], peers: dict[str, str]) -> None:
    stored: dict[str, Any] = {
        "machine": machine,
        "runs": options.runs,
        "scale": options.scale,
        "peers": peers,
        "lines": [line.as_dict() for line in lines],
    }
    path.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
