"""A job that cannot be read becomes dead, and that is announced once, after its commit."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_alkstore import signals
from django_alkstore.clock import ManualClock, to_us
from django_alkstore.dialects.cursors import Cursor
from django_alkstore.dialects.sqlite import SQLite
from django_alkstore.dialects.transactions import write_operations
from django_alkstore.models import Job
from django_alkstore.registry import handler, isolated
from django_alkstore.runtime.writing import Writer
from django_alkstore.services import enqueue
from django_alkstore.services.claims import handles_of
from django_alkstore.testing import run_pending

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def told() -> Iterator[list[tuple[int, str]]]:
    """The jobs that `job_unreadable` has named, each with the state that its row had then."""
    said: list[tuple[int, str]] = []

    def note(job_id: int, **_: Any) -> None:
        said.append((job_id, Job.objects.get(pk=job_id).state))

    signals.job_unreadable.connect(note)
    yield said
    signals.job_unreadable.disconnect(note)


def damaged() -> int:
    """The id of a pending job whose payload is not JSON."""
    job_id = enqueue("mail", None).pk
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_alkstore_job SET payload = '{' WHERE id = %s", [job_id])
    return job_id


def test_in_a_transaction_it_is_announced_after_the_commit_and_not_after_a_rollback(
    told: list[tuple[int, str]],
) -> None:
    job_id = damaged()
    with isolated():
        handler("mail")(lambda job: None)
        with transaction.atomic():
            assert run_pending("mail") == []
            assert Job.objects.get().state == "dead"
            transaction.set_rollback(True)
        assert told == []
        with transaction.atomic():
            run_pending("mail")
            assert told == []
        assert told == [(job_id, "dead")]


def test_a_worker_announces_it_once_though_the_transaction_was_repeated(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, told: list[tuple[int, str]]
) -> None:
    job_id = damaged()
    rows = write_operations("default", lambda db: db.claim("mail", "worker", 1, to_us(clock.now())))
    _, unreadable = handles_of("default", rows)
    real: Callable[..., AbstractContextManager[object]] = SQLite.begin
    tries = []

    @contextmanager
    def refuse_first_commit(self: SQLite, connection: BaseDatabaseWrapper, cursor: Cursor) -> Iterator[None]:
        with real(self, connection, cursor):
            yield
            tries.append(len(posted))
            if len(tries) == 1:
                cause = sqlite3.OperationalError("database is locked")
                cause.sqlite_errorcode = sqlite3.SQLITE_BUSY
                raise OperationalError("database is locked") from cause

    posted: list[Callable[[], None]] = []
    writer = Writer(connections["default"], "worker", None, posted.append)
    with monkeypatch.context() as patch:
        patch.setattr(SQLite, "begin", refuse_first_commit)
        with writer.turn():
            writer.bury_unreadable(unreadable)
    assert tries == [0, 0], "no event before the commit"
    for send in posted:
        send()
    assert told == [(job_id, "dead")]
