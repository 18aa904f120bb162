"""Handlers for the tests of a worker's promises. The tests install this package as an app of their workers."""

import asyncio
import os
import signal
import sqlite3
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

from asgiref.sync import sync_to_async
from django.db import DatabaseError, connection, transaction
from django.utils import timezone, translation

from django_alkstore.exceptions import Discard, Retry, Snooze
from django_alkstore.registrations import Registration, register
from django_alkstore.registry import delivery, handler
from django_alkstore.services import JobHandle
from tests.ledger.models import Entry


def say(text: str) -> None:
    sys.stdout.write(text + "\n")  # in one piece: the log writes to the same pipe
    sys.stdout.flush()


def wait_for_file(path: str) -> None:
    while not Path(path).exists():
        threading.Event().wait(0.02)


def _keep_transaction_open(job: JobHandle, until: str) -> None:
    with transaction.atomic():
        Entry.objects.create(text="in a transaction", job_id=job.id)
        say(f"transaction of {job.id}")
        wait_for_file(until)
        try:
            Entry.objects.create(text="too late")
        except DatabaseError:
            say(f"late row of {job.id} refused")
            raise


@handler("open-transaction", time_limit=1)
def open_transaction(job: JobHandle) -> None:
    """Keeps its own transaction open until the file of its payload exists."""
    _keep_transaction_open(job, job.payload)


@handler("long-transaction")
def long_transaction(job: JobHandle) -> None:
    _keep_transaction_open(job, job.payload)


@handler("late-transaction", time_limit=0.5)
def late_transaction(job: JobHandle) -> None:
    """Opens its transaction when the first file of its payload exists, and keeps it open until the second does."""
    begin, end = job.payload
    say(f"running {job.id}")
    wait_for_file(begin)
    _keep_transaction_open(job, end)


@handler("reconnecting", time_limit=0.5)
def reconnecting(job: JobHandle) -> None:
    """As `late-transaction`; then opens a second transaction on a new connection, as code does that retries."""
    begin, end = job.payload
    try:
        _keep_transaction_open(job, begin)
    except DatabaseError:
        connection.close()
    _keep_transaction_open(job, end)


@handler("short-atomic", atomic=True, time_limit=2)
def short_atomic(job: JobHandle) -> None:
    """Holds the writer lock for as many seconds as its payload says."""
    threading.Event().wait(job.payload)
    Entry.objects.create(text="short", job_id=job.id)


@handler("limited-atomic", atomic=True, time_limit=0.5)
def limited_atomic(job: JobHandle) -> None:
    Entry.objects.create(text="limited", job_id=job.id)


@handler("silent")
def silent(job: JobHandle) -> None:
    """Prints without a flush; the first file of its payload says that it did. It runs until the second exists."""
    print(f"output of {job.id}")
    told, end = job.payload
    Path(told).touch()
    wait_for_file(end)


@handler("gives-up")
async def gives_up(job: JobHandle) -> None:
    """Gives up waiting for a function that runs in another thread."""
    way, path = job.payload
    call = sync_to_async(wait_for_file)(path) if way == "sync_to_async" else asyncio.to_thread(wait_for_file, path)
    try:
        await asyncio.wait_for(call, 0.1)
    except TimeoutError:
        say(f"{job.id} gave up")


@handler("save-place")
def save_place(job: JobHandle) -> None:
    """Runs until the worker is told to stop, and then comes back later."""
    say(f"running {job.id}")
    job.stopping.wait()
    raise Snooze(0)


@handler("locked-out")
def locked_out(job: JobHandle) -> None:
    """Meets a lock error of the database as often as its payload says."""
    database, times = job.payload
    _deliveries[job.id] = _deliveries.get(job.id, 0) + 1
    say(f"delivery of {job.id} with attempt {job.attempt}")
    if _deliveries[job.id] > times:
        return
    with closing(sqlite3.connect(database, isolation_level=None)) as raw:
        raw.execute("BEGIN IMMEDIATE")
        try:
            with transaction.atomic():
                Entry.objects.create(text="never")
        finally:
            raw.execute("ROLLBACK")


_deliveries: dict[int, int] = {}


@handler("read-and-write")
def read_and_write(job: JobHandle) -> None:
    """Reads before it writes, which SQLite refuses in a deferred transaction if another has written in between."""
    with transaction.atomic():
        count = Entry.objects.count()
        Entry.objects.create(text=f"after {count}", job_id=job.id)


@handler("poison")
def poison(job: JobHandle) -> None:
    """Nothing, or (payload: "poison") takes its process with it."""
    if job.payload == "poison":
        say(f"poisoned by {job.id}")
        os.kill(os.getpid(), signal.SIGKILL)


@handler("batch")
def batch(job: JobHandle) -> None:
    """Tells when it ended; with a payload, it first waits for that file."""
    if job.payload is not None:
        say(f"running {job.id}")
        wait_for_file(job.payload)
    say(f"ended {job.id} at {time.time()}")


class _Naps:
    running = most = 0


@handler("nap")
@handler("nap-too")
async def nap(job: JobHandle) -> None:
    """Waits as many seconds as its payload says."""
    _Naps.running += 1
    _Naps.most = max(_Naps.most, _Naps.running)
    await asyncio.sleep(job.payload)
    _Naps.running -= 1


@handler("most-naps")
def most_naps(job: JobHandle) -> None:
    Entry.objects.create(text=str(_Naps.most))


@handler("nap-and-write")
async def nap_and_write(job: JobHandle) -> None:
    await asyncio.sleep(job.payload)
    await Entry.objects.acreate(text="rested", job_id=job.id)


async def _wait_for_file(job: JobHandle, path: str) -> None:
    say(f"running {job.id}")
    try:
        while not Path(path).exists():
            if job.lease_lost.is_set():
                say(f"told that the lease of {job.id} is lost")
                return
            if job.stopping.is_set() and path == "stopping":
                raise Snooze(0)
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        await asyncio.sleep(0.02)
        say(f"cancelled {job.id}")
        raise


@handler("wait-async")
async def wait_async(job: JobHandle) -> None:
    """Runs until the file of its payload exists, until its lease is lost or, for "stopping", until the worker stops."""
    await _wait_for_file(job, job.payload)


@handler("limited-async", time_limit=0.5)
async def limited_async(job: JobHandle) -> None:
    await _wait_for_file(job, job.payload)


@handler("refuses-to-end", time_limit=0.5)
async def refuses_to_end(job: JobHandle) -> None:
    while True:
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            say(f"cancelled {job.id}")


@handler("blocks")
async def blocks(job: JobHandle) -> None:
    say(f"running {job.id}")
    wait_for_file(job.payload)


@handler("blocks-too-long", time_limit=0.5)
async def blocks_too_long(job: JobHandle) -> None:
    await asyncio.create_task(blocks(job))


@handler("open-transaction-async")
async def open_transaction_async(job: JobHandle) -> None:
    """Leaves a transaction open where its sync functions run."""
    await sync_to_async(transaction.atomic().__enter__)()
    say(f"transaction of {job.id}")
    await asyncio.sleep(job.payload)


@handler("late-transaction-async", time_limit=0.5)
async def late_transaction_async(job: JobHandle) -> None:
    await sync_to_async(_keep_transaction_open)(job, job.payload)


@handler("surroundings-async")
async def surroundings_async(job: JobHandle) -> None:
    seen = f"{translation.get_language()} {timezone.get_current_timezone_name()}"
    translation.activate("de")
    timezone.activate("Asia/Tokyo")
    await asyncio.sleep(0.02)
    await Entry.objects.acreate(text=seen, job_id=job.id)


async def _exit() -> None:
    sys.exit("in a task")


@handler("hostile-async")
async def hostile_async(job: JobHandle) -> None:
    if job.payload == "task that exits":
        await asyncio.create_task(_exit())
    elif job.payload == "cancel everything":
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(0)
    elif job.payload == "raise CancelledError":
        raise asyncio.CancelledError
    elif job.payload == "retry":
        raise Retry("later", delay=3_600)
    elif job.payload == "discard":
        raise Discard("never")
    elif job.payload == "snooze":
        raise Snooze(3_600)
    elif job.payload == "ack":
        await sync_to_async(job.ack)()


@delivery("letters-async")
async def letters_async(job: JobHandle) -> None:
    await Entry.objects.acreate(text=str(job.payload), job_id=job.id)


@handler("poison-async")
async def poison_async(job: JobHandle) -> None:
    """Ends its process if its payload says so."""
    if job.payload == "poison":
        say(f"poisoned by {job.id}")
        os.kill(os.getpid(), signal.SIGKILL)


def _resolve(job: JobHandle) -> Registration:
    """A coroutine or a sync handler, by the first word of the payload. Both run until the file of the second exists."""
    target = wait_in_loop if job.payload[0] == "async" else wait_in_thread
    return Registration(job.queue, target, 3_600.0, atomic=False, module=__name__)


async def wait_in_loop(job: JobHandle) -> None:
    await _wait_for_file(job, job.payload[1])


def wait_in_thread(job: JobHandle) -> None:
    say(f"running {job.id}")
    wait_for_file(job.payload[1])


for _queue in ("tasks", "other-tasks"):
    register(Registration(_queue, wait_in_thread, 3_600.0, atomic=False, module=__name__, resolve=_resolve))


def _save_and_ack(job: JobHandle) -> None:
    with transaction.atomic():
        Entry.objects.create(text="exactly once", job_id=job.id)
        job.ack_tx()
        if job.payload == "fail":
            raise ValueError("after the ack")


@handler("exact-async")
async def exact_async(job: JobHandle) -> None:
    await sync_to_async(_save_and_ack)(job)
