"""What a contender does when it is started as a process of its own. The loops that are timed are here, one for all.

A contender says how *it* stores, claims and acks; it is started with `python -m MODULE ROLE FOLDER ARGUMENT...`, plays
the role and prints its result in JSON. Rates are per second.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import notes
from bench.processes import RESULT

PAYLOAD = {"order": 4711, "email": "ada@example.com"}
"""Of the jobs that are only stored. Those that are run carry nothing, or what is to be noted of them."""
FIRST, LAST = "first", "last"
WARM_UP = 100
LONGEST = 6.0
"""Seconds after which a loop ends, for those that are slow. A rate is of what was done."""
LOOK_AFTER = 20
"""Operations between two looks at the time."""


class NotOffered(Exception):
    """The contender has no such thing."""


class Program:
    """One contender. `folder` holds its database and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open()

    # What each contender says for itself

    def open(self) -> None:
        """Set up, and connect."""

    def prepare(self) -> None:
        """Make the empty database."""
        raise NotImplementedError

    def enqueue(self, payload: object, *, priority: int = 0) -> object:
        """Store one job for the no-op handler, committed."""
        raise NotImplementedError

    def enqueue_many(self, payloads: Sequence[object]) -> object:
        """Store many, by the best way there is."""
        raise NotOffered

    def claim_and_ack(self) -> bool:
        """One job, by the contender's own claim and ack, without its worker; was there one?"""
        raise NotOffered

    def claim_and_ack_batch(self, size: int) -> int:
        """As many as `size` jobs at once: how many."""
        raise NotOffered

    def left(self) -> int:
        """Jobs that are stored and not done."""
        raise NotImplementedError

    def worker(self) -> Sequence[str]:
        """The command of its real worker, for the no-op handler."""
        raise NotOffered

    # The roles

    def play(self, role: str, *arguments: int | str) -> Any:
        return getattr(self, f"role_{role}")(*arguments)

    def role_prepare(self) -> None:
        self.prepare()

    def role_single(self, count: int) -> dict[str, float]:
        """One job for each commit."""
        for _ in range(WARM_UP):
            self.enqueue(PAYLOAD)
        return _timed(lambda: self.enqueue(PAYLOAD), count)

    def role_bulk(self, count: int) -> dict[str, float]:
        """Many jobs at once, twice; the second is timed."""
        payloads = [PAYLOAD] * count
        self.enqueue_many(payloads[: max(1, count // 10)])
        started = time.perf_counter()
        self.enqueue_many(payloads)
        seconds = time.perf_counter() - started
        return {"rate": count / seconds, "seconds": seconds}

    def role_loop(self, count: int) -> dict[str, float]:
        """Claim one, ack it."""
        self._fill(count + WARM_UP)
        return self.role_claims(count)

    def role_claims(self, count: int) -> dict[str, float]:
        """The same, on what is stored already."""
        for _ in range(min(WARM_UP, count)):
            self.claim_and_ack()
        return _timed(self._claimed, count)

    def _claimed(self) -> None:
        if not self.claim_and_ack():
            raise RuntimeError("there was nothing to claim")

    def role_batches(self, count: int, size: int) -> dict[str, float]:
        """Claim and ack many at once."""
        self._fill(count + size)
        self.claim_and_ack_batch(size)
        done = 0
        started = time.perf_counter()
        while done < count and time.perf_counter() - started < LONGEST:
            done += self.claim_and_ack_batch(size)
        seconds = time.perf_counter() - started
        return {"rate": done / seconds, "seconds": seconds}

    def _fill(self, count: int, payload: object = None) -> None:
        try:
            self.enqueue_many([payload] * count)
        except NotOffered:
            for _ in range(count):
                self.enqueue(payload)

    def role_stock(self, count: int) -> None:
        """Jobs that wait, whoever comes for them."""
        self._fill(count)

    def role_fill(self, count: int) -> None:
        """As many no-op jobs for a worker, with one before them and one after them that are noted."""
        self.enqueue(FIRST, priority=1)
        self._fill(count)
        self.enqueue(LAST, priority=-1)

    def role_left(self) -> int:
        return self.left()

    def role_produce(self, first: int, count: int) -> dict[str, int]:
        """Wait for a line, then store `count` numbered jobs, one for each commit; the moments in nanoseconds."""
        self.enqueue(-1)
        print("ready", flush=True)
        sys.stdin.readline()
        started = time.monotonic_ns()
        for number in range(first, first + count):
            self.enqueue(number)
        return {"started": started, "ended": time.monotonic_ns()}

    def role_ping(self, count: int, longest_gap_ms: int, seed: int) -> list[int]:
        """One job after each random gap, once the one before has begun: the moment that each was committed."""
        gaps = random.Random(seed)
        moments = []
        for number in range(count):
            self._wait_until_begun(number - 1)
            time.sleep(gaps.uniform(0.001, longest_gap_ms / 1_000))
            self.enqueue(number)
            moments.append(time.monotonic_ns())
        self._wait_until_begun(count - 1)
        return moments

    def _wait_until_begun(self, number: int) -> None:
        folder = Path(os.environ[notes.FOLDER])
        deadline = time.monotonic() + 60.0
        while number >= 0 and not any(what == str(number) for what, _ in notes.read(folder)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"job {number} was never begun")
            time.sleep(0.005)

    def role_work(self) -> None:
        """Become the real worker."""
        command = self.worker()
        os.execvp(command[0], list(command))  # noqa: S606


def _timed(step: Callable[[], object], count: int) -> dict[str, float]:
    """Repeat `step`, and weigh it: operations and the processor's microseconds for each."""
    done = 0
    cpu = time.process_time()
    started = time.perf_counter()
    while done < count and time.perf_counter() - started < LONGEST:
        for _ in range(min(LOOK_AFTER, count - done)):
            step()
            done += 1
    seconds = time.perf_counter() - started
    return {"rate": done / seconds, "seconds": seconds, "cpu_us": (time.process_time() - cpu) / done * 1e6}


def main(contender: type[Program]) -> None:
    """Play the role that the command line names."""
    role, folder, *arguments = sys.argv[1:]
    program = contender(Path(folder))
    try:
        result = program.play(role, *(int(a) if a.isdigit() else a for a in arguments))
    except NotOffered:
        result = None
    print(RESULT + json.dumps(result), flush=True)
