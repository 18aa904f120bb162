"""The moments of the tables in the ORM: compared, added to, and never stored as anything but microseconds."""

import pickle
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import FieldError, ValidationError
from django.db import connection, transaction
from django.db.models import BigIntegerField, Case, Exists, ExpressionWrapper, F, Max, OuterRef, Subquery, Value, When
from django.db.models.expressions import RawSQL
from django.db.models.functions import Coalesce, Greatest, Now, TruncHour
from django.test import override_settings

from django_alkstore.clock import ManualClock
from django_alkstore.models import Job, Lock, Schedule
from django_alkstore.services import claim_batch, enqueue, lock, schedule, soonest, tick

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)
FAR = datetime(2100, 1, 1, tzinfo=UTC)
AT = datetime(2026, 3, 1, 12, 0, 0, 250_001, tzinfo=UTC)


@pytest.fixture
def job() -> Job:
    return enqueue("q", None, run_at=FAR)


def stored(column: str = "run_at") -> Any:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT typeof({column}) FROM django_alkstore_job")
        assert cursor.fetchone() == ("integer",)
    return Job.objects.values_list(column, flat=True).get()


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        (F("created_at") - HOUR, AT - HOUR),
        (F("created_at") + timedelta(microseconds=1), AT + timedelta(microseconds=1)),
        (HOUR + F("created_at"), AT + HOUR),
        (Value(HOUR) + F("created_at"), AT + HOUR),
        (F("created_at") - HOUR - HOUR, AT - 2 * HOUR),
        (F("created_at"), AT),
        (F("created_at") + (F("run_at") - F("created_at")), FAR),
        (Value(AT), AT),
        (
            Value(datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)),
            datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC),
        ),
        (Value(AT) - HOUR, AT - HOUR),
        (Case(When(queue="q", then=Value(AT))), AT),
        (Case(When(queue="q", then=F("created_at"))), AT),
        (Coalesce(F("expires_at"), F("created_at") - HOUR), AT - HOUR),
        (Coalesce("expires_at", Value(AT) - HOUR), AT - HOUR),
        (Greatest(F("created_at"), Value(AT) + HOUR), AT + HOUR),
        (Case(When(queue="q", then=Value(AT) - HOUR), default=F("run_at")), AT - HOUR),
        (Case(When(queue="q", then=Value(AT)), output_field=Job._meta.get_field("run_at")), AT),
        (ExpressionWrapper(F("created_at") - HOUR, output_field=Job._meta.get_field("run_at")), AT - HOUR),
        (RawSQL("run_at - 1", [], output_field=Job._meta.get_field("run_at")), FAR - timedelta(microseconds=1)),
        (Subquery(Job.objects.values("created_at")), AT),
    ],
)
def test_a_moment_is_set_to_what_an_expression_gives(job: Job, expression: Any, result: datetime) -> None:
    Job.objects.update(created_at=AT)
    assert Job.objects.update(run_at=expression) == 1
    assert stored() == result


def test_a_moment_that_is_set_on_an_instance_is_saved_too(job: Job) -> None:
    job.run_at = F("created_at") - HOUR  # type: ignore[assignment]
    job.save()
    assert stored() == job.created_at - HOUR


def test_the_databases_own_now_is_due_at_once(job: Job) -> None:
    Job.objects.update(run_at=Now() - HOUR)
    assert abs(stored() - datetime.now(UTC) + HOUR) < HOUR
    assert [claimed.id for claimed in claim_batch("q", "w")] == [job.pk]


def test_a_lease_and_a_lock_that_are_aged_lapse_and_a_boundary_comes(clock: ManualClock) -> None:
    first = enqueue("q", None)
    claim_batch("q", "w")
    assert lock("l").acquire()
    schedule("s", "@every 1h", "fired")
    Job.objects.update(lease_expires_at=F("lease_expires_at") - HOUR)
    Lock.objects.update(expires_at=F("expires_at") - HOUR)
    Schedule.objects.update(next_fire_at=F("next_fire_at") - HOUR)
    assert [claimed.id for claimed in claim_batch("q", "w")] == [first.pk]
    assert lock("l").acquire()
    assert soonest() == clock.now()
    assert [fire.name for fire in tick()] == ["s"]


@pytest.mark.parametrize(
    "expression",
    [
        TruncHour(Now()),
        TruncHour(Value(AT)),
        Case(When(queue="q", then=F("id"))),
        RawSQL("run_at", [], output_field=BigIntegerField()),
        F("priority"),
        F("queue"),
        Value("2026-01-01"),
        Value(5),
        F("run_at") + 5,
        F("run_at") * 2,
        F("attempts") - HOUR,
        HOUR - F("run_at"),
    ],
)
def test_what_is_no_moment_is_refused_and_nothing_is_stored(job: Job, expression: Any) -> None:
    with pytest.raises(FieldError), transaction.atomic():
        Job.objects.update(run_at=expression)
    with pytest.raises(FieldError):
        Job.objects.filter(run_at__gt=expression).count()
    assert stored() == job.run_at


def test_the_databases_own_now_is_the_same_moment_without_time_zones(job: Job) -> None:
    with override_settings(USE_TZ=False, TIME_ZONE="Asia/Kolkata"):
        Job.objects.update(run_at=Now())
        assert Job.objects.filter(run_at__lte=Now()).exists()
    assert abs(stored() - datetime.now(UTC)) < HOUR


def test_a_bulk_update_stores_moments_too(job: Job) -> None:
    for moment in (Now(), F("created_at"), AT, Value(AT) - HOUR):
        job.run_at = moment  # type: ignore[assignment]
        Job.objects.bulk_update([job], ["run_at"])
        assert stored() < FAR
    job.run_at = F("id")  # type: ignore[assignment]
    with pytest.raises(FieldError), transaction.atomic():
        Job.objects.bulk_update([job], ["run_at"])
    assert stored() == AT - HOUR


def test_no_moment_is_one_too(job: Job) -> None:
    Job.objects.update(expires_at=AT)
    Job.objects.update(expires_at=Value(None))
    assert Job.objects.filter(expires_at__isnull=True).exists()
    assert not Job.objects.filter(expires_at__gt=Value(None)).exists()


def test_a_moment_is_compared_with_one_of_the_query_around_it(job: Job) -> None:
    later = enqueue("q", None, run_at=FAR + HOUR)
    for condition, expected in (
        ({"run_at__gt": OuterRef("run_at")}, {job.pk}),
        ({"run_at__gte": OuterRef("run_at") + HOUR}, {job.pk}),
        ({"run_at__lt": OuterRef("run_at") - timedelta(minutes=59)}, {later.pk}),
        ({"run_at__gt": OuterRef("run_at") + HOUR}, set()),
    ):
        found = Job.objects.filter(Exists(Job.objects.filter(**condition)))
        assert {each.pk for each in found} == expected, condition


@pytest.mark.parametrize(
    ("found", "condition"),
    [
        (True, {"run_at__gt": Now()}),
        (False, {"run_at__lte": Now() + HOUR}),
        (True, {"created_at__lt": Now() + HOUR}),
        (True, {"created_at__lt": F("run_at") - HOUR}),
        (False, {"run_at__lt": F("created_at") + HOUR}),
        (True, {"created_at": F("created_at")}),
        (True, {"run_at__range": (Now(), Now() + timedelta(days=40_000))}),
        (True, {"run_at__range": (F("created_at"), F("created_at") + timedelta(days=40_000))}),
        (True, {"created_at__in": [F("created_at"), F("run_at")]}),
        (True, {"created_at__in": [F("run_at"), Now(), AT, F("created_at")]}),
        (False, {"created_at__in": [Now() + HOUR]}),
        (False, {"created_at__gt": Now() + HOUR}),
        (True, {"run_at__in": Job.objects.values("run_at")}),
    ],
)
def test_a_moment_is_compared_with_what_an_expression_gives(job: Job, found: bool, condition: dict[str, Any]) -> None:
    assert Job.objects.filter(**condition).exists() is found


def test_two_moments_are_a_duration_apart(job: Job) -> None:
    Job.objects.update(created_at=AT, run_at=AT + HOUR)
    waits = Job.objects.annotate(wait=F("run_at") - F("created_at"))
    assert waits.values_list("wait", flat=True).get() == HOUR
    assert waits.filter(wait=HOUR).exists()
    assert waits.aggregate(longest=Max("wait"))["longest"] == HOUR


def test_a_sum_that_is_selected_is_an_error(job: Job) -> None:
    """Django would make text of it."""
    for ask in (
        lambda: Job.objects.annotate(half=F("created_at") + HOUR).get(),
        lambda: Job.objects.annotate(half=F("created_at") - HOUR).filter(half__lt=AT).exists(),
    ):
        with pytest.raises(FieldError, match="Cannot infer type"):
            ask()


@pytest.mark.parametrize(
    "value", [AT.date(), AT.time(), 5.5, Decimal("1.5"), b"x", "", "soon", datetime(2026, 1, 1), HOUR, []]
)
def test_a_value_that_is_no_moment_is_refused(job: Job, value: Any) -> None:
    for ask in (
        lambda: Job.objects.filter(created_at__lt=value).exists(),
        lambda: Job.objects.filter(created_at__range=(AT, value)).exists(),
        lambda: Job.objects.update(expires_at=value),
        lambda: Job.objects.update(expires_at=Value(value, output_field=Job._meta.get_field("run_at"))),
        lambda: Job(queue="q", payload=None, max_attempts=1, run_at=value, created_at=AT).save(),
    ):
        with pytest.raises(ValidationError), transaction.atomic():
            ask()


def test_a_query_can_be_pickled(job: Job) -> None:
    for condition in ({"run_at__gt": AT}, {"run_at": FAR}, {"run_at__range": (AT, Now() + HOUR * 10**6)}):
        found = Job.objects.filter(**condition)
        again = Job.objects.all()
        again.query = pickle.loads(pickle.dumps(found.query))
        assert [each.pk for each in again] == [job.pk]
        assert [each.pk for each in pickle.loads(pickle.dumps(found))] == [job.pk]


def test_a_moment_of_another_kind_in_the_query_around_it_is_refused(job: Job) -> None:
    with pytest.raises(FieldError):
        User.objects.filter(Exists(Job.objects.filter(created_at__gt=OuterRef("date_joined")))).exists()


def test_what_only_a_datetime_column_can_do_is_an_error(job: Job) -> None:
    for ask in (
        lambda: Job.objects.filter(run_at__year=2026).exists(),
        lambda: Job.objects.filter(run_at__date=AT.date()).exists(),
        lambda: Job.objects.annotate(hour=TruncHour("run_at")).get(),
    ):
        with pytest.raises((FieldError, TypeError, ValueError)):
            ask()
