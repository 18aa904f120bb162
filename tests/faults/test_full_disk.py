"""The disk is full, at every step of every operation: the caller is told, and no half-written state is left."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction

from django_alkstore import services
from django_alkstore.clock import ManualClock
from django_alkstore.models import Job
from django_alkstore.services import presence
from tests.faults.tools import (
    ALIAS,
    TROUBLE,
    UNDER,
    SmallDisk,
    Store,
    everything,
    integrity,
    limit_file_size,
    pauses,
    without_room,
)
from tests.ledger.models import Entry
from tests.ledger.tools import database, wait_for_state
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

BOTH = pytest.mark.django_db(transaction=True, databases=["default", "other"])

LONG = "x" * 30_000
"""Some pages. An error is cut at 10,000 characters, and kept twice."""
LONG_NAME = "w" * 250


def fill_free_pages() -> None:
    """Use up what earlier deletes have left, so that whatever grows needs a page of the disk."""
    with connection.cursor() as cursor:
        cursor.execute("VACUUM")


def long_jobs(count: int, **options: Any) -> list[int]:
    return services.enqueue_many("mail", [LONG] * count, **options)


def claimed(count: int = 1, **options: Any) -> list[services.JobHandle]:
    services.enqueue_many("mail", [None] * count, **options)
    return services.claim_batch("mail", "w", limit=count)


def order() -> None:
    with transaction.atomic():
        Entry.objects.create(text=LONG[:150])
        services.outbox_enqueue_tx("mail", LONG)


def declared(count: int = 40) -> None:
    for number in range(count):
        services.schedule(f"s{number}", "@every 1s", "mail", LONG[:3_000])


# What is made ready with room, and what is then asked for without. The second may be one of many steps.
GROWING: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "enqueue": (lambda: None, lambda _: services.enqueue("mail", LONG)),
    "enqueue with a key": (lambda: None, lambda _: services.enqueue("mail", LONG, unique_key="k")),
    "get_or_enqueue": (lambda: None, lambda _: services.get_or_enqueue("mail", "k", LONG)),
    "enqueue_many": (lambda: None, lambda _: long_jobs(3)),
    "an order and its job": (lambda: None, lambda _: order()),
    "retry": (claimed, lambda handles: handles[0].retry(LONG)),
    "fail": (claimed, lambda handles: handles[0].fail(LONG)),
    "schedule": (lambda: None, lambda _: services.schedule("nightly", "@every 1h", "mail", LONG)),
}


@pytest.mark.parametrize(("prepare", "act"), GROWING.values(), ids=GROWING.keys())
def test_without_room_the_caller_is_told_and_nothing_is_half_written(
    prepare: Callable[[], Any], act: Callable[[Any], Any]
) -> None:
    """Refused at its first page, at its second, and so on, until there is room for all of it."""
    ready = prepare()
    fill_free_pages()
    before = everything()
    refused = 0
    while True:
        try:
            with without_room(refused):
                act(ready)
            break
        except OperationalError as error:
            assert "full" in str(error)  # noqa: PT017  whether it raises is what is found out
            assert everything() == before
            assert not connection.in_atomic_block
            refused += 1
            fill_free_pages()
    assert refused >= 2, "the disk was never full"
    assert everything() != before
    assert integrity(database()) == "ok"


def lapsed(count: int) -> None:
    claimed(count)
    Job.objects.update(lease_expires_at=0)


# Steps that each need no page, or now and then one: repeated until the disk is full.
CREEPING: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "claim_batch": (
        lambda: services.enqueue_many("mail", [None] * 300),
        lambda _: services.claim_batch("mail", LONG_NAME, limit=20),
    ),
    "ack": (lambda: claimed(900), lambda handles: handles.pop().ack()),
    "sweep": (lambda: lapsed(150), lambda _: services.sweep("mail")),
    "tick": (declared, lambda _: services.tick()),
    "lock": (lambda: iter(range(1_000)), lambda numbers: _lock(next(numbers))),
    "cancel": (lambda: services.enqueue_many("mail", [None] * 900), lambda ids: services.cancel(ids.pop())),
}


def _lock(number: int) -> bool:
    return services.lock(f"{number}-{'n' * 110}", owner=LONG_NAME).acquire()


@pytest.mark.parametrize(("prepare", "act"), CREEPING.values(), ids=CREEPING.keys())
def test_a_step_that_finds_the_disk_full_changes_nothing_and_succeeds_once_there_is_room(
    prepare: Callable[[], Any], act: Callable[[Any], Any], clock: ManualClock
) -> None:
    ready = prepare()
    fill_free_pages()
    clock.advance(5)  # schedules are due, leases of 300 s are not over
    with without_room():
        while True:
            before = everything()
            try:
                assert act(ready), "it never needed a page: the test is void"
            except OperationalError as error:
                assert "full" in str(error)  # noqa: PT017  whether it raises is what is found out
                break
        assert everything() == before
        assert not connection.in_atomic_block
    assert integrity(database()) == "ok"
    assert act(ready)


def test_what_needs_no_page_goes_on_on_a_full_disk(clock: ManualClock) -> None:
    """Leases are renewed, jobs given back, locks renewed and freed, and pruning makes the room that is missing."""
    services.enqueue_many("old", [LONG] * 20)
    Job.objects.update(state="completed", finished_at=clock.now())
    clock.advance(90_000)
    first, second = claimed(2)
    held = services.lock("report", ttl=600)
    assert held.acquire()
    fill_free_pages()
    with without_room():
        assert first.heartbeat()
        assert second.release()
        assert held.renew()
        assert held.release()
        with pytest.raises(OperationalError, match="full"):
            services.enqueue("mail", LONG)
        assert services.prune()["completed"] == 20
        assert services.enqueue("mail", LONG).pk


# In processes


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process")
def test_every_service_raises_and_changes_nothing_where_no_write_reaches_the_disk(
    start: Callable[..., Process],
) -> None:
    """Not even one that needs no page: each write of the process fails."""
    code = """
import resource, sys
from django.db import DatabaseError, connection, transaction
from django_alkstore.services import *
ids = enqueue_many("mail", range(6))
acked, retried, failed, beaten, released = claim_batch("mail", "w", limit=5)
enqueue("more", 1)
schedule("often", "@every 1h", "mail")
held = lock("held")
held.acquire()
calls = {
    "enqueue": lambda: enqueue("mail", 1), "enqueue_many": lambda: enqueue_many("mail", [1, 2]),
    "get_or_enqueue": lambda: get_or_enqueue("mail", "k", 1), "claim": lambda: claim_batch("more", "w"),
    "ack": acked.ack, "retry": lambda: retried.retry("x"), "fail": lambda: failed.fail("x"),
    "heartbeat": beaten.heartbeat, "release": released.release, "cancel": lambda: cancel(ids[5]),
    "lock": lambda: lock("another").acquire(), "renew": held.renew, "free": held.release,
    "schedule": lambda: schedule("new", "@every 1h", "mail"), "pause": lambda: pause_schedule("often"),
    "tick": lambda: fire_due(), "unschedule": lambda: unschedule("often"),
}
def fire_due():
    from django_alkstore import clock
    from datetime import timedelta
    return tick(clock.now() + timedelta(hours=2))
print("ready", flush=True)
sys.stdin.readline()
for name, call in calls.items():
    try:
        call()
    except DatabaseError as error:
        print("refused", name, error, flush=True)
    else:
        print("WENT THROUGH", name, flush=True)
    assert not connection.in_atomic_block
print("all tried", flush=True)
sys.stdin.readline()
assert acked.ack() and enqueue("mail", "after").pk and held.renew()
print("recovered", flush=True)
"""
    process = start("-c", code)
    process.wait_for("ready")
    before = everything()
    limit_file_size(process, 0)
    process.tell("go")
    process.wait_for("all tried")
    assert "WENT THROUGH" not in process.output
    assert process.output.count("refused") == 17
    assert everything() == before
    limit_file_size(process, -1)
    process.tell("go")
    process.wait_for("recovered")
    assert process.wait() == 0
    assert integrity(database()) == "ok"


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process")
def test_a_worker_and_a_scheduler_whose_disk_is_full_for_a_while_go_on_by_themselves(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    open_end = tmp_path / "open"
    running = services.enqueue("mix", str(open_end))
    services.schedule("often", "@every 1s", "noop")
    process = start("run_alkstore")
    process.wait_for("fired often")
    process.wait_for(f"running {running.pk}")
    limit_file_size(process, 0)
    open_end.touch()
    process.wait_for(f"done {running.pk}")
    process.wait_for(f"{TROUBLE} while working", 2)
    process.wait_for(f"{TROUBLE} while ticking", 2)
    assert process.popen.poll() is None
    assert Job.objects.get(pk=running.pk).state == "processing"
    waiting = services.enqueue("noop", None)  # this process has room
    limit_file_size(process, -1)
    process.wait_for("database is back: working")
    process.wait_for("database is back: ticking")
    wait_for_state("completed", running.pk, waiting.pk)
    assert (Job.objects.get(pk=running.pk).attempts, Job.objects.get(pk=running.pk).errors) == (1, [])
    assert process.output.count(f"running {running.pk}") == 1
    assert "Traceback" not in process.output
    boundaries = list(Job.objects.filter(schedule="often").values_list("fire_at", flat=True))
    assert len(set(boundaries)) == len(boundaries)
    assert integrity(database()) == "ok"


@BOTH
def test_a_failure_for_whose_text_there_is_no_room_is_recorded_once_there_is(store: Store, tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    with store.raw() as raw:
        raw.execute("VACUUM")
    job = services.enqueue("hostile", "huge", max_attempts=1, using=ALIAS)
    with store.raw() as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (count,) = raw.execute("PRAGMA page_count").fetchone()
    fault.write_text(f"PRAGMA max_page_count = {count}")
    process = store.start("-c", UNDER, str(fault), "run_queue", "hostile")
    process.wait_for(TROUBLE, 2)
    assert "database or disk is full" in process.output
    assert store.job(job.pk).state == "processing"
    fault.unlink()
    store.wait_for_state("dead", job.pk)
    assert [entry["attempt"] for entry in store.job(job.pk).errors] == [1]
    assert integrity(store.path) == "ok"


# A small disk


def order_elsewhere() -> None:
    with transaction.atomic(using=ALIAS):
        Entry.objects.using(ALIAS).create(text=LONG[:150])
        services.outbox_enqueue_tx("mail", LONG, using=ALIAS)


@BOTH
@pytest.mark.parametrize(
    "act",
    [
        lambda: services.enqueue("mail", LONG, using=ALIAS),
        lambda: services.enqueue_many("mail", [LONG] * 3, using=ALIAS),
        order_elsewhere,
    ],
    ids=["enqueue", "enqueue_many", "an order and its job"],
)
def test_on_a_disk_that_is_really_full_the_caller_is_told_and_nothing_is_half_written(
    small_disk: SmallDisk, act: Callable[[], object]
) -> None:
    """Refused at each block that is missing, until there is room for all of it."""
    before = everything(ALIAS)
    refused = 0
    while True:
        small_disk.fill(leaving=refused)
        try:
            act()
            break
        except OperationalError as error:
            assert "full" in str(error)  # noqa: PT017  whether it raises is what is found out
            assert everything(ALIAS) == before
            assert not connections[ALIAS].in_atomic_block
            refused += 1
    assert refused >= 2, "the disk was never full"
    assert everything(ALIAS) != before
    assert integrity(small_disk.store.path) == "ok"


@BOTH
def test_a_worker_whose_disk_is_really_full_says_so_waits_longer_each_time_and_goes_on_once_there_is_room(
    small_disk: SmallDisk, tmp_path: Path
) -> None:
    store, open_end = small_disk.store, tmp_path / "open"
    running = services.enqueue("wait", str(open_end), using=ALIAS)
    waiting = services.enqueue("noop", None, delay=1, using=ALIAS)
    process = store.start("run_queue")
    process.wait_for(f"running {running.pk}")
    # A sign that cannot be left is told of as well, and tried again after a minute.
    wait_until(lambda: presence.signs(ALIAS).exists(), "it has left its signs of life")
    small_disk.fill()
    open_end.touch()
    process.wait_for(TROUBLE, 4)
    assert all("full" in line for line in process.lines if TROUBLE in line)
    found = pauses(process)
    assert found == sorted(found)
    assert found[-1] >= 4 * found[0]
    assert process.popen.poll() is None
    with pytest.raises(OperationalError, match="full"):
        services.enqueue("noop", LONG, using=ALIAS)
    assert store.job(running.pk).state == "processing"
    small_disk.make_room()
    process.wait_for("database is back: working")
    store.wait_for_state("completed", running.pk, waiting.pk)
    assert (store.job(running.pk).attempts, store.job(running.pk).errors) == (1, [])
    assert process.output.count(f"running {running.pk}") == 1
    assert "Traceback" not in process.output
    assert integrity(store.path) == "ok"
