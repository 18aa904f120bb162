"""What a handler says of its job inside a transaction counts only if that is committed."""

import copy
import functools
import pickle
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.db.backends.utils import CursorWrapper

from django_alkstore import failures
from django_alkstore.exceptions import DuplicateJob, LeaseLost, LockHeld, LockLost, Retry, Snooze
from django_alkstore.registry import handler, isolated
from django_alkstore.services import JobHandle, claim_batch, claims, enqueue, get_job, outbox
from django_alkstore.testing import run_pending
from tests.ledger.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)

SETTLE: dict[str, Callable[[JobHandle], Any]] = {
    "ack": lambda job: job.ack(),
    "ack_tx": lambda job: job.ack_tx(),
    "retry": lambda job: job.retry("taken back", delay=0),
    "fail": lambda job: job.fail("taken back"),
    "release": lambda job: job.release(),
}


class Boom(Exception):
    pass


def settle_and_take_back(job: JobHandle, how: str) -> None:
    with suppress(Boom), transaction.atomic():
        SETTLE[how](job)
        raise Boom


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("how", SETTLE)
def test_what_a_savepoint_took_back_settles_nothing(how: str, atomic: bool) -> None:
    with isolated():

        @handler("work", atomic=atomic)
        def work(job: JobHandle) -> None:
            Entry.objects.create(text="effect")
            settle_and_take_back(job, how)

        job = enqueue("work", None)
        ran = run_pending("work")
    assert len(ran) == 1
    assert Entry.objects.count() == 1
    after = get_job(job.pk)
    assert after is not None
    assert (after.state, after.errors) == ("completed", [])


@pytest.mark.parametrize("how", SETTLE)
def test_run_once_acks_what_a_rollback_took_back(how: str) -> None:
    job = outbox("mail").enqueue(None)
    assert outbox("mail").run_once("w", lambda handle: settle_and_take_back(handle, how))
    after = get_job(job.pk)
    assert after is not None
    assert after.state == "completed"


@pytest.mark.parametrize(("how", "state"), [("ack", "completed"), ("ack_tx", "completed"), ("fail", "dead")])
def test_an_atomic_handler_that_settles_its_job_itself_has_its_way(how: str, state: str) -> None:
    with isolated():

        @handler("work", atomic=True)
        def work(job: JobHandle) -> None:
            Entry.objects.create(text="effect")
            SETTLE[how](job)

        job = enqueue("work", None)
        run_pending("work")
    after = get_job(job.pk)
    assert after is not None
    assert (after.state, Entry.objects.count()) == (state, 1)


def test_an_atomic_handler_that_did_not_get_the_writer_lock_has_not_run_and_spends_no_attempt() -> None:
    with isolated():
        ran: list[int] = []

        @handler("work", atomic=True)
        def work(job: JobHandle) -> None:
            ran.append(job.id)

        job = enqueue("work", None)
        refusals = [True]

        def refuse(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            # The first renewal is the handler's transaction taking the lock.
            if "SET lease_expires_at" in sql and refusals:
                refusals.pop()
                busy = OperationalError("database is locked")
                busy.__cause__ = _sqlite_busy()
                raise busy
            return execute(sql, params, many, context)

        with connection.execute_wrapper(refuse):
            run_pending("work")
    after = get_job(job.pk)
    assert after is not None
    assert (ran, after.state, after.attempts, after.errors) == ([], "pending", 0, [])


def _sqlite_busy() -> Exception:
    import sqlite3

    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return error


def test_a_claim_whose_renewal_is_refused_is_handed_out_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    job = enqueue("work", None)
    monkeypatch.setattr(claims, "STALE", -1.0)

    def refuse(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "SET lease_expires_at" in sql:
            raise OperationalError("database is locked")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(refuse):
        assert [handle.id for handle in claim_batch("work", "w")] == [job.pk]


def test_statements_are_seen_by_what_has_wrapped_djangos_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    original = CursorWrapper.execute

    @functools.wraps(original)
    def traced(self: CursorWrapper, sql: Any, params: Any = None) -> Any:
        seen.append(sql)
        return original(self, sql, params)

    monkeypatch.setattr(CursorWrapper, "execute", traced)
    enqueue("work", None)
    assert any("INSERT" in sql for sql in seen)


def test_a_history_that_utf8_cannot_hold_can_be_added_to() -> None:
    entry = failures.failure(1, datetime(2026, 1, 1, tzinfo=UTC), failures.Described("new"))
    assert failures.append(b'["\\ud800"]', entry).encode()


@pytest.mark.parametrize(
    "error",
    [
        DuplicateJob("mail", "k", 7),
        LeaseLost(7),
        LockHeld("report", "cron", datetime(2026, 1, 1, tzinfo=UTC)),
        LockLost("report"),
        Retry("reason", delay=5),
        Snooze(5),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_an_error_survives_copying_and_pickling(error: Exception, again: Callable[[Exception], Exception]) -> None:
    back = again(error)
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))
