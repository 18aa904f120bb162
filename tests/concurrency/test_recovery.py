"""Crash detection without the worker around it: real processes that claim, die, stop, fork and live on."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test import override_settings

from django_alkstore import signals
from django_alkstore.clock import FIRST_US, ManualClock
from django_alkstore.dialects.liveness import Liveness
from django_alkstore.models import Job
from django_alkstore.names import LEADERSHIP_LOCK
from django_alkstore.services import claim_batch, enqueue, enqueue_many, get_job, sweep
from django_alkstore.services import recovery as module
from django_alkstore.services.locks import LockHandle, lock
from django_alkstore.services.recovery import LOOK_EVERY, LOOK_EVERY_UNTOLD, LOOKS_AFTER_EVENT, Recovery
from tests.claimer import claim, recover, watch_for_deaths
from tests.ledger.tools import database, variant
from tests.processes import Process

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(sys.platform != "linux", reason="crash detection works on Linux only"),
]

WORKER = """
import os, shutil, signal, sys
from tests.claimer import *
worker = Worker("mail")
others = []


def fork():
    held = worker.file
    if os.fork() == 0:
        say(f"child {os.getpid()} knows {worker.knows(worker.holder, held)} in {worker.file}")
        os.closerange(0, 3)
        signal.pause()


def copy():
    file = sys.argv[-1]
    shutil.copy(file, file + ".copy")
    open(file, "r+").close()


def ack():
    now = clock.now_us()
    claims = [(row.id, row.fence, now) for row in worker.rows]
    acked = write_statement("default", lambda db: db.ack(claims, now, delete=False))
    say(f"acked {len(acked)}")


obey(die=die, fork=fork, copy=copy, ack=ack, claim=lambda: others.append(Worker("mail")), close=worker.close)
"""
SOON = 10.0
"""Seconds, for what happens within one. A lease lasts 300."""

Start = Callable[..., Process]


def jobs(state: str) -> int:
    return Job.objects.filter(state=state).count()


def all_recovered() -> bool:
    return jobs("processing") == 0


def file() -> str:
    return f"{database()}-alkstore"


def worker(start: Start, claims: int = 4, **environment: str) -> Process:
    """A worker that has claimed so many new jobs."""
    enqueue_many("mail", range(claims))
    process = start("-c", WORKER, file(), **environment)
    process.wait_for(f"claimed {claims} as")
    return process


def kill(process: Process) -> None:
    process.signal(signal.SIGKILL)
    process.wait()


def only() -> Job:
    return Job.objects.get()


# Real processes


@pytest.mark.parametrize("death", ["kill", "exit"])
def test_the_jobs_of_a_dead_process_are_claimable_soon(start: Start, death: str) -> None:
    with closing(Liveness("default")) as liveness:
        process = worker(start)
        watch_for_deaths(liveness, all_recovered, 0)
        assert jobs("processing") == 4, "a living process keeps its claims"
        if death == "kill":
            process.signal(signal.SIGKILL)
        else:
            process.tell("die")
        watch_for_deaths(liveness, all_recovered, SOON)
        assert jobs("pending") == 4
        assert len(claim(liveness, "mail")) == 4
    for job in Job.objects.all():
        assert (job.attempts, job.last_error) == (2, "worker died")


def test_so_they_are_without_inotify(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inotify_simple.INotify", None)
    with closing(Liveness("default")) as liveness:
        process = worker(start)
        watch_for_deaths(liveness, all_recovered, 0)
        process.signal(signal.SIGKILL)
        watch_for_deaths(liveness, all_recovered, SOON)
        assert jobs("pending") == 4


def test_whoever_starts_next_recovers_the_jobs(start: Start) -> None:
    kill(worker(start))
    with closing(Liveness("default")) as liveness:
        assert Recovery("default", liveness).step() == 4
    assert jobs("pending") == 4


def test_a_process_that_is_suspended_keeps_its_claims(start: Start) -> None:
    process = worker(start)
    process.signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    with closing(Liveness("default")) as liveness:
        assert recover(liveness) == 0
        assert jobs("processing") == 4
        process.signal(signal.SIGCONT)
        process.tell("ack")
        process.wait_for("acked 4")
        assert recover(liveness) == 0


def test_a_child_that_lives_on_does_not_keep_its_dead_parent_alive(start: Start) -> None:
    process = worker(start)
    process.tell("fork")
    process.wait_for("knows None in None")
    [child] = [int(line.split()[1]) for line in process.lines if line.startswith("child")]
    try:
        with closing(Liveness("default")) as liveness:
            assert recover(liveness) == 0
            process.signal(signal.SIGKILL)
            watch_for_deaths(liveness, all_recovered, SOON)
            assert jobs("pending") == 4
            os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_handler_that_opens_copies_and_closes_the_file_loses_nothing(start: Start) -> None:
    process = worker(start)
    process.tell("copy")
    process.wait_for("did copy")
    with closing(Liveness("default")) as liveness:
        assert recover(liveness) == 0
        kill(process)
        assert recover(liveness) == 4


def test_two_workers_in_a_process_die_with_it_and_one_by_one(start: Start) -> None:
    process = worker(start)
    enqueue_many("mail", range(3))
    process.tell("claim")
    process.wait_for("claimed 3")
    with closing(Liveness("default")) as liveness:
        assert recover(liveness) == 0
        process.tell("close")
        process.wait_for("did close")
        assert recover(liveness) == 4
        kill(process)
        assert recover(liveness) == 3


def test_a_file_that_is_deleted_leaves_the_claims_to_their_leases(start: Start) -> None:
    process = worker(start)
    with closing(Liveness("default")) as before:
        Path(file()).unlink()
        with closing(Liveness("default")) as after:
            assert recover(after) == 0, "it cannot know, and takes no job from a living worker"
            kill(process)
            assert recover(after) == 0
            assert jobs("processing") == 4
        assert recover(before) == 4


def test_switched_off_in_the_dead_worker_leases_decide(start: Start) -> None:
    kill(worker(start, **variant(ALKSTORE={"LIVENESS": False})))
    with closing(Liveness("default")) as liveness:
        assert recover(liveness) == 0
    assert set(Job.objects.values_list("liveness", flat=True)) == {None}


def test_switched_off_in_the_living_worker_leases_decide(start: Start) -> None:
    kill(worker(start))
    with override_settings(ALKSTORE={"LIVENESS": False}), closing(Liveness("default")) as liveness:
        assert Recovery("default", liveness).due_in() == float("inf")
        assert recover(liveness) == 0
    assert jobs("processing") == 4


# What becomes of the jobs


@pytest.fixture
def observer() -> Any:
    """A living worker."""
    with closing(Liveness("default")) as liveness:
        yield liveness


def die_with(queue: str = "mail", limit: int = 1) -> str:
    """A worker claims and is gone; its id."""
    with closing(Liveness("default")) as liveness:
        assert claim(liveness, queue, limit)
        return liveness.holder


def test_the_attempt_counts_and_its_entry_says_what_happened(clock: ManualClock, observer: Liveness) -> None:
    enqueue("mail", None, delay=5)
    clock.advance(6)
    run_at = only().run_at
    holder = die_with()
    clock.advance(1)
    assert recover(observer) == 1
    job = only()
    assert (job.state, job.attempts, job.run_at) == ("pending", 1, run_at)
    assert (job.worker_id, job.lease_expires_at, job.worker_ids) == (None, None, [holder])
    assert job.last_error == "worker died"
    assert job.errors == [
        {
            "attempt": 1,
            "at": clock.now().isoformat(),
            "error": "worker died",
            "traceback": "",
            "exception": "django_alkstore.exceptions.WorkerDied",
        }
    ]
    assert recover(observer) == 0


def test_without_an_attempt_left_the_job_is_dead(clock: ManualClock, observer: Liveness) -> None:
    enqueue("mail", None, max_attempts=1)
    die_with()
    assert recover(observer) == 1
    job = only()
    assert (job.state, job.last_error, job.finished_at) == ("dead", "worker died", clock.now())


def test_from_the_second_death_in_a_row_the_job_waits_by_the_curve(clock: ManualClock, observer: Liveness) -> None:
    enqueue("mail", None, max_attempts=9, backoff_base=100)

    def dies() -> float:
        """Seconds that it waits afterwards."""
        die_with()
        recover(observer)
        wait = (only().run_at - clock.now()).total_seconds()
        clock.advance(max(0.0, wait))
        return wait

    assert dies() <= 0
    assert 200 <= dies() <= 220
    assert 400 <= dies() <= 440
    [job] = claim_batch("mail", "by hand")
    job.retry("another error", delay=0)
    assert dies() <= 0, "the one before was of another kind"
    assert dies() >= 100 * 2**5


def test_all_queues_and_batches_are_recovered_and_announced_after_the_commit(
    observer: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH", 2)
    enqueue_many("mail", range(5))
    [spent] = enqueue_many("post", [None], max_attempts=1)
    holders = {die_with("mail", 3), die_with("mail", 2), die_with("post")}
    told = []

    def hear(job_id: int, queue: str, worker_id: str, dead: bool, **_: object) -> None:
        assert not connection.in_atomic_block
        job = get_job(job_id)
        assert job is not None
        assert job.state == ("dead" if dead else "pending")
        told.append((job_id, queue, worker_id))
        assert dead == (job_id == spent)

    signals.job_abandoned.connect(hear)
    try:
        assert recover(observer) == 6
    finally:
        signals.job_abandoned.disconnect(hear)
    assert sorted(told) == sorted((job.pk, job.queue, job.worker_ids[0]) for job in Job.objects.all())
    assert {worker_id for _, _, worker_id in told} == holders


def test_only_claims_under_the_byte_of_a_dead_worker_are_judged(observer: Liveness) -> None:
    enqueue_many("mail", range(4))
    [by_hand] = claim_batch("mail", "by hand")
    with closing(Liveness("default")) as dead:
        [in_its_name] = claim_batch("mail", dead.holder)
        [elsewhere] = claim(dead, "mail", 1)
        Job.objects.filter(pk=elsewhere.id).update(liveness="1:1")
    claim(observer, "mail", 1)
    assert recover(observer) == 0
    assert by_hand.ack()
    assert in_its_name.ack()


def test_a_claim_that_another_has_taken_over_is_not_touched(clock: ManualClock, observer: Liveness) -> None:
    enqueue("mail", None)
    die_with()
    clock.advance(301)
    assert sweep() == 1
    [row] = claim(observer, "mail")
    assert recover(observer) == 0
    assert (only().fence, only().last_error) == (row.fence, "lease expired")


def test_a_history_that_cannot_be_read_is_no_obstacle(observer: Liveness) -> None:
    enqueue("mail", None)
    die_with()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_alkstore_job SET errors = 'x', last_error = CAST(x'ff' AS TEXT)")
    assert recover(observer) == 1
    assert only().last_error == "worker died"


def damage(**columns: str) -> None:
    """Store values (SQL expressions) in the leased jobs, as another program may."""
    values = ", ".join(f"{column} = {value}" for column, value in columns.items())
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE django_alkstore_job SET {values} WHERE state = 'processing'")


def test_a_claim_that_cannot_be_ended_is_left_to_the_sweep_and_stops_nobody(
    observer: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue("mail", None)
    die_with()
    damage(lease_expires_at=str(FIRST_US))
    enqueue("post", None)
    die_with("post")
    real, transactions = module.write_operations, count(1)

    def write(*arguments: Any) -> Any:
        assert next(transactions) < 10, "endless"
        return real(*arguments)

    monkeypatch.setattr(module, "write_operations", write)
    recovery = Recovery("default", observer)
    while recovery.due_in() == 0:
        recovery.step()
    assert (jobs("processing"), jobs("pending")) == (1, 1)
    assert sweep() == 1
    assert jobs("pending") == 2


# When it looks


def test_a_step_recovers_one_batch_and_is_due_again_at_once(
    observer: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH", 2)
    enqueue_many("mail", range(4))
    die_with("mail", 3)
    die_with("mail", 1)
    recovery = Recovery("default", observer)
    steps = []
    while recovery.due_in() == 0:
        steps.append(recovery.step())
    assert sorted(steps[:-1]) == [1, 1, 2]
    assert steps[-1] == 0
    assert jobs("pending") == 4


def test_it_looks_at_the_start_and_each_minute(observer: Liveness, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.clock, "waiting_from", lambda: now)
    recovery = Recovery("default", observer)
    assert recovery.due_in() == 0
    recovery.step()
    assert recovery.due_in() == LOOK_EVERY
    now += LOOK_EVERY - 1
    recovery.step()
    assert recovery.due_in() == 1
    now += 1
    recovery.step()
    assert recovery.due_in() == LOOK_EVERY
    monkeypatch.setattr(observer, "fileno", lambda: None)
    now += LOOK_EVERY
    recovery.step()
    assert recovery.due_in() == LOOK_EVERY_UNTOLD == 1


def test_after_an_event_it_looks_at_once_and_three_times_more(
    observer: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(module.clock, "waiting_from", lambda: now)
    looks = []
    monkeypatch.setattr(module, "recover_batch", lambda *_: looks.append(round(now - 100, 3)) or 0)
    recovery = Recovery("default", observer)
    recovery.step()
    looks.clear()
    recovery.note_event()
    for _ in LOOKS_AFTER_EVENT:
        recovery.step()
        now += recovery.due_in()
    assert looks == [0, 0.01, 0.1, 1]
    assert recovery.due_in() == 0, f"and then {LOOK_EVERY} s later"
    assert now == pytest.approx(101 + LOOK_EVERY)


def test_a_look_that_failed_is_due_again(observer: Liveness, monkeypatch: pytest.MonkeyPatch) -> None:
    enqueue("mail", None)
    die_with()

    def refuse(*_: object) -> None:
        raise OperationalError

    recovery = Recovery("default", observer)
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_operations", refuse)
        with pytest.raises(OperationalError):
            recovery.step()
    assert recovery.due_in() == 0
    assert recovery.step() == 1


# The leadership


def leadership(liveness: Liveness) -> LockHandle:
    return LockHandle(LEADERSHIP_LOCK, 10, liveness.holder, "default", liveness)


def test_the_leadership_of_a_dead_process_may_be_taken_at_once(clock: ManualClock, observer: Liveness) -> None:
    with closing(Liveness("default")) as leader:
        old = leadership(leader)
        assert old.acquire()
        new = leadership(observer)
        assert not new.acquire()
    assert new.acquire()
    assert old.token is not None
    assert new.token is not None
    assert new.token > old.token
    assert not old.renew()
    clock.advance(11)
    assert old.acquire() is True, "a lapsed one is anybody's"


def test_the_leadership_of_whoever_has_no_byte_lasts_as_long_as_its_lease(
    clock: ManualClock, observer: Liveness
) -> None:
    with override_settings(ALKSTORE={"LIVENESS": False}), closing(Liveness("default")) as leader:
        assert leadership(leader).acquire()
    new = leadership(observer)
    assert not new.acquire()
    clock.advance(timedelta(seconds=10).total_seconds())
    assert new.acquire()


def test_another_lock_of_a_dead_process_lasts_as_long_as_its_lease(clock: ManualClock) -> None:
    with closing(Liveness("default")) as dead:
        assert lock("report", ttl=10, owner=dead.holder).acquire()
    assert not lock("report").acquire()
    clock.advance(10)
    assert lock("report").acquire()
