"""`immediately`: jobs run right after the commit that stores them."""

from contextlib import suppress
from datetime import UTC, datetime

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import transaction
from django.test import TestCase, TransactionTestCase

from django_alkstore import signals
from django_alkstore.registry import delivery, handler
from django_alkstore.services import (
    JobHandle,
    cancel,
    enqueue,
    enqueue_many,
    enqueue_tx,
    fire_schedule,
    get_job,
    outbox_enqueue_tx,
    requeue,
    reschedule,
    run_now,
    schedule,
    tick,
)
from django_alkstore.testing import frozen_clock, immediately, isolated_registry
from tests.ledger.models import Entry


class Promises:
    """What holds in a `TestCase` and in a `TransactionTestCase` alike."""

    def setUp(self) -> None:
        context = isolated_registry()
        context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)  # type: ignore[attr-defined]
        self.ran: list[object] = []
        handler("q")(lambda job: self.ran.append(job.payload))

    def test_a_job_runs_right_after_it_was_stored(self) -> None:
        with immediately():
            enqueue("q", 1)
            assert self.ran == [1]
            enqueue_many("q", [2, 3])
            assert self.ran == [1, 2, 3]
        enqueue("q", 4)
        assert self.ran == [1, 2, 3]

    def test_in_a_transaction_it_runs_after_the_outermost_block(self) -> None:
        delivery("letters")(lambda job: self.ran.append(job.payload))
        with immediately():
            with transaction.atomic():
                with transaction.atomic():
                    enqueue_tx("q", 1)
                outbox_enqueue_tx("letters", "letter")
                assert self.ran == []
            assert sorted(map(str, self.ran)) == ["1", "letter"]

    def test_what_is_rolled_back_does_not_run(self) -> None:
        with immediately(), suppress(ZeroDivisionError), transaction.atomic():
            enqueue_tx("q", 1)
            raise ZeroDivisionError
        assert self.ran == []

    def test_a_job_that_is_not_due_waits(self) -> None:
        with immediately():
            job = enqueue("q", "later", delay=3_600)
            assert self.ran == []
            run_now(job.pk)
            assert self.ran == ["later"]

    def test_other_calls_that_make_a_job_due_run_it(self) -> None:
        with frozen_clock(datetime(2027, 1, 1, tzinfo=UTC)) as hands, immediately():
            job = enqueue("q", "requeued", delay=60)
            cancel(job.pk)
            requeue(job.pk)
            moved = enqueue("q", "rescheduled", delay=60)
            reschedule(moved.pk, hands.now())
            schedule("often", "@every 1h", "q", "fired")
            fire_schedule("often")
            hands.advance(3_600)
            tick()
        assert self.ran == ["requeued", "rescheduled", "fired", "fired"]

    def test_what_a_handler_enqueues_runs_after_the_handler(self) -> None:
        @handler("first")
        def first(job: JobHandle) -> None:
            enqueue("q", "second")
            self.ran.append("first")

        with immediately():
            enqueue("first", None)
            assert self.ran == ["first", "second"]

    def test_a_callback_that_enqueues_runs_its_job(self) -> None:
        with immediately():
            with transaction.atomic():
                transaction.on_commit(lambda: enqueue("q", 1))
                assert self.ran == []
            assert self.ran == [1]

    def test_a_handler_has_no_transaction_open(self) -> None:
        @handler("durable")
        def run(job: JobHandle) -> None:
            with transaction.atomic(durable=True):
                Entry.objects.create(text="durable")

        with immediately(), transaction.atomic():
            job = enqueue_tx("durable", None)
        found = get_job(job.pk)
        assert found is not None
        assert (found.state, found.errors) == ("completed", [])

    def test_a_handler_that_fails_does_so_as_in_a_worker(self) -> None:
        @handler("fails")
        def run(job: JobHandle) -> None:
            raise ValueError("no")

        with immediately():
            job = enqueue("fails", None)
        found = get_job(job.pk)
        assert found is not None
        assert (found.state, found.last_error) == ("pending", "ValueError: no")

    def test_a_job_that_never_ends_is_an_error_of_the_test(self) -> None:
        handler("again")(lambda job: enqueue("again", None))
        with pytest.raises(AssertionError, match="again and again"), immediately():
            enqueue("again", None)

    def test_an_error_of_the_block_goes_first_and_nothing_is_left_behind(self) -> None:
        handler("again")(lambda job: enqueue("again", None))
        with suppress(ZeroDivisionError), immediately():
            enqueue("again", None)
            raise ZeroDivisionError
        assert not signals.jobs_enqueued.receivers

    def test_a_queue_without_a_handler_is_left_alone(self) -> None:
        with immediately():
            job = enqueue("unknown", None)
        found = get_job(job.pk)
        assert found is not None
        assert found.state == "pending"


class InATestCase(Promises, TestCase):
    async def test_a_coroutine_may_not_enter_it(self) -> None:
        """Its thread has other connections than the test: jobs would silently not run."""
        with pytest.raises(SynchronousOnlyOperation), immediately():
            pass


class InAnAsyncTest(TestCase):
    def setUp(self) -> None:
        self.enterContext(isolated_registry())
        self.enterContext(immediately())

    async def test_jobs_of_a_coroutine_run_at_once(self) -> None:
        ran: list[object] = []

        @handler("async")
        async def run(job: JobHandle) -> None:
            ran.append(await Entry.objects.acount())

        def store() -> None:
            with transaction.atomic():
                Entry.objects.create(text="stored")
                enqueue_tx("async", None)
                assert ran == []

        await sync_to_async(store)()
        assert ran == [1]


class InATransactionTestCase(Promises, TransactionTestCase):
    pass
