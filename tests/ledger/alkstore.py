"""Handlers for the worker tests. What they do is in their payload; what they did is in `Entry`."""

import asyncio
import json
import os
import signal
import sqlite3
import sys
import threading
from contextlib import closing, suppress
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from django.db import DatabaseError, IntegrityError, connection, transaction

from django_alkstore import clock
from django_alkstore.exceptions import Discard, LeaseLost, Retry, Snooze
from django_alkstore.models import Job
from django_alkstore.registry import delivery, handler
from django_alkstore.services import JobHandle
from tests.ledger.models import Entry


def say(text: str) -> None:
    sys.stdout.write(text + "\n")  # in one piece: the log writes to the same pipe
    sys.stdout.flush()


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


class NotText(Exception):
    def __str__(self) -> Any:
        return 42  # noqa: PLE0307  that is the point


class BadRepr(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class BadInit(Exception):
    def __init__(self) -> None:
        raise RuntimeError("no exception")


class Liar(Exception):
    """Even asking for its class raises."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")


class OwnRetry(Retry):
    """A project's own, which forgets its parent's `__init__`."""

    def __init__(self) -> None:
        pass


class OwnSnooze(Snooze):
    def __init__(self) -> None:
        pass


def _raise(error: BaseException) -> None:
    raise error


def _raise_circular() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


def _recurse(depth: int) -> None:
    if depth:
        _recurse(depth - 1)
    raise ValueError("deep")


def _raise_deep_frames() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(5_000)
    try:
        _recurse(1_000)
    finally:
        sys.setrecursionlimit(limit)


def _swallow_integrity_error() -> None:
    with transaction.atomic():
        for _ in range(2):
            with suppress(IntegrityError):
                Entry.objects.create(text="never committed", job_id=-1)


def _leave_open_cursor() -> None:
    cursor = connection.cursor()
    cursor.execute("SELECT 1 UNION SELECT 2")
    cursor.fetchone()
    HELD.append(cursor)


def _begin_past_django() -> None:
    with connection.cursor() as cursor:
        cursor.execute("BEGIN IMMEDIATE")
    Entry.objects.create(text="never committed")


def _spoil_the_connection() -> None:
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA query_only = 1")


def _stop_inside_a_savepoint() -> None:
    transaction.atomic().__enter__()
    transaction.atomic().__enter__()
    Entry.objects.create(text="never committed")
    raise ValueError("two blocks deep")


_trace: ContextVar[str] = ContextVar("trace", default="fine")


def _set_context() -> None:
    _trace.set("what another job has set")


def _without_end() -> None:
    _without_end()


HELD: list[Any] = []
"""What handlers leave behind, so that no garbage collector mends it."""
FAR = 252_000_000_000
"""Seconds: a length that a date can hold, from now past the year 9999."""


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
    "close": lambda: connection.close(),  # noqa: PLW0108  the thread's own connection, when it is called
    "close in transaction": _close_in_transaction,
    "retry": lambda: _raise(Retry("later", delay=3_600)),
    "discard": lambda: _raise(Discard("no use")),
    "snooze": lambda: _raise(Snooze(3_600)),
    "bad retry": lambda: _raise(Retry(delay=-1)),
    "fine": lambda: None,
    "write": lambda: Entry.objects.create(text="fine"),
    "not text": lambda: _raise(NotText()),
    "bad repr": lambda: _raise(BadRepr("with a message")),
    "bad init": BadInit,
    "circular": _raise_circular,
    "group": lambda: _raise(ExceptionGroup("several", [ValueError("one"), TypeError("two")])),
    "base group": lambda: _raise(BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError("two")])),
    "deep frames": _raise_deep_frames,
    "odd text": lambda: _raise(ValueError("nul \x00, surrogate \ud800, \N{PILE OF POO}")),
    "stop iteration": lambda: _raise(StopIteration("early")),
    "generator exit": lambda: _raise(GeneratorExit()),
    "memory": lambda: _raise(MemoryError()),
    "recursion": _without_end,
    "swallowed": _swallow_integrity_error,
    "open cursor": _leave_open_cursor,
    "raw begin": _begin_past_django,
    "spoil the connection": _spoil_the_connection,
    "savepoint": _stop_inside_a_savepoint,
    "liar": lambda: _raise(Liar("lies")),
    "own retry": lambda: _raise(OwnRetry()),
    "own snooze": lambda: _raise(OwnSnooze()),
    "retry past all dates": lambda: _raise(Retry(delay=FAR)),
    "snooze past all dates": lambda: _raise(Snooze(FAR)),
    "retry for ever": lambda: _raise(Retry(delay=timedelta.max)),
    "snooze for nan": lambda: _raise(Snooze(float("nan"))),
    "snooze for text": lambda: _raise(Snooze("soon")),  # type: ignore[arg-type]
    "set the context": _set_context,
    "never end": lambda: threading.Event().wait(),
    "retry now": lambda: _raise(Retry(delay=timedelta(0))),
}


@handler("hostile")
def hostile(job: JobHandle) -> None:
    if job.payload == "ack in raw begin":
        _begin_past_django()
        job.ack()
    else:
        HOSTILE[job.payload]()


@handler("deadly")
def deadly(job: JobHandle) -> None:
    """Takes its process with it."""
    say(f"running {job.id}")
    os.kill(os.getpid(), signal.SIGKILL)


@delivery("mail")
def mail(job: JobHandle) -> None:
    Entry.objects.create(text=str(job.payload), job_id=job.id)


# What follows is for the worker tests alone.


@handler("mix")
def mix(job: JobHandle) -> None:
    """Nothing, or (payload: a path) wait for that file."""
    if job.payload is not None:
        say(f"running {job.id}")
        while not Path(job.payload).exists():
            threading.Event().wait(0.02)
        say(f"done {job.id}")


@handler("fail")
def fail(job: JobHandle) -> None:
    say(f"attempt {job.attempt} of {job.id}")
    raise ValueError(f"no luck with {job.payload}")


@handler("tell")
def tell(job: JobHandle) -> None:
    """Says what it was given, and how its connection stands."""
    seen = {name: getattr(job, name) for name in ("id", "queue", "payload", "attempt", "max_attempts", "priority")}
    seen |= {"last_error": job.last_error, "schedule": job.schedule}
    seen |= {"moments": [str(job.enqueued_at), str(job.run_at), str(job.lease_expires_at), str(job.fire_at)]}
    seen |= {"in_atomic_block": connection.in_atomic_block, "autocommit": connection.get_autocommit()}
    seen |= {"queries": len(connection.queries), "lost": job.lease_lost.is_set()}
    Entry.objects.count()
    say(f"told {json.dumps(seen)}")


_crowd = threading.Lock()
_inside = 0
_peak = 0
_meeting: dict[int, threading.Barrier] = {}


@handler("crowd")
def crowd(job: JobHandle) -> None:
    """Meets as many others as its payload says, and notes the most that were ever inside."""
    global _inside, _peak  # noqa: PLW0603  counted across the threads
    with _crowd:
        barrier = _meeting.setdefault(job.payload, threading.Barrier(job.payload))
        _inside += 1
        _peak = max(_peak, _inside)
    try:
        barrier.wait(45)
        say(f"met {job.id}, peak {_peak}")
    finally:
        with _crowd:
            _inside -= 1
    barrier.wait(45)


def _row_then_wait(job: JobHandle) -> None:
    """On the first attempt it stays between its row and its commit until the file exists."""
    Entry.objects.create(text=f"attempt {job.attempt}", job_id=job.id)
    say(f"row of {job.id}")
    while job.attempt == 1 and not Path(job.payload).exists():
        threading.Event().wait(0.02)


@handler("doomed", atomic=True)
def doomed(job: JobHandle) -> None:
    _row_then_wait(job)


@handler("own")
def own(job: JobHandle) -> None:
    """Acks in a transaction of its own; then does what its payload says."""
    if job.payload == "roll back":
        with suppress(ZeroDivisionError), transaction.atomic():
            Entry.objects.create(text="rolled back", job_id=job.id)
            job.ack_tx()
            raise ZeroDivisionError
        raise ValueError("rolled back")
    with transaction.atomic():
        Entry.objects.create(text="own", job_id=job.id)
        job.ack_tx()
    if job.payload == "raise":
        raise ValueError("after the commit")


@handler("settle")
def settle(job: JobHandle) -> None:
    """Settles itself by the way that its payload names, and then returns, or raises where it says so."""
    way, _, after = job.payload.partition(" ")
    done = {
        "ack": job.ack,
        "fail": lambda: job.fail("by itself"),
        "retry": lambda: job.retry("by itself", delay=3_600),
    }[way]()
    say(f"{job.payload}: {done}")
    if after:
        raise ValueError("after settling")


_next_job = threading.Event()


async def _write_late() -> None:
    """Writes if it is still there when the next job runs."""
    while not _next_job.is_set():
        await asyncio.sleep(0)
    await Entry.objects.acreate(text="late")


async def _leave_another() -> None:
    try:
        await asyncio.sleep(3_600)
    finally:
        HELD.append(asyncio.create_task(_write_late()))


@handler("async-hostile")
async def async_hostile(job: JobHandle) -> None:
    """What `hostile` does, with `beside: ` before it in the thread of the ORM's calls, with `elsewhere: ` in any other;
    or what only a coroutine can."""
    await asyncio.sleep(0)
    kind = job.payload
    _next_job.clear()
    if kind == "write":
        _next_job.set()
        await Entry.objects.acreate(text=_trace.get())
    elif kind == "leave a task":
        HELD.append(asyncio.create_task(_write_late()))
    elif kind == "leave a task that leaves another":
        HELD.append(asyncio.create_task(_leave_another()))
        await asyncio.sleep(0)
    elif kind == "stop the loop afterwards":
        await Entry.objects.acount()
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, loop.stop)
    elif kind == "stop the loop":
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
    elif kind == "close the loop":
        asyncio.get_running_loop().close()
    elif kind.startswith("beside: "):
        await sync_to_async(HOSTILE[kind.removeprefix("beside: ")])()
    elif kind.startswith("elsewhere: "):
        await asyncio.to_thread(HOSTILE[kind.removeprefix("elsewhere: ")])
    else:
        HOSTILE[kind]()


@handler("exit-hard")
def exit_hard(job: JobHandle) -> None:
    say(f"running {job.id}")
    os._exit(1)


@delivery("flaky")
def flaky(job: JobHandle) -> None:
    if job.attempt < 3:
        raise ConnectionError(f"refused {job.attempt}")
    Entry.objects.create(text=str(job.payload), job_id=job.id)


@delivery("exact", atomic=True)
def exact(job: JobHandle) -> None:
    Entry.objects.create(text=str(job.payload), job_id=job.id)


@handler("self-ack")
def self_ack(job: JobHandle) -> None:
    """Waits for the file of its payload, and acks by itself."""
    say(f"running {job.id}")
    while not Path(job.payload).exists():
        threading.Event().wait(0.02)
    say(f"acked {job.id}: {job.ack()}")


@delivery("slow")
def slow(job: JobHandle) -> None:
    mix(job)


@handler("doomed-once")
def doomed_once(job: JobHandle) -> None:
    """Fails on its first attempt, and waits on the second."""
    if job.attempt == 1:
        raise ValueError("first attempt")
    mix(job)


@handler("late-failure")
def late_failure(job: JobHandle) -> None:
    mix(job)
    raise ValueError("after the wait")


@handler("locked")
def locked(job: JobHandle) -> None:
    """Meets somebody else's writer lock in its own writing."""
    with closing(sqlite3.connect(job.payload, isolation_level=None)) as raw:
        raw.execute("BEGIN IMMEDIATE")
        try:
            Entry.objects.create(text="never")
        finally:
            raw.execute("ROLLBACK")


@handler("atomic-stubborn", atomic=True, time_limit=2)
def atomic_stubborn(job: JobHandle) -> None:
    """Holds the writer lock until the file that its payload names exists, and then would write a row."""
    say(f"running {job.id}")
    while not Path(job.payload).exists():
        threading.Event().wait(0.02)
    try:
        Entry.objects.create(text="too late", job_id=job.id)
    except DatabaseError:
        say(f"late row of {job.id} refused")
        raise


@handler("paced")
@handler("paced-too")
def paced(job: JobHandle) -> None:
    """Lasts as many seconds as its payload says."""
    threading.Event().wait(job.payload)


@handler("atomic-late", atomic=True)
def atomic_late(job: JobHandle) -> None:
    """Outlives its lease, and then gives up."""
    while job.lease_expires_at > clock.now():
        threading.Event().wait(0.02)
    raise Discard("the real reason")


@handler("print")
def print_payload(job: JobHandle) -> None:
    print(job.payload)


@handler("fatal")
def fatal(job: JobHandle) -> None:
    """Nothing, or (payload: how) ends its process. `once`: on the first attempt only."""
    how, _, when = (job.payload or "").partition(" ")
    if when == "once" and job.attempt > 1:
        return
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        os._exit(1)
    elif how == "devour":
        say(f"devours {job.id}")
        kept = []
        while True:
            kept.append(b"x" * 2**22)


@handler("forks-on")
def forks_on(job: JobHandle) -> None:
    """On the first attempt it leaves a child behind, says its process id, and waits."""
    if job.attempt > 1:
        return
    child = os.fork()
    if child == 0:
        os.closerange(0, 3)
        signal.pause()
    say(f"child {child}")
    threading.Event().wait()


@handler("told-late")
def told_late(job: JobHandle) -> None:
    """On the first attempt its lease has run out at its ack, which it does not mind; the worker may then renew it."""
    if job.attempt == 1:
        Job.objects.filter(pk=job.id).update(lease_expires_at=clock.now())
    with transaction.atomic():
        Entry.objects.create(text=f"attempt {job.attempt}", job_id=job.id)
        with suppress(LeaseLost):
            job.ack_tx()
    if job.attempt == 1:
        threading.Event().wait(3)


@handler("slow-commit")
def slow_commit(job: JobHandle) -> None:
    """Its ack is committed long before its handle knows that."""
    with transaction.atomic():
        transaction.on_commit(lambda: threading.Event().wait(5) and None)
        job.ack_tx()
