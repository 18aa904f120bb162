"""The sales report: a schedule's job whose row and ack are one transaction."""

from datetime import timedelta

import pytest
from django.core.management import call_command

from django_alkstore.clock import ManualClock
from django_alkstore.models import Job, Schedule, State
from django_alkstore.services import fire_schedule, tick
from django_alkstore.testing import run_pending
from testproject.shop.models import SalesReport
from testproject.shop.orders import place

NAME = "sales-report"


@pytest.fixture
def declared(clock: ManualClock) -> Schedule:
    call_command("declare_schedules", verbosity=0)
    return Schedule.objects.get(name=NAME)


def test_the_schedule_is_declared_by_the_command_and_by_nothing_else(clock: ManualClock) -> None:
    assert not Schedule.objects.exists()
    call_command("declare_schedules", verbosity=0)
    first = Schedule.objects.get()
    assert (first.name, first.spec, first.queue) == (NAME, "@every 10s", "reports")
    clock.advance(7)
    call_command("declare_schedules", verbosity=0)
    assert Schedule.objects.get().next_fire_at == first.next_fire_at


def test_each_boundary_makes_one_report_of_all_orders(declared: Schedule, clock: ManualClock) -> None:
    place("T-1", "a@example.com", {"tea": 2})
    place("T-2", "b@example.com", {"pot": 1})
    clock.advance(21)
    tick()
    ran = run_pending("reports")
    reports = list(SalesReport.objects.order_by("pk"))
    assert [report.job_id for report in reports] == [job.id for job in ran]
    assert [report.boundary for report in reports] == [
        declared.next_fire_at,
        declared.next_fire_at + timedelta(seconds=10),
    ]
    assert {(report.orders, report.total_cents) for report in reports} == {(2, 5_300)}
    assert set(Job.objects.filter(schedule=NAME).values_list("state", flat=True)) == {State.COMPLETED}


def test_a_report_without_orders_is_one_of_nothing(declared: Schedule, clock: ManualClock) -> None:
    clock.advance(10)
    tick()
    run_pending("reports")
    assert str(SalesReport.objects.get()) == "0 orders, 0.00"


def test_a_report_that_was_fired_by_hand_has_no_boundary(declared: Schedule) -> None:
    assert fire_schedule(NAME)
    run_pending("reports")
    assert SalesReport.objects.get().boundary is None


@pytest.mark.django_db(transaction=True)
def test_a_report_whose_ack_fails_is_not_there_and_is_made_by_the_next_attempt(
    declared: Schedule, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is taken back with the ack, so there is never a second one."""
    clock.advance(10)
    tick()
    seen: list[int] = []
    real = SalesReport.save

    def save(report: SalesReport, *args: object, **kwargs: object) -> None:
        real(report)
        seen.append(SalesReport.objects.count())
        monkeypatch.setattr(SalesReport, "save", real)
        raise ConnectionError("after the row")

    monkeypatch.setattr(SalesReport, "save", save)
    run_pending("reports")
    assert seen == [1]
    assert not SalesReport.objects.exists()
    clock.advance(5)
    run_pending("reports")
    assert SalesReport.objects.count() == 1
