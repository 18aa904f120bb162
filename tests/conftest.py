"""Fixtures for the whole suite."""

import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.db import connections, transaction
from django.test import TransactionTestCase

from django_alkstore import backoff
from django_alkstore import clock as clock_module
from django_alkstore.clock import ManualClock
from tests.processes import Process, start_process

_KEPT = {"django_migrations", ContentType._meta.db_table, Permission._meta.db_table}
"""Tables that migrating has filled."""


def _empty_tables(test_case: TransactionTestCase) -> None:
    """What Django's flush does, without making every content type and permission anew after each test."""
    for alias in test_case._databases_names(include_mirrors=False):
        connection = connections[alias]
        # In one transaction: foreign keys are checked at its end.
        with transaction.atomic(using=alias), connection.cursor() as cursor:
            for table in set(connection.introspection.table_names(cursor)) - _KEPT:
                cursor.execute(f"DELETE FROM {connection.ops.quote_name(table)}")


@pytest.fixture(autouse=True, scope="session")
def _quick_teardown() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", _empty_tables)
        yield


class _NoExtra(random.Random):
    def random(self) -> float:
        return 0.0


@pytest.fixture(autouse=True, scope="session")
def _no_jitter() -> Iterator[None]:
    """Waits are exactly the retry curve's in this process. A test of the random extra sets another source."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backoff, "rng", _NoExtra())
        yield


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    """A clock that only the test moves."""
    manual = ManualClock(datetime(2026, 3, 1, 12, 0, tzinfo=UTC))
    with clock_module.use(manual):
        yield manual


@pytest.fixture
def start(transactional_db: None) -> Iterator[Callable[..., Process]]:
    """Start real processes on the test database's file; those that are left are killed at the end."""
    started: list[Process] = []

    def start_one(*arguments: str, **environment: str) -> Process:
        database = str(connections["default"].settings_dict["NAME"])
        process = start_process(arguments, {"ALKSTORE_TEST_DATABASE": database, **environment})
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.end()
