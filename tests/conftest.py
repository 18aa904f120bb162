"""Fixtures for the whole suite."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
from django.db import connections

from django_alkstore import clock as clock_module
from django_alkstore.clock import ManualClock
from tests.processes import Process, start_process


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
