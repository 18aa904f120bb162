"""Locks between real processes on the real file."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import connections

from django_alkstore import clock
from django_alkstore.models import Lock
from django_alkstore.services import lock
from tests.faults.tools import Passage
from tests.ledger.models import Entry
from tests.processes import Process, wait_until

Start = Callable[..., Process]

HOLD = """
import sys
from django_alkstore.services import lock
handle = lock("report", ttl=float(sys.argv[1]), owner="the child")
print("acquired", handle.acquire(), handle.token, flush=True)
sys.stdin.readline()
"""

RACE = """
import sys
from django.db import connection
from django_alkstore.services import lock
connection.ensure_connection()
handle = lock("report", owner=sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print("acquired" if handle.acquire() else "refused", flush=True)
sys.stdin.readline()
print("released", handle.release(), flush=True)
"""

# Each round: take the lock or try again, and see from inside that nobody else is in.
TAKE_TURNS = """
import os, sys, threading
from django.db import connection
from django_alkstore.services import lock
from tests.ledger.models import Entry
pause = threading.Event()
connection.ensure_connection()
print("ready", flush=True)
sys.stdin.readline()
done = 0
while done < int(sys.argv[1]):
    handle = lock("report", ttl=60)
    if not handle.acquire():
        pause.wait(0.005)
        continue
    assert Entry.objects.filter(text="inside").count() == 0, "two held it"
    entry = Entry.objects.create(text="inside")
    Entry.objects.filter(pk=entry.pk).update(text=f"{os.getpid()} left", job_id=handle.token)
    assert handle.release(), "lost it"
    done += 1
print("done", flush=True)
"""

TRY_AND_TRY = """
import threading
from django_alkstore.services import lock
pause = threading.Event()
print("trying", flush=True)
tries = 0
while True:
    if lock("report", ttl=600).acquire():
        print("STOLEN", flush=True)
        break
    tries += 1
    if tries % 20 == 0:
        print("refused 20 times", flush=True)
    pause.wait(0.01)
"""


@pytest.mark.parametrize("owners", ["each its own", "one for all"])
def test_of_eight_processes_that_race_for_a_lock_one_gets_it(start: Start, owners: str) -> None:
    racers = [start("-c", RACE, "cron" if owners == "one for all" else f"owner-{number}") for number in range(8)]
    for racer in racers:
        racer.wait_for("ready")
    for racer in racers:
        racer.tell("go")
    wait_until(lambda: all(len(racer.lines) >= 2 for racer in racers), "each has its answer")
    answers = [racer.lines[1] for racer in racers]
    assert sorted(answers) == ["acquired"] + ["refused"] * 7
    assert Lock.objects.count() == 1
    for racer in racers:
        racer.tell("release")
    assert [racer.wait() for racer in racers] == [0] * 8
    for racer, answer in zip(racers, answers, strict=True):
        assert racer.lines[2] == f"released {answer == 'acquired'}"
    assert Lock.objects.count() == 0


def test_eight_processes_that_take_turns_are_never_two_at_once_and_the_tokens_grow_in_that_order(start: Start) -> None:
    turns = 10
    processes = [start("-c", TAKE_TURNS, str(turns)) for _ in range(8)]
    for process in processes:
        process.wait_for("ready")
    for process in processes:
        process.tell("go")
    assert [process.wait() for process in processes] == [0] * 8, "\n".join(p.output for p in processes)
    tokens = list(Entry.objects.order_by("pk").values_list("job_id", flat=True))
    assert len(tokens) == 8 * turns
    assert tokens == sorted(set(tokens))


def test_f138_the_lock_of_a_killed_process_is_anybodys_after_its_ttl_and_not_before(start: Start) -> None:
    holder = start("-c", HOLD, "3")
    holder.wait_for("acquired True")
    row = Lock.objects.get()
    holder.signal(signal.SIGKILL)
    holder.wait()
    before = Lock.objects.get()
    assert (before.token, before.owner, before.expires_at) == (row.token, "the child", row.expires_at)
    mine = lock("report")
    wait_until(mine.acquire, "the dead process's lock is free")
    after = Lock.objects.get()
    assert after.acquired_at >= row.expires_at
    assert mine.token is not None
    assert mine.token > row.token
    assert mine.release()


def test_f139_a_stopped_process_that_outlived_its_lock_cannot_free_the_next_holders(start: Start) -> None:
    code = """
import sys
from django_alkstore.exceptions import LockLost
from django_alkstore.services import lock
try:
    with lock("report", ttl=0.5) as handle:
        print("inside", flush=True)
        sys.stdin.readline()
        print("renewed", handle.renew(), "released", handle.release(), flush=True)
except LockLost:
    print("lost", flush=True)
"""
    holder = start("-c", code)
    holder.wait_for("inside")
    holder.signal(signal.SIGSTOP)
    mine = lock("report", ttl=600)
    wait_until(mine.acquire, "the stopped process's lock is free")
    holder.signal(signal.SIGCONT)
    holder.tell("go on")
    assert holder.wait() == 0
    assert holder.lines[1:] == ["renewed False released False", "lost"]
    assert Lock.objects.get().token == mine.token
    assert mine.release()


def test_f145_a_lock_that_is_renewed_in_time_is_never_anybody_elses(start: Start, tmp_path: Path) -> None:
    passage = Passage(tmp_path / "passage")
    with clock.use(passage):
        handle = lock("report", ttl=600)
        assert handle.acquire()
        first_end = Lock.objects.get().expires_at
        thieves = [passage.run(start, TRY_AND_TRY) for _ in range(2)]
        for thief in thieves:
            thief.wait_for("trying")
        # Until its own time would have been over twice, with both trying all the while.
        for rounds in range(1, 7):
            passage.by(250)
            assert handle.renew() is True
            for thief in thieves:
                thief.wait_for("refused 20 times", times=rounds)
            assert not any("STOLEN" in thief.output for thief in thieves)
        assert (Lock.objects.get().expires_at - first_end).total_seconds() >= 1_200
        for thief in thieves:
            thief.end()
        assert handle.release() is True


def test_two_threads_of_one_process_exclude_each_other(transactional_db: None) -> None:
    barrier = threading.Barrier(4)
    inside: list[int] = []
    refused: list[int] = []
    failures: list[BaseException] = []
    guard = threading.Lock()

    def race(number: int) -> None:
        try:
            barrier.wait(60)
            for _ in range(20):
                handle = lock("report")
                if not handle.acquire():
                    refused.append(number)
                    continue
                assert guard.acquire(blocking=False), "two threads are inside"
                inside.append(number)
                guard.release()
                assert handle.release()
        except Exception as error:
            failures.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=race, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert len(inside) + len(refused) == 80
    assert inside
    assert Lock.objects.count() == 0
