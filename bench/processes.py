"""The processes of a run: started on the same processors, heard, weighed, and none left behind."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
RESULT = "RESULT "
"""Begins the line of a program's output that is its result, in JSON."""
PATIENCE = 30.0
"""Seconds that a process gets to end when it is asked to."""
EVERY_CPU = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
ONE_CPU = EVERY_CPU[-1:]
"""Where a program runs that is alone: the last, since the first one often serves the machine's interrupts."""


class Failed(Exception):
    """A process did not do what it was started for."""


class Child:
    """One process, leader of a session of its own, so that all that it starts can be found and ended."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, cpus: Sequence[int], *, told: bool
    ) -> None:
        self.log = log
        self._killed = False
        before = os.sched_getaffinity(0) if cpus else None
        with log.open("w") as output:
            if cpus:
                os.sched_setaffinity(0, cpus)  # inherited
            try:
                self.popen = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    # Modules are compiled once, as in production, whatever the surroundings say.
                    env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **environment},
                    stdin=subprocess.PIPE if told else subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            finally:
                if before is not None:
                    os.sched_setaffinity(0, before)
        self._command = command

    @property
    def pid(self) -> int:
        return self.popen.pid

    def tell(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n".encode())
        self.popen.stdin.flush()

    def wait_for(self, pattern: str, timeout: float) -> None:
        """Until its output matches. `Failed` where it ends first, or takes longer."""
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self.log.read_text(errors="replace")):
            if not self.is_running():
                raise self._failure(f"ended with {self.popen.returncode} before it said {pattern!r}")
            if time.monotonic() > deadline:
                raise self._failure(f"did not say {pattern!r} within {timeout:g} s")
            time.sleep(0.02)

    def is_running(self) -> bool:
        return self.popen.poll() is None

    def result(self, timeout: float) -> Any:
        """What it printed as its result, once it has ended well."""
        try:
            code = self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self._failure(f"did not end within {timeout:g} s") from None
        self.kill()
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith(RESULT)]
        if code or not lines:
            raise self._failure(f"ended with {code} and {len(lines)} results")
        return json.loads(lines[-1].removeprefix(RESULT))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it in order, and by force what is left of its session."""
        if self.is_running():
            self.popen.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(PATIENCE)
        self.kill()

    def kill(self) -> None:
        """End its whole session. Once: later its number may be another's."""
        if self._killed:
            return
        self._killed = True
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait()
        if self.popen.stdin is not None:
            self.popen.stdin.close()

    def cpu_seconds(self) -> float:
        """What the processes of its session have used so far, those apart that have ended."""
        return sum(_cpu_seconds(pid) for pid in _session(self.pid))

    def io(self) -> dict[str, int]:
        """Sums over its session: bytes and system calls, by the kernel's names."""
        sums: dict[str, int] = {}
        for pid in _session(self.pid):
            for line in _read(f"/proc/{pid}/io").splitlines():
                name, _, count = line.partition(":")
                sums[name] = sums.get(name, 0) + int(count)
        return sums

    def _failure(self, what: str) -> Failed:
        tail = self.log.read_text(errors="replace")[-2_000:]
        return Failed(f"{' '.join(map(str, self._command))} {what}:\n{tail}")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # it has ended
        return ""


def _session(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _read(f"{entry}/stat").rpartition(")")[2].split()
        if len(fields) > 3 and int(fields[3]) == leader:
            found.append(int(entry.name))
    return found


def _cpu_seconds(pid: int) -> float:
    """In nanoseconds where the kernel counts them, else in clock ticks."""
    threads = [_read(f"{path}/schedstat").split() for path in Path(f"/proc/{pid}/task").glob("[0-9]*")]
    if any(threads):
        return sum(int(fields[0]) for fields in threads if fields) / 1e9
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


class Processes:
    """A context manager outside which none of its processes is left."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        cpus: Sequence[int] = EVERY_CPU,
        *,
        told: bool = False,
    ) -> Child:
        child = Child(command, environment, log, cpus, told=told)
        self._children.append(child)
        return child

    def kill_all(self) -> None:
        for child in self._children:
            child.kill()
        self._children.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.kill_all()
