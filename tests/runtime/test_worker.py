"""Section 8: what a worker claims, how it runs it, and what becomes of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from django_alkstore import clock
from django_alkstore.models import Job
from django_alkstore.runtime.jobs import LARGEST_BATCH
from django_alkstore.services import claim_batch, enqueue, enqueue_many, get_job, outbox, schedule, tick
from tests.ledger.models import Entry
from tests.ledger.tools import (
    can_write_at_once,
    counted_claims,
    row,
    state,
    variant,
    wait_for_state,
)
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]


def told(process: Process, times: int = 1) -> list[dict[str, Any]]:
    process.wait_for("told {", times)
    return [json.loads(line.split(" ", 1)[1]) for line in process.lines if line.startswith("told {")]


def is_untouched(job: Job) -> bool:
    """As it was enqueued: nobody has claimed it, no attempt is spent."""
    now = row(job.pk)
    return (now.state, now.attempts, now.worker_id, now.errors) == ("pending", 0, None, [])


# Outcomes


def test_a_handler_that_returns_acks_its_job(start: Start) -> None:
    job = enqueue("record", "hello")
    start("run_queue", "record")
    wait_for_state("completed", job.pk)
    done = row(job.pk)
    assert (done.attempts, done.errors, done.last_error, done.worker_id) == (1, [], None, None)
    assert list(Entry.objects.values_list("text", "job_id")) == [("hello", job.pk)]


def test_a_handler_that_raises_is_retried_by_the_curve_with_the_full_traceback_kept(start: Start) -> None:
    job = enqueue("fail", "x", backoff_base=1_000)
    before = clock.now()
    process = start("run_queue", "fail")
    process.wait_for(f"attempt 1 of {job.pk}")
    wait_until(lambda: bool(row(job.pk).errors), "the failure is on the job")
    failed = row(job.pk)
    assert (failed.state, failed.attempts, failed.last_error) == ("pending", 1, "ValueError: no luck with x")
    assert (failed.run_at - before).total_seconds() >= 1_000
    (entry,) = failed.errors
    assert (entry["attempt"], entry["error"]) == (1, "ValueError: no luck with x")
    assert entry["traceback"].startswith("Traceback (most recent call last):")
    assert 'raise ValueError(f"no luck with {job.payload}")' in entry["traceback"]
    assert entry["traceback"].rstrip().endswith("ValueError: no luck with x")


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_f046_a_handler_that_always_raises_runs_exactly_as_often_as_it_may(start: Start, attempts: int) -> None:
    job = enqueue("fail", "x", max_attempts=attempts, backoff_base=0)
    process = start("run_queue", "fail", "noop")
    wait_for_state("dead", job.pk)
    last = enqueue("noop", None)
    process.wait_for(f"completed job {last.pk} ")
    ran = [line for line in process.lines if line.startswith("attempt ")]
    assert ran == [f"attempt {number} of {job.pk}" for number in range(1, attempts + 1)]
    assert [entry["attempt"] for entry in row(job.pk).errors] == list(range(1, attempts + 1))


def test_f044_by_default_a_handler_that_always_raises_runs_three_times_and_is_dead(start: Start) -> None:
    job = enqueue("fail", "x", backoff_base=0)
    process = start("run_queue", "fail")
    process.wait_for("dead: ")
    assert len([line for line in process.lines if line.startswith("attempt ")]) == 3
    assert row(job.pk).last_error == "ValueError: no luck with x"


def test_retry_discard_and_snooze_do_what_they_say(start: Start) -> None:
    asked = {name: enqueue("hostile", name) for name in ("retry", "discard", "snooze", "retry now")}
    before = clock.now()
    start("run_queue", "hostile")
    wait_for_state("dead", asked["discard"].pk, asked["retry now"].pk)
    wait_until(lambda: row(asked["snooze"].pk).run_at > before, "snoozed")
    wait_until(lambda: bool(row(asked["retry"].pk).errors), "retried")

    retried = row(asked["retry"].pk)
    assert (retried.state, retried.attempts, len(retried.errors)) == ("pending", 1, 1)
    assert (retried.run_at - before).total_seconds() >= 3_600
    assert "later" in retried.errors[0]["error"]

    discarded = row(asked["discard"].pk)
    assert (discarded.attempts, len(discarded.errors)) == (1, 1)
    assert "no use" in (discarded.last_error or "")

    snoozed = row(asked["snooze"].pk)
    assert (snoozed.state, snoozed.attempts, snoozed.worker_id) == ("pending", 0, None)
    assert (snoozed.run_at - before).total_seconds() >= 3_600

    assert (row(asked["retry now"].pk).attempts, len(row(asked["retry now"].pk).errors)) == (3, 3)


def test_a_handler_is_given_what_the_contract_lists(start: Start) -> None:
    payload = {"text": "naïve \N{PILE OF POO}", "number": 2**70, "deep": [[[None, True, 1.5]]]}
    job = enqueue("tell", payload, priority=7, max_attempts=4)
    (seen,) = told(start("run_queue", "tell"))
    assert seen["id"] == job.pk
    assert (seen["queue"], seen["payload"], seen["priority"]) == ("tell", payload, 7)
    assert (seen["attempt"], seen["max_attempts"], seen["last_error"], seen["schedule"]) == (1, 4, None, None)
    assert seen["moments"][:2] == [str(job.created_at), str(job.run_at)]
    assert seen["lost"] is False


def test_a_fired_job_tells_its_handler_of_its_schedule(start: Start) -> None:
    declared = schedule("every", "@every 1h", "tell")
    (fire,) = tick(declared.next_fire_at)
    assert fire.job_id is not None
    Job.objects.filter(pk=fire.job_id).update(run_at=clock.now())  # it was fired for an hour from now
    (seen,) = told(start("run_queue", "tell"))
    assert (seen["schedule"], seen["moments"][3]) == ("every", str(declared.next_fire_at))


def test_a_handler_that_settles_its_job_itself_has_the_last_word(start: Start) -> None:
    jobs = {way: enqueue("settle", way) for way in ("ack", "fail", "retry", "ack raise", "fail raise", "retry raise")}
    process = start("run_queue", "settle", "noop", "--concurrency", "1")
    for way in jobs:
        process.wait_for(f"{way}: True")
    last = enqueue("noop", None)
    wait_for_state("completed", last.pk)
    found = {way: (row(job.pk).state, [entry["error"] for entry in row(job.pk).errors]) for way, job in jobs.items()}
    assert found == {
        "ack": ("completed", []),
        "ack raise": ("completed", []),
        "fail": ("dead", ["by itself"]),
        "fail raise": ("dead", ["by itself"]),
        "retry": ("pending", ["by itself"]),
        "retry raise": ("pending", ["by itself"]),
    }


# Transactions


def test_an_atomic_handler_s_row_and_ack_commit_together_or_not_at_all(start: Start) -> None:
    good, bad = enqueue("ledger", "good"), enqueue("ledger", "fail", max_attempts=1)
    start("run_queue", "ledger")
    wait_for_state("completed", good.pk)
    wait_for_state("dead", bad.pk)
    assert list(Entry.objects.values_list("text", "job_id")) == [("good", good.pk)]
    assert "after the row" in (row(bad.pk).last_error or "")


def test_a_handler_s_own_transaction_with_ack_tx_commits_rows_and_ack_or_neither(start: Start) -> None:
    good, back, late = (enqueue("own", how, max_attempts=1) for how in ("good", "roll back", "raise"))
    start("run_queue", "own")
    wait_for_state("completed", good.pk, late.pk)
    wait_for_state("dead", back.pk)
    assert sorted(Entry.objects.values_list("job_id", flat=True)) == [good.pk, late.pk]
    assert row(late.pk).errors == []


def test_an_async_handler_uses_the_orm_and_is_acked(start: Start) -> None:
    jobs = [enqueue("async", f"number {number}") for number in range(5)]
    start("run_queue", "async")
    wait_for_state("completed", *(job.pk for job in jobs))
    assert sorted(Entry.objects.values_list("job_id", flat=True)) == [job.pk for job in jobs]


def test_f011_no_transaction_is_open_while_a_handler_runs(start: Start, tmp_path: Path) -> None:
    open_end = tmp_path / "open"
    job = enqueue("wait", str(open_end))
    process = start("run_queue", "wait", "tell", "--concurrency", "2")
    process.wait_for(f"running {job.pk}")
    wait_until(can_write_at_once, "another process writes while the handler runs")
    beside = enqueue("tell", None)
    (seen,) = told(process)
    assert (seen["id"], seen["in_atomic_block"], seen["autocommit"]) == (beside.pk, False, True)
    assert state(job.pk) == "processing"
    open_end.touch()
    wait_for_state("completed", job.pk)


def test_f119_the_query_log_is_empty_at_the_start_of_each_job(start: Start) -> None:
    enqueue_many("tell", [None] * 30)
    process = start("run_queue", "tell", "--concurrency", "1", **variant(DEBUG=True))
    seen = told(process, 30)
    assert max(job["queries"] for job in seen) <= seen[0]["queries"] + 1


# What is claimed


def test_jobs_of_queues_without_a_handler_wait_untouched(start: Start) -> None:
    strangers = [enqueue("unknown", None, priority=9), outbox("unknown").enqueue(None), enqueue("mailx", None)]
    spent = enqueue("unknown-too", None, max_attempts=1)
    (lapsed,) = claim_batch("unknown-too", "ghost")
    Job.objects.filter(pk=spent.pk).update(lease_expires_at=clock.now())
    start("run_alkstore")
    known = enqueue("noop", None), outbox("mail").enqueue("a")
    wait_for_state("completed", *(job.pk for job in known))
    assert all(is_untouched(job) for job in strangers)
    assert (row(spent.pk).attempts, row(spent.pk).worker_id, lapsed.attempt) == (1, "ghost", 1)


def test_a_worker_claims_only_from_the_queues_that_it_was_told(start: Start) -> None:
    others = enqueue("record", "a"), outbox("mail").enqueue("b")
    start("run_queue", "noop")
    mine = enqueue("noop", None)
    wait_for_state("completed", mine.pk)
    assert all(is_untouched(job) for job in others)


@pytest.mark.parametrize("count", [1, 4])
def test_concurrency_n_runs_n_handlers_at_once_and_never_more(start: Start, count: int) -> None:
    ids = enqueue_many("crowd", [count] * (count * 3))
    process = start("run_queue", "crowd", "--concurrency", str(count))
    process.wait_for("met ", len(ids))
    peaks = {line.rsplit(" ", 1)[1] for line in process.lines if line.startswith("met ")}
    assert peaks == {str(count)}


def test_the_default_concurrency_is_four(start: Start) -> None:
    ids = enqueue_many("crowd", [4] * 8)
    process = start("run_queue", "crowd")
    process.wait_for("met ", len(ids))
    assert {line.rsplit(" ", 1)[1] for line in process.lines if line.startswith("met ")} == {"4"}


def test_no_more_is_ever_claimed_than_a_batch_and_what_can_run(start: Start) -> None:
    with counted_claims() as most:
        ids = enqueue_many("noop", [None] * 300)
        process = start("run_queue", "noop", "-v", "0", "--concurrency", "2")
        wait_for_state("completed", *ids)
        process.end()
        assert 1 <= most() <= LARGEST_BATCH + 2
    assert set(Job.objects.values_list("attempts", flat=True)) == {1}


def test_what_waits_for_a_thread_is_given_back_and_not_counted(start: Start, tmp_path: Path) -> None:
    """Quick jobs let the worker claim ahead; then one holds the only thread."""
    open_end = tmp_path / "open"
    with counted_claims() as most:
        ids = enqueue_many("mix", [None] * 60 + [str(open_end)] + [None] * 6)
        slow, behind = ids[60], ids[61:]
        process = start("run_queue", "mix", "--concurrency", "1")
        process.wait_for(f"running {slow}")
        waiting = Job.objects.filter(pk__in=behind)
        wait_until(lambda: set(waiting.values_list("state", "attempts")) == {("pending", 0)}, "all are given back")
        # Free for anybody: a second worker runs them while the first is busy.
        start("run_queue", "mix", "--concurrency", "1")
        wait_for_state("completed", *behind)
        assert state(slow) == "processing"
        assert most() <= LARGEST_BATCH + 1
    assert all((job.attempts, job.errors, job.last_error) == (1, [], None) for job in waiting)
    open_end.touch()
    wait_for_state("completed", slow)


CLAIMS_AHEAD = """
import sys
from django.core.management import call_command
from django_alkstore.runtime import keeper, leadership, shared_state
from django_alkstore.services import maintenance
shared_state.QUICK = 3_600.0  # every handler is quick, however long it has taken
shared_state.LONGEST_WAIT_TO_START = maintenance.UPKEEP_INTERVAL = 600.0
leadership.LONGEST_SLEEP = keeper.LONGEST_SLEEP = 600.0
call_command(*sys.argv[1:])
"""


def test_what_has_ended_is_written_though_its_thread_is_busy_and_others_wait(start: Start, tmp_path: Path) -> None:
    """The threads go on with the other jobs of their batch, so the keeper writes."""
    first_end, open_end = tmp_path / "first", tmp_path / "open"
    process = start("-c", CLAIMS_AHEAD, "run_queue", "mix", "--concurrency", "2")
    known = enqueue("mix", None)
    wait_for_state("completed", known.pk)  # from here on the worker takes its handler for a quick one
    first, second, third, behind = ids = enqueue_many("mix", [str(first_end), *[str(open_end)] * 2, None])
    process.wait_for(f"running {second}")  # the keeper lets the other thread lead
    first_end.touch()
    process.wait_for(f"completed job {first} ")  # no thread has time to write it
    process.wait_for(f"running {third}")
    assert state(behind) == "processing"
    open_end.touch()
    wait_for_state("completed", *ids)
    assert row(behind).attempts == 1


def test_higher_priorities_go_first_then_older_ones(start: Start) -> None:
    order = [enqueue("tell", None, priority=priority).pk for priority in (0, -5, 9, 0, 9)]
    process = start("run_queue", "tell", "--concurrency", "1")
    assert [job["id"] for job in told(process, 5)] == [order[2], order[4], order[0], order[3], order[1]]


def test_f042_claims_of_dead_workers_take_no_place_of_a_live_one(start: Start) -> None:
    orphans = enqueue_many("noop", [None] * 4)
    assert len(claim_batch("noop", "ghost", 4)) == 4
    fresh = enqueue("noop", None)
    start("run_queue", "noop", "--concurrency", "4")
    wait_for_state("completed", fresh.pk)
    assert {state(orphan) for orphan in orphans} == {"processing"}
    Job.objects.filter(pk__in=orphans).update(lease_expires_at=clock.now())
    wait_for_state("completed", *orphans)
    assert {row(orphan).attempts for orphan in orphans} == {2}


def test_f029_a_worker_puts_right_what_has_lapsed_and_expired_in_its_queues(start: Start) -> None:
    spent = enqueue("noop", None, max_attempts=1)
    assert len(claim_batch("noop", "ghost")) == 1
    expired = enqueue("noop", None, expires_in=1)
    Job.objects.filter(pk=spent.pk).update(lease_expires_at=clock.now())
    Job.objects.filter(pk=expired.pk).update(expires_at=clock.now())
    start("run_queue", "noop")
    wait_for_state("dead", spent.pk, expired.pk)
    assert (row(spent.pk).last_error, row(spent.pk).attempts) == ("lease expired", 1)
    assert (row(expired.pk).last_error, row(expired.pk).attempts) == ("expired", 0)


def test_f051_a_row_that_cannot_be_read_dies_with_its_reason_and_the_others_run(start: Start) -> None:
    ids = enqueue_many("noop", [None] * 5)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_alkstore_job SET payload = '{broken' WHERE id = %s", [ids[1]])
        cursor.execute("UPDATE django_alkstore_job SET errors = 'broken' WHERE id = %s", [ids[3]])
    start("run_queue", "noop", "--concurrency", "1")
    wait_for_state("completed", ids[0], ids[2], ids[3], ids[4])
    wait_for_state("dead", ids[1])
    with connection.cursor() as cursor:
        cursor.execute("SELECT last_error, attempts FROM django_alkstore_job WHERE id = %s", [ids[1]])
        reason, _ = cursor.fetchone()
    assert "payload" in reason


def test_f051_a_failure_is_recorded_on_a_history_that_cannot_be_read(start: Start) -> None:
    job = enqueue("fail", "x", max_attempts=1)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_alkstore_job SET errors = '{broken' WHERE id = %s", [job.pk])
    start("run_queue", "fail")
    wait_for_state("dead", job.pk)
    assert row(job.pk).errors[-1]["error"] == "ValueError: no luck with x"


def test_a_job_that_is_due_later_is_run_when_it_is_due(start: Start) -> None:
    process = start("run_queue", "noop")
    process.wait_for("worker started")
    job = enqueue("noop", None, delay=0.7)
    wait_for_state("completed", job.pk)
    done = row(job.pk)
    assert done.finished_at is not None
    assert done.finished_at >= done.run_at


@pytest.mark.parametrize("queue", ["mix", "self-ack"])
def test_a_job_that_is_enqueued_while_every_thread_is_busy_is_run_as_soon_as_one_is_free(
    start: Start, tmp_path: Path, queue: str
) -> None:
    """Whoever writes the ack, the worker or the handler itself: no commit of the meantime is overlooked."""
    open_end = tmp_path / "open"
    slow = enqueue(queue, str(open_end))
    process = start("run_queue", queue, "noop", "--concurrency", "1")
    process.wait_for(f"running {slow.pk}")
    late = enqueue("noop", None)
    open_end.touch()
    wait_for_state("completed", slow.pk, late.pk)


def test_keep_completed_zero_deletes_a_job_on_its_ack(start: Start) -> None:
    job = enqueue("record", "a")
    start("run_queue", "record", **variant(ALKSTORE={"KEEP_COMPLETED": 0}))
    wait_until(lambda: get_job(job.pk) is None, "the job is deleted")
    assert Entry.objects.count() == 1


@pytest.mark.parametrize("queues", [("noop", "record"), ("async",)])
def test_f119_five_thousand_jobs_leave_the_worker_s_open_files_as_they_were(
    start: Start, queues: tuple[str, ...]
) -> None:
    def open_files() -> int:
        return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))

    def threads() -> int:
        return len(list(Path(f"/proc/{process.pid}/task").iterdir()))

    # One thread, or one coroutine: others might open connections of their own only later.
    process = start("run_queue", *queues, "-v", "0", "--concurrency", "1", "--async-concurrency", "1")
    warm = [job for queue in queues for job in enqueue_many(queue, ["a"] * 50)]
    wait_until(lambda: not Job.objects.live().exists(), "the first jobs are done")
    before = open_files(), threads()
    ids = [
        *enqueue_many(queues[0], ["a"] * (5_000 if queues[0] == "noop" else 500)),
        *enqueue_many(queues[-1], ["a"] * 50),
    ]
    wait_until(lambda: not Job.objects.live().exists(), "all are done")
    assert Job.objects.filter(state="completed", attempts=1).count() == len(warm) + len(ids)
    wait_until(lambda: open_files() <= before[0] and threads() <= before[1], f"as before: {before}")


MUCH_TO_PRUNE = """
import sys
from pathlib import Path
from django.core.management import call_command
from django_alkstore.services import maintenance
enough = Path(sys.argv[1])

def prune_batch(alias, whole=maintenance.prune_batch):
    if not enough.exists():
        print("prunes")
        return {"completed": 1}
    return whole(alias)

maintenance.prune_batch = prune_batch
call_command(*sys.argv[2:])
"""


def test_work_goes_on_while_there_is_much_to_prune(start: Start, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    process = start("-c", MUCH_TO_PRUNE, str(enough), "run_queue", "noop")
    process.wait_for("prunes")
    job = enqueue("noop", None)
    process.wait_for(f"completed job {job.pk} ")
    assert "pruned" not in process.output
    enough.touch()
    process.wait_for("pruned ")


def test_a_queue_that_was_empty_is_not_forgotten_while_another_keeps_every_thread_busy(start: Start) -> None:
    """The first is never found empty, so that nobody waits for news."""
    enqueue_many("paced", [0.01] * 10_000)
    worker = start("run_queue", "paced", "noop", "--concurrency", "1")
    worker.wait_for("completed job")
    late = enqueue("noop", None)
    wait_for_state("completed", late.pk)
    assert Job.objects.filter(queue="paced", state="pending").exists()
