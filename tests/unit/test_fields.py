"""Moments are integers in the database and aware datetimes in Python, whatever the project's settings."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.core.exceptions import ValidationError
from django.db import connection
from django.test import override_settings

from django_alkstore.clock import ManualClock
from django_alkstore.fields import InstantField, JSONTextField
from django_alkstore.models import Job
from django_alkstore.services import enqueue

MOMENT = datetime(2026, 10, 25, 0, 30, 0, 123_456, tzinfo=UTC)


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=-9)), ZoneInfo("Europe/Paris")])
def test_one_instant_is_one_integer_in_every_zone(zone: Any) -> None:
    assert InstantField().get_prep_value(MOMENT.astimezone(zone)) == 1_792_888_200_123_456


def test_a_naive_datetime_is_refused() -> None:
    with pytest.raises(ValidationError):
        InstantField().get_prep_value(datetime(2026, 1, 1))
    with pytest.raises(ValidationError):
        InstantField().to_python("yesterday")


@pytest.mark.django_db
@pytest.mark.parametrize("use_tz", [True, False])
def test_f082_lookups_and_reading_are_exact_whatever_use_tz_says(use_tz: bool, clock: ManualClock) -> None:
    with override_settings(USE_TZ=use_tz, TIME_ZONE="Asia/Shanghai"):
        job = enqueue("mail", None, run_at=MOMENT)
        assert Job.objects.get(run_at=MOMENT) == job
        assert Job.objects.get(run_at=MOMENT.astimezone(ZoneInfo("Asia/Shanghai"))).run_at == MOMENT
        assert Job.objects.filter(run_at__gt=MOMENT - timedelta(microseconds=1)).count() == 1
        assert not Job.objects.filter(run_at__gt=MOMENT).exists()
        assert Job.objects.values_list("run_at", flat=True).get() == MOMENT
        with connection.cursor() as cursor:
            cursor.execute("SELECT run_at, typeof(run_at) FROM django_alkstore_job")
            assert cursor.fetchone() == (1_792_888_200_123_456, "integer")


@pytest.mark.django_db
def test_a_payload_can_be_looked_up_by_its_value() -> None:
    job = enqueue("mail", {"a": 1})
    enqueue("mail", {"a": 2})
    assert Job.objects.get(payload={"a": 1}) == job


def test_the_fields_deconstruct_to_themselves() -> None:
    for field in (InstantField(null=True), JSONTextField()):
        _, path, args, kwargs = field.deconstruct()
        assert path == f"django_alkstore.fields.{type(field).__name__}"
        assert type(field)(*args, **kwargs).null == field.null
