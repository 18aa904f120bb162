"""Outboxes between real processes on the real file. What is sent is written down outside the database."""

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import transaction

from django_alkstore import clock
from django_alkstore.models import Job
from django_alkstore.services import JobHandle, outbox, outbox_enqueue_tx
from tests.ledger.models import Entry
from tests.ledger.tools import end_leases
from tests.processes import Process, wait_until

Start = Callable[..., Process]

# Sends by appending one line to a file, which is at the receiver whatever becomes of the sender.
SENDER = """
import os, sys, threading
from django_alkstore.services import outbox
receiver = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
box, me, pause = outbox("mail"), f"sender-{os.getpid()}", threading.Event()

def deliver(job):
    os.write(receiver, f"{job.id} {job.attempt} {os.getpid()}\\n".encode())

print("ready", flush=True)
sys.stdin.readline()
while True:
    if not box.run_once(me, deliver):
        print("empty", flush=True)
        pause.wait(0.1)
"""

# Sends, and then hangs before it can say so.
SENDS_AND_HANGS = """
import os, sys, threading
from django_alkstore.services import outbox

def deliver(job):
    with open(sys.argv[1], "a") as receiver:
        receiver.write(f"{job.id} {job.attempt} {os.getpid()}\\n")
    print("sent", flush=True)
    if sys.argv[2] == "hangs":
        threading.Event().wait()
    return job

print("delivered", outbox("mail").run_once("the only one", deliver), flush=True)
"""

ENQUEUE = """
import sys
from django.db import transaction
from django_alkstore.services import outbox_enqueue_tx
from tests.ledger.models import Entry
with transaction.atomic():
    Entry.objects.create(text="order")
    outbox_enqueue_tx("mail", 1)
    print("inside", flush=True)
    sys.stdin.readline()
print("committed", flush=True)
"""


def received(receiver: Path) -> list[tuple[int, int, int]]:
    """(job id, attempt, process) of each delivery, in the receiver's order."""
    if not receiver.exists():
        return []
    return [tuple(map(int, line.split())) for line in receiver.read_text().splitlines()]  # type: ignore[misc]


def fill(count: int, **options: object) -> list[int]:
    with transaction.atomic():
        return [outbox_enqueue_tx("mail", number, **options).pk for number in range(count)]  # type: ignore[arg-type]


def all_done() -> bool:
    return not Job.objects.exclude(state="completed").exists()


def test_f147_three_senders_at_once_send_each_event_once(start: Start, tmp_path: Path) -> None:
    receiver = tmp_path / "received"
    events = fill(600)
    senders = [start("-c", SENDER, str(receiver)) for _ in range(3)]
    for sender in senders:
        sender.wait_for("ready")
    for sender in senders:
        sender.tell("go")
    wait_until(all_done, "all is sent")
    for sender in senders:
        sender.wait_for("empty")
        sender.end()
    sent = received(receiver)
    assert Counter(job_id for job_id, _, _ in sent) == dict.fromkeys(events, 1)
    assert {attempt for _, attempt, _ in sent} == {1}


def test_f147_the_events_of_a_killed_sender_are_sent_by_the_others_after_the_lease(
    start: Start, tmp_path: Path
) -> None:
    receiver = tmp_path / "received"
    events = fill(300, visibility_timeout=600, backoff_base=0)
    senders = [start("-c", SENDER, str(receiver)) for _ in range(3)]
    for sender in senders:
        sender.wait_for("ready")
    for sender in senders:
        sender.tell("go")
    for number, sender in enumerate(senders[:2], start=1):
        wait_until(lambda number=number: len(received(receiver)) >= 20 * number, "they send")  # type: ignore[misc]
        sender.signal(signal.SIGKILL)
        sender.wait()
    # Theirs alone: that of a live sender must last, whatever keeps it from its work.
    names = [f"sender-{sender.pid}" for sender in senders[:2]]
    end_leases(*Job.objects.filter(state="processing", worker_id__in=names).values_list("pk", flat=True))
    wait_until(all_done, "all is sent")
    times = Counter(job_id for job_id, _, _ in received(receiver))
    assert set(times) == set(events), "none is lost"
    # One killed sender held one event at the most, so no more than that many were sent again.
    assert sum(times.values()) - len(events) <= 2
    again = [job_id for job_id, count in times.items() if count > 1]
    lapsed = {job.pk for job in Job.objects.all() if job.errors}
    assert set(again) <= lapsed
    for job in Job.objects.filter(pk__in=lapsed):
        assert [entry["error"] for entry in job.errors] == ["lease expired"]


def test_f148_an_event_whose_sender_died_after_sending_is_sent_again_under_the_same_id(
    start: Start, tmp_path: Path
) -> None:
    receiver = tmp_path / "received"
    (event,) = fill(1, visibility_timeout=600)
    first = start("-c", SENDS_AND_HANGS, str(receiver), "hangs")
    first.wait_for("sent")
    first.signal(signal.SIGKILL)
    first.wait()
    assert outbox("mail").run_once("early", lambda job: None) is False, "the lease still stands"
    end_leases(event)
    second = start("-c", SENDS_AND_HANGS, str(receiver), "returns")
    assert second.wait() == 0
    second.wait_for("delivered True")
    assert [(job_id, attempt) for job_id, attempt, _ in received(receiver)] == [(event, 1), (event, 2)]
    row = Job.objects.get()
    assert (row.state, row.attempts) == ("completed", 2)
    assert [entry["error"] for entry in row.errors] == ["lease expired"]


def test_an_event_that_kills_every_sender_is_dead_after_its_attempts_and_not_sent_for_ever(
    start: Start, tmp_path: Path
) -> None:
    receiver = tmp_path / "received"
    (event,) = fill(1, visibility_timeout=0.3, max_attempts=2)
    for attempt in (1, 2):
        wait_until(lambda: _claimable(event), "its lease is over")
        sender = start("-c", SENDS_AND_HANGS, str(receiver), "hangs")
        sender.wait_for("sent")
        sender.signal(signal.SIGKILL)
        sender.wait()
        assert len(received(receiver)) == attempt
    wait_until(lambda: _claimable(event), "its lease is over")
    assert outbox("mail").run_once("w", lambda job: None) is False
    row = Job.objects.get()
    assert (row.state, row.last_error, len(row.errors)) == ("dead", "lease expired", 2)


def test_a_sender_that_was_stopped_past_its_lease_does_not_touch_the_next_delivery(
    start: Start, tmp_path: Path
) -> None:
    code = """
import sys
from django_alkstore.services import outbox

def deliver(job):
    print("sent", flush=True)
    sys.stdin.readline()

print("delivered", outbox("mail").run_once("same name", deliver), flush=True)
"""
    (event,) = fill(1, visibility_timeout=600)
    late = start("-c", code)
    late.wait_for("sent")
    late.signal(signal.SIGSTOP)
    end_leases(event)
    seen: list[tuple[int, int]] = []

    def deliver(job: JobHandle) -> None:
        seen.append((job.id, job.attempt))
        late.signal(signal.SIGCONT)
        late.tell("go on")
        assert late.wait() == 0
        late.wait_for("delivered True")
        assert Job.objects.get().state == "processing", "the late ack changed nothing"
        raise ValueError("this delivery failed")

    assert outbox("mail").run_once("same name", deliver) is True
    assert seen == [(event, 2)]
    row = Job.objects.get()
    assert (row.state, row.last_error) == ("pending", "ValueError: this delivery failed")


@pytest.mark.parametrize("commit", [True, False])
def test_a_process_that_dies_before_its_commit_leaves_neither_the_rows_nor_the_event(
    start: Start, commit: bool
) -> None:
    writer = start("-c", ENQUEUE)
    writer.wait_for("inside")
    if commit:
        writer.tell("go on")
        assert writer.wait() == 0
    else:
        writer.signal(signal.SIGKILL)
        writer.wait()
    assert (Entry.objects.count(), Job.objects.count()) == ((1, 1) if commit else (0, 0))
    assert outbox("mail").run_once("w", lambda job: None) is commit


def _claimable(job_id: int) -> bool:
    ends = Job.objects.get(pk=job_id).lease_expires_at
    return ends is None or ends <= clock.now()
