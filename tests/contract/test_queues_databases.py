"""Contract, section 1: whichever database a project keeps its jobs in, by argument, by setting or by router."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.test import TestCase, override_settings
from django.utils.connection import ConnectionDoesNotExist

from django_alkstore import services
from django_alkstore.exceptions import DuplicateJob
from django_alkstore.models import Job


class JobsToOther:
    """A router that keeps the library's tables in `other`."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label == "django_alkstore" else None

    db_for_read = db_for_write


class JobsReadElsewhere(JobsToOther):
    """A router whose reads go to a replica: what is asked right after a write must not be asked there."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "default"


@contextmanager
def by_argument() -> Iterator[dict[str, str]]:
    yield {"using": "other"}


@contextmanager
def by_setting() -> Iterator[dict[str, str]]:
    with override_settings(ALKSTORE={"DATABASE": "other"}):
        yield {}


@contextmanager
def by_router() -> Iterator[dict[str, str]]:
    with override_settings(DATABASE_ROUTERS=[f"{__name__}.JobsToOther"]):
        yield {}


@contextmanager
def by_router_with_a_replica() -> Iterator[dict[str, str]]:
    with override_settings(DATABASE_ROUTERS=[f"{__name__}.JobsReadElsewhere"]):
        yield {}


@contextmanager
def by_argument_over_the_setting() -> Iterator[dict[str, str]]:
    with override_settings(ALKSTORE={"DATABASE": "default"}):
        yield {"using": "other"}


@contextmanager
def by_setting_over_the_router() -> Iterator[dict[str, str]]:
    class ToDefault(JobsToOther):
        def db_for_write(self, model: Any, **hints: Any) -> str | None:
            return "default"

    with override_settings(ALKSTORE={"DATABASE": "other"}, DATABASE_ROUTERS=[ToDefault()]):
        yield {}


WAYS = [
    by_argument,
    by_setting,
    by_router,
    by_router_with_a_replica,
    by_argument_over_the_setting,
    by_setting_over_the_router,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_f063_every_queue_function_works_on_the_chosen_database_alone(way: Callable[[], Any]) -> None:
    # A lure on the wrong database, which nothing may touch or find.
    lure = services.enqueue("mail", "lure", unique_key="lure", using="default")
    with way() as using:
        job = services.enqueue("mail", 1, **using)
        assert job._state.db == "other"
        assert services.get_job(job.id, **using).payload == 1
        assert services.next_claim_at("mail", **using) == job.run_at
        assert services.get_or_enqueue("mail", "lure", 2, **using)[1]
        assert not services.get_or_enqueue("mail", "lure", 2, **using)[1]
        assert len(services.enqueue_many("mail", [3, 4], **using)) == 2
        with transaction.atomic(using="other"):
            services.enqueue_tx("mail", 5, **using)
            services.outbox_enqueue_tx("box", 6, **using)
        handles = services.claim_batch("mail", "w", limit=10, **using)
        assert [handle.payload for handle in handles] == [1, 2, 3, 4, 5]
        assert handles[0].ack()
        assert handles[1].retry("x")
        assert handles[2].fail("x")
        assert handles[3].heartbeat()
        with transaction.atomic(using="other"):
            handles[3].ack_tx()
        assert handles[4].release()
        assert services.cancel(handles[4].id, **using)
        assert services.requeue(handles[4].id, **using)
        assert services.sweep(**using) == 0
        stats = {row.queue: (row.pending, row.completed, row.dead) for row in services.queue_stats(**using)}
        assert stats == {"mail": (2, 2, 1), "__alkstore_outbox:box": (1, 0, 0)}
        assert services.outbox("box", **using).run_once("w", lambda handle: None)
    assert Job.objects.using("other").count() == 6
    [left] = Job.objects.using("default").all()
    assert (left.id, left.state, left.attempts) == (lure.id, "pending", 0)


class InATestCase(TestCase):
    """Also run against Django's default in-memory test database, by the test below."""

    def test_f116_f120_every_queue_function_works_inside_a_test_case(self) -> None:
        first = services.enqueue("mail", {"a": "\x00"})
        services.enqueue_tx("mail", 2)
        services.enqueue_many("mail", [3, 4])
        with transaction.atomic():
            services.get_or_enqueue("mail", "k", 5)
        handles = services.claim_batch("mail", "w", limit=10)
        assert [handle.payload for handle in handles] == [{"a": "\x00"}, 2, 3, 4, 5]
        assert handles[0].ack()
        assert not handles[0].ack()
        assert handles[1].retry("x", delay=0)
        assert handles[2].fail("x")
        assert handles[3].heartbeat()
        assert handles[3].release()
        handles[4].ack_tx()
        assert services.get_job(first.id).state == "completed"
        assert services.requeue(handles[2].id)
        assert services.cancel(handles[2].id)
        assert services.sweep() == 0
        assert len(services.queue_stats()) == 1
        services.enqueue("mail", 1, unique_key="twice")
        with pytest.raises(DuplicateJob):
            services.enqueue("mail", 1, unique_key="twice")
        services.enqueue("mail", "the transaction is usable")
        with pytest.raises(RuntimeError), transaction.atomic():
            services.claim_batch("mail", "w")

    def test_nothing_is_left_of_another_test(self) -> None:
        assert not Job.objects.exists()
        services.enqueue("mail", None)


IN_MEMORY = """
import django
from django.conf import settings
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=["django_alkstore", "tests.ledger"],
    USE_TZ=%r,
)
django.setup()
from django.core.management import call_command
call_command("test", "tests.contract.test_queues_databases.InATestCase", verbosity=2)
"""


@pytest.mark.parametrize("use_tz", [True, False])
def test_f120_the_same_holds_in_an_in_memory_test_database(use_tz: bool) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", IN_MEMORY % use_tz],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Ran 2 tests" in ran.stderr


@pytest.mark.django_db(databases=["default", "other"])
@pytest.mark.parametrize("missing", ["nowhere", "DEFAULT"])
def test_an_alias_that_is_not_configured_is_said_by_name(missing: str) -> None:
    with pytest.raises(ConnectionDoesNotExist, match=missing):
        services.enqueue("mail", None, using=missing)
