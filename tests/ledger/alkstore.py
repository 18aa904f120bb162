"""Handlers for the worker tests. What they do is in their payload; what they did is in `Entry`."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from django.db import connection, transaction

from django_alkstore.exceptions import Discard, Retry, Snooze
from django_alkstore.registry import delivery, handler
from django_alkstore.services import JobHandle
from tests.ledger.models import Entry


def say(text: str) -> None:
    print(text, flush=True)


@handler("noop")
def noop(job: JobHandle) -> None:
    pass


@handler("record")
def record(job: JobHandle) -> None:
    """Fails on a second delivery: the job id is unique."""
    Entry.objects.create(text=str(job.payload), job_id=job.id)


@handler("ledger", atomic=True)
def ledger(job: JobHandle) -> None:
    """Its row and its ack commit together."""
    Entry.objects.create(text=str(job.payload), job_id=job.id)
    if job.payload == "fail":
        raise ValueError("after the row")


@handler("async")
async def record_async(job: JobHandle) -> None:
    await Entry.objects.acreate(text=str(job.payload), job_id=job.id)


@handler("wait")
def wait(job: JobHandle) -> None:
    """Says that it runs, and runs until the file that its payload names exists."""
    Entry.objects.create(text=f"started {job.attempt}")
    say(f"running {job.id}")
    while not Path(job.payload).exists():
        if job.lease_lost.wait(0.02):
            say(f"told that the lease of {job.id} is lost")
            return
    say(f"done {job.id}")


@handler("stubborn", time_limit=0.5)
def stubborn(job: JobHandle) -> None:
    """As `wait`, with a short time limit that it ignores."""
    say(f"running {job.id}")
    while not Path(job.payload).exists():
        threading.Event().wait(0.02)
    say(f"late end of {job.id}: {job.ack()}")


class Rude(BaseException):
    pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _raise(error: BaseException) -> None:
    raise error


def _leave_broken_transaction() -> None:
    transaction.atomic().__enter__()
    Entry.objects.create(text="never committed")


def _leave_manual_commit() -> None:
    transaction.set_autocommit(False)
    Entry.objects.create(text="never committed")


def _close_in_transaction() -> None:
    transaction.atomic().__enter__()
    connection.close()


HOSTILE: dict[str, Any] = {
    "exit": lambda: sys.exit("leaving"),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "rude": lambda: _raise(Rude("rude")),
    "unprintable": lambda: _raise(Unprintable()),
    "huge": lambda: _raise(ValueError("x" * 5_000_000)),
    "broken transaction": _leave_broken_transaction,
    "manual commit": _leave_manual_commit,
    "close": lambda: connection.close(),  # the thread's own connection
    "close in transaction": _close_in_transaction,
    "retry": lambda: _raise(Retry("later", delay=3_600)),
    "discard": lambda: _raise(Discard("no use")),
    "snooze": lambda: _raise(Snooze(3_600)),
    "bad retry": lambda: _raise(Retry(delay=-1)),
    "fine": lambda: None,
}


@handler("hostile")
def hostile(job: JobHandle) -> None:
    HOSTILE[job.payload]()


@handler("deadly")
def deadly(job: JobHandle) -> None:
    """Takes its process with it."""
    say(f"running {job.id}")
    os.kill(os.getpid(), signal.SIGKILL)


@delivery("mail")
def mail(job: JobHandle) -> None:
    Entry.objects.create(text=str(job.payload), job_id=job.id)
