"""The hot statements use their index: no scan of the table, no sorting step. F109."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from django_alkstore.clock import ManualClock, now
from django_alkstore.dialects.liveness import Liveness
from django_alkstore.exceptions import DuplicateJob
from django_alkstore.models import Job
from django_alkstore.services import (
    cancel,
    claim_batch,
    enqueue,
    enqueue_many,
    get_job,
    get_or_enqueue,
    next_claim_at,
    prune,
    queue_stats,
    requeue,
    reschedule,
    sweep,
)
from tests.claimer import claim, recover

pytestmark = pytest.mark.django_db(transaction=True)

NEVER = {"BEGIN", "COMMIT", "SAVEPOINT", "RELEASE", "ROLLBACK", "PRAGMA", "EXPLAIN"}


def plans_of(work: Callable[[], Any]) -> dict[str, list[str]]:
    """What SQLite says that it does for each statement that `work` sends it."""
    sent: list[tuple[str, Any]] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.split(maxsplit=1)[0].upper() not in NEVER:
            rows = params = list(params) if many else params
            sent.append((sql, rows[0] if many and rows else params))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        work()
    plans = {}
    with connection.cursor() as cursor:
        for sql, params in sent:
            cursor.execute(f"EXPLAIN QUERY PLAN {sql}", params)
            plans[sql] = [row[3] for row in cursor.fetchall()]
    assert plans
    return plans


def assert_direct(plans: dict[str, list[str]]) -> None:
    """No step walks the whole table or a whole index of all states, and none sorts."""
    for sql, steps in plans.items():
        for step in steps:
            said = f"{step!r} in {steps}\nof {sql}"
            if "django_alkstore_job" in step:
                assert not step.startswith("SCAN"), said
                assert "AUTOMATIC" not in step, said
            assert "TEMP B-TREE FOR" not in step, said


@pytest.fixture
def crowd(clock: ManualClock) -> None:
    """Jobs in every state, so that a scan would be the worse choice, and SQLite knows it or not."""
    ids = enqueue_many("mail", range(300))
    Job.objects.filter(pk__in=ids[:200]).update(state="completed", finished_at=clock.now())
    Job.objects.filter(pk__in=ids[200:250]).update(state="dead", finished_at=clock.now())
    enqueue_many("mail", range(50), delay=1000, priority=5)
    enqueue_many("mail", range(10), expires_in=500)


@pytest.fixture(params=[False, True], ids=["fresh", "analysed"])
def statistics(request: pytest.FixtureRequest, crowd: None) -> Any:
    """With SQLite's statistics and without: neither may lead it astray."""
    with connection.cursor() as cursor:
        if request.param:
            cursor.execute("ANALYZE")
        yield
        if request.param:
            cursor.execute("DELETE FROM sqlite_stat1")
            cursor.execute("ANALYZE sqlite_master")


def duplicate() -> None:
    enqueue("mail", None, unique_key="taken")
    with pytest.raises(DuplicateJob):
        enqueue("mail", None, unique_key="taken")
    get_or_enqueue("mail", "taken", None)


def finish_in_every_way() -> None:
    handles = claim_batch("mail", "w", limit=5)
    handles[0].heartbeat()
    handles[0].ack()
    handles[1].retry("x")
    handles[2].fail("x")
    handles[3].release()
    cancel(handles[4].id)
    requeue(handles[4].id)
    reschedule(handles[4].id, now())
    get_job(handles[4].id)


HOT: dict[str, Callable[[], Any]] = {
    "enqueue": lambda: enqueue("mail", None),
    "a taken key": duplicate,
    "claim": lambda: claim_batch("mail", "w", limit=3),
    "claim of an empty queue": lambda: claim_batch("empty", "w"),
    "handles": finish_in_every_way,
    "sweep": lambda: sweep("mail"),
    "sweep of all": sweep,
    "next_claim_at": lambda: next_claim_at("mail"),
    "prune": prune,
}


@pytest.mark.parametrize("work", HOT.values(), ids=HOT.keys())
def test_f109_the_hot_statements_use_an_index_and_sort_nothing(work: Callable[[], Any], statistics: None) -> None:
    assert_direct(plans_of(work))


def test_f109_a_sweep_that_finds_work_uses_its_indexes_too(crowd: None, clock: ManualClock) -> None:
    claim_batch("mail", "w", limit=3)
    clock.advance(600)
    assert_direct(plans_of(lambda: sweep("mail")))


def test_a_look_for_dead_workers_reads_the_leased_jobs_alone(statistics: None) -> None:
    with Liveness("default") as dead:
        claim(dead, "mail", 3)
    with Liveness("default") as liveness:
        plans = plans_of(lambda: recover(liveness))
    for sql, steps in plans.items():
        if sql.lstrip().startswith("SELECT"):
            assert all("INDEX alkstore_job_lease" in step for step in steps if "django_alkstore_job" in step), steps
        else:
            assert_direct({sql: steps})
    assert sum("alkstore_job_lease" in step for steps in plans.values() for step in steps) >= 2


def test_f109_a_claim_costs_no_more_for_finished_and_delayed_jobs(crowd: None, clock: ManualClock) -> None:
    """The plan promises it; SQLite's own count of the steps that it took proves it."""

    def steps() -> int:
        taken = 0

        def tick() -> int:
            nonlocal taken
            taken += 1
            return 0

        connection.connection.set_progress_handler(tick, 1)
        try:
            [handle] = claim_batch("mail", "w")
            handle.release()
        finally:
            connection.connection.set_progress_handler(None, 0)
        return taken

    before = steps()
    ids = enqueue_many("mail", range(5_000))
    Job.objects.filter(pk__in=range(ids[0], ids[-1] + 1)).update(state="completed", finished_at=clock.now())
    enqueue_many("mail", range(5_000), delay=10_000, priority=5)
    assert steps() < before * 2


def test_queue_stats_is_answered_by_indexes(crowd: None) -> None:
    for steps in plans_of(queue_stats).values():
        for step in steps:
            if "django_alkstore_job" in step:
                assert "USING" in step, steps
                assert "INDEX" in step, steps
