"""A worker reduced to what crash detection needs: it takes its byte, claims under it, and says so."""

import os
import selectors
import sys
import time
from collections.abc import Callable
from functools import partial

from django_alkstore import clock
from django_alkstore.dialects import Operations
from django_alkstore.dialects.base import ClaimedJob
from django_alkstore.dialects.liveness import Liveness
from django_alkstore.dialects.transactions import write_statement
from django_alkstore.services.recovery import Recovery, recover_batch


def say(text: str) -> None:
    sys.stdout.write(text + "\n")  # in one piece: a forked child writes to the same pipe
    sys.stdout.flush()


def claim(liveness: Liveness, queue: str, limit: int = 100) -> list[ClaimedJob]:
    """Claim as a worker does."""

    def statement(db: Operations) -> list[ClaimedJob]:
        return db.claim(queue, liveness.holder, limit, clock.now_us(), liveness.file)

    return write_statement("default", statement)


class Worker(Liveness):
    """Claims at its start."""

    def __init__(self, queue: str) -> None:
        super().__init__("default")
        self.rows = claim(self, queue)
        say(f"claimed {len(self.rows)} as {self.holder}")


def obey(**commands: Callable[[], object]) -> None:
    """Run the command that each line of the standard input names, until that ends."""
    for line in sys.stdin:
        commands[line.strip()]()
        say(f"did {line.strip()}")


def watch_for_deaths(liveness: Liveness, enough: Callable[[], bool], longest: float) -> None:
    """Look for dead workers as a worker does, until `enough` is true or `longest` seconds have passed."""
    recovery = Recovery("default", liveness)
    ends = time.monotonic() + longest
    with selectors.DefaultSelector() as selector:
        events = liveness.fileno()
        if events is not None:
            selector.register(events, selectors.EVENT_READ)
        while True:
            recovery.step()
            left = ends - time.monotonic()
            if enough() or left <= 0:
                return
            selector.select(min(left, recovery.due_in()))
            if liveness.take_events():
                recovery.note_event()


def recover(liveness: Liveness) -> int:
    """Recover every job whose worker is known to be dead: how many."""
    count = 0
    while recovered := recover_batch("default", liveness):
        count += recovered
    return count


die = partial(os._exit, 1)
