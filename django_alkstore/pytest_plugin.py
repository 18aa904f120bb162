"""The functions of `django_alkstore.testing` as pytest fixtures.

pytest imports this module at its start, before Django has its settings. So each fixture imports what it needs when a
test uses it.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from django_alkstore.clock import ManualClock


def _kit() -> Any:
    from django_alkstore import testing  # noqa: PLC0415  see above

    return testing


@pytest.fixture
def run_pending() -> Callable[..., Any]:
    """`django_alkstore.testing.run_pending`: run the jobs that are due, as a worker does."""
    return _kit().run_pending  # type: ignore[no-any-return]


@pytest.fixture
def run_until() -> Callable[..., Any]:
    """`django_alkstore.testing.run_until`: let time pass, with every job and boundary on the way."""
    return _kit().run_until  # type: ignore[no-any-return]


@pytest.fixture
def assert_enqueued() -> Callable[..., Any]:
    """`django_alkstore.testing.assert_enqueued`: fail unless a job was enqueued."""
    return _kit().assert_enqueued  # type: ignore[no-any-return]


@pytest.fixture
def assert_nothing_enqueued() -> Callable[..., Any]:
    """`django_alkstore.testing.assert_nothing_enqueued`: fail if a job was enqueued."""
    return _kit().assert_nothing_enqueued  # type: ignore[no-any-return]


@pytest.fixture
def immediately() -> Iterator[None]:
    """In this test, jobs run right after the commit that stores them."""
    with _kit().immediately():
        yield


@pytest.fixture
def frozen_clock() -> Iterator["ManualClock"]:
    """In this test, the library's time stands still, and moves only by the `ManualClock` that this fixture is."""
    with _kit().frozen_clock() as clock:
        yield clock


@pytest.fixture
def isolated_registry() -> Iterator[None]:
    """In this test, nothing is registered but what the test registers."""
    with _kit().isolated_registry():
        yield
