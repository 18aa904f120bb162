"""`django_alkstore.testing`: the same encoding, claim and ending as in production, in the test's own transaction."""

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import TestCase, TransactionTestCase

from django_alkstore import testing
from django_alkstore.clock import ManualClock
from django_alkstore.exceptions import Discard, InvalidOption, InvalidPayload, Retry, Snooze
from django_alkstore.models import Job
from django_alkstore.registry import delivery, handler
from django_alkstore.services import JobHandle, enqueue, enqueue_tx, get_job, outbox, outbox_enqueue_tx
from django_alkstore.testing import isolated_registry, run_pending
from tests.ledger.models import Entry
from tests.ledger.tools import database


def end_of(job: Job) -> tuple[str, int, str | None]:
    found = get_job(job.pk)
    assert found is not None
    return found.state, found.attempts, found.last_error


def kept_by_others() -> int:
    """Rows that another connection sees: what has been committed. Nothing, where it may not even look."""
    with closing(sqlite3.connect(database(), timeout=0)) as other:
        try:
            return int(
                other.execute(
                    "SELECT (SELECT count(*) FROM django_alkstore_job) + (SELECT count(*) FROM ledger_entry)"
                ).fetchone()[0]
            )
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):  # an EXCLUSIVE transaction in a rollback journal, still open
                raise
            return 0


class Promises:
    """What holds in a `TestCase` and in a `TransactionTestCase` alike."""

    def setUp(self) -> None:
        context = isolated_registry()
        context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)  # type: ignore[attr-defined]

    def test_it_runs_what_is_due_in_this_thread_and_returns_it(self) -> None:
        threads = []

        @handler("q")
        def run(job: JobHandle) -> None:
            threads.append(threading.current_thread())
            Entry.objects.create(text=job.payload, job_id=job.id)

        first, second, later = enqueue("q", "a"), enqueue("q", "b"), enqueue("q", "c", delay=3_600)
        ran = run_pending()
        assert [job.id for job in ran] == [first.pk, second.pk]
        assert [end_of(job) for job in (first, second, later)] == [
            ("completed", 1, None), ("completed", 1, None), ("pending", 0, None),
        ]  # fmt: skip
        assert set(threads) == {threading.current_thread()}
        assert sorted(Entry.objects.values_list("text", flat=True)) == ["a", "b"]
        assert run_pending() == []

    def test_f102_the_payload_is_refused_and_decoded_as_in_production(self) -> None:
        seen: list[Any] = []
        handler("q")(lambda job: seen.append(job.payload))
        for unfit in (Decimal(1), datetime(2026, 1, 1), {"a": {1, 2}}, object(), {1: 2}):
            with pytest.raises(InvalidPayload):
                enqueue("q", unfit)
        original: dict[str, Any] = {"tuple": (1, 2), "nested": {"list": [1]}}
        enqueue("q", original)
        original["nested"]["list"].append(2)
        run_pending()
        assert seen == [{"tuple": [1, 2], "nested": {"list": [1]}}]
        assert seen[0] is not original

    def test_each_outcome_is_that_of_a_worker(self) -> None:
        raised = {
            "error": ValueError("no"), "exit": SystemExit(1), "retry": Retry("later", delay=3_600),
            "discard": Discard("never"), "snooze": Snooze(3_600), "kill": KeyboardInterrupt(),
        }  # fmt: skip

        @handler("q")
        def run(job: JobHandle) -> None:
            raise raised[job.payload]

        jobs = {name: enqueue("q", name) for name in raised}
        run_pending("q")
        assert end_of(jobs["error"]) == ("pending", 1, "ValueError: no")
        assert end_of(jobs["exit"]) == ("pending", 1, "SystemExit: 1")
        assert end_of(jobs["kill"])[:2] == ("pending", 1)
        assert end_of(jobs["retry"])[:2] == ("pending", 1)
        assert end_of(jobs["discard"])[:2] == ("dead", 1)
        assert end_of(jobs["snooze"]) == ("pending", 0, None)

    def test_the_log_says_how_a_job_failed(self) -> None:
        @handler("q")
        def run(job: JobHandle) -> None:
            raise ValueError("no")

        first, last = enqueue("q", None), enqueue("q", None, max_attempts=1)
        with self.assertLogs("django_alkstore", "WARNING") as logs:
            run_pending("q")
        failed, died = (record.getMessage() for record in logs.records)
        assert failed.startswith(f"failed job {first.pk} in queue q after ")
        assert died.startswith(f"dead: job {last.pk} in queue q after ")
        assert failed.rstrip().endswith("ValueError: no")

    def test_outboxes_and_atomic_and_async_handlers_run_too(self) -> None:
        @delivery("letters", atomic=True)
        def deliver(job: JobHandle) -> None:
            Entry.objects.create(text="letter", job_id=job.id)

        @handler("async")
        async def run(job: JobHandle) -> None:
            await Entry.objects.acreate(text="async", job_id=job.id)

        with transaction.atomic():
            letter = outbox_enqueue_tx("letters", None)
        job = enqueue("async", None)
        assert {job.id for job in run_pending()} == {letter.pk, job.pk}
        assert end_of(letter)[0] == end_of(job)[0] == "completed"
        assert sorted(Entry.objects.values_list("text", flat=True)) == ["async", "letter"]

    def test_an_atomic_handler_that_fails_leaves_no_row(self) -> None:
        @handler("q", atomic=True)
        def run(job: JobHandle) -> None:
            Entry.objects.create(text="undone")
            raise ValueError("no")

        job = enqueue("q", None)
        run_pending()
        assert end_of(job) == ("pending", 1, "ValueError: no")
        assert not Entry.objects.exists()

    def test_names_choose_and_an_unknown_one_is_an_error(self) -> None:
        handler("q")(lambda job: None)
        handler("r")(lambda job: None)
        first, second = enqueue("q", None), enqueue("r", None)
        assert [job.id for job in run_pending("r")] == [second.pk]
        assert end_of(first) == ("pending", 0, None)
        with pytest.raises(InvalidOption, match="nope"):
            run_pending("nope")

    def test_jobs_that_jobs_enqueue_are_run_as_well(self) -> None:
        @handler("a")
        def first(job: JobHandle) -> None:
            enqueue("b", None)
            outbox("letters").enqueue(None)

        handler("b")(lambda job: Entry.objects.create(text="b"))
        delivery("letters")(lambda job: enqueue("b", None))
        enqueue("a", None)
        assert len(run_pending()) == 4
        assert Entry.objects.count() == 2

    def test_one_that_never_ends_is_an_error_and_no_hang(self) -> None:
        handler("q")(lambda job: enqueue("q", None))
        enqueue("q", None)
        with pytest.raises(AssertionError):
            run_pending(limit=20)

    def test_f059_a_handler_whose_write_is_refused_leaves_the_test_s_connection_usable(self) -> None:
        """In a worker the handler is in no transaction: an IntegrityError there breaks nothing but its attempt."""

        @handler("q")
        def run(job: JobHandle) -> None:
            Entry.objects.create(text="once", job_id=-1)

        jobs = enqueue("q", None), enqueue("q", None, max_attempts=1)
        run_pending()
        assert end_of(jobs[0])[:2] == ("completed", 1)
        assert end_of(jobs[1])[:2] == ("dead", 1)
        assert "IntegrityError" in (end_of(jobs[1])[2] or "")
        assert Entry.objects.count() == 1

    def test_time_can_be_moved_by_hand(self) -> None:
        @handler("q")
        def run(job: JobHandle) -> None:
            raise ValueError("no")

        with testing.frozen_clock(ManualClock(datetime.fromisoformat("2026-03-01T12:00:00+00:00"))) as hands:
            job = enqueue("q", None, backoff_base=10, max_attempts=3)
            runs = []
            for _ in range(4):
                runs.append(len(run_pending()))
                hands.advance(10)
            assert runs == [1, 1, 0, 1]  # at 0, 10 and 10 + 20 seconds
        assert end_of(job)[:2] == ("dead", 3)


class InsideATestCase(Promises, TestCase):
    def test_f116_nothing_is_committed_inside_or_outside_a_nested_atomic_and_later_queries_work(self) -> None:
        handler("q")(lambda job: Entry.objects.create(text=str(job.payload)))
        enqueue("q", "outside")
        assert len(run_pending()) == 1
        with transaction.atomic():
            enqueue_tx("q", "inside")
            assert len(run_pending()) == 1
            assert Entry.objects.count() == 2
        with suppress(ZeroDivisionError), transaction.atomic():
            enqueue_tx("q", "undone")
            raise ZeroDivisionError
        assert run_pending() == []
        assert sorted(Entry.objects.values_list("text", flat=True)) == ["inside", "outside"]
        assert connection.in_atomic_block
        assert not connection.needs_rollback
        assert kept_by_others() == 0

    def test_f116_a_failing_job_commits_nothing_and_breaks_nothing(self) -> None:
        @handler("q")
        def run(job: JobHandle) -> None:
            Entry.objects.create(text="before")
            raise IntegrityError("as if")

        enqueue("q", None)
        run_pending()
        assert Job.objects.get().state == "pending"
        assert kept_by_others() == 0


class InsideATransactionTestCase(Promises, TransactionTestCase):
    def test_what_is_run_is_committed_as_in_production(self) -> None:
        handler("q")(lambda job: Entry.objects.create(text="a"))
        enqueue("q", None)
        run_pending()
        assert kept_by_others() == 2
        assert not connection.in_atomic_block


def test_f120_with_django_s_own_database_in_memory_jobs_run_in_place(start: Callable[..., Any]) -> None:
    """A project's own test run, with Django's runner and its default test database."""
    process = start(
        "test",
        "tests.ledger.in_memory",
        "-v",
        "2",
        DJANGO_SETTINGS_MODULE="tests.ledger.variant",
        ALKSTORE_TEST_JOURNAL="memory",
        ALKSTORE_TEST_VARIANT='{"IN_MEMORY": true}',
    )
    assert process.wait() == 0, process.output
    process.wait_for("Ran 3 tests")
