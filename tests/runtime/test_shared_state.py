"""The state that a worker's threads share, and what of a batch is held: step by step, in one thread."""

import inspect
import re
import threading
from collections.abc import Iterator
from functools import partial
from math import inf

import pytest
from django.db import connections
from django.test import override_settings

from django_alkstore.clock import ManualClock, now_us
from django_alkstore.models import Job
from django_alkstore.registry import Registration
from django_alkstore.runtime.event_loop import EventLoopThread
from django_alkstore.runtime.events_thread import EventsThread
from django_alkstore.runtime.handler_threads import HandlerThread
from django_alkstore.runtime.jobs import (
    BATCH_SECONDS,
    LARGEST_BATCH,
    LONGEST_UNWRITTEN,
    LONGEST_WAIT_TO_START,
    OVERSLEPT,
    QUICK,
    SLOW,
    Plan,
    Result,
    Run,
)
from django_alkstore.runtime.perform import Ending
from django_alkstore.runtime.shared_state import SharedState
from django_alkstore.runtime.writing import Writer, Written
from django_alkstore.services import JobHandle, claim_batch, enqueue, enqueue_many
from django_alkstore.services.outcomes import ACK, RELEASE, TIME_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)

DONE = Ending(ACK, 0.0001)
SLOWLY_DONE = Ending(ACK, 1.0)


class Thread:
    """Stands for a handler thread."""

    def cancel(self, run: Run) -> None:
        raise AssertionError("nothing is to be cancelled")

    def has_open_transaction(self, run: Run) -> bool:
        return False

    def cut_off(self, run: Run) -> None:
        raise AssertionError("nothing is to be cut off")


class Rings:
    """Counts how often the leader and the keeper were rung."""

    def __init__(self) -> None:
        self.leader = self.keeper = 0

    def ring_leader(self) -> None:
        self.leader += 1

    def ring_keeper(self) -> None:
        self.keeper += 1


@pytest.fixture
def rings() -> Rings:
    return Rings()


@pytest.fixture
def state(rings: Rings, clock: ManualClock) -> SharedState:
    return SharedState(2, rings.ring_leader, rings.ring_keeper)


def registered(time_limit: float = 3_600.0, *, atomic: bool = False) -> Registration:
    return Registration("noop", print, time_limit=time_limit, atomic=atomic, module=__name__)


def held(state: SharedState, clock: ManualClock, count: int = 1, **options: float) -> list[Run]:
    """So many claimed jobs that wait to be started."""
    enqueue_many("noop", [None] * count, visibility_timeout=300)
    runs = [
        Run(job, registered(**options), claimed_at=clock.monotonic(), renew_at=clock.monotonic() + 100)
        for job in claim_batch("noop", "w", count)
    ]
    state.add(runs)
    return runs


def start(state: SharedState, thread: Thread, clock: ManualClock) -> Run | None:
    return state.start_next(thread, clock.monotonic(), now_us())


def written(state: SharedState, count: int) -> None:
    state.note_written(count, completed=count, failed=0)


def planned(state: SharedState, thread: Thread, clock: ManualClock) -> Plan | None:
    return state.plan(thread, clock.monotonic(), now_us())


def make_quick(state: SharedState, thread: Thread, clock: ManualClock) -> None:
    """Let the state learn that the handler is quick; afterwards `thread` leads and nothing is held."""
    held(state, clock)
    state.lead(thread)
    run = start(state, thread, clock)
    assert run is not None
    state.finish(thread, run, DONE)
    state.lead(thread)
    written(state, len(state.take_results()))


@pytest.fixture
def followers(state: SharedState) -> Iterator[list[threading.Thread]]:
    """Real threads that wait in `lead`; each ends as soon as it leads."""
    started: list[threading.Thread] = []
    yield started
    state.end()
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


def follow(state: SharedState, followers: list[threading.Thread]) -> Thread:
    """A thread that waits as a follower."""
    thread = Thread()
    waiter = threading.Thread(target=state.lead, args=[thread])
    followers.append(waiter)
    waiter.start()
    while not state._idle:
        threading.Event().wait(0.001)
    return thread


# The leadership


def test_a_thread_that_leads_keeps_the_leadership_while_it_runs_a_quick_handler(
    state: SharedState, clock: ManualClock
) -> None:
    me = Thread()
    make_quick(state, me, clock)
    held(state, clock, 2)
    assert start(state, me, clock) is not None
    assert state.leads(me)


@pytest.mark.parametrize("known", [False, True], ids=["not known yet", "known to be slow"])
def test_before_a_handler_that_is_not_quick_a_follower_leads(
    state: SharedState, clock: ManualClock, followers: list[threading.Thread], known: bool
) -> None:
    me = Thread()
    state.lead(me)
    if known:
        held(state, clock)
        run = start(state, me, clock)
        assert run is not None
        state.finish(me, run, SLOWLY_DONE)
        state.lead(me)
        written(state, len(state.take_results()))
    other = follow(state, followers)
    held(state, clock, 2)
    assert start(state, me, clock) is not None
    followers[0].join(60)
    assert state.leads(other)
    assert start(state, me, clock) is None
    assert start(state, other, clock) is not None


def test_a_slow_leader_is_replaced_and_goes_on_as_a_follower(
    state: SharedState, clock: ManualClock, followers: list[threading.Thread]
) -> None:
    me = Thread()
    make_quick(state, me, clock)
    other = follow(state, followers)
    first, second = held(state, clock, 2)
    assert start(state, me, clock) is first
    clock.advance(SLOW * 0.9)
    state.promote(clock.monotonic())
    assert state.leads(me)
    clock.advance(SLOW * 0.2)
    state.promote(clock.monotonic())
    followers[0].join(60)
    assert state.leads(other)
    assert start(state, other, clock) is second  # it takes over the batch
    state.finish(me, first, DONE)
    assert start(state, me, clock) is None
    assert planned(state, me, clock) is None


def test_a_thread_that_comes_back_leads_at_once_if_the_leader_is_slow(state: SharedState, clock: ManualClock) -> None:
    me, other = Thread(), Thread()
    make_quick(state, me, clock)
    held(state, clock, 2)
    assert start(state, me, clock) is not None
    clock.advance(SLOW)
    assert state.lead(other) is True
    assert state.leads(other)


def test_a_slow_receiver_counts_like_a_slow_handler(
    state: SharedState, clock: ManualClock, followers: list[threading.Thread]
) -> None:
    me = Thread()
    state.lead(me)
    other = follow(state, followers)
    state.note_written(0, 0, 0, me)
    clock.advance(SLOW)
    state.promote(clock.monotonic())
    followers[0].join(60)
    assert state.leads(other)


# Results


def test_a_result_rings_a_leader_that_waits_and_no_other(state: SharedState, clock: ManualClock, rings: Rings) -> None:
    me, other = Thread(), Thread()
    state.lead(me)
    first, second = held(state, clock, 2)
    assert start(state, me, clock) is first
    state.lead(other)
    assert start(state, other, clock) is second
    state.lead(me)
    assert state.begin_wait(me) is True
    state.finish(other, second, DONE)
    assert rings.leader == 1
    state.end_wait()
    assert state.begin_wait(me) is False  # there is a result to write
    plan = planned(state, me, clock)
    assert plan is not None
    assert [result.run for result in plan.results] == [second]


def test_results_that_cannot_be_written_are_kept_in_their_order(state: SharedState, clock: ManualClock) -> None:
    me = Thread()
    make_quick(state, me, clock)
    runs = held(state, clock, 3)
    for run in runs:
        assert start(state, me, clock) is run
        state.finish(me, run, DONE)
    taken = state.take_results()
    assert not state.is_done  # though nothing is held any more: a writer has them
    state.put_back(taken)
    assert [result.run for result in state.take_results()] == runs
    written(state, 3)
    assert state.is_done


def test_the_keeper_takes_results_that_have_waited_too_long(state: SharedState, clock: ManualClock) -> None:
    me = Thread()
    make_quick(state, me, clock)
    first, _ = held(state, clock, 2)
    start(state, me, clock)
    state.finish(me, first, DONE)
    start(state, me, clock)  # takes long
    ended = clock.monotonic()
    assert state.sleep_until(inf, ended) <= ended + LONGEST_UNWRITTEN
    assert state.take_old_results(clock.monotonic()) == []
    clock.advance(LONGEST_UNWRITTEN)
    assert [result.run for result in state.take_old_results(clock.monotonic())] == [first]


def test_a_leader_writes_before_it_starts_the_next_job_of_a_long_batch(state: SharedState, clock: ManualClock) -> None:
    me = Thread()
    make_quick(state, me, clock)
    first, second = held(state, clock, 2)
    assert start(state, me, clock) is first
    state.finish(me, first, DONE)
    clock.advance(LONGEST_UNWRITTEN)
    assert start(state, me, clock) is None
    plan = planned(state, me, clock)
    assert plan is not None
    assert ([result.run for result in plan.results], plan.free) == ([first], 0)
    assert start(state, me, clock) is second


# Leases and time limits


def test_a_job_whose_lease_is_over_is_renewed_before_it_starts(
    state: SharedState, clock: ManualClock, rings: Rings
) -> None:
    me = Thread()
    state.lead(me)
    (run,) = held(state, clock)
    clock.advance(301)
    assert start(state, me, clock) is None
    assert rings.keeper > 0
    assert state.to_renew(clock.monotonic()) == [run]
    ends = now_us() + 300_000_000
    state.note_renewals([(run, ends)], clock.monotonic())
    assert start(state, me, clock) is run


def test_a_job_whose_lease_cannot_be_renewed_is_not_started(state: SharedState, clock: ManualClock) -> None:
    me = Thread()
    state.lead(me)
    (run,) = held(state, clock)
    clock.advance(301)
    assert start(state, me, clock) is None
    state.note_renewals([(run, None)], clock.monotonic())
    assert start(state, me, clock) is None
    assert state.is_done


def test_a_renewal_that_comes_after_the_result_loses_nothing(state: SharedState, clock: ManualClock) -> None:
    me = Thread()
    state.lead(me)
    (run,) = held(state, clock)
    start(state, me, clock)
    state.finish(me, run, DONE)
    state.note_renewals([(run, None)], clock.monotonic())
    assert state.lose(run) is False
    assert not run.lost


def test_past_its_time_limit_an_attempt_fails_once_and_its_own_end_changes_nothing(
    state: SharedState, clock: ManualClock
) -> None:
    me = Thread()
    state.lead(me)
    (run,) = held(state, clock, time_limit=10)
    start(state, me, clock)
    clock.advance(9)
    assert state.fail_at_time_limit(clock.monotonic()) == []
    clock.advance(1)
    (failed,) = state.fail_at_time_limit(clock.monotonic())
    assert (failed.run, failed.outcome) == (run, TIME_LIMIT)
    assert state.overdue() == [run]
    assert state.fail_at_time_limit(clock.monotonic()) == []
    assert state.finish(me, run, DONE) is False
    assert (state.overdue(), state.take_results()) == ([], [])


def test_the_time_limit_of_an_atomic_handler_begins_with_the_writer_lock(
    state: SharedState, clock: ManualClock
) -> None:
    me = Thread()
    state.lead(me)
    (run,) = held(state, clock, time_limit=10, atomic=True)
    start(state, me, clock)
    clock.advance(60)
    assert state.fail_at_time_limit(clock.monotonic()) == []
    state.start_time_limit(run)
    clock.advance(9)
    assert state.fail_at_time_limit(clock.monotonic()) == []
    clock.advance(1)
    assert [result.run for result in state.fail_at_time_limit(clock.monotonic())] == [run]


def test_what_no_thread_has_started_for_a_second_is_given_back(state: SharedState, clock: ManualClock) -> None:
    (run,) = held(state, clock)
    clock.advance(LONGEST_WAIT_TO_START * 0.9)
    assert state.withdraw_waiting(clock.monotonic()) == []
    clock.advance(LONGEST_WAIT_TO_START * 0.2)
    (result,) = state.withdraw_waiting(clock.monotonic())
    assert (result.run, result.outcome) == (run, RELEASE)


def test_the_keeper_is_rung_for_a_deadline_that_is_earlier_than_its_sleep(
    state: SharedState, clock: ManualClock, rings: Rings
) -> None:
    me = Thread()
    state.lead(me)
    held(state, clock, 2, time_limit=0.5)
    state.sleep_until(clock.monotonic() + 60, clock.monotonic())
    start(state, me, clock)
    assert rings.keeper == 1
    state.lead(me)
    start(state, me, clock)
    assert rings.keeper == 1  # it is awake already


# What is claimed


def test_a_plan_wants_a_job_for_each_free_thread_and_batches_for_quick_handlers(
    state: SharedState, clock: ManualClock
) -> None:
    me = Thread()
    make_quick(state, me, clock)
    plan = planned(state, me, clock)
    assert plan is not None
    assert (plan.free, plan.batches) == (2, {"noop": LARGEST_BATCH})
    state._means["noop"] = QUICK * 0.9
    plan = planned(state, me, clock)
    assert plan is not None
    assert plan.batches == {"noop": int(BATCH_SECONDS / (QUICK * 0.9))}
    state.stop()
    plan = planned(state, me, clock)
    assert plan is not None
    assert (plan.free, plan.batches) == (0, {})


def coroutines(state: SharedState, clock: ManualClock, count: int) -> list[Run]:
    """So many claimed jobs whose handlers are coroutines."""
    runs = held(state, clock, count)
    for run in runs:
        state._waiting.remove(run)
        run.in_loop = True
    state.add(runs)
    return runs


def test_coroutines_are_first_in_the_line_and_cost_no_leadership(rings: Rings, clock: ManualClock) -> None:
    state = SharedState(1, rings.ring_leader, rings.ring_keeper, 3)
    me = Thread()
    state.lead(me)
    (sync,) = held(state, clock)
    first, second = coroutines(state, clock, 2)
    assert [start(state, me, clock) for _ in range(2)] == [first, second]
    assert state.leads(me)
    assert start(state, me, clock) is sync
    assert not state.leads(me)


def test_a_plan_has_room_for_coroutines_and_for_sync_handlers_apart(rings: Rings, clock: ManualClock) -> None:
    state = SharedState(1, rings.ring_leader, rings.ring_keeper, 3)
    me, loop = Thread(), Thread()
    state.lead(me)
    runs = coroutines(state, clock, 2)
    for _ in runs:
        start(state, me, clock)
    plan = planned(state, me, clock)
    assert plan is not None
    assert (plan.free, plan.coroutines) == (1, 1)
    held(state, clock)
    start(state, me, clock)  # it is not known to be quick, so another thread leads
    state.lead(other := Thread())
    plan = planned(state, other, clock)
    assert plan is not None
    assert (plan.free, plan.coroutines) == (0, 1)
    held(state, clock)  # of a batch, for instance: no thread is free
    assert start(state, other, clock) is None
    assert state.begin_wait(other)
    state.finish(loop, runs[0], Ending(None, 0.1))  # without a result to write, it makes room
    assert rings.leader == 1
    assert not state.begin_wait(other)
    plan = planned(state, other, clock)
    assert plan is not None
    assert (plan.free, plan.coroutines) == (0, 2)


def test_a_coroutine_that_has_no_time_to_end_is_not_stuck(rings: Rings, clock: ManualClock) -> None:
    """The process was suspended after its coroutine was cancelled."""
    state = SharedState(1, rings.ring_leader, rings.ring_keeper, 3)
    me = Thread()
    state.lead(me)
    (run,) = coroutines(state, clock, 1)
    start(state, me, clock)
    state.expire(run, clock.monotonic())
    state.fail_at_time_limit(clock.monotonic())
    assert state.note_cancelled(run)
    assert not state.note_cancelled(run)
    clock.advance(100)
    assert state.stuck(clock.monotonic()) == []
    clock.advance(OVERSLEPT)
    assert state.stuck(clock.monotonic()) == [run]


def test_one_transaction_claims_for_the_event_loop_and_for_threads(writer: Writer) -> None:
    enqueue_many("noop", [None] * 10)
    enqueue_many("async", [None] * 10)
    for free, room, found in ((2, 3, (2, 3)), (0, 2, (0, 2)), (2, 0, (2, 0))):
        plan = Plan([], free, room, {}, [])
        claims = partial(writer.claim, ["noop", "async", "noop"], ("async",), (), plan, 0)
        with writer.turn():
            queues = [job.queue for job in writer.write([], [], claims).claimed]
        assert (queues.count("noop"), queues.count("async")) == found


def test_a_claim_that_is_being_made_while_the_worker_stops_is_held_and_given_back(
    state: SharedState, clock: ManualClock
) -> None:
    thread = Thread()
    state.lead(thread)
    assert planned(state, thread, clock) is not None
    state.stop()
    assert state.withdraw_waiting(clock.monotonic()) == []
    assert not state.is_done  # the leader is claiming
    held(state, clock)
    state.end_plan()
    assert not state.is_done
    (result,) = state.withdraw_waiting(clock.monotonic())
    assert result.outcome == RELEASE
    written(state, 1)
    assert state.is_done


def test_the_end_of_a_claim_without_a_job_wakes_the_keeper_of_a_worker_that_stops(
    state: SharedState, rings: Rings, clock: ManualClock
) -> None:
    thread = Thread()
    state.lead(thread)
    assert planned(state, thread, clock) is not None
    state.stop()
    assert not state.is_done
    state.sleep_until(inf, clock.monotonic())
    before = rings.keeper
    state.end_plan()
    assert rings.keeper == before + 1
    assert state.is_done


def claimed(writer: Writer, *, quick: bool, free: int = 4) -> list[JobHandle]:
    """What a worker holds after one claim."""
    plan = Plan([], free, 0, {"noop": LARGEST_BATCH} if quick else {}, [])
    with writer.turn():
        written: Written = writer.write(
            [], [], lambda db, written: writer.claim(["noop"], (), (), plan, 0, db, written)
        )
    return written.claimed


@pytest.fixture
def writer() -> Writer:
    return Writer(connections["default"], "w", None, lambda send: None)


def test_what_is_held_of_a_batch(writer: Writer) -> None:
    """A last attempt, or one after a crash, is only held if it starts at once."""
    first = enqueue("noop", None).pk
    last_attempt = enqueue("noop", None, max_attempts=1).pk
    suspected = enqueue("noop", None).pk
    Job.objects.filter(pk=suspected).update(last_error="worker died")
    fresh = enqueue("noop", None).pk
    assert [job.id for job in claimed(writer, quick=True)] == [first, fresh]
    untouched = Job.objects.filter(pk__in=[last_attempt, suspected]).values_list("state", "attempts", "worker_ids")
    assert list(untouched) == [("pending", 0, [])] * 2
    # The next one must be alone: nothing else is held with it, and nothing is claimed in vain.
    assert [job.id for job in claimed(writer, quick=True)] == [last_attempt]
    assert [job.id for job in claimed(writer, quick=True)] == [suspected]


def test_a_handler_that_is_not_known_to_be_quick_gets_one_job_for_each_free_thread(writer: Writer) -> None:
    ids = enqueue_many("noop", [None] * 6, max_attempts=1)
    assert [job.id for job in claimed(writer, quick=False, free=4)] == ids[:4]


@pytest.mark.parametrize("kind", [HandlerThread, EventLoopThread, EventsThread])
def test_a_thread_of_the_worker_hides_no_name_of_python_s_own(kind: type[threading.Thread]) -> None:
    """`Thread._stop` of Python 3.11 ends `join`, and `Thread._context` of Python 3.14 is entered by `start`."""
    own = {name for name in vars(kind) if not name.startswith("__")} - {"run", "start"}
    source = inspect.getsource(kind)
    own |= set(re.findall(r"self\.(_?\w+)(?::[^=]+)? = ", source))
    plain = threading.Thread()
    assert not {name for name in own if hasattr(plain, name)} - {"name", "daemon"}
    assert "_context" not in own


@pytest.mark.parametrize("keep", [None, 0])
def test_of_two_claims_of_one_job_that_end_together_only_the_later_one_counts(
    writer: Writer, clock: ManualClock, keep: int | None
) -> None:
    """The first handler was suspended for longer than its lease, and the same worker has claimed the job again."""
    enqueue("noop", None)
    (first,) = claim_batch("noop", "w")
    clock.advance(301)
    (second,) = claim_batch("noop", "w")
    runs = [Run(job, registered(), claimed_at=0.0, renew_at=inf) for job in (first, second)]
    results = [Result(run, ACK, 0.1, clock.monotonic()) for run in runs]
    with override_settings(ALKSTORE={"KEEP_COMPLETED": keep}), writer.turn():
        written = writer.write(results, [])
    assert [took_effect for _, took_effect in written.results] == [False, True]
    assert written.completed == 1
