"""A leader's tick in several steps, between which the clock goes on."""

from datetime import timedelta
from functools import partial

import pytest

from django_alkstore import clock as clock_module
from django_alkstore.clock import ManualClock
from django_alkstore.dialects.transactions import write_transaction
from django_alkstore.models import Job
from django_alkstore.services import schedule, ticks
from django_alkstore.services.ticks import MAX_CATCH_UP, Step, tick_step

pytestmark = pytest.mark.django_db(transaction=True)


def step_after(before: Step | None) -> Step:
    """As the leader makes them: each with the moment at which it begins."""
    unfinished = {} if before is None or not before.more else before.unfinished
    return write_transaction("default", partial(tick_step, now=clock_module.now_us(), unfinished=unfinished))


def boundaries() -> list[int]:
    """Seconds after the first."""
    found = list(Job.objects.order_by("fire_at").values_list("fire_at", flat=True))
    return [round((moment - found[0]).total_seconds()) for moment in found if moment and found[0]]


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticks, "JOBS_IN_STEP", 2)


def test_a_boundary_that_becomes_due_between_two_steps_is_fired(clock: ManualClock) -> None:
    schedule("often", "@every 1s", "mail")
    clock.advance(4)
    step = step_after(None)
    assert step.more
    clock.advance(1)
    while step.more:
        step = step_after(step)
    assert boundaries() == [0, 1, 2, 3, 4]


def test_no_more_than_64_boundaries_are_fired_in_all_steps_of_a_tick(clock: ManualClock) -> None:
    schedule("often", "@every 1s", "mail")
    clock.advance(100)
    step = None
    while step is None or step.more:
        step = step_after(step)
        clock.advance(timedelta(milliseconds=1).total_seconds())
    assert boundaries() == list(range(MAX_CATCH_UP))
