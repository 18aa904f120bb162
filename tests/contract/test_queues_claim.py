"""Contract, section 4: jobs out. The claim's order, leases and their lapse, expiry, sweep, what is next, the counts."""
# ruff: noqa: PT012  what is raised must leave an open transaction, so the block holds more than one statement

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_alkstore.clock import ManualClock
from django_alkstore.exceptions import DuplicateJob, InvalidOption
from django_alkstore.models import Job
from django_alkstore.services import (
    JobHandle,
    QueueStats,
    cancel,
    claim_batch,
    enqueue,
    enqueue_many,
    get_job,
    next_claim_at,
    outbox,
    queue_stats,
    requeue,
    sweep,
)

pytestmark = pytest.mark.django_db(transaction=True)


def claim(queue: str = "mail", worker: str = "w") -> JobHandle:
    [handle] = claim_batch(queue, worker)
    return handle


def claimed_payloads(limit: int) -> list[Any]:
    return [handle.payload for handle in claim_batch("mail", "w", limit=limit)]


# Order


def test_due_jobs_go_by_priority_then_run_at_then_id(clock: ManualClock) -> None:
    wanted = []
    # Stored in an order that none of the three keys has.
    for number, (priority, delay) in enumerate(
        [(0, 5), (9, 5), (0, 1), (-3, 0), (9, 1), (2, 3), (9, 5), (0, 1), (-3, 0)]
    ):
        enqueue("mail", number, priority=priority, delay=delay)
        wanted.append((-priority, delay, number))
    clock.advance(10)
    assert claimed_payloads(100) == [number for *_, number in sorted(wanted)]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 100])
def test_batches_of_any_size_keep_the_order(limit: int, clock: ManualClock) -> None:
    for number in range(12):
        enqueue("mail", number, priority=number % 3)
    wanted = sorted(range(12), key=lambda number: (-(number % 3), number))
    batches = [claimed_payloads(limit) for _ in range(12 // limit + 1)]
    assert list(itertools.chain(*batches)) == wanted
    assert all(len(batch) <= limit for batch in batches)


def test_a_delayed_job_of_a_higher_priority_hides_no_due_one(clock: ManualClock) -> None:
    enqueue("mail", "due low", priority=-1)
    for priority in (5, 9):
        enqueue("mail", f"later {priority}", priority=priority, delay=60)
    enqueue("mail", "due 5", priority=5)
    assert claimed_payloads(10) == ["due 5", "due low"]
    assert claimed_payloads(10) == []
    clock.advance(60)
    assert claimed_payloads(10) == ["later 9", "later 5"]


def test_a_job_is_due_at_its_run_at_and_not_before(clock: ManualClock) -> None:
    job = enqueue("mail", None, delay=10)
    clock.advance(9.999_999)
    assert claim_batch("mail", "w") == []
    clock.advance(0.000_001)
    assert clock.now() == job.run_at
    assert claim().id == job.id


def test_a_claim_takes_from_its_own_queue_alone() -> None:
    enqueue("mail", None)
    outbox("mail").enqueue(None)
    assert claim_batch("other", "w", limit=9) == []
    assert claim_batch("mai", "w", limit=9) == []
    assert len(claim_batch("mail", "w", limit=9)) == 1


@pytest.mark.parametrize("states", [("cancelled",), ("completed",), ("dead",), ("processing",)])
def test_only_pending_jobs_are_claimed(states: tuple[str]) -> None:
    for state in states:
        job = enqueue("mail", state)
        if state == "cancelled":
            cancel(job.id)
        else:
            handle = claim()
            assert state == "processing" or (handle.ack() if state == "completed" else handle.fail("x"))
    assert claim_batch("mail", "w", limit=9) == []


# The lease


def test_a_claim_leases_the_job_and_counts_the_attempt(clock: ManualClock) -> None:
    job = enqueue("mail", {"a": 1}, priority=4, visibility_timeout=30, max_attempts=2, delay=5)
    enqueued_at = clock.now()
    clock.advance(7)
    handle = claim(worker="worker-1")
    row = get_job(job.id)
    assert (row.state, row.worker_id, row.attempts) == ("processing", "worker-1", 1)
    assert row.lease_expires_at == handle.lease_expires_at == clock.now() + timedelta(seconds=30)
    assert (handle.id, handle.queue, handle.payload, handle.priority) == (job.id, "mail", {"a": 1}, 4)
    assert (handle.attempt, handle.max_attempts) == (1, 2)
    assert (handle.enqueued_at, handle.run_at) == (enqueued_at, job.run_at)
    assert (handle.last_error, handle.schedule, handle.fire_at) == (None, None, None)


@pytest.mark.parametrize("timeout", [0.29, 1.001, 4.35, 8.41, 300, 86_400.000_001])
def test_the_lease_is_the_visibility_timeout_to_the_microsecond(timeout: float, clock: ManualClock) -> None:
    enqueue("mail", None, visibility_timeout=timeout)
    handle = claim()
    assert handle.lease_expires_at - clock.now() == timedelta(seconds=timeout)
    assert handle.heartbeat()
    assert handle.lease_expires_at - clock.now() == timedelta(seconds=timeout)


def test_a_leased_job_is_nobody_elses_until_its_very_end(clock: ManualClock) -> None:
    job = enqueue("mail", None, visibility_timeout=10)
    claim(worker="a")
    clock.advance(9.999_999)
    assert claim_batch("mail", "b") == []
    clock.advance(0.000_001)
    assert [handle.id for handle in claim_batch("mail", "b")] == [job.id]


def test_at_each_instant_the_lease_is_either_held_or_claimable(clock: ManualClock) -> None:
    for offset in (-0.000_001, 0, 0.000_001):
        enqueue("mail", None, visibility_timeout=10)
        handle = claim(worker="a")
        clock.advance(10 + offset)
        taken = claim_batch("mail", "b")
        assert handle.ack() is (taken == [])
        assert [other.ack() for other in taken] in ([], [True])


def test_the_longest_lease_that_is_taken_can_also_be_claimed(clock: ManualClock) -> None:
    """An option that is out of range is refused when the job comes in, not when a worker wants it."""
    accepted = []
    for timeout in (1e6, 1e9, 1e11, 2.4e11, 2.5e11, 2.533e11):
        try:
            accepted.append(enqueue("mail", timeout, visibility_timeout=timeout).id)
        except InvalidOption:
            continue
    assert accepted
    assert [handle.id for handle in claim_batch("mail", "w", limit=9)] == accepted


@pytest.mark.parametrize(
    "bad", [0, -1, True, None, 1.0, "1", 2**31, 2**63, 10**5000, float("nan")], ids=lambda bad: type(bad).__name__
)
def test_a_limit_out_of_range_is_refused(bad: Any) -> None:
    enqueue("mail", None)
    with pytest.raises(InvalidOption, match="limit"):
        claim_batch("mail", "w", bad)
    assert Job.objects.get().state == "pending"


@pytest.mark.parametrize("bad", [None, 1, b"w", "", "w" * 256, "a\x00", "\udcff"], ids=ascii)
def test_f103_a_worker_id_that_not_every_database_can_hold_is_refused(bad: Any) -> None:
    enqueue("mail", None)
    with pytest.raises(InvalidOption, match="worker_id"):
        claim_batch("mail", bad)
    assert Job.objects.get().state == "pending"


@pytest.mark.parametrize("queue", ["mail", "empty"])
def test_a_claim_inside_a_transaction_is_a_runtime_error_and_leases_nothing(queue: str) -> None:
    enqueue("mail", None)
    with transaction.atomic(), pytest.raises(RuntimeError):
        claim_batch(queue, "w")
    connection = connections["default"]
    connection.set_autocommit(False)
    try:
        with pytest.raises(RuntimeError):
            claim_batch(queue, "w")
    finally:
        connection.rollback()
        connection.set_autocommit(True)
    with pytest.raises(RuntimeError), transaction.atomic():
        outbox("mail").run_once("w", lambda job: None)
    assert Job.objects.get().state == "pending"


@pytest.mark.django_db(databases=["default", "other"], transaction=True)
def test_a_transaction_on_another_database_hides_no_lease() -> None:
    enqueue("mail", None)
    with transaction.atomic(using="other"):
        assert claim().attempt == 1


# Lapse


def test_f031_f047_a_lapsed_job_comes_back_with_its_attempt_spent_and_its_lapse_kept(clock: ManualClock) -> None:
    job = enqueue("mail", None, max_attempts=3)
    for attempt in (1, 2, 3):
        handle = claim()
        assert handle.attempt == attempt
        assert handle.last_error == (None if attempt == 1 else "lease expired")
        clock.advance(300)
    assert claim_batch("mail", "w") == []
    dead = get_job(job.id)
    assert (dead.state, dead.attempts, dead.last_error) == ("dead", 3, "lease expired")
    assert (dead.worker_id, dead.lease_expires_at, dead.finished_at) == (None, None, clock.now())
    assert [(entry["attempt"], entry["error"]) for entry in dead.errors] == [(n, "lease expired") for n in (1, 2, 3)]
    clock.advance(10**6)
    assert claim_batch("mail", "w") == []


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_f046_f047_a_job_whose_worker_dies_each_time_starts_max_attempts_times(
    attempts: int, clock: ManualClock
) -> None:
    enqueue("mail", None, max_attempts=attempts)
    runs = 0
    while claim_batch("mail", "w"):
        runs += 1
        clock.advance(301)
    assert runs == attempts


def test_a_lapsed_job_takes_its_old_place_in_the_order(clock: ManualClock) -> None:
    enqueue("mail", "lapsed")
    clock.advance(1)
    enqueue("mail", "younger")
    enqueue("mail", "urgent", priority=1)
    claim_batch("mail", "dead worker", limit=1)
    claim_batch("mail", "dead worker", limit=1)
    clock.advance(300)
    assert claimed_payloads(10) == ["urgent", "lapsed", "younger"]


def test_f042_other_jobs_flow_while_claims_of_dead_workers_wait_for_their_lapse(clock: ManualClock) -> None:
    enqueue_many("mail", range(4), visibility_timeout=60)
    assert len(claim_batch("mail", "dead worker", limit=4)) == 4
    enqueue("mail", "new")
    assert claimed_payloads(10) == ["new"]
    clock.advance(60)
    assert sorted(claimed_payloads(10)) == [0, 1, 2, 3]


def test_more_lapsed_and_expired_jobs_than_one_batch_holds_are_all_put_right(clock: ManualClock) -> None:
    enqueue_many("mail", range(450), max_attempts=1)
    enqueue_many("mail", range(450), delay=1, expires_in=1)
    assert len(claim_batch("mail", "w", limit=450)) == 450
    clock.advance(1000)
    enqueue("mail", "good", priority=-9)
    assert claimed_payloads(1) == ["good"]
    assert Job.objects.filter(state="dead", last_error="lease expired").count() == 450
    assert Job.objects.filter(state="dead", last_error="expired").count() == 450


# Expiry


def test_an_expired_job_is_dead_and_never_delivered(clock: ManualClock) -> None:
    job = enqueue("mail", "stale", delay=10, expires_in=5)
    enqueue("mail", "fresh", delay=10, expires_in=500)
    clock.advance(16)
    assert claimed_payloads(10) == ["fresh"]
    dead = get_job(job.id)
    assert (dead.state, dead.last_error, dead.attempts, dead.finished_at) == ("dead", "expired", 0, clock.now())
    assert dead.errors[-1]["error"] == "expired"


def test_an_expiry_counts_from_run_at(clock: ManualClock) -> None:
    job = enqueue("mail", None, delay=100, expires_in=5)
    assert job.expires_at == job.run_at + timedelta(seconds=5)
    clock.advance(104)
    assert claim().id == job.id


def test_a_job_claimed_in_time_may_finish_after_its_expiry(clock: ManualClock) -> None:
    job = enqueue("mail", None, expires_in=5)
    handle = claim()
    clock.advance(50)
    assert sweep() == 0
    assert handle.ack()
    assert get_job(job.id).state == "completed"


@pytest.mark.parametrize("end", [lambda handle, clock: handle.retry("no"), lambda handle, clock: clock.advance(300)])
def test_a_job_that_expired_between_two_attempts_is_not_delivered_again(
    end: Callable[..., Any], clock: ManualClock
) -> None:
    job = enqueue("mail", None, expires_in=60)
    end(claim(), clock)
    clock.advance(100)
    assert claim_batch("mail", "w") == []
    dead = get_job(job.id)
    assert (dead.state, dead.last_error) == ("dead", "expired")
    assert len(dead.errors) == 2


# Sweep


def test_sweep_counts_each_job_it_put_right_once(clock: ManualClock) -> None:
    enqueue_many("mail", range(3))
    enqueue_many("mail", range(2), max_attempts=1)
    assert len(claim_batch("mail", "w", limit=5)) == 5
    enqueue_many("mail", range(4), expires_in=1)
    enqueue_many("other", range(2), expires_in=1)
    outbox("box").enqueue(None, expires_in=1)
    enqueue("mail", "untouched")
    assert sweep() == 0
    clock.advance(300)
    assert sweep("nothing") == 0
    assert sweep("other") == 2
    assert sweep() == 3 + 2 + 4 + 1
    assert sweep() == 0
    counts = {stats.queue: (stats.pending, stats.processing, stats.dead) for stats in queue_stats()}
    assert counts == {"mail": (4, 0, 6), "other": (0, 0, 2), "__alkstore_outbox:box": (0, 0, 1)}


def test_sweep_in_a_callers_transaction_takes_the_writer_lock_before_it_reads() -> None:
    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        sweep()
    statements = [query["sql"] for query in queries if not query["sql"].startswith("SAVEPOINT")]
    assert not statements[0].startswith("SELECT"), statements


def test_sweep_counts_a_job_that_lapsed_and_had_expired_once(clock: ManualClock) -> None:
    job = enqueue("mail", None, expires_in=60)
    claim()
    clock.advance(300)
    assert sweep("mail") == 1
    assert get_job(job.id).state == "dead"


def test_a_sweep_leaves_a_held_lease_and_a_job_in_time_alone(clock: ManualClock) -> None:
    enqueue("mail", None, expires_in=100)
    handle = claim()
    enqueue("mail", None, expires_in=400)
    clock.advance(299)
    before = list(Job.objects.order_by("id").values())
    assert sweep() == 0
    assert list(Job.objects.order_by("id").values()) == before
    assert handle.ack()


# The clock


def test_f078_a_clock_that_steps_back_takes_no_lease_away_and_gives_none_twice(clock: ManualClock) -> None:
    enqueue("mail", None)
    handle = claim(worker="a")
    clock.step(-7200)
    assert claim_batch("mail", "b") == []
    assert sweep() == 0
    assert handle.heartbeat()
    assert handle.ack()
    assert claim_batch("mail", "b") == []


def test_a_clock_that_steps_forward_lapses_a_lease_and_the_late_ack_changes_nothing(clock: ManualClock) -> None:
    enqueue("mail", None)
    handle = claim(worker="a")
    clock.step(7200)
    other = claim(worker="b")
    before = Job.objects.values().get()
    assert not handle.ack()
    assert Job.objects.values().get() == before
    clock.step(-7200)
    assert not handle.ack()
    assert Job.objects.values().get() == before
    assert other.ack()


# What is next


def test_next_claim_at_is_the_earliest_run_at_or_lease_end(clock: ManualClock) -> None:
    start = clock.now()

    def at(seconds: float) -> Any:
        return start + timedelta(seconds=seconds)

    assert next_claim_at("mail") is None
    enqueue("mail", "far", delay=900, priority=9)
    assert next_claim_at("mail") == at(900)
    enqueue("mail", "near", delay=400, priority=-9)
    enqueue("other", None)
    assert next_claim_at("mail") == at(400)
    enqueue("mail", "now", visibility_timeout=30)
    assert next_claim_at("mail") == start
    handle = claim()
    assert next_claim_at("mail") == at(30)
    handle.heartbeat(60)
    assert next_claim_at("mail") == at(60)
    handle.ack()
    assert next_claim_at("mail") == at(400)
    Job.objects.filter(queue="mail").delete()
    assert next_claim_at("mail") is None


@pytest.mark.parametrize("state", ["completed", "dead", "cancelled"])
def test_a_finished_job_is_not_next(state: str) -> None:
    job = enqueue("mail", None)
    if state == "cancelled":
        cancel(job.id)
    else:
        handle = claim()
        assert handle.ack() if state == "completed" else handle.fail("x")
    assert next_claim_at("mail") is None


def test_queue_stats_counts_each_state_by_queue(clock: ManualClock) -> None:
    assert queue_stats() == []
    enqueue("b", None)
    clock.advance(2.5)
    enqueue("b", None)
    enqueue("b", None, delay=60)
    ends = [
        lambda handle: handle.ack(),
        lambda handle: handle.ack(),
        lambda handle: handle.fail("x"),
        lambda handle: None,
    ]
    for end in ends:
        enqueue("a", None)
        end(claim("a"))
    assert cancel(enqueue("a", None).id)
    outbox("o").enqueue(None, delay=1)
    assert queue_stats() == [
        QueueStats("__alkstore_outbox:o", 1, 0, 0, 0, 0, 0, None),
        QueueStats("a", 0, 1, 2, 1, 1, 0, None),
        QueueStats("b", 3, 0, 0, 0, 0, 2, 2.5),
    ]
    fields = ["queue", "pending", "processing", "completed", "dead", "cancelled", "due", "oldest_due_age"]
    assert list(QueueStats.__dataclass_fields__) == fields
    with pytest.raises(AttributeError):
        queue_stats()[0].due = 5  # type: ignore[misc]


# Control


def row(job_id: int) -> dict[str, Any] | None:
    return Job.objects.filter(pk=job_id).values().first()


NEVER_AN_ID = [0, -1, 10**9, 2**63 - 1, 2**63, 2**64, -(2**70)]


@pytest.mark.parametrize("job_id", NEVER_AN_ID)
def test_an_id_that_no_job_has_is_none_or_false(job_id: int) -> None:
    assert get_job(job_id) is None
    assert cancel(job_id) is False
    assert requeue(job_id) is False


def in_state(state: str, clock: ManualClock, **options: Any) -> int:
    job = enqueue("mail", state, **options)
    if state in ("processing", "completed", "dead"):
        handle = claim()
        if state == "completed":
            handle.ack()
        elif state == "dead":
            handle.fail("broken")
    elif state == "cancelled":
        cancel(job.id)
    assert get_job(job.id).state == state
    return job.id


@pytest.mark.parametrize("state", ["pending", "processing"])
def test_cancel_ends_a_live_job(state: str, clock: ManualClock) -> None:
    job_id = in_state(state, clock)
    clock.advance(1)
    assert cancel(job_id) is True
    job = get_job(job_id)
    assert (job.state, job.finished_at, job.worker_id, job.lease_expires_at) == ("cancelled", clock.now(), None, None)
    assert claim_batch("mail", "w") == []
    assert cancel(job_id) is False


@pytest.mark.parametrize("state", ["completed", "dead", "cancelled"])
def test_cancel_changes_no_finished_job(state: str, clock: ManualClock) -> None:
    job_id = in_state(state, clock)
    before = row(job_id)
    clock.advance(1)
    assert cancel(job_id) is False
    assert row(job_id) == before


@pytest.mark.parametrize("state", ["pending", "processing", "completed"])
def test_requeue_changes_no_live_or_completed_job(state: str, clock: ManualClock) -> None:
    job_id = in_state(state, clock)
    before = row(job_id)
    clock.advance(1)
    assert requeue(job_id) is False
    assert row(job_id) == before


@pytest.mark.parametrize("state", ["dead", "cancelled"])
def test_f049_requeue_gives_a_fresh_budget_no_expiry_and_keeps_the_history(state: str, clock: ManualClock) -> None:
    job = enqueue("mail", None, max_attempts=2, expires_in=60, backoff_base=10)
    claim().retry("first")
    clock.advance(10)
    if state == "dead":
        claim().retry("second")
    else:
        cancel(job.id)
    assert get_job(job.id).state == state
    history = get_job(job.id).errors
    clock.advance(5000)
    assert requeue(job.id) is True
    back = get_job(job.id)
    assert (back.state, back.attempts, back.max_attempts, back.run_at) == ("pending", 0, 2, clock.now())
    assert (back.expires_at, back.finished_at, back.worker_id, back.lease_expires_at) == (None,) * 4
    assert back.errors == history
    assert history
    # The whole budget again, and the curve from its start.
    clock.advance(9000)
    handle = claim()
    assert handle.attempt == 1
    handle.retry("third")
    assert get_job(job.id).run_at == clock.now() + timedelta(seconds=10)
    clock.advance(10)
    claim().retry("fourth")
    assert get_job(job.id).state == "dead"
    assert [entry["error"] for entry in get_job(job.id).errors][-2:] == ["third", "fourth"]
    assert requeue(job.id) is True
    assert requeue(job.id) is False


@override_settings(ALKSTORE={"KEEP_COMPLETED": 0})
def test_a_job_deleted_on_its_ack_is_none() -> None:
    job = enqueue("mail", None)
    assert claim().ack() is True
    assert get_job(job.id) is None
    assert cancel(job.id) is False
    assert requeue(job.id) is False


def test_a_requeue_of_a_taken_key_raises_duplicate_job_and_changes_nothing(clock: ManualClock) -> None:
    dead = in_state("dead", clock, unique_key="k")
    holder = enqueue("mail", None, unique_key="k").id
    before = row(dead)
    with transaction.atomic():
        with pytest.raises(DuplicateJob) as raised:
            requeue(dead)
        assert raised.value.job_id == holder
        enqueue("other", "the transaction goes on")
    assert row(dead) == before
    assert Job.objects.filter(queue="other").count() == 1
    assert cancel(holder)
    assert requeue(dead) is True


@pytest.mark.parametrize("change", [cancel, requeue])
def test_control_joins_the_callers_transaction(change: Callable[[int], bool], clock: ManualClock) -> None:
    job_id = in_state("pending" if change is cancel else "dead", clock)
    before = row(job_id)
    with pytest.raises(LookupError), transaction.atomic():
        assert change(job_id) is True
        raise LookupError
    assert row(job_id) == before


def test_f131_an_old_id_and_its_handle_never_touch_a_later_job() -> None:
    old = enqueue("mail", None)
    handle = claim()
    Job.objects.all().delete()
    new = enqueue("mail", None)
    claim()
    assert new.id > old.id
    before = row(new.id)
    for call in (handle.ack, handle.heartbeat, handle.release, lambda: handle.retry("x"), lambda: handle.fail("x")):
        assert call() is False
    assert cancel(old.id) is False
    assert row(new.id) == before
