"""For the tests of projects that use the library, and for our own. docs/testing.md shows each function in use."""

from django_alkstore.clock import ManualClock
from django_alkstore.registry import isolated as isolated_registry
from django_alkstore.testing.assertions import assert_enqueued, assert_nothing_enqueued
from django_alkstore.testing.frozen import frozen_clock, run_until
from django_alkstore.testing.immediate import immediately
from django_alkstore.testing.running import run_pending

__all__ = [
    "ManualClock",
    "assert_enqueued",
    "assert_nothing_enqueued",
    "frozen_clock",
    "immediately",
    "isolated_registry",
    "run_pending",
    "run_until",
]
