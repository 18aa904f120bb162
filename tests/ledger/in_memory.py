"""A project's tests as Django's runner finds them. Run in a child, on Django's default test database in memory."""

from django.core.management import CommandError, call_command
from django.db import connection
from django.test import TestCase, TransactionTestCase

from django_alkstore.services import enqueue, get_job
from django_alkstore.testing import run_pending
from tests.ledger.models import Entry


class RunsInPlace:
    def test_jobs(self) -> None:
        assert connection.is_in_memory_db()  # type: ignore[attr-defined]
        job = enqueue("record", "a")
        assert [ran.id for ran in run_pending()] == [job.pk]
        found = get_job(job.pk)
        assert found is not None
        assert found.state == "completed"
        assert Entry.objects.get().job_id == job.pk


class InTestCase(RunsInPlace, TestCase):
    pass


class InTransactionTestCase(RunsInPlace, TransactionTestCase):
    def test_a_real_worker_is_a_clear_error(self) -> None:
        for command in ("run_queue", "run_outbox", "run_alkstore", "run_schedules"):
            with self.assertRaisesMessage(CommandError, "in memory"):
                call_command(command)
