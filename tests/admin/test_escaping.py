"""Whatever a row holds is text on every page."""

import pytest
from django.db import connection
from django.test import Client

from django_alkstore import services
from django_alkstore.clock import ManualClock
from django_alkstore.models import Job, Lock, Schedule
from tests.admin.conftest import URL, post_action

pytestmark = pytest.mark.django_db

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'></pre></textarea><!--"
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;&lt;img src=x onerror=alert(2)&gt;"


def overwrite(table: str, *columns: str) -> None:
    with connection.cursor() as cursor:
        for column in columns:
            cursor.execute(f"UPDATE django_alkstore_{table} SET {column} = %s", [HOSTILE])


def assert_harmless(client: Client, url: str, times: int) -> None:
    response = client.get(url, follow=True)
    assert response.status_code == 200
    page = response.content.decode()
    for raw in ("<script>alert", "<img src=x", "</pre></textarea>", "<!--\n<"):
        assert raw not in page
    assert page.count(ESCAPED) >= times, (url, page.count(ESCAPED))


def test_a_job(admin: Client, clock: ManualClock) -> None:
    job = services.enqueue("mail", {HOSTILE: [HOSTILE]}, unique_key=HOSTILE, max_attempts=1)
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        services.claim_batch("mail", HOSTILE)[0].retry(error)
    overwrite("job", "schedule", "queue")
    url = f"{URL}job/{job.pk}/change/"
    # Key and value, explanation, error, traceback, unique key, schedule, queue.
    assert_harmless(admin, url, 8)
    assert_harmless(admin, f"{URL}job/", 3)  # queue, last error, the filter's choice
    assert_harmless(admin, f"{URL}job/?q=%3Cscript%3Ealert(1)%3C/script%3E", 0)
    assert_harmless(admin, f"{URL}job/?queue=%3Cscript%3Ealert(1)%3C/script%3E", 0)
    response = post_action(admin, "job", "requeue", [job.pk])
    assert "<script>alert" not in response.content.decode()
    assert_harmless(admin, f"{URL}job/{job.pk}/history/", 1)
    assert_harmless(admin, "/admin/", 1)


def test_a_worker(admin: Client, clock: ManualClock) -> None:
    job = services.enqueue("mail", {})
    services.claim_batch("mail", HOSTILE)
    assert_harmless(admin, f"{URL}job/{job.pk}/change/", 2)
    clock.advance(86_400)
    assert_harmless(admin, f"{URL}job/{job.pk}/change/", 2)


def test_histories_of_another_shape(admin: Client) -> None:
    job = services.enqueue("mail", {})
    for errors in ({HOSTILE: HOSTILE}, HOSTILE, [HOSTILE, {"attempt": HOSTILE, "at": HOSTILE, "traceback": HOSTILE}]):
        Job.objects.update(errors=errors)
        assert_harmless(admin, f"{URL}job/{job.pk}/change/", 1)
    overwrite("job", "payload", "errors")
    assert_harmless(admin, f"{URL}job/{job.pk}/change/", 2)


def test_a_schedule(admin: Client) -> None:
    services.schedule("report", "@every 1h", "reports", {HOSTILE: HOSTILE})
    overwrite("schedule", "name", "spec", "queue", "last_error")
    assert_harmless(admin, f"{URL}schedule/", 4)
    assert_harmless(admin, f"{URL}schedule/{Schedule.objects.get().pk}/change/", 6)
    response = post_action(admin, "schedule", "pause", [Schedule.objects.get().pk])
    assert "<script>alert" not in response.content.decode()


def test_a_lock(admin: Client) -> None:
    services.lock("nightly", 60, HOSTILE).acquire()
    overwrite("lock", "name")
    pk = Lock.objects.get().pk
    assert_harmless(admin, f"{URL}lock/", 2)
    assert_harmless(admin, f"{URL}lock/{pk}/change/", 2)
    post_action(admin, "lock", "force_release", [pk])
    assert not Lock.objects.filter(pk=pk).exists()
    assert_harmless(admin, "/admin/", 1)
