"""`run_pending` behaves as a worker does, also inside the transaction of a `TestCase`."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import IntegrityError, connection, connections, transaction
from django.test import TestCase, TransactionTestCase

from django_alkstore import signals
from django_alkstore.exceptions import Discard, Retry, Snooze
from django_alkstore.registry import handler
from django_alkstore.services import JobHandle, enqueue, get_job
from django_alkstore.testing import isolated_registry, run_pending
from tests.ledger.models import Entry


def state_of(job_id: int) -> str:
    found = get_job(job_id)
    assert found is not None
    return found.state


class AsInAWorker:
    """What holds in a `TestCase` and in a `TransactionTestCase` alike."""

    def setUp(self) -> None:
        context = isolated_registry()
        context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)  # type: ignore[attr-defined]
        self.events: list[str] = []

    def note(self, what: str) -> Callable[[], None]:
        return lambda: self.events.append(what)

    def test_a_durable_block_works_in_a_handler(self) -> None:
        @handler("q")
        def run(job: JobHandle) -> None:
            with transaction.atomic(durable=True):
                Entry.objects.create(text="durable")
                with pytest.raises(RuntimeError, match="durable"), transaction.atomic(durable=True):
                    pass

        job = enqueue("q", None)
        run_pending(raise_errors=True)
        assert state_of(job.pk) == "completed"
        assert Entry.objects.filter(text="durable").exists()

    def test_a_durable_block_is_refused_in_an_atomic_handler(self) -> None:
        @handler("q", atomic=True)
        def run(job: JobHandle) -> None:
            with transaction.atomic(durable=True):
                pass

        enqueue("q", None)
        with pytest.raises(RuntimeError, match="durable"):
            run_pending(raise_errors=True)

    def test_callbacks_run_at_the_end_of_the_block_and_before_the_handler_goes_on(self) -> None:
        @handler("q")
        def run(job: JobHandle) -> None:
            with transaction.atomic():
                transaction.on_commit(self.note("outer"))
                with transaction.atomic():
                    transaction.on_commit(self.note("inner"))
                self.events.append("before the commit")
            self.events.append("after the commit")
            transaction.on_commit(self.note("no block"))
            self.events.append("end")

        enqueue("q", None)
        run_pending(raise_errors=True)
        assert self.events == ["before the commit", "outer", "inner", "after the commit", "no block", "end"]

    def test_callbacks_of_a_block_that_is_rolled_back_do_not_run(self) -> None:
        @handler("q")
        def run(job: JobHandle) -> None:
            with suppress(ZeroDivisionError), transaction.atomic():
                transaction.on_commit(self.note("undone"))
                raise ZeroDivisionError
            with transaction.atomic():
                with suppress(ZeroDivisionError), transaction.atomic():
                    transaction.on_commit(self.note("inner, undone"))
                    raise ZeroDivisionError
                transaction.on_commit(self.note("kept"))

        enqueue("q", None)
        run_pending(raise_errors=True)
        assert self.events == ["kept"]

    def test_callbacks_of_an_atomic_handler_run_if_it_succeeds(self) -> None:
        @handler("q", atomic=True)
        def run(job: JobHandle) -> None:
            transaction.on_commit(self.note(job.payload))
            self.events.append("end")
            if job.payload == "fails":
                raise ValueError("no")

        enqueue("q", "succeeds")
        enqueue("q", "fails")
        run_pending()
        assert self.events == ["end", "succeeds", "end"]

    def test_callbacks_that_were_committed_before_the_handler_failed_have_run(self) -> None:
        @handler("q")
        def run(job: JobHandle) -> None:
            with transaction.atomic():
                transaction.on_commit(self.note("committed"))
            raise ValueError("later")

        enqueue("q", None)
        run_pending()
        assert self.events == ["committed"]

    def test_a_callback_that_raises_fails_the_attempt_and_stops_the_others(self) -> None:
        @handler("q")
        def run(job: JobHandle) -> None:
            def fail() -> None:
                raise ValueError("in the callback")

            with transaction.atomic():
                transaction.on_commit(fail)
                transaction.on_commit(self.note("never"))

        job = enqueue("q", None, max_attempts=1)
        with pytest.raises(ValueError, match="in the callback"):
            run_pending(raise_errors=True)
        assert state_of(job.pk) == "dead"
        assert self.events == []

    def test_a_robust_callback_that_raises_harms_nothing(self) -> None:
        @handler("q")
        def run(job: JobHandle) -> None:
            def fail() -> None:
                raise ValueError("in the callback")

            with transaction.atomic():
                transaction.on_commit(fail, robust=True)
                transaction.on_commit(self.note("next"))

        job = enqueue("q", None)
        with self.assertLogs(level="ERROR"):  # type: ignore[attr-defined]
            run_pending(raise_errors=True)
        assert state_of(job.pk) == "completed"
        assert self.events == ["next"]

    def test_a_callback_that_enqueues_gets_its_job_run(self) -> None:
        @handler("q")
        def run(job: JobHandle) -> None:
            with transaction.atomic():
                transaction.on_commit(lambda: enqueue("r", None))

        handler("r")(lambda job: self.events.append("r"))
        enqueue("q", None)
        assert [job.queue for job in run_pending()] == ["q", "r"]
        assert self.events == ["r"]

    def test_a_job_that_its_handler_settles_is_announced(self) -> None:
        completed: list[int] = []

        def receive(job: JobHandle, **_: object) -> None:
            completed.append(job.id)

        @handler("own")
        def run(job: JobHandle) -> None:
            assert job.ack()

        handler("atomic", atomic=True)(lambda job: None)
        signals.job_completed.connect(receive)
        try:
            jobs = [enqueue("own", None).pk, enqueue("atomic", None).pk]
            run_pending()
        finally:
            signals.job_completed.disconnect(receive)
        assert sorted(completed) == sorted(jobs)

    def test_raise_errors_raises_the_handler_s_exception_once_the_row_is_written(self) -> None:
        error = ValueError("no")

        @handler("q")
        def run(job: JobHandle) -> None:
            raise error

        first, second = enqueue("q", None, max_attempts=1), enqueue("q", None)
        with self.assertLogs("django_alkstore", "ERROR") as logs, pytest.raises(ValueError, match="no") as raised:  # type: ignore[attr-defined]
            run_pending(raise_errors=True)
        assert raised.value is error
        assert state_of(first.pk) == "dead"
        assert state_of(second.pk) == "pending"
        assert logs.records[0].exc_info[1] is error
        assert any(entry.name == "run" for entry in raised.traceback)

    def test_what_a_handler_asks_for_is_no_error(self) -> None:
        asked: dict[str, Any] = {"retry": Retry(delay=60), "discard": Discard("no"), "snooze": Snooze(60)}

        @handler("q")
        def run(job: JobHandle) -> None:
            raise asked[job.payload]

        jobs = {name: enqueue("q", name).pk for name in asked}
        assert len(run_pending(raise_errors=True)) == 3
        assert {name: state_of(job_id) for name, job_id in jobs.items()} == {
            "retry": "pending", "discard": "dead", "snooze": "pending",
        }  # fmt: skip

    def test_an_error_after_the_handler_s_own_ack_is_raised_too(self) -> None:
        @handler("q")
        def run(job: JobHandle) -> None:
            job.ack()
            raise ValueError("late")

        job = enqueue("q", None)
        with pytest.raises(ValueError, match="late"):
            run_pending(raise_errors=True)
        assert state_of(job.pk) == "completed"


class InATestCase(AsInAWorker, TestCase):
    databases = {"default", "other"}

    def test_the_other_database_is_committed_as_well(self) -> None:
        @handler("q")
        def run(job: JobHandle) -> None:
            with transaction.atomic(using="other", durable=True):
                transaction.on_commit(self.note("other"), using="other")

        enqueue("q", None)
        run_pending(raise_errors=True)
        assert self.events == ["other"]

    def test_callbacks_of_the_test_itself_still_wait(self) -> None:
        handler("q")(lambda job: None)
        transaction.on_commit(self.note("before"))
        enqueue("q", None)
        with self.captureOnCommitCallbacks(execute=True):
            run_pending()
            transaction.on_commit(self.note("captured"))
        assert self.events == ["captured"]

    def test_it_works_inside_a_block_of_the_test(self) -> None:
        @handler("q")
        def run(job: JobHandle) -> None:
            with transaction.atomic(durable=True):
                transaction.on_commit(self.note("committed"))

        with transaction.atomic():
            enqueue("q", None)
            run_pending(raise_errors=True)
            assert self.events == ["committed"]

    def test_a_broken_handler_leaves_the_test_s_transaction_usable(self) -> None:
        @handler("q")
        def run(job: JobHandle) -> None:
            with transaction.atomic(savepoint=False):
                transaction.on_commit(self.note("never"))
                raise IntegrityError("as if")

        job = enqueue("q", None, max_attempts=1)
        run_pending()
        assert state_of(job.pk) == "dead"
        assert self.events == []
        assert not connection.needs_rollback
        assert not {"on_commit", "savepoint_commit"} & vars(connections["default"]).keys()  # nothing is left behind

    def test_a_block_without_a_savepoint_is_committed_at_the_handler_s_end(self) -> None:
        @handler("q")
        def run(job: JobHandle) -> None:
            with transaction.atomic(savepoint=False):
                transaction.on_commit(self.note("committed"))

        enqueue("q", None)
        run_pending(raise_errors=True)
        assert self.events == ["committed"]


class InATransactionTestCase(AsInAWorker, TransactionTestCase):
    pass
