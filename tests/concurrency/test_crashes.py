"""Workers that are killed, by the real commands: their jobs run again at once, though their leases last 300 s.

A wait gives up after 60 s (`PATIENCE`), so a test passes only if no lease had to end.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from django_alkstore.models import Job
from django_alkstore.services import claim_batch, enqueue, enqueue_many, get_job, outbox
from tests.ledger.tools import database, freeze, row, state, variant, wait_for_state
from tests.processes import Process, wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(sys.platform != "linux", reason="crash detection works on Linux only"),
]

Start = Callable[..., Process]
SOON = 30.0
"""Seconds, for what happens within one. Without an event the look of each minute would find it."""
CGROUPS = Path("/sys/fs/cgroup")


def kill(process: Process) -> None:
    process.signal(signal.SIGKILL)
    process.wait()


def run(start: Start, *job_ids: int, queue: str = "wait", **environment: str) -> Process:
    """A worker that runs these jobs."""
    process = start("run_queue", queue, **environment)
    runs(process, *job_ids)
    return process


def runs(process: Process, *job_ids: int) -> None:
    for job_id in job_ids:
        process.wait_for(f"running {job_id}")


def idle(start: Start, queue: str = "wait", **environment: str) -> Process:
    process = start("run_queue", queue, **environment)
    process.wait_for("worker started")
    return process


def four(end: Path) -> list[int]:
    """Jobs that run until the file exists."""
    return enqueue_many("wait", [str(end)] * 4)


def died(job_id: int) -> list[str]:
    return [entry["error"] for entry in row(job_id).errors]


def test_an_idle_worker_takes_over_at_once_in_ten_rounds(start: Start, tmp_path: Path) -> None:
    ids = four(tmp_path / "end 0")
    holder = run(start, *ids)
    for number in range(1, 11):
        other = idle(start)
        kill(holder)
        killed_at = time.monotonic()
        runs(other, *ids)
        assert time.monotonic() - killed_at < SOON
        for job_id in ids:
            assert (row(job_id).attempts, died(job_id)) == (2, ["worker died"])
        (tmp_path / f"end {number - 1}").touch()
        wait_for_state("completed", *ids)
        ids = four(tmp_path / f"end {number}")
        holder = other
        runs(holder, *ids)


def test_a_worker_that_is_started_later_takes_over_at_once(start: Start, tmp_path: Path) -> None:
    ids = four(tmp_path / "end")
    kill(run(start, *ids))
    runs(idle(start), *ids)


def test_a_worker_of_another_queue_recovers_the_jobs(start: Start, tmp_path: Path) -> None:
    ids = four(tmp_path / "end")
    holder = run(start, *ids)
    other = idle(start, "noop")
    kill(holder)
    wait_for_state("pending", *ids)
    other.wait_for("claimable again", times=4)
    assert died(ids[0]) == ["worker died"]


def test_a_busy_worker_recovers_the_jobs(start: Start, tmp_path: Path) -> None:
    ids = four(tmp_path / "end")
    holder = run(start, *ids)
    others = four(tmp_path / "end")
    busy = run(start, *others)
    kill(holder)
    wait_for_state("pending", *ids)
    assert {state(job_id) for job_id in others} == {"processing"}
    (tmp_path / "end").touch()
    wait_for_state("completed", *ids, *others)
    assert busy.popen.poll() is None


def test_a_scheduler_recovers_the_jobs(start: Start, tmp_path: Path) -> None:
    ids = four(tmp_path / "end")
    holder = run(start, *ids)
    scheduler = start("run_schedules")
    scheduler.wait_for("scheduler leads")
    kill(holder)
    wait_for_state("pending", *ids)


def test_an_outbox_is_no_exception(start: Start, tmp_path: Path) -> None:
    letter = outbox("slow").enqueue(str(tmp_path / "end"))
    holder, other = start("run_outbox", "slow"), None
    holder.wait_for(f"running {letter.pk}")
    other = start("run_outbox", "slow")
    other.wait_for("worker started")
    kill(holder)
    other.wait_for(f"running {letter.pk}")


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_handler_that_ends_its_process(start: Start, how: str) -> None:
    other = idle(start, "noop")
    victim = idle(start, "fatal")
    job = enqueue("fatal", f"{how} once", max_attempts=2)
    victim.wait()
    other.wait_for("claimable again")
    idle(start, "fatal")
    wait_for_state("completed", job.pk)
    assert died(job.pk) == ["worker died"]


@contextmanager
def memory_limit(process: Process) -> Iterator[None]:
    """A limit of 64 MiB on the memory that the process takes from now on."""
    old = (CGROUPS / "memory").is_dir()
    group = (CGROUPS / "memory" if old else CGROUPS) / f"alkstore-test-{process.pid}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(2**26))
        with suppress(OSError):
            (group / ("memory.swappiness" if old else "memory.swap.max")).write_text("0")
        (group / "cgroup.procs").write_text(str(process.pid))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        yield
    finally:
        process.end()
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
        group.rmdir()


def test_a_worker_that_is_out_of_memory(start: Start) -> None:
    other = idle(start, "noop")
    victim = idle(start, "fatal")
    with memory_limit(victim):
        job = enqueue("fatal", "devour once", max_attempts=2)
        assert victim.wait() == -signal.SIGKILL
    other.wait_for("claimable again")
    idle(start, "fatal")
    wait_for_state("completed", job.pk)


def test_a_handler_whose_child_lives_on(start: Start) -> None:
    other = idle(start, "noop")
    job = enqueue("forks-on", None)
    holder = start("run_queue", "forks-on")
    holder.wait_for("child ")
    [child] = [int(line.split()[1]) for line in holder.lines if line.startswith("child ")]
    try:
        kill(holder)
        other.wait_for("claimable again")
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
    idle(start, "forks-on")
    wait_for_state("completed", job.pk)


def test_a_worker_that_is_suspended_keeps_its_jobs(start: Start, tmp_path: Path) -> None:
    ids = four(tmp_path / "end")
    suspended = run(start, *ids)
    others = four(tmp_path / "end")
    dead = run(start, *others)
    other = idle(start)
    freeze(suspended)
    kill(dead)
    runs(other, *others)  # by a look that found the one alive and the other dead
    assert {(state(job_id), row(job_id).attempts) for job_id in ids} == {("processing", 1)}
    suspended.signal(signal.SIGCONT)
    (tmp_path / "end").touch()
    wait_for_state("completed", *ids, *others)
    assert {row(job_id).attempts for job_id in ids} == {1}


def test_a_claim_by_hand_keeps_its_lease(start: Start, tmp_path: Path) -> None:
    [job_id] = enqueue_many("wait", [str(tmp_path / "end")])
    [handle] = claim_batch("wait", "by hand")
    ids = four(tmp_path / "end")
    holder = run(start, *ids)
    other = idle(start)
    kill(holder)
    runs(other, *ids)
    assert state(job_id) == "processing"
    assert handle.ack()


def test_a_job_that_kills_its_worker_spends_its_own_attempts_only(start: Start) -> None:
    quick = enqueue_many("fatal", [None] * 60)
    [poison] = enqueue_many("fatal", ["kill"], backoff_base=0)
    quick += enqueue_many("fatal", [None] * 60)
    for _ in range(3):
        assert start("run_queue", "fatal").wait() == -signal.SIGKILL
    idle(start, "fatal")
    wait_for_state("dead", poison)
    wait_for_state("completed", *quick)
    assert died(poison) == ["worker died"] * 3
    assert max(Job.objects.filter(pk__in=quick).values_list("attempts", flat=True)) <= 2


def test_a_file_that_is_deleted_while_a_worker_runs(start: Start, tmp_path: Path) -> None:
    ids = four(tmp_path / "end")
    holder = run(start, *ids)
    Path(f"{database()}-alkstore").unlink()
    fresh = four(tmp_path / "end")
    other = run(start, *fresh)
    assert {(state(job_id), row(job_id).attempts) for job_id in ids} == {("processing", 1)}
    (tmp_path / "end").touch()
    wait_for_state("completed", *ids, *fresh)
    for process in (holder, other):
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert all(sum(f"running {job_id}" in process.lines for process in (holder, other)) == 1 for job_id in ids + fresh)


@pytest.mark.parametrize("off", ["in the dead worker", "in the living one"])
def test_switched_off_leases_decide(start: Start, tmp_path: Path, off: str) -> None:
    settings = variant(ALKSTORE={"LIVENESS": False})
    ids = four(tmp_path / "end")
    holder = run(start, *ids, **(settings if off == "in the dead worker" else {}))
    other = idle(start, **(settings if off == "in the living one" else {}))
    kill(holder)
    fresh = four(tmp_path / "end")
    runs(other, *fresh)
    assert {(state(job_id), row(job_id).attempts) for job_id in ids} == {("processing", 1)}
    said = holder if off == "in the dead worker" else other
    assert sum("crash detection is off" in line for line in said.lines) == 1
    for job_id in ids:
        job = get_job(job_id)
        assert job is not None
        assert (job.liveness is None) == (off == "in the dead worker")
