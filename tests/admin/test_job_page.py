"""One job's page: its payload, its failed attempts, and why it has not run."""

import json
from collections.abc import Callable
from html import unescape
from typing import Any

import pytest
from django.db import connection
from django.test import Client

from django_alkstore import services
from django_alkstore.clock import ManualClock
from django_alkstore.models import Job, Schedule
from tests.admin.conftest import URL

pytestmark = pytest.mark.django_db


def page(client: Client, row: Any) -> str:
    response = client.get(f"{URL}{row._meta.model_name}/{row.pk}/change/")
    assert response.status_code == 200
    return str(response.content.decode())


def store(job: Job, column: str, sql: str, *parameters: object) -> Job:
    """Write what the library would not."""
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE django_alkstore_job SET {column} = {sql} WHERE id = %s", [*parameters, job.pk])
    return job


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("lapsed", "The lease of worker-1 ran out on March 1, 2026, 13:00:10. It will be tried again when a worker"),
        ("completed", "Completed on March 1, 2026, 13:01:00."),
        ("dead", "Dead since March 1, 2026, 13:01:00, after 1 of 1 attempts: broken …"),
        ("cancelled", "Cancelled on March 1, 2026, 13:01:00."),
        ("processing", "Leased to worker-5 until March 1, 2026, 13:06:00."),
        ("pending", "Due since March 1, 2026, 13:01:00, and waiting for a worker. No handler for queue mail is"),
        ("delayed", "Not due until March 1, 2026, 14:01:00."),
    ],
)
def test_says_why_it_has_not_run(
    admin: Client, every_state: Callable[[], dict[str, Job]], name: str, sentence: str
) -> None:
    assert sentence in page(admin, every_state()[name])


def test_says_that_it_failed_and_waits(admin: Client, clock: ManualClock) -> None:
    job = services.enqueue("mail", {})
    services.claim_batch("mail", "w")[0].retry("no luck")
    assert "Its last attempt failed." in page(admin, job)


def test_says_that_it_expired(admin: Client, clock: ManualClock) -> None:
    job = services.enqueue("mail", {}, expires_in=5)
    clock.advance(10)
    assert "Expired on March 1, 2026, 13:00:05. It will be dead when" in page(admin, job)
    services.sweep("mail")
    assert "Dead: it expired on March 1, 2026, 13:00:05, before a worker took it." in page(admin, job)


def test_shows_the_payload_as_readable_json(admin: Client) -> None:
    payload = {"name": "漢字 ملف", "list": [1, {"a": None}], "empty": {}}
    assert json.dumps(payload, indent=2, ensure_ascii=False) in unescape(page(admin, services.enqueue("mail", payload)))


def test_shows_each_failed_attempt_with_its_traceback(admin: Client, clock: ManualClock) -> None:
    job = services.enqueue("mail", {}, max_attempts=3, backoff_base=0)
    for number in range(3):
        try:
            raise ValueError(f"failure number {number}")
        except ValueError as error:
            services.claim_batch("mail", "w")[0].retry(error)
        clock.advance(3_600)
    shown = unescape(page(admin, job))
    assert shown.index("Attempt 3") < shown.index("Attempt 2") < shown.index("Attempt 1")
    for number in range(3):
        assert f"\nValueError: failure number {number}" in shown
    assert "March 1, 2026, 13:00:00" in shown


@pytest.mark.parametrize(
    "payload",
    [{"text": "x" * 1_000_000}, ["x"] * 200_000, {"x" * 500_000: 1}],
    ids=["text", "list", "key"],
)
def test_a_payload_of_a_megabyte(admin: Client, payload: Any) -> None:
    shown = page(admin, services.enqueue("mail", payload))
    assert "Cut here: the whole is " in shown
    assert len(shown) < 100_000


@pytest.mark.parametrize("depth", [100, 900, 100_000])
def test_a_deep_payload(admin: Client, depth: int) -> None:
    job = services.enqueue("mail", {})
    store(job, "payload", "%s", "[" * depth + "]" * depth)
    assert "[" in page(admin, job)
    assert admin.get(f"{URL}job/").status_code == 200


@pytest.mark.parametrize(
    ("sql", "seen"),
    [
        ("'{\"a\": '", '{"a": '),
        ("CAST(X'FF66FE' AS TEXT)", "\ufffdf\ufffd"),
        ("X'FF66FE'", "\ufffdf\ufffd"),
        ("''", "Not JSON"),
        ("'NaN'", "NaN"),
        ("5", "5"),
    ],
    ids=["broken", "not UTF-8", "not UTF-8 blob", "empty", "NaN", "number"],
)
@pytest.mark.parametrize("column", ["payload", "errors"])
def test_what_something_else_wrote(admin: Client, sql: str, seen: str, column: str) -> None:
    job = store(services.enqueue("mail", {}), column, sql)
    assert column == "errors" or seen in unescape(page(admin, job))
    assert page(admin, job)
    assert admin.get(f"{URL}job/").status_code == 200


@pytest.mark.parametrize("column", ["last_error", "unique_key", "queue", "schedule"])
def test_text_that_is_not_utf8(admin: Client, column: str) -> None:
    job = store(services.enqueue("mail", {}), column, "CAST(X'FF66FE' AS TEXT)")
    assert page(admin, job)
    assert admin.get(f"{URL}job/").status_code == 200


@pytest.mark.parametrize("errors", [{"a": 1}, "text", [1, None, {"at": 5}, {"attempt": [], "traceback": {}}], 7, None])
def test_a_history_of_another_shape(admin: Client, errors: Any) -> None:
    assert page(admin, store(services.enqueue("mail", {}), "errors", "%s", json.dumps(errors)))


def test_a_schedule(admin: Client, clock: ManualClock) -> None:
    services.schedule("report", "@every 1h", "reports", {"kind": ["daily"]})
    shown = unescape(page(admin, Schedule.objects.get()))
    assert '"kind": [' in shown
    assert "March 1, 2026, 14:00:00" in shown


def test_a_schedule_that_something_else_wrote(admin: Client, clock: ManualClock) -> None:
    services.schedule("report", "@every 1h", "reports")
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_alkstore_schedule SET payload = CAST(X'FF66FE' AS TEXT), spec = 'x'")
    assert "\ufffdf\ufffd" in page(admin, Schedule.objects.get())


@pytest.mark.parametrize(
    "path", ["job/999/change/", "job/abc/change/", "job/1_5F/change/", "job/" + "9" * 40 + "/change/"]
)
def test_a_job_that_is_not_there(admin: Client, path: str) -> None:
    assert admin.get(f"{URL}{path}", follow=True).status_code == 200
