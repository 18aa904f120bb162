"""docs/backup.md: what a restored backup gives out and delivers again, and what VACUUM changes."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import connection

from django_alkstore.clock import ManualClock
from django_alkstore.models import Job, Schedule
from django_alkstore.services import (
    cancel,
    claim_batch,
    enqueue,
    enqueue_many,
    get_job,
    get_or_enqueue,
    lock,
    pause_schedule,
    schedule,
    tick,
)
from tests.ledger.tools import database, wait_for_state
from tests.processes import Process

pytestmark = pytest.mark.django_db(transaction=True)

Copy = Callable[[], Callable[[], None]]


def _copy(source: str, target: str) -> None:
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)


@pytest.fixture
def back_up(tmp_path: Path) -> Iterator[Copy]:
    """Make a copy of the database; what it returns puts the copy back."""
    copy = str(tmp_path / "copy.sqlite3")

    def restore() -> None:
        connection.close()
        _copy(copy, database())

    def make() -> Callable[[], None]:
        _copy(database(), copy)
        return restore

    yield make
    connection.close()


def test_ids_are_given_out_a_second_time_and_idempotency_keys_are_not(back_up: Copy) -> None:
    enqueue("mail", "before")
    restore = back_up()
    lost = [enqueue("mail", n) for n in range(5)]
    restore()
    new = [enqueue("mail", n) for n in range(5)]
    assert [job.id for job in new] == [job.id for job in lost]
    assert {job.idempotency_key for job in new}.isdisjoint(job.idempotency_key for job in lost)
    handles = claim_batch("mail", "w", limit=6)[1:]
    assert {handle.idempotency_key for handle in handles} == {job.idempotency_key for job in new}


def test_what_was_done_since_the_backup_is_delivered_again_under_the_same_key(
    back_up: Copy, clock: ManualClock
) -> None:
    jobs = [enqueue("mail", "waiting"), enqueue("mail", "held", priority=1)]
    [held] = claim_batch("mail", "w")
    restore = back_up()
    delivered = {held.payload: held.idempotency_key}
    for handle in (held, *claim_batch("mail", "w")):
        delivered[handle.payload] = handle.idempotency_key
        assert handle.ack()
    restore()
    again = claim_batch("mail", "w", limit=5)
    assert [handle.payload for handle in again] == ["waiting"]
    clock.advance(300)  # the lease that the backup holds
    again += [handle for handle in claim_batch("mail", "w", limit=5) if handle.payload == "held"]
    assert {handle.payload: handle.idempotency_key for handle in again} == delivered
    assert {handle.id for handle in again} == {job.id for job in jobs}


def test_boundaries_since_the_backup_fire_again_with_the_same_fire_at_and_another_key(
    back_up: Copy, clock: ManualClock
) -> None:
    schedule("report", "@every 1h", "reports")
    restore = back_up()
    clock.advance(3_600)
    [fired] = tick()
    first = get_job(fired.job_id)
    clock.advance(60)
    restore()
    [fired] = tick()
    again = get_job(fired.job_id)
    assert (again.schedule, again.fire_at) == (first.schedule, first.fire_at)
    assert again.idempotency_key != first.idempotency_key


def test_a_unique_key_is_taken_again_and_the_tokens_of_locks_go_on_growing(back_up: Copy, clock: ManualClock) -> None:
    job, _ = get_or_enqueue("sync", "customer-7", None)
    restore = back_up()
    claim_batch("sync", "w")[0].ack()
    with lock("import") as held:
        token = held.token
    restore()
    clock.advance(1)
    assert get_or_enqueue("sync", "customer-7", None) == (job, False)
    with lock("import") as held:
        assert held.token > token


def test_the_way_to_take_the_work_out_of_a_copy_leaves_none(clock: ManualClock) -> None:
    """The example of the page, for a copy that is to be looked at and not to send anything."""
    enqueue_many("mail", range(3))
    claim_batch("mail", "w")
    schedule("report", "@every 1h", "reports")
    for job in Job.objects.live():
        cancel(job.id)
    for row in Schedule.objects.all():
        pause_schedule(row.name)
    clock.advance(86_400)
    assert tick() == []
    assert not Job.objects.live().exists()
    assert claim_batch("mail", "w") == []


def test_after_a_vacuum_a_running_worker_goes_on_and_no_id_comes_back(start: Callable[..., Process]) -> None:
    process = start("run_queue", "noop")
    process.wait_for("worker started")
    last = enqueue_many("noop", range(50))[-1]
    wait_for_state("completed", last)
    Job.objects.all().delete()
    with connection.cursor() as cursor:
        cursor.execute("VACUUM")
    job = enqueue("noop", None)
    assert job.id > last
    wait_for_state("completed", job.id)
    assert process.popen.poll() is None


def test_vacuum_into_makes_a_whole_copy(tmp_path: Path) -> None:
    job = enqueue("mail", {"n": 1}, delay=timedelta(days=1))
    copy = tmp_path / "copy.sqlite3"
    with connection.cursor() as cursor:
        cursor.execute("VACUUM INTO %s", [str(copy)])
    with closing(sqlite3.connect(copy)) as raw:
        assert raw.execute("SELECT id, payload FROM django_alkstore_job").fetchall() == [(job.id, '{"n":1}')]
        assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert raw.execute("SELECT seq FROM sqlite_sequence WHERE name = 'django_alkstore_job'").fetchone() == (job.id,)
