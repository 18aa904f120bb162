"""The workers' signs of life: when they are left, renewed, taken back and removed, and where they show."""

import json
import re
import signal
import sqlite3
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError, connections
from django.test import override_settings

from django_alkstore import clock as clocks
from django_alkstore.clock import ManualClock
from django_alkstore.dialects import dialect_of
from django_alkstore.dialects.liveness import Liveness
from django_alkstore.models import Lock
from django_alkstore.names import LEADERSHIP_LOCK, SIGN_PREFIX, queue_of_sign
from django_alkstore.registry import Registration
from django_alkstore.runtime.worker import Worker
from django_alkstore.services import enqueue, force_release, lock, maintenance, outbox, presence
from django_alkstore.services.locks import LockHandle, unique_owner
from django_alkstore.services.maintenance import UPKEEP_INTERVAL, Upkeep
from tests.ledger.tools import wait_for_state, wait_past
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]


def signed() -> set[str | None]:
    """The queues that there is a sign of life for."""
    return set(map(queue_of_sign, presence.signs("default").values_list("name", flat=True)))


def upkeep_of(*queues: str) -> tuple[Upkeep, str]:
    worker_id = unique_owner()
    return Upkeep("default", queues, worker_id, "a file that nobody has"), worker_id


def finish_round(upkeep: Upkeep) -> None:
    while upkeep.due_in() <= 0:
        upkeep.step()


def test_two_and_a_half_upkeeps_long() -> None:
    assert presence.TTL == 2.5 * UPKEEP_INTERVAL


def test_a_worker_leaves_one_for_each_queue_and_renews_them_all_each_minute(clock: ManualClock) -> None:
    upkeep, worker_id = upkeep_of("mail", "post")
    upkeep.step()
    before = list(presence.signs("default").order_by("name").values())
    assert signed() == {"mail", "post"}
    assert {row["owner"] for row in before} == {worker_id}
    assert {row["expires_at"] for row in before} == {clock.now() + timedelta(seconds=presence.TTL)}
    clock.advance(UPKEEP_INTERVAL)
    upkeep.step()
    renewed = [{**row, "expires_at": clock.now() + timedelta(seconds=presence.TTL)} for row in before]
    assert list(presence.signs("default").order_by("name").values()) == renewed


def test_in_between_nothing_is_committed(clock: ManualClock) -> None:
    upkeep, _ = upkeep_of("mail")
    finish_round(upkeep)
    change = dialect_of(connections["default"]).change("default")
    try:
        version = change.version()
        clock.advance(UPKEEP_INTERVAL - 1)
        upkeep.step()
        assert change.version() == version
        clock.advance(1)
        upkeep.step()
        assert change.version() != version
    finally:
        change.close()


def test_a_long_prune_does_not_let_it_lapse(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "prune_batch", lambda alias: {"completed": 1})
    upkeep, _ = upkeep_of("mail")
    for _ in range(10):
        upkeep.step()
        clock.advance(50)
        assert presence.signs("default").get().expires_at > clock.now()


def test_one_that_was_removed_is_back_at_the_next_upkeep(clock: ManualClock) -> None:
    upkeep, _ = upkeep_of("mail", "post")
    upkeep.step()
    assert force_release(presence.signs("default")[0].name)
    clock.advance(UPKEEP_INTERVAL)
    upkeep.step()
    assert signed() == {"mail", "post"}


def test_two_workers_of_one_queue_have_one_each(clock: ManualClock) -> None:
    (first, _), (second, kept) = upkeep_of("mail"), upkeep_of("mail")
    first.step()
    second.step()
    assert presence.signs("default").count() == 2
    first.end()
    first.end()
    assert presence.signs("default").get().owner == kept


@pytest.mark.parametrize("queues", [(), ("post",)], ids=["a scheduler's", "a worker's"])
def test_anybody_s_upkeep_removes_those_that_lapsed_an_hour_ago_and_no_lock(
    clock: ManualClock, queues: tuple[str, ...]
) -> None:
    upkeep_of("mail")[0].step()
    lock("report", ttl=1).acquire()
    another = Upkeep("default", queues, unique_owner() if queues else None)
    clock.advance(presence.TTL - 1)
    another.step()
    clock.advance(presence.LISTED)
    another.step()
    assert "mail" in signed()
    clock.advance(UPKEEP_INTERVAL)
    another.step()
    assert signed() == set(queues)
    assert presence.locks("default").get().name == "report"


def refuse(code: int) -> Callable[..., None]:
    def raise_(*_: Any) -> None:
        cause = sqlite3.OperationalError("refused")
        cause.sqlite_errorcode = code
        raise OperationalError("refused") from cause

    return raise_


@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY], ids=["a fault", "another writes"])
def test_one_that_cannot_be_written_is_due_again_like_the_rest_of_the_upkeep(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    upkeep, _ = upkeep_of("mail")
    with monkeypatch.context() as patch:
        patch.setattr(presence, "leave", refuse(code))
        with pytest.raises(OperationalError):
            upkeep.step()
    assert upkeep.due_in() == 0
    upkeep.step()
    assert signed() == {"mail"}


def test_one_that_cannot_be_taken_back_keeps_nobody_from_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(presence, "take_back", refuse(sqlite3.SQLITE_FULL))
    worker = Worker("default", [Registration("mail", print, time_limit=1, atomic=False, module=__name__)])
    worker.wind_down("the test is over")
    assert worker.run() == 0
    assert "database trouble while taking back the sign of life" in caplog.text


# Real workers


def test_a_worker_has_it_from_its_start_until_a_clean_stop(start: Start) -> None:
    process = start("run_alkstore")
    wait_until(lambda: {"noop", "__alkstore_outbox:mail"} <= signed(), "it has left its signs")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert signed() == set()


def test_it_is_taken_back_at_a_second_signal_too(start: Start, tmp_path: Path) -> None:
    job = enqueue("wait", str(tmp_path / "never"))
    process = start("run_queue", "wait")
    process.wait_for(f"running {job.pk}")
    wait_until(lambda: signed() == {"wait"}, "the sign")
    process.signal(signal.SIGTERM)
    process.wait_for("worker stopping")
    wait_past(clocks.now() + timedelta(seconds=1))  # a signal that comes earlier counts as the same
    process.signal(signal.SIGTERM)
    assert process.wait() == 1
    assert signed() == set()


def test_a_worker_that_was_killed_leaves_it(start: Start) -> None:
    letter = outbox("mail").enqueue("x")
    process = start("run_outbox", "mail")
    wait_for_state("completed", letter.pk)
    wait_until(lambda: signed() == {letter.queue}, "the sign")
    process.signal(signal.SIGKILL)
    process.wait()
    assert signed() == {letter.queue}


# Where they show


def shown(*arguments: str) -> str:
    out = StringIO()
    call_command("alkstore_status", *arguments, stdout=out, no_color=True)
    return out.getvalue()


def test_the_status_shows_workers_apart_and_no_lock_of_theirs(clock: ManualClock) -> None:
    lock("report").acquire()
    upkeep, worker_id = upkeep_of("mail", "post", *(f"queue-{n}" for n in range(5)))
    upkeep.step()
    assert [each["name"] for each in json.loads(shown("--json"))["locks"]] == ["report"]
    first = "queue mail, queue post, queue queue-0, queue queue-1,"
    rest = "queue queue-2, queue queue-3, queue queue-4"
    text = rf"^{worker_id}\s+0 s ago\s+alive\s+0 s ago +{first}\n +{rest}$"
    assert re.search(text, shown(), re.MULTILINE)
    (one, other) = [line for line in shown().splitlines() if first in line or rest in line]
    assert one.index(first) == other.index(rest)
    assert SIGN_PREFIX not in shown()
    clock.advance(presence.TTL + 5)
    assert re.search(rf"^{worker_id}\s+2 min 35 s ago\s+dead\s+2 min 35 s ago\s+queue mail", shown(), re.MULTILINE)


def worker() -> tuple[str, list[str], str]:
    """The only worker, as the status has it."""
    [found] = json.loads(shown("--json"))["workers"]
    return found["id"], found["queues"], found["state"]


def test_the_state_of_a_worker_is_what_the_kernel_knows_of_its_process(clock: ManualClock) -> None:
    with Liveness("default") as liveness:
        Upkeep("default", ["mail", "post"], liveness.holder, liveness.file).step()
        assert worker() == (liveness.holder, ["mail", "post"], "alive")
        clock.advance(presence.TTL)
        assert worker() == (liveness.holder, ["mail", "post"], "suspended")
        clock.advance(presence.LISTED)
        Upkeep("default").step()
        assert worker()[2] == "suspended", "however long it is suspended"
    assert worker()[2] == "dead"
    Upkeep("default").step()
    assert json.loads(shown("--json"))["workers"] == []


def test_a_dead_worker_is_dead_though_its_sign_lasts(clock: ManualClock) -> None:
    with Liveness("default") as liveness:
        Upkeep("default", ["mail"], liveness.holder, liveness.file).step()
    assert worker()[2] == "dead"
    clock.advance(presence.TTL + presence.LISTED - 1)
    Upkeep("default").step()
    assert worker()[2] == "dead", "it is listed for an hour"


@pytest.mark.parametrize("file", [None, "another"])
def test_without_knowledge_the_sign_decides(clock: ManualClock, file: str | None) -> None:
    with Liveness("default") as liveness:
        Upkeep("default", ["mail"], liveness.holder, file).step()
    assert worker()[2] == "alive"
    clock.advance(presence.TTL)
    assert worker()[2] == "dead"


def test_a_leader_whose_process_is_dead_does_not_lead(clock: ManualClock) -> None:
    with Liveness("default") as liveness:
        LockHandle(LEADERSHIP_LOCK, 10, liveness.holder, "default", liveness).acquire()
        assert json.loads(shown("--json"))["leader"]["owner"] == liveness.holder
    assert json.loads(shown("--json"))["leader"] is None
    assert "nobody leads" in shown()


def test_the_status_says_that_crash_detection_is_off_and_why(clock: ManualClock, capsys: Any) -> None:
    assert "Crash detection" not in shown()
    presence.leave("default", unique_owner(), ["mail"])
    assert "Crash detection is off" in shown()
    assert "could not set it up" in shown()
    with override_settings(ALKSTORE={"LIVENESS": False}):
        assert 'wait for their leases: ALKSTORE["LIVENESS"] is False.' in shown()
        shown("--json")
    assert "LIVENESS" in capsys.readouterr().err


def test_the_admin_shows_locks_only(clock: ManualClock, admin_client: Any) -> None:
    lock("report").acquire()
    upkeep_of("mail")[0].step()
    page = admin_client.get("/admin/django_alkstore/lock/").content.decode()
    assert "report" in page
    assert SIGN_PREFIX not in page
    token = presence.signs("default").get().pk
    assert admin_client.get(f"/admin/django_alkstore/lock/{token}/change/").status_code == 302
    chosen = {"action": "force_release", "_selected_action": [token]}
    admin_client.post("/admin/django_alkstore/lock/", chosen)
    assert Lock.objects.filter(pk=token).exists()
