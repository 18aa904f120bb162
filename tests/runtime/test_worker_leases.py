"""Section 8: leases are renewed from outside the handler, end with the process, and fence what comes too late."""

import signal
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from django.db import connections
from django.test import override_settings

from django_alkstore import clock as clocks
from django_alkstore.clock import ManualClock
from django_alkstore.dialects.liveness import Liveness
from django_alkstore.dialects.watch import Bell, Watch
from django_alkstore.models import Job
from django_alkstore.registry import Registration
from django_alkstore.runtime import shared_state as shared_state_module
from django_alkstore.runtime.claim_times import GATHER
from django_alkstore.runtime.jobs import LOOK_FOR_LOSS, Run
from django_alkstore.runtime.keeper import CONFIRM_LOSS, Keeper
from django_alkstore.runtime.leadership import Leadership
from django_alkstore.runtime.perform import Ending
from django_alkstore.runtime.shared_state import SharedState
from django_alkstore.runtime.writing import Writer
from django_alkstore.services import cancel, claim_batch, enqueue, enqueue_many, presence
from django_alkstore.services.outcomes import ACK
from tests.faults.tools import Passage
from tests.ledger.models import Entry
from tests.ledger.tools import freeze, row, state, variant, wait_for_state
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]
LEASE = 1.5
"""Seconds. Where another worker is there to take a job, a stall could let it end in the middle of a test."""
LONG_LEASE = 600.0
"""For those: it ends when the test says that the time has passed."""


def as_stored(job_id: int) -> object:
    return Job.objects.filter(pk=job_id).values().get()


# A live worker


@pytest.fixture
def passage(tmp_path: Path) -> Passage:
    return Passage(tmp_path / "passage")


def test_f019_a_job_longer_than_its_lease_runs_once_beside_an_idle_worker(
    start: Start, tmp_path: Path, passage: Passage
) -> None:
    open_end = tmp_path / "open"
    job = enqueue("wait", str(open_end), visibility_timeout=LONG_LEASE)
    first = passage.start(start, "run_queue", "wait")
    first.wait_for(f"running {job.pk}")
    idle = passage.start(start, "run_queue", "wait")
    idle.wait_for("worker started")
    passage.outlast_leases(LONG_LEASE, job.pk)
    held = row(job.pk)
    assert (held.state, held.attempts, held.errors) == ("processing", 1, [])
    open_end.touch()
    first.wait_for(f"done {job.pk}")
    wait_for_state("completed", job.pk)
    assert (row(job.pk).attempts, row(job.pk).errors) == (1, [])
    assert list(Entry.objects.values_list("text", flat=True)) == ["started 1"]
    assert "running" not in [line.split(" ")[0] for line in idle.lines]


def test_a_worker_renews_the_leases_of_all_its_handlers_at_once(start: Start, tmp_path: Path, passage: Passage) -> None:
    open_end = tmp_path / "open"
    ids = enqueue_many("mix", [str(open_end)] * 4, visibility_timeout=LONG_LEASE)
    first = passage.start(start, "run_queue", "mix", "--concurrency", "4")
    for job_id in ids:
        first.wait_for(f"running {job_id}")
    passage.start(start, "run_queue", "mix").wait_for("worker started")
    passage.outlast_leases(LONG_LEASE, *ids)
    open_end.touch()
    wait_for_state("completed", *ids)
    assert {(job.attempts, len(job.errors)) for job in Job.objects.all()} == {(1, 0)}


# A dead worker


def test_f031_a_job_whose_worker_is_killed_is_back_after_one_lease(
    start: Start, tmp_path: Path, passage: Passage
) -> None:
    open_end = tmp_path / "open"
    job = enqueue("wait", str(open_end), visibility_timeout=LONG_LEASE)
    start_with_leases_alone = partial(start, **variant(ALKSTORE={"LIVENESS": False}))
    first = passage.start(start_with_leases_alone, "run_queue", "wait")
    first.wait_for(f"running {job.pk}")
    second = passage.start(start_with_leases_alone, "run_queue", "wait")
    second.wait_for("worker started")
    first.signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    ends = row(job.pk).lease_expires_at
    assert ends is not None
    passage.by(LONG_LEASE)
    second.wait_for(f"running {job.pk}")
    open_end.touch()
    wait_for_state("completed", job.pk)
    (lapse,) = row(job.pk).errors
    assert (lapse["attempt"], lapse["error"], row(job.pk).attempts) == (1, "lease expired", 2)
    assert lapse["at"] >= ends.isoformat()
    wait_until(lambda: any("WARNING" in line and f"job {job.pk} " in line for line in second.lines), "the warning")


def test_exactly_once_a_worker_killed_between_the_rows_and_the_commit_leaves_no_row(
    start: Start, tmp_path: Path
) -> None:
    job = enqueue("doomed", str(tmp_path / "never"), visibility_timeout=LEASE)
    first = start("run_queue", "doomed")
    first.wait_for(f"row of {job.pk}")
    first.signal(signal.SIGKILL)
    first.wait()
    assert Entry.objects.count() == 0
    start("run_queue", "doomed")
    wait_for_state("completed", job.pk)
    assert list(Entry.objects.values_list("text", "job_id")) == [("attempt 2", job.pk)]
    assert row(job.pk).attempts == 2


def test_f047_a_job_that_kills_its_worker_is_started_as_often_as_it_may_and_then_is_dead(start: Start) -> None:
    job = enqueue("deadly", None, max_attempts=3, backoff_base=0)
    runs = 0
    for _ in range(3):  # a supervisor starts it again
        process = start("run_queue", "deadly", "noop", "--concurrency", "1")
        assert process.wait() == -signal.SIGKILL
        runs += process.output.count(f"running {job.pk}")
    last = start("run_queue", "deadly", "noop", "--concurrency", "1")
    other = enqueue("noop", None)
    wait_for_state("completed", other.pk)
    wait_for_state("dead", job.pk)
    assert (runs, f"running {job.pk}" in last.output) == (3, False)
    assert row(job.pk).last_error == "worker died"
    assert [(entry["attempt"], entry["error"]) for entry in row(job.pk).errors] == [
        (1, "worker died"),
        (2, "worker died"),
        (3, "worker died"),
    ]


def test_f038_a_job_whose_handler_ends_the_process_is_reclaimed_after_the_lease(start: Start) -> None:
    job = enqueue("exit-hard", None, visibility_timeout=1, max_attempts=2)
    assert start("run_queue", "exit-hard").wait() == 1
    second = start("run_queue", "exit-hard")
    second.wait_for(f"running {job.pk}")
    assert second.wait() == 1
    assert row(job.pk).attempts == 2


def test_f035_workers_killed_again_and_again_lose_nothing_and_do_nothing_twice(start: Start) -> None:
    ids: list[int] = []
    for kill in range(6):
        # Twice as many as it is left the time for, and no more: however late the kill comes, the next has something.
        ids += enqueue_many("ledger", [f"job {number}" for number in range(50)], visibility_timeout=1, max_attempts=50)
        process = start("run_queue", "ledger", "-v", "0")
        goal = len(ids) - 25
        wait_until(lambda goal=goal: Job.objects.filter(state="completed").count() >= goal, f"{goal} are done")
        assert Job.objects.count() == len(ids)
        # Rows first: a job that is completed in between has its row already.
        assert Entry.objects.count() <= Job.objects.filter(state="completed").count() + 4
        process.signal(signal.SIGKILL if kill % 2 else signal.SIGTERM)
        process.wait()
    start("run_queue", "ledger", "-v", "0")
    wait_for_state("completed", *ids)
    assert sorted(Entry.objects.values_list("job_id", flat=True)) == ids


# A worker that is frozen past its leases, with nobody else there to take them


class Freezing(ManualClock):
    """Stands still, but for ten seconds before the reading that is named, whichever of the two clocks is read."""

    def __init__(self, before: int) -> None:
        super().__init__(datetime(2026, 3, 1, 12, 0, tzinfo=UTC))
        self.left = before

    def _count(self) -> None:
        if self.left == 0:
            self.advance(10)
        self.left -= 1

    def now(self) -> datetime:
        self._count()
        return super().now()

    def monotonic(self) -> float:
        self._count()
        return super().monotonic()


class ByHand:
    """A worker's leader and keeper, used by the test's own thread. No handler is ever called."""

    def __init__(self, registration: Registration) -> None:
        self.rings: list[str] = []
        """What has rung the keeper's bell."""
        self.state = SharedState(2, lambda: None, lambda: self.rings.append("rung"))
        with override_settings(ALKSTORE={"LIVENESS": False}):
            self._liveness = Liveness("default")
        writer = Writer(connections["default"], self._liveness.holder, None, lambda send: send())
        self._bell = Bell()
        self._watch = Watch("default")
        self._keeper = Keeper(self.state, writer, self._liveness, [registration.queue], self._bell, self._watch.version)
        registrations = {registration.queue: registration}
        self._leadership = Leadership(self.state, writer, self._watch, registrations, threading.Event())
        self.state.lead(self)

    def cancel(self, run: Run) -> None:
        raise AssertionError("nothing runs")

    def has_open_transaction(self, run: Run) -> bool:
        return False

    def cut_off(self, run: Run) -> None:
        raise AssertionError("nothing runs")

    def run_all(self) -> int:
        """Complete the jobs that were claimed; how many."""
        count = 0
        while (run := self.state.start_next(self, clocks.monotonic(), clocks.now_us())) is not None:
            self.state.finish(self, run, Ending(ACK, 0.0001))
            if not self.state.leads(self):
                self.state.lead(self)
            count += 1
        return count

    def go_on(self) -> None:
        self._leadership.round(self)
        self._keeper.look_after()

    def look_after(self) -> None:
        self._keeper.look_after()

    def close(self) -> None:
        self._keeper.close()
        self._watch.close()
        self._bell.close()


def test_a_worker_that_is_frozen_anywhere_does_not_sweep_its_own_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the claim and its commit, after it, or in the next plan: it renews what has lapsed before it sweeps."""
    monkeypatch.setattr(shared_state_module, "LONGEST_WAIT_TO_START", 3_600.0)
    before, frozen = 0, True
    while frozen:
        freezing = Freezing(10_000)
        with clocks.use(freezing):
            job = enqueue("noop", None, visibility_timeout=2)
            registration = Registration("noop", print, time_limit=3_600, atomic=False, module=__name__)
            with closing(ByHand(registration)) as worker:
                freezing.left = before
                for _ in range(3):
                    worker.go_on()
                frozen = freezing.left < 0
                freezing.left = 10_000
                worker.go_on()
                held = row(job.pk)
                assert (held.state, held.attempts, held.errors) == ("processing", 1, []), f"before reading {before}"
                assert held.lease_expires_at is not None
                assert held.lease_expires_at > freezing.now()
        Job.objects.all().delete()
        before += 1
    assert before > 10


# A worker that has lost its lease


def test_a_worker_lets_quick_jobs_gather_while_they_arrive_several_at_a_time(clock: ManualClock) -> None:
    registration = Registration("noop", print, time_limit=3_600, atomic=False, module=__name__)
    with closing(ByHand(registration)) as worker:
        for _ in range(3):  # after the first the worker knows that the handler is quick
            enqueue_many("noop", [None, None])
            worker.go_on()
            assert worker.run_all() == 2
        enqueue("noop", None)
        worker.go_on()
        assert worker.run_all() == 0
        clock.advance(GATHER)
        worker.go_on()
        assert worker.run_all() == 1


def test_no_job_is_claimed_beside_one_that_may_have_ended_its_process() -> None:
    first, *others = enqueue_many("noop", [None] * 3)
    Job.objects.filter(pk=first).update(last_error="worker died")
    registration = Registration("noop", print, time_limit=3_600, atomic=False, module=__name__)
    with closing(ByHand(registration)) as worker:
        worker.go_on()
        assert [row(job_id).attempts for job_id in (first, *others)] == [1, 0, 0]
        assert worker.state.start_next(worker, clocks.monotonic(), clocks.now_us()) is not None
        assert worker.state.leads(
            worker
        )  # so no other thread claims before this one, or before it turns out to be slow


def test_a_claim_without_results_does_not_wake_the_keeper() -> None:
    """Both threads would want the interpreter at the moment at which the job is about to start."""
    enqueue("noop", None)
    registration = Registration("noop", print, time_limit=3_600, atomic=False, module=__name__)
    with closing(ByHand(registration)) as worker:
        worker.state.sleep_until(clocks.monotonic() + 60, clocks.monotonic())
        worker.go_on()
        assert row(Job.objects.get().pk).state == "processing"
        assert worker.rings == []


def test_a_job_is_looked_at_once_it_has_run_for_a_second_and_not_at_its_start(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at each start would hold up the claims and results of quick jobs."""
    looks: list[int] = []
    read = Writer.read
    monkeypatch.setattr(Writer, "read", lambda self, body: (looks.append(1), read(self, body))[1])
    enqueue("noop", None)
    registration = Registration("noop", print, time_limit=3_600, atomic=False, module=__name__)
    with closing(ByHand(registration)) as worker:
        worker.go_on()
        clock.advance(10)  # the worker has idled for a while
        run = worker.state.start_next(worker, clock.monotonic(), clocks.now_us())
        assert run is not None
        looks.clear()
        worker.look_after()
        assert looks == []
        cancel(run.job.id)
        clock.advance(LOOK_FOR_LOSS)
        worker.look_after()
        assert (len(looks), run.lost) == (1, False)
        clock.advance(CONFIRM_LOSS)
        worker.look_after()
        assert (len(looks), run.lost) == (2, True)
        assert run.job.lease_lost.is_set()


def test_f021_a_worker_that_was_stopped_past_its_lease_changes_nothing_and_says_which_job(
    start: Start, tmp_path: Path
) -> None:
    open_end = tmp_path / "open"
    job = enqueue("wait", str(open_end), visibility_timeout=2)
    first = start("run_queue", "wait")
    first.wait_for(f"running {job.pk}")
    freeze(first)
    second = start("run_queue", "wait")
    second.wait_for(f"running {job.pk}")
    open_end.touch()
    wait_for_state("completed", job.pk)
    before = as_stored(job.pk)
    first.signal(signal.SIGCONT)
    wait_until(lambda: any("WARNING" in line and f"job {job.pk} " in line for line in first.lines), "the warning")
    # It goes on, and with the next job as with any other.
    second.signal(signal.SIGTERM)
    second.wait()
    following = enqueue("wait", str(open_end))
    wait_for_state("completed", following.pk)
    first.wait_for(f"done {following.pk}")
    assert as_stored(job.pk) == before
    assert (row(job.pk).attempts, len(row(job.pk).errors)) == (2, 1)


def test_a_handler_is_told_that_its_job_was_cancelled_and_its_thread_is_free_again(
    start: Start, tmp_path: Path
) -> None:
    job = enqueue("wait", str(tmp_path / "never"), visibility_timeout=1)
    process = start("run_queue", "wait", "noop", "--concurrency", "1")
    process.wait_for(f"running {job.pk}")
    assert cancel(job.pk) is True
    before = as_stored(job.pk)
    process.wait_for(f"told that the lease of {job.pk} is lost")
    following = enqueue("noop", None)
    wait_for_state("completed", following.pk)
    assert as_stored(job.pk) == before
    assert row(job.pk).state == "cancelled"
    wait_until(lambda: any("WARNING" in line and f"job {job.pk} " in line for line in process.lines), "the warning")


def test_a_job_that_is_deleted_while_it_runs_harms_nothing(start: Start, tmp_path: Path) -> None:
    open_end = tmp_path / "open"
    job = enqueue("mix", str(open_end), visibility_timeout=1)
    process = start("run_queue", "mix", "--concurrency", "1")
    process.wait_for(f"running {job.pk}")
    Job.objects.filter(pk=job.pk).delete()
    open_end.touch()
    following = enqueue("mix", None)
    wait_for_state("completed", following.pk)
    assert not Job.objects.filter(pk=job.pk).exists()


# The time limit


def test_past_its_time_limit_the_attempt_has_failed_and_the_late_ack_changes_nothing(
    start: Start, tmp_path: Path
) -> None:
    open_end = tmp_path / "open"
    job = enqueue("stubborn", str(open_end), backoff_base=1_000)
    process = start("run_queue", "stubborn", "noop", "crowd", "--concurrency", "2")
    process.wait_for(f"running {job.pk}")
    wait_until(lambda: bool(row(job.pk).errors), "the time limit is on the job")
    failed = row(job.pk)
    assert (failed.state, failed.attempts, failed.last_error) == ("pending", 1, "time limit")
    assert (failed.run_at - failed.created_at).total_seconds() > 1_000
    before = as_stored(job.pk)
    beside = enqueue("noop", None)
    wait_for_state("completed", beside.pk)  # the other thread works on
    open_end.touch()
    process.wait_for(f"late end of {job.pk}: False")
    assert as_stored(job.pk) == before
    together = enqueue_many("crowd", [2, 2])  # both threads are free again
    wait_for_state("completed", *together)


def test_past_its_time_limit_a_job_without_attempts_left_is_dead(start: Start, tmp_path: Path) -> None:
    job = enqueue("stubborn", str(tmp_path / "never"), max_attempts=1)
    start("run_queue", "stubborn", "--concurrency", "2")
    wait_for_state("dead", job.pk)
    assert [entry["error"] for entry in row(job.pk).errors] == ["time limit"]


def test_a_lease_is_not_renewed_past_the_time_limit(start: Start, tmp_path: Path) -> None:
    """A retry that is due at once goes to whoever is free: here another worker, while the first still runs it."""
    open_end = tmp_path / "open"
    job = enqueue("stubborn", str(open_end), backoff_base=0, max_attempts=2)
    # With a thread that stays free, so that it has no reason to end.
    first = start("run_queue", "stubborn", "--concurrency", "3")
    first.wait_for(f"running {job.pk}", 2)
    wait_for_state("dead", job.pk)
    assert [entry["error"] for entry in row(job.pk).errors] == ["time limit", "time limit"]


def test_a_worker_whose_every_thread_is_stuck_gives_back_what_it_can_and_exits_with_status_4(
    start: Start, tmp_path: Path
) -> None:
    quick = enqueue_many("noop", [None] * 60)
    process = start("run_queue", "stubborn", "noop", "--concurrency", "1")
    wait_for_state("completed", *quick)  # from here on it may claim ahead
    stuck, behind = enqueue_many("stubborn", [str(tmp_path / "never")] * 2, backoff_base=1_000)
    assert process.wait() == 4
    assert (row(stuck).state, row(stuck).attempts, row(stuck).last_error) == ("pending", 1, "time limit")
    assert (row(behind).state, row(behind).attempts, row(behind).errors) == ("pending", 0, [])
    assert f"running {behind}" not in process.output
    assert any("ERROR" in line and str(stuck) in line for line in process.lines)


def test_with_one_thread_still_free_a_worker_stays(start: Start, tmp_path: Path) -> None:
    stuck = enqueue("stubborn", str(tmp_path / "never"), max_attempts=1)
    process = start("run_queue", "stubborn", "noop", "--concurrency", "2")
    wait_for_state("dead", stuck.pk)
    ids = enqueue_many("noop", [None] * 20)
    wait_for_state("completed", *ids)
    assert process.popen.poll() is None
    assert state(stuck.pk) == "dead"
    process.signal(signal.SIGTERM)
    process.wait()
    assert (row(stuck.pk).state, row(stuck.pk).attempts) == ("dead", 1)


def test_a_job_that_waits_longer_than_its_time_limit_is_no_reason_to_look_again_at_once(clock: ManualClock) -> None:
    """Its time is counted from its start. To look at once, again and again, took a processor whole."""
    enqueue("stubborn", None)
    (job,) = claim_batch("stubborn", "w")
    registration = Registration("stubborn", print, time_limit=0.1, atomic=False, module=__name__)
    shared = SharedState(1, lambda: None, lambda: None)
    now = clock.monotonic()
    shared.add([Run(job, registration, claimed_at=now - 0.2, renew_at=now + 60)])
    assert shared.fail_at_time_limit(now) == []
    assert shared.sleep_until(now + 60, now) > now


def test_a_job_is_not_done_if_its_handler_was_refused_the_ack(start: Start) -> None:
    """Though its worker, which goes by the fence, could renew the lease and ack the job after the handler's return."""
    start("run_queue", "told-late", "--concurrency", "1")  # no free thread sweeps it
    wait_until(presence.signs("default").exists, "the first upkeep, which sweeps, is over")
    job = enqueue("told-late", None, visibility_timeout=3)
    wait_for_state("completed", job.pk)
    assert [(entry.text, entry.job_id) for entry in Entry.objects.all()] == [("attempt 2", job.pk)]


def test_a_handler_that_acks_itself_is_not_told_that_its_lease_is_lost(start: Start) -> None:
    """Though the worker looks at the row, which is completed, while callbacks of the commit run."""
    job = enqueue("slow-commit", None)
    worker = start("run_queue", "slow-commit")
    wait_for_state("completed", job.pk)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert f"completed job {job.pk} " in worker.output
    assert "lost the lease" not in worker.output
