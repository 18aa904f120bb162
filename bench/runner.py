"""One run of the benchmarks: the contenders, their fresh folders, and the order in which they take their turns."""

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench import floor as floor_program
from bench import notes
from bench.processes import EVERY_CPU, ONE_CPU, ROOT, Child, Failed, Processes
from bench.results import Line

NOTHING: Mapping[str, str] = MappingProxyType({})
LONGEST = 300.0
"""Seconds that a role, or a worker, may take."""


@dataclass(frozen=True)
class Contender:
    """A program that plays the roles of `bench.program`."""

    name: str
    module: str
    python: str = sys.executable
    pace: float = 1.0
    """How many jobs it is given, as a share of ours: less for the slow, so that a run ends."""
    consumers: int = 2
    """Worker processes where a case has two."""
    environment: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    started: str = ""
    """What its worker's output says once it works."""
    version: str = ""
    settle: float = 0.0
    """Seconds that its worker gets besides, where its output says nothing."""


FLOOR = Contender("floor", "bench.floor", started="worker started")
OURS = Contender("django-alkstore", "bench.ours", started="worker started")


class Bench:
    """Starts the contenders' roles, in folders of their own under one temporary folder."""

    def __init__(
        self, folder: Path, processes: Processes, *, runs: int, scale: float, peers: Sequence[Contender] = ()
    ) -> None:
        self.folder = folder
        self.processes = processes
        self.runs = runs
        self.scale = scale
        self.peers = peers
        self._made = 0
        self._templates: dict[tuple[str, ...], Path] = {}

    def count(self, number: int, contender: Contender | None = None) -> int:
        """A case's number of jobs, as this run is scaled and the contender is paced."""
        pace = contender.pace if contender else 1.0
        return max(20, round(number * self.scale * pace))

    def rounds(self, *contenders: Contender) -> Iterator[Contender]:
        """Each contender once, then each again: floor, ours, floor, ours."""
        for number in range(self.runs):
            say(f"  run {number + 1} of {self.runs}", end="\r")
            yield from contenders
        say(" " * 30, end="\r")

    # Folders

    def fresh(self, contender: Contender, *stock: str | int) -> "Sample":
        """A new folder with the contender's database: empty, or with the jobs of a role such as `("stock", 1000)`."""
        sample = Sample(self, contender, self._new_folder(contender))
        shutil.copytree(self._template(contender, *stock), sample.data, dirs_exist_ok=True)
        return sample

    def _template(self, contender: Contender, *stock: str | int) -> Path:
        key = (contender.name, *map(str, stock))
        if key not in self._templates:
            if stock:
                sample = self.fresh(contender)
                role, *numbers = stock
                sample.play(str(role), *numbers)
            else:
                sample = Sample(self, contender, self._new_folder(contender))
                sample.play("prepare")
            self._templates[key] = sample.data
        return self._templates[key]

    def forget(self) -> None:
        """Remove the databases that were filled for one case."""
        for key in [key for key in self._templates if len(key) > 1]:
            shutil.rmtree(self._templates.pop(key).parent, ignore_errors=True)

    def _new_folder(self, contender: Contender) -> Path:
        self._made += 1
        folder = self.folder / f"{self._made:04}-{contender.name}"
        for part in ("data", "log", "notes"):
            (folder / part).mkdir(parents=True)
        return folder

    def model(self) -> Path:
        """A migrated database of ours: the floor's table is a copy of the one in it."""
        return self._template(OURS) / floor_program.DATABASE

    # What many cases do

    def rates(
        self, role: str, number: int, *more: int, contenders: Sequence[Contender]
    ) -> dict[str, list[dict[str, float]]]:
        """Play a timed role by turns; each contender's results. One that does not offer it is left out."""
        results: dict[str, list[dict[str, float]]] = {}
        for contender in self.rounds(*contenders):
            sample = self.fresh(contender)
            try:
                result = sample.play(role, self.count(number, contender), *more, cpus=ONE_CPU)
            except Failed as error:
                if contender in (FLOOR, OURS):
                    raise
                complain(contender.name, error)
                continue
            finally:
                sample.remove()
            if result is not None:
                results.setdefault(contender.name, []).append(result)
        return results

    def attempt(self, contender: Contender, action: Callable[[], float | None], into: dict[str, list[float]]) -> None:
        """Add a contender's figure; a peer that fails is left out, and said so."""
        try:
            value = action()
        except Failed as error:
            if contender in (FLOOR, OURS):
                raise
            complain(contender.name, error)
            return
        if value is not None:
            into.setdefault(contender.name, []).append(value)


class Sample:
    """One contender's folder, for one run of one case."""

    def __init__(self, bench: Bench, contender: Contender, folder: Path) -> None:
        self.bench = bench
        self.contender = contender
        self.folder = folder
        self.data = folder / "data"
        self.logs = folder / "log"
        self.notes = folder / "notes"
        self._started = 0

    def start(
        self,
        role: str,
        *numbers: object,
        cpus: Sequence[int] = EVERY_CPU,
        told: bool = False,
        environment: Mapping[str, str] = NOTHING,
    ) -> Child:
        self._started += 1
        model = {} if self.contender is OURS else {floor_program.MODEL: str(self.bench.model())}
        return self.bench.processes.start(
            [self.contender.python, "-m", self.contender.module, role, str(self.data), *map(str, numbers)],
            {
                "PYTHONPATH": str(ROOT),
                "PYTHONUNBUFFERED": "1",
                notes.FOLDER: str(self.notes),
                **self.contender.environment,
                **model,
                **environment,
            },
            self.logs / f"{self._started:02}-{role}.txt",
            cpus,
            told=told,
        )

    def play(
        self, role: str, *numbers: object, cpus: Sequence[int] = EVERY_CPU, environment: Mapping[str, str] = NOTHING
    ) -> Any:
        return self.start(role, *numbers, cpus=cpus, environment=environment).result(LONGEST)

    def start_worker(self, environment: Mapping[str, str] = NOTHING) -> Child:
        """The real worker, once it works. Its log goes to a file, as under a supervisor."""
        worker = self.start("work", environment=environment)
        worker.wait_for(self.contender.started, timeout=60.0)
        time.sleep(self.contender.settle)
        return worker

    def wait_for_note(self, what: object, timeout: float, *children: Child) -> None:
        """Until a handler has noted `what`; `Failed` past the timeout, or where a child ended."""
        self.wait_until(lambda: any(seen == str(what) for seen, _ in notes.read(self.notes)), timeout, *children)

    def wait_until(
        self, condition: Callable[[], bool], timeout: float, *children: Child, look_every: float = 0.02
    ) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            ended = [child for child in children if not child.is_running()]
            if ended:
                ended[0].result(0)
            if time.monotonic() > deadline:
                raise Failed(f"{self.contender.name}: not done within {timeout:g} s; see {self.logs}")
            time.sleep(look_every)

    def moments(self) -> dict[str, int]:
        """What was noted, each once, and when: nanoseconds."""
        return dict(notes.read(self.notes))

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self.logs.glob("*.txt"))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def say(text: str = "", end: str = "\n") -> None:
    """To the person who waits; the tables alone go to standard output."""
    if end != "\r" or sys.stderr.isatty():
        print(text, end=end, file=sys.stderr, flush=True)


def complain(name: str, error: object) -> None:
    """What went wrong, and the last that was printed before."""
    lines = str(error).strip().splitlines() or [repr(error)]
    for line in dict.fromkeys((lines[0], lines[-1])):
        say(f"  {name}: {line.strip()[:200]}")


def column(results: Iterable[Mapping[str, float]], key: str) -> list[float]:
    return [result[key] for result in results]


def compare(
    name: str, what: str, results: Mapping[str, list[dict[str, float]]], key: str = "rate", **more: Any
) -> Line:
    """A line of what each contender did, run by run."""
    figures = {contender: column(found, key) for contender, found in results.items()}
    return line_of(name, what, figures, **more)


def line_of(name: str, what: str, figures: Mapping[str, list[float]], **more: Any) -> Line:
    peers = {contender: found for contender, found in figures.items() if contender not in (FLOOR.name, OURS.name)}
    return Line(
        name, what, more.pop("unit", "/s"), figures[OURS.name], figures.get(FLOOR.name, []), peers=peers, **more
    )
