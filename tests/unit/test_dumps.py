"""`dumpdata` and `loaddata` in every format, and Django's own validation of what the services have stored."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.models import Model

from django_alkstore.clock import ManualClock
from django_alkstore.exceptions import InvalidPayload
from django_alkstore.models import Job, Lock, Schedule
from django_alkstore.payloads import UnreadablePayload, from_dump, to_dump
from django_alkstore.services import cancel, claim_batch, enqueue, lock, outbox, schedule

pytestmark = pytest.mark.django_db

PAYLOADS = [
    None,
    True,
    0,
    -5.5,
    2**70,
    "",
    "text",
    "5",
    "null",
    "unreadable text",
    " leading and trailing ",
    "line\nbreak\r\n\ttab",
    "\x00\x01\x0b\x1f\x7f\x85\u2028\ufffe\uffff",
    "\U0001f600 & <b>'\"]]>",
    [],
    {},
    [[], {}, None],
    {"a": {"b": [1, 2.5, "x", None, False]}, "": "empty", "\x00": 1},
]


def store_everything(clock: ManualClock) -> None:
    for number, payload in enumerate(PAYLOADS):
        enqueue("mail", payload, unique_key=f"k{number}", delay=number, priority=-number, expires_in=60)
    outbox("hooks").enqueue({"order": 1})
    enqueue("errors", None, max_attempts=1)
    (job,) = claim_batch("errors", "me")
    job.fail(ValueError("\x00 \x1b[31mred\x1b[0m \x08 bell\x07"))
    enqueue("running", None)
    assert claim_batch("running", "me")
    cancel(enqueue("cancelled", None).pk)
    done = enqueue("done", {"a": 1})
    assert [job.ack() for job in claim_batch("done", "me")] == [True]
    Job.objects.filter(pk=done.pk).update(result={"returned": [1, "\x00"]}, task="shop.tasks.one")
    schedule("nightly", "0 3 * * *", "mail", {"a": "\x00"}, timezone="Europe/Berlin", grace=5, starts_at=clock.now())
    schedule("often", "@every 5m", "mail", starting=clock.now() - timedelta(days=1))
    assert lock("import").acquire()


def rows(model: type[Model]) -> list[dict[str, Any]]:
    return list(model._default_manager.order_by("pk").values())


@pytest.mark.parametrize("form", ["json", "jsonl", "xml", "yaml"])
@pytest.mark.parametrize("natural", [False, True])
def test_everything_survives_dumpdata_and_loaddata(
    clock: ManualClock, tmp_path: Path, form: str, natural: bool
) -> None:
    clock.step(-clock.now().microsecond / 1e6)  # Django's JSON serializer cuts moments to milliseconds
    store_everything(clock)
    before = {model: rows(model) for model in (Job, Lock, Schedule)}
    path = tmp_path / f"dump.{form}"
    call_command("dumpdata", "django_alkstore", output=str(path), format=form, use_natural_primary_keys=natural)
    for model in before:
        model._default_manager.all().delete()
    call_command("loaddata", str(path), verbosity=0)
    for model, stored in before.items():
        found = rows(model)
        if natural and model is Schedule:  # a natural key stands for the id
            for row in (*found, *stored):
                del row["id"]
        assert found == stored


@pytest.mark.parametrize("form", ["xml", "yaml"])
def test_moments_keep_their_microseconds(clock: ManualClock, tmp_path: Path, form: str) -> None:
    clock.step(0.123456)
    job = enqueue("mail", None)
    path = tmp_path / f"dump.{form}"
    call_command("dumpdata", "django_alkstore.job", output=str(path), format=form)
    Job.objects.all().delete()
    call_command("loaddata", str(path), verbosity=0)
    assert Job.objects.get().idempotency_key == job.idempotency_key


@pytest.mark.parametrize("form", ["json", "xml", "yaml"])
@pytest.mark.parametrize("text", ["{oops", "", "nul \x00 and \x1b", "NaN"])
def test_an_unreadable_payload_survives_as_it_is(tmp_path: Path, form: str, text: str) -> None:
    enqueue("mail", None)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_alkstore_job SET payload = %s", [text])
    path = tmp_path / f"dump.{form}"
    call_command("dumpdata", "django_alkstore.job", output=str(path), format=form)
    Job.objects.all().delete()
    call_command("loaddata", str(path), verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute("SELECT payload FROM django_alkstore_job")
        assert cursor.fetchone() == (text,)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_dumped_value_is_ascii_without_control_characters_and_reads_back(payload: Any) -> None:
    text = to_dump(payload)
    assert text.isascii()
    assert text.isprintable()
    assert from_dump(text) == payload


def test_a_dump_that_somebody_has_edited_wrongly_reads_as_unreadable() -> None:
    assert isinstance(from_dump("{oops"), UnreadablePayload)


def test_a_schedule_is_found_by_its_natural_key() -> None:
    row = schedule("nightly", "@daily", "mail")
    assert Schedule.objects.get_by_natural_key(*row.natural_key()) == row


def test_djangos_validation_accepts_what_the_services_store_and_changes_nothing(clock: ManualClock) -> None:
    store_everything(clock)
    for model in (Job, Lock, Schedule):
        for row in model._default_manager.all():
            before = {field.attname: getattr(row, field.attname) for field in row._meta.concrete_fields}
            row.full_clean()
            assert {name: getattr(row, name) for name in before} == before


def test_a_payload_that_is_no_json_is_refused_before_it_is_saved() -> None:
    with pytest.raises((InvalidPayload, TypeError)):
        Job.objects.create(queue="mail", payload=object(), max_attempts=1)
