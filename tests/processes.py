"""Real processes for the tests: started on the test database's file, watched by their output, killed by id."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PATIENCE = 60.0
"""Seconds after which a test that waits for an event gives up. No test asserts that anything is quicker."""


class Process:
    """A child whose output is read line by line, so that a test can wait for a line and not for a time."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            cwd=Path(__file__).parent.parent,
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until `text` stands in that many lines of the output."""

        def there() -> bool:
            return sum(text in line for line in self.lines) >= times

        with self._news:
            self._news.wait_for(lambda: there() or self._ended, PATIENCE)
            assert there(), f"no {text!r} ({times}x) in:\n{self.output}"

    def tell(self, line: str) -> None:
        """Write a line to the child's standard input."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait(self) -> int:
        """The exit code, once the process has ended and all its output is read."""
        code = self.popen.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def end(self) -> None:
        """Whatever state it is in: gone afterwards."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


def start_process(arguments: Sequence[str], environment: Mapping[str, str]) -> Process:
    """`("run_queue", "mail")` starts that management command; `("-c", code)` runs code after `django.setup()`."""
    settings = {"DJANGO_SETTINGS_MODULE": "tests.settings"}
    if arguments[0] == "-c":
        prelude = "import django; django.setup()\n"
        return Process(["-c", prelude + arguments[1], *arguments[2:]], {**settings, **environment})
    return Process(["-m", "django", *arguments], {**settings, **environment})


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Until `condition` holds: for states that another process reaches and nothing announces."""
    event = threading.Event()
    for _ in range(int(PATIENCE / 0.02)):
        if condition():
            return
        event.wait(0.02)
    raise AssertionError(f"never came true: {what}")
