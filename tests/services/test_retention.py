"""Contract, section 4: how long finished jobs are kept, and how they are pruned."""

from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_alkstore.clock import ManualClock
from django_alkstore.models import Job
from django_alkstore.services import cancel, claim_batch, enqueue, enqueue_many, get_job, prune, requeue

pytestmark = pytest.mark.django_db(transaction=True)

DAY = 86_400


def finished(state: str, count: int = 1) -> list[int]:
    ids = enqueue_many("mail", [state] * count)
    if state == "cancelled":
        assert all(cancel(job_id) for job_id in ids)
        return ids
    for handle in claim_batch("mail", "w", limit=count):
        assert handle.ack() if state == "completed" else handle.fail("x")
    return ids


def kept() -> dict[str, int]:
    counts: dict[str, int] = {}
    for state in Job.objects.values_list("state", flat=True):
        counts[state] = counts.get(state, 0) + 1
    return counts


def one_of_each() -> None:
    for state in ("completed", "dead", "cancelled"):
        finished(state)
    enqueue("mail", None)
    claim_batch("mail", "w")
    enqueue("mail", None, delay=1)


def test_f108_by_default_completed_jobs_are_kept_for_a_day_and_everything_else_for_ever(clock: ManualClock) -> None:
    one_of_each()
    clock.advance(DAY - 1)
    assert prune() == {"completed": 0, "dead": 0, "cancelled": 0}
    clock.advance(2)
    assert prune() == {"completed": 1, "dead": 0, "cancelled": 0}
    clock.advance(1000 * DAY)
    assert sum(prune().values()) == 0
    assert kept() == {"dead": 1, "cancelled": 1, "pending": 1, "processing": 1}


@pytest.mark.parametrize("keep", [60, 60.0, timedelta(minutes=1)])
def test_the_settings_say_how_long(keep: Any, clock: ManualClock) -> None:
    with override_settings(ALKSTORE={"KEEP_COMPLETED": keep, "KEEP_DEAD": timedelta(hours=1)}):
        one_of_each()
        clock.advance(61)
        assert prune() == {"completed": 1, "dead": 0, "cancelled": 0}
        clock.advance(3600)
        assert prune() == {"completed": 0, "dead": 1, "cancelled": 1}
    assert kept() == {"pending": 1, "processing": 1}


@override_settings(ALKSTORE={"KEEP_COMPLETED": None})
def test_none_keeps_for_ever(clock: ManualClock) -> None:
    one_of_each()
    clock.advance(10_000 * DAY)
    assert sum(prune().values()) == 0
    assert kept()["completed"] == 1


def test_zero_deletes_on_ack_and_what_an_earlier_setting_kept_at_the_next_pruning(clock: ManualClock) -> None:
    finished("completed")
    with override_settings(ALKSTORE={"KEEP_COMPLETED": 0}):
        [job_id] = finished("completed")
        assert get_job(job_id) is None
        assert kept() == {"completed": 1}
        finished("dead")
        assert prune() == {"completed": 1, "dead": 0, "cancelled": 0}
    assert kept() == {"dead": 1}


@override_settings(ALKSTORE={"KEEP_DEAD": 0})
def test_keep_dead_of_zero_leaves_a_dead_job_to_the_next_pruning(clock: ManualClock) -> None:
    finished("dead")
    finished("cancelled")
    assert prune() == {"completed": 0, "dead": 1, "cancelled": 1}


def test_a_requeued_job_is_no_old_one(clock: ManualClock) -> None:
    with override_settings(ALKSTORE={"KEEP_DEAD": 60}):
        [job_id] = finished("dead")
        assert requeue(job_id)
        clock.advance(10_000)
        assert sum(prune().values()) == 0
        [handle] = claim_batch("mail", "w")
        handle.fail("again")
        clock.advance(59)
        assert sum(prune().values()) == 0
        clock.advance(2)
        assert sum(prune().values()) == 1


def test_f110_f114_pruning_works_in_small_batches_each_its_own_transaction(clock: ManualClock) -> None:
    enqueue_many("mail", range(5_000))
    Job.objects.update(state="completed", finished_at=clock.now())
    keep = enqueue("mail", "keep")
    clock.advance(DAY + 1)
    deleted: list[int] = []

    def watch(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        if sql.lstrip().startswith("DELETE"):
            assert not connection.in_atomic_block, "all batches in one transaction"
            deleted.append(context["cursor"].rowcount)
        return result

    with connection.execute_wrapper(watch):
        assert prune() == {"completed": 5_000, "dead": 0, "cancelled": 0}
    assert sum(deleted) == 5_000
    assert max(deleted) <= 1_000
    assert [job.id for job in Job.objects.all()] == [keep.id]


def test_f110_an_interrupted_pruning_keeps_its_progress(clock: ManualClock) -> None:
    enqueue_many("mail", range(3_000))
    Job.objects.update(state="completed", finished_at=clock.now())
    clock.advance(DAY + 1)
    seen = 0

    def interrupt(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal seen
        if sql.lstrip().startswith("DELETE"):
            seen += 1
            if seen == 3:
                raise KeyboardInterrupt
        return execute(sql, params, many, context)

    with pytest.raises(KeyboardInterrupt), connection.execute_wrapper(interrupt):
        prune()
    left = Job.objects.count()
    assert 0 < left < 3_000
    assert prune()["completed"] == left


def test_pruning_reads_no_payload(clock: ManualClock) -> None:
    finished("completed", 3)
    clock.advance(DAY + 1)
    with CaptureQueriesContext(connection) as queries:
        prune()
    assert not [query for query in queries if '"payload"' in query["sql"]]


def test_f131_ids_never_come_back_after_pruning(clock: ManualClock) -> None:
    newest = finished("completed", 3)[-1]
    clock.advance(DAY + 1)
    prune()
    assert not Job.objects.exists()
    assert enqueue("mail", None).id > newest


@pytest.mark.parametrize(
    "bad", [-1, "1", True, float("nan"), float("inf"), 10**5000], ids=lambda bad: type(bad).__name__
)
@pytest.mark.parametrize("key", ["KEEP_COMPLETED", "KEEP_DEAD"])
def test_a_retention_out_of_range_deletes_nothing(key: str, bad: Any, clock: ManualClock) -> None:
    finished("completed")
    finished("dead")
    clock.advance(100 * DAY)
    with override_settings(ALKSTORE={key: bad}), pytest.raises(ImproperlyConfigured, match=key):
        prune()
    assert kept() == {"completed": 1, "dead": 1}
