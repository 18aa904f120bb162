"""A tick names the boundary that it has read: a schedule that was changed since then stands. F022.

On SQLite nothing can happen in between, since the tick holds the writer lock. Here it does, in the same transaction.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from django_alkstore import signals
from django_alkstore.clock import ManualClock, now
from django_alkstore.dialects.sqlite import SQLiteOperations
from django_alkstore.models import Job, Schedule
from django_alkstore.services import schedule, tick

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)


def _declared_anew() -> None:
    Schedule.objects.update(spec="@every 1h", next_fire_at=now() + HOUR)


def _moved() -> None:
    Schedule.objects.update(next_fire_at=now() + timedelta(minutes=1), last_fire_at=now())


def _removed() -> None:
    Schedule.objects.all().delete()


@pytest.fixture
def happens(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], list[list[dict[str, Any]]]]:
    """Let something happen to the schedules once a tick has read them. The rows as it left them are in the list."""
    real = SQLiteOperations.due_schedules

    def happen(event: Callable[[], None]) -> list[list[dict[str, Any]]]:
        left: list[list[dict[str, Any]]] = []

        def read(db: SQLiteOperations, *arguments: int) -> list[Any]:
            found = real(db, *arguments)
            if found and not left:
                event()
                left.append(list(Schedule.objects.values()))
            return found

        monkeypatch.setattr(SQLiteOperations, "due_schedules", read)
        return left

    return happen


@pytest.mark.parametrize("event", [_declared_anew, _moved, _removed])
def test_f022_a_schedule_that_was_changed_since_it_was_read_is_not_moved(
    clock: ManualClock, happens: Callable[[Callable[[], None]], list[Any]], event: Callable[[], None]
) -> None:
    schedule("report", "@every 1m", "reports")
    clock.advance(60)
    left = happens(event)
    assert len(tick()) == 1  # its job is stored, and no other transaction has seen the change yet
    assert list(Schedule.objects.values()) == left[0]
    assert Job.objects.count() == 1


@pytest.mark.parametrize("event", [_declared_anew, _removed])
def test_f022_a_broken_schedule_that_was_mended_since_it_was_read_is_not_paused_and_not_counted(
    clock: ManualClock, happens: Callable[[Callable[[], None]], list[Any]], event: Callable[[], None]
) -> None:
    schedule("report", "@every 1m", "reports")
    Schedule.objects.update(spec="@every nonsense")
    clock.advance(60)
    left = happens(event)
    said: list[str] = []

    def note(name: str, **_: Any) -> None:
        said.append(name)

    signals.schedule_broken.connect(note)
    try:
        assert tick() == []
    finally:
        signals.schedule_broken.disconnect(note)
    assert said == []
    assert list(Schedule.objects.values()) == left[0]
