"""The upkeep of workers and schedulers goes in short steps, and `delete_finished` announces what was committed."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction

from django_alkstore import signals
from django_alkstore.clock import ManualClock
from django_alkstore.models import Job
from django_alkstore.services import claim_batch, claims, delete_finished, enqueue_many, maintenance
from django_alkstore.services.maintenance import UPKEEP_INTERVAL, Upkeep

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def pruned() -> Iterator[list[dict[str, int]]]:
    """What `jobs_pruned` has announced."""
    said: list[dict[str, int]] = []

    def note(removed: dict[str, int], **_: Any) -> None:
        said.append(removed)

    signals.jobs_pruned.connect(note)
    yield said
    signals.jobs_pruned.disconnect(note)


def lapsed(clock: ManualClock, **counts: int) -> None:
    """So many jobs of each queue whose lease has run out."""
    for queue, count in counts.items():
        enqueue_many(queue, range(count))
        assert len(claim_batch(queue, "w", limit=count)) == count
    clock.advance(301)


def left(queue: str) -> int:
    return Job.objects.filter(queue=queue, state="processing").count()


def test_a_step_sweeps_one_batch_of_one_queue_and_is_due_again_at_once(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "SWEEP_BATCH", 2)
    lapsed(clock, mail=5, post=3)
    upkeep = Upkeep("default", ["mail", "post"])
    swept = []
    while upkeep.due_in() <= 0:
        before = left("mail"), left("post")
        upkeep.step()
        swept.append((before[0] - left("mail"), before[1] - left("post")))
    assert {mail + post for mail, post in swept} == {0, 1, 2}, "a batch at most"
    assert all(not (mail and post) for mail, post in swept), "of one queue"
    assert (left("mail"), left("post")) == (0, 0)
    assert upkeep.due_in() == UPKEEP_INTERVAL


def test_each_round_sweeps_every_queue_anew(clock: ManualClock) -> None:
    upkeep = Upkeep("default", ["mail", "post"])
    for _ in range(2):
        lapsed(clock, mail=1, post=1)
        clock.advance(UPKEEP_INTERVAL)
        while upkeep.due_in() <= 0:
            upkeep.step()
        assert (left("mail"), left("post")) == (0, 0)


def test_a_round_announces_at_its_end_what_all_its_steps_have_pruned(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, pruned: list[dict[str, int]]
) -> None:
    monkeypatch.setattr(maintenance, "PRUNE_BATCH", 2)
    enqueue_many("mail", range(5))
    for job in claim_batch("mail", "w", limit=5):
        job.ack()
    clock.advance(86_401)
    upkeep = Upkeep("default", ["mail"])
    while upkeep.due_in() <= 0:
        assert pruned == []
        upkeep.step()
    assert pruned == [{"completed": 5}]


def test_what_is_deleted_in_a_transaction_is_announced_after_its_commit(pruned: list[dict[str, int]]) -> None:
    enqueue_many("mail", range(2))
    for job in claim_batch("mail", "w", limit=2):
        job.ack()
    with transaction.atomic():
        assert delete_finished(state="completed") == {"completed": 2}
        assert pruned == []
        transaction.set_rollback(True)
    assert pruned == []
    assert Job.objects.count() == 2
    with transaction.atomic():
        delete_finished(state="completed")
    assert pruned == [{"completed": 2}]
