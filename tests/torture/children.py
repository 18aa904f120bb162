"""The processes of a run: started, tormented, started again, and none left behind."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.torture import journal

ROOT = Path(__file__).parent.parent.parent
_PR_SET_PDEATHSIG = 1
SOME_WORK = 1_000
"""Bytes of a journal: some twenty events."""
EXIT_EXHAUSTED = 4
SHUT_OUT = "(database is locked); try again"


def die_with_parent() -> None:
    """Let this process be killed where its parent is gone, and cannot end it any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Child:
    """One life of one process."""

    role: str
    log: Path
    journal: Path
    popen: subprocess.Popen[bytes]
    sent: set[signal.Signals] = field(default_factory=set)
    thaw_at: float | None = None
    """Monotonic; while it is frozen."""

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    @property
    def up(self) -> bool:
        """Has it come as far as its work?"""
        return self.journal.exists()

    @property
    def has_worked(self) -> bool:
        """Has it done some of it? A scheduler that stands by has no more to do than to be up."""
        return self.up and (self.role.startswith("scheduler") or self.journal.stat().st_size > SOME_WORK)

    @property
    def frozen(self) -> bool:
        return self.thaw_at is not None

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)
        self.sent.add(number)

    def freeze(self, until: float) -> None:
        self.popen.send_signal(signal.SIGSTOP)
        self.thaw_at = until

    def thaw(self) -> None:
        self.popen.send_signal(signal.SIGCONT)
        self.thaw_at = None


class Children:
    """All processes of a run, by role; `roles` says how each is started."""

    def __init__(self, folder: Path, environment: Mapping[str, str], roles: Mapping[str, Sequence[str]]) -> None:
        self.folder = folder
        self.environment = environment
        self.roles = roles
        self.by_role: dict[str, Child] = {}
        self.starts: Tally[str] = Tally()
        self.unexpected_ends: list[str] = []

    def start(self, role: str) -> Child:
        self.starts[role] += 1
        name = f"{role}.{self.starts[role]:03}"
        log, diary = self.folder / f"{name}.log", self.folder / f"{name}.journal"
        with log.open("wb") as output:
            popen = subprocess.Popen(
                [sys.executable, *(argument.format(name=name) for argument in self.roles[role])],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **self.environment, journal.VARIABLE: str(diary)},
                preexec_fn=die_with_parent,  # noqa: PLW1509  there are no threads
            )
        child = self.by_role[role] = Child(role, log, diary, popen)
        return child

    def running(self) -> list[Child]:
        return [child for child in self.by_role.values() if child.running]

    def reap(self) -> list[str]:
        """The roles whose process has ended since the last call; an end that nobody asked for is noted."""
        ended = [role for role, child in self.by_role.items() if not child.running]
        for role in ended:
            child = self.by_role.pop(role)
            if not _is_expected(child):
                tail = child.log.read_text(errors="replace")[-1_500:]
                sent = ", ".join(sorted(number.name for number in child.sent)) or "nothing"
                self.unexpected_ends.append(
                    f"{child.log.name}: ended with status {child.popen.returncode}, having been sent {sent}:\n{tail}"
                )
        return ended

    def stop(self, roles: Sequence[str], patience: float) -> bool:
        """Ask them to end, and wait; did they all?"""
        for role in roles:
            if role in self.by_role:
                self.by_role[role].send(signal.SIGTERM)
        deadline = time.monotonic() + patience
        while left := [role for role in roles if role in self.by_role]:
            if time.monotonic() > deadline:
                self.unexpected_ends += [f"{self.by_role[role].log.name}: does not end after SIGTERM" for role in left]
                return False
            self.reap()
            time.sleep(0.05)
        return True

    def kill_all(self) -> None:
        for child in self.by_role.values():
            if child.running:
                child.popen.kill()
        for child in self.by_role.values():
            child.popen.wait()


def _is_expected(child: Child) -> bool:
    code = child.popen.returncode
    if code == -signal.SIGKILL and signal.SIGKILL in child.sent:
        return True
    text = child.log.read_text(errors="replace")
    if child.role == "prune" and not child.sent:
        # Shut out for longer than the busy timeout, it says so and ends.
        return code == 0 or (code == 1 and text.rstrip().endswith(SHUT_OUT))
    if code == EXIT_EXHAUSTED:
        return "every thread is held by a handler past its time limit" in text
    if signal.SIGTERM not in child.sent:
        return False
    # Before its signal handler is there, a process ends by the signal. 1: a worker's grace was over, or a second came.
    cut_off = "worker stopping" in text or "cut off at a second signal" in text
    return code in (0, -signal.SIGTERM) or (code == 1 and cut_off)
