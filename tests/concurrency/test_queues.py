"""Contract, section 4, among real processes on one file: claims, effects exactly once, fences, keys, contention."""

import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from django.db import connection, transaction

from django_alkstore import services
from django_alkstore.models import Job
from tests.ledger.models import Entry
from tests.ledger.tools import end_leases
from tests.processes import Process

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]

COMMON = """
import sys
from django.db import IntegrityError, OperationalError, connection, transaction
from django_alkstore.exceptions import DuplicateJob, LeaseLost
from django_alkstore.models import Job
from django_alkstore.services import *
from tests.ledger.models import Entry

def say(*words):
    print(*words, flush=True)

def listen():
    return sys.stdin.readline().strip()

connection.ensure_connection()
say("ready")
"""


def start_all(start: Start, count: int, code: str, *arguments: str) -> list[Process]:
    """That many processes, let go at one moment once all of them are ready."""
    processes = [start("-c", COMMON + "listen()\n" + code, str(number), *arguments) for number in range(count)]
    for process in processes:
        process.wait_for("ready")
    for process in processes:
        process.tell("go")
    return processes


def all_end_well(processes: list[Process]) -> None:
    assert [process.wait() for process in processes] == [0] * len(processes), "\n".join(p.output for p in processes)


# Exclusive claims

DRAIN = """
worker, job_count = sys.argv[1], int(sys.argv[2])
mine = 0
while True:
    handles = claim_batch("mail", worker, limit=1 + mine % 7)
    for handle in handles:
        with transaction.atomic():
            Entry.objects.create(text=worker, job_id=handle.id)  # unique: a second effect would raise
            handle.ack_tx()
        mine += 1
    if not handles and Entry.objects.count() == job_count:
        break
say("drained", mine)
"""


def test_f001_f014_f015_several_workers_drain_a_queue_and_each_job_has_one_effect(start: Start) -> None:
    ids = services.enqueue_many("mail", range(400))
    workers = start_all(start, 4, DRAIN, str(len(ids)))
    all_end_well(workers)
    assert sorted(Entry.objects.values_list("job_id", flat=True)) == ids
    assert set(Job.objects.values_list("state", "attempts")) == {("completed", 1)}
    assert not any("locked" in worker.output for worker in workers)


PRODUCE = """
for number in range(100):
    enqueue("mail", [sys.argv[1], number])
    enqueue_many("mail", [None, None])
say("produced")
"""


def test_f001_producers_and_workers_share_the_file_and_no_lock_error_reaches_them(start: Start) -> None:
    producers = [start("-c", COMMON + "listen()\n" + PRODUCE, str(number)) for number in range(2)]
    workers = [start("-c", COMMON + "listen()\n" + DRAIN, f"w{number}", "600") for number in range(2)]
    for process in [*producers, *workers]:
        process.wait_for("ready")
    for process in [*producers, *workers]:
        process.tell("go")
    all_end_well([*producers, *workers])
    assert Entry.objects.count() == Job.objects.filter(state="completed", attempts=1).count() == 600


# A worker that dies

DIES = """
where = sys.argv[1]
def here(place):
    if place == where:
        say("at", place)
        listen()
[handle] = claim_batch("mail", "dies")
here("claimed")
with transaction.atomic():
    Entry.objects.create(text="effect", job_id=handle.id)
    here("effect")
    handle.ack_tx()
    here("acked")
here("committed")
"""


@pytest.mark.parametrize("place", ["claimed", "effect", "acked", "committed"])
def test_f031_f035_a_worker_killed_anywhere_leaves_an_effect_exactly_once(place: str, start: Start) -> None:
    job = services.enqueue("mail", None, visibility_timeout=600)
    victim = start("-c", COMMON + DIES, place)
    victim.wait_for(f"at {place}")
    victim.signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    committed = place == "committed"
    assert Entry.objects.count() == int(committed)
    if committed:
        assert services.get_job(job.id).state == "completed"
        return
    assert services.claim_batch("mail", "early") == []
    end_leases(job.id)
    (heir,) = services.claim_batch("mail", "heir")
    assert heir.attempt == 2
    with transaction.atomic():
        Entry.objects.create(text="effect", job_id=heir.id)
        heir.ack_tx()
    stored = services.get_job(job.id)
    assert (stored.state, stored.attempts, stored.last_error) == ("completed", 2, "lease expired")
    assert Entry.objects.count() == 1


RUNS = """
worker, last = sys.argv[1], int(sys.argv[2])
told = 0
while Job.objects.exclude(state__in=["completed", "dead"]).exists():
    for handle in claim_batch("mail", worker, limit=3):
        say("claimed", handle.id)
        try:
            with transaction.atomic():
                Entry.objects.create(text=worker, job_id=handle.id)
                say("effect", handle.id)
                told += 1
                if told == last:
                    listen()  # to be killed here, or wherever it is by then
                handle.ack_tx()
        except LeaseLost:
            say("lost", handle.id)
        except IntegrityError:
            # Another has had its effect committed while this lease lay lapsed: the ack must not be possible.
            assert not handle.ack()
say("drained")
"""


def test_f035_f047_workers_killed_again_and_again_lose_no_job_and_double_none(start: Start) -> None:
    ids = services.enqueue_many("mail", range(60), visibility_timeout=1, max_attempts=50)
    for round_number in range(6):
        # It would get to its tenth and no further.
        victim = start("-c", COMMON + RUNS, f"victim {round_number}", "10")
        victim.wait_for("effect", times=4 + round_number)
        victim.signal(signal.SIGKILL)
        victim.wait()
        assert Job.objects.count() == 60
    survivors = [start("-c", COMMON + RUNS, f"survivor {number}", "0") for number in range(2)]
    all_end_well(survivors)
    assert sorted(Entry.objects.values_list("job_id", flat=True)) == ids
    assert set(Job.objects.values_list("state", flat=True)) == {"completed"}


# A worker that is stopped past its lease

STOPPED = """
[handle] = claim_batch("mail", "same name")
say("claimed")
call = listen()
before = list(Job.objects.values())
if call == "ack_tx":
    try:
        with transaction.atomic():
            Entry.objects.create(text="late")
            try:
                handle.ack_tx()
            except LeaseLost:
                pass
    finally:
        done = Entry.objects.filter(text="late").exists()
elif call in ("retry", "fail"):
    done = getattr(handle, call)("late")
else:
    done = getattr(handle, call)()
assert list(Job.objects.values()) == before
say("took effect" if done else "took no effect")
"""


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "running"])
@pytest.mark.parametrize("call", ["ack", "ack_tx", "retry", "fail", "heartbeat", "release"])
def test_f021_f022_a_worker_stopped_past_its_lease_changes_nothing_when_it_goes_on(
    call: str, finished: bool, start: Start
) -> None:
    job = services.enqueue("mail", None, visibility_timeout=600)
    stopped = start("-c", COMMON + STOPPED)
    stopped.wait_for("claimed")
    stopped.signal(signal.SIGSTOP)
    end_leases(job.id)
    # The heir goes by the same name: names are no fence.
    (heir,) = services.claim_batch("mail", "same name")
    if finished:
        assert heir.ack()
    before = Job.objects.values().get()
    stopped.signal(signal.SIGCONT)
    stopped.tell(call)
    stopped.wait_for("took no effect")
    assert stopped.wait() == 0
    assert Job.objects.values().get() == before
    assert not Entry.objects.exists()
    if not finished:
        assert heir.ack()
    assert services.get_job(job.id).state == "completed"


# Unique keys

KEYS = """
for number in range(40):
    try:
        enqueue("mail", sys.argv[1], unique_key=f"key {number}")
        say("won", number)
    except DuplicateJob as taken:
        say("lost", number, taken.job_id)
"""
GET_KEYS = """
for number in range(40):
    job, created = get_or_enqueue("mail", f"key {number}", sys.argv[1])
    say("won" if created else "lost", number, job.id)
"""


@pytest.mark.parametrize("code", [KEYS, GET_KEYS], ids=["enqueue", "get_or_enqueue"])
def test_a_key_raced_for_by_8_processes_is_won_by_one(code: str, start: Start) -> None:
    racers = start_all(start, 8, code)
    all_end_well(racers)
    lines = [line.split() for racer in racers for line in racer.lines]
    for number in range(40):
        mine = [line for line in lines if line[0] in ("won", "lost") and line[1] == str(number)]
        assert len(mine) == 8
        assert [line[0] for line in mine].count("won") == 1
        holder = Job.objects.get(unique_key=f"key {number}").id
        assert all(line[2] == str(holder) for line in mine if line[0] == "lost")
    assert Job.objects.count() == 40


# Contention

BLOCKED = """
job_id, dead_id, cancel_id = (int(n) for n in sys.argv[1:4])
[handle] = claim_batch("mail", "blocked")
say("claimed")
listen()
calls = {
    "enqueue": lambda: enqueue("mail", 1),
    "a key": lambda: enqueue("mail", 1, unique_key="k"),
    "enqueue_many": lambda: enqueue_many("mail", [1, 2]),
    "get_or_enqueue": lambda: get_or_enqueue("mail", "k", 1),
    "claim_batch": lambda: claim_batch("more", "blocked"),
    "ack": handle.ack,
    "retry": handle.retry,
    "fail": lambda: handle.fail("x"),
    "heartbeat": handle.heartbeat,
    "release": handle.release,
    "cancel": lambda: cancel(cancel_id),
    "requeue": lambda: requeue(dead_id),
    "sweep": lambda: sweep("mail"),
    "prune": prune,
}
for name, call in calls.items():
    try:
        call()
    except OperationalError as error:
        say("refused", name)
    else:
        say("WENT THROUGH", name)
    assert not connection.in_atomic_block
say("all tried")
listen()
assert handle.ack()
assert enqueue("mail", "after").id
assert len(claim_batch("more", "blocked")) == 1
say("recovered")
"""


def test_past_the_busy_timeout_every_service_raises_operational_error_and_leaves_nothing(start: Start) -> None:
    job = services.enqueue("mail", "job", priority=5)
    dead = services.enqueue("mail", "dead", priority=9)
    services.claim_batch("mail", "w")[0].fail("x")
    services.enqueue("more", None)
    old = services.enqueue("old", None)
    assert services.claim_batch("old", "w")[0].ack()
    Job.objects.filter(pk=old.id).update(finished_at=0)
    cancelled = services.enqueue("mail", "to cancel")
    blocked = start("-c", COMMON + BLOCKED, str(job.id), str(dead.id), str(cancelled.id), ALKSTORE_TEST_TIMEOUT="0.2")
    blocked.wait_for("claimed")
    before = list(Job.objects.order_by("id").values())
    with transaction.atomic():
        Entry.objects.create(text="holds the writer lock")
        blocked.tell("go")
        blocked.wait_for("all tried")
    assert "WENT THROUGH" not in blocked.output
    assert blocked.output.count("refused") == 14
    assert list(Job.objects.order_by("id").values()) == before
    blocked.tell("go")
    blocked.wait_for("recovered")
    assert blocked.wait() == 0


WAITS = """
listen()
say("asking")
say("stored", enqueue("mail", "waited").id)
"""


def test_within_the_busy_timeout_a_service_waits_for_the_writer(start: Start) -> None:
    waiting = start("-c", COMMON + WAITS)
    waiting.wait_for("ready")
    with transaction.atomic():
        Entry.objects.create(text="holds the writer lock")
        waiting.tell("go")
        waiting.wait_for("asking")
    waiting.wait_for("stored")
    assert waiting.wait() == 0
    assert Job.objects.get().payload == "waited"


# Forced interleaving


@contextmanager
def a_commit_before_each_statement() -> Iterator[Callable[[], int]]:
    """Another connection commits a write before every statement that ours sends, wherever the lock lets it."""
    name = connection.settings_dict["NAME"]
    other = sqlite3.connect(name, timeout=0, isolation_level=None)
    commits = 0
    inside = False

    def interfere(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal commits, inside
        if not inside:
            inside = True
            try:
                other.execute("INSERT INTO ledger_entry (text) VALUES ('other')")
                commits += 1
            except sqlite3.OperationalError:
                pass  # ours holds the lock: nothing can come between any more
            finally:
                inside = False
        return execute(sql, params, many, context)

    with closing(other), connection.execute_wrapper(interfere):
        yield lambda: commits


def claimed(queue: str = "mail") -> services.JobHandle:
    services.enqueue(queue, None)
    [handle] = services.claim_batch(queue, "w")
    return handle


def dead() -> int:
    handle = claimed()
    assert handle.fail("x")
    return handle.id


def lapsed() -> None:
    handle = claimed()
    Job.objects.filter(pk=handle.id).update(lease_expires_at=0)


# What is made ready undisturbed, and what is then done with another's commits in between.
INTERLEAVED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "claim_batch": (lambda: services.enqueue("mail", None), lambda job: services.claim_batch("mail", "w")[0].ack()),
    "claim of nothing": (lambda: None, lambda _: services.claim_batch("empty", "w") == []),
    "claim of a lapsed one": (lapsed, lambda _: services.claim_batch("mail", "w")[0].ack()),
    "enqueue": (lambda: None, lambda _: services.enqueue("free", None)),
    "enqueue with a key": (lambda: None, lambda _: services.cancel(services.enqueue("mail", None, unique_key="k").id)),
    "enqueue_many": (lambda: None, lambda _: services.enqueue_many("free", [1, 2])),
    "get_or_enqueue": (lambda: None, lambda _: services.get_or_enqueue("keyed", "k", None)),
    "ack": (claimed, lambda handle: handle.ack()),
    "retry": (claimed, lambda handle: handle.retry("x", delay=9999)),
    "fail": (claimed, lambda handle: handle.fail("x")),
    "heartbeat": (claimed, lambda handle: handle.heartbeat() and handle.ack()),
    "release": (claimed, lambda handle: handle.release() and services.cancel(handle.id)),
    "cancel": (lambda: services.enqueue("mail", None).id, services.cancel),
    "requeue": (dead, lambda job_id: services.requeue(job_id) and services.cancel(job_id)),
    "sweep": (lapsed, lambda _: services.sweep("mail") == 1 and services.claim_batch("mail", "w")[0].ack()),
    "prune": (lambda: None, lambda _: services.prune()),
}


@pytest.mark.parametrize(("prepare", "act"), INTERLEAVED.values(), ids=INTERLEAVED.keys())
def test_f003_a_write_that_another_commits_in_between_refuses_none_of_ours(
    prepare: Callable[[], Any], act: Callable[[Any], Any]
) -> None:
    for _ in range(60):
        ready = prepare()
        list(Job.objects.values_list("id")[:5])  # the connection has just read
        with a_commit_before_each_statement() as commits:
            assert act(ready)
        assert commits() > 0, "nothing came in between: the test is void"
