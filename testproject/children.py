"""The demo's processes: started, heard, and ended whatever happens."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 30.0
"""Seconds that a process gets to start, and to end."""


class Broken(Exception):
    """A process did not start, or ended by itself."""


class Child:
    """One process; what it prints goes to a file."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        with log.open("w") as output:
            # In a session of its own: Ctrl-C in the terminal is for the demo, which then ends its children in order.
            self._process = subprocess.Popen(  # noqa: S603  our own programs
                [sys.executable, *arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, pattern: str) -> str:
        """Until a line of its output matches; what the pattern's group caught. `Broken` where it never does."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = re.search(pattern, self.log.read_text())
            if found:
                return found.group(1)
            self.check()
            time.sleep(0.05)
        raise Broken(f"the {self.name} did not start within {PATIENCE:g} s; see {self.log}")

    def check(self) -> None:
        """`Broken` where it has ended."""
        code = self._process.poll()
        if code is not None:
            raise Broken(f"the {self.name} ended by itself ({_meaning(code)}); see {self.log}")

    def ask_to_end(self) -> None:
        self._process.terminate()

    def wait(self) -> str:
        """How it ended. One that does not end in time is killed."""
        try:
            return _meaning(self._process.wait(PATIENCE))
        except subprocess.TimeoutExpired:
            self.kill()
            return f"killed: it did not end within {PATIENCE:g} s"

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def _meaning(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"


class Children:
    """A context manager outside which none of its processes is left."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def start(self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
        child = Child(name, arguments, log, environment)
        self._children.append(child)
        return child

    def check(self) -> None:
        for child in self._children:
            child.check()

    def end(self) -> dict[str, str]:
        """End all; how each one ended."""
        for child in self._children:
            child.ask_to_end()
        ended = {child.name: child.wait() for child in self._children}
        self._children.clear()
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        left = list(self._children)
        try:
            self.end()
        finally:  # a second Ctrl-C ends the waiting above, but leaves nothing running
            for child in left:
                child.kill()
