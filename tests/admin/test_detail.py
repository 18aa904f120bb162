"""One job, schedule or lock on its page; whatever it holds, it is shown as text."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils.html import escape

from django_alkstore import names
from django_alkstore.admin import show
from django_alkstore.admin.show import MAX_JSON
from django_alkstore.clock import LAST_MOMENT, ManualClock
from django_alkstore.models import Job, Lock, Schedule
from django_alkstore.registry import delivery, handler
from django_alkstore.services import (
    LockHandle,
    cancel,
    claim_batch,
    enqueue,
    enqueue_many,
    lock,
    outbox,
    pause_schedule,
    presence,
    schedule,
)
from django_alkstore.testing import isolated_registry
from tests.admin.conftest import Browser

pytestmark = pytest.mark.django_db

HOSTILE = '<script>alert("1")</script></pre></textarea>\'<img src=x onerror=alert(2)>'


def assert_harmless(page: str) -> None:
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;alert" in page


def tamper(table: str, pk: int, **columns: Any) -> None:
    """As anything else that opens the file may."""
    with connection.cursor() as cursor:
        for column, value in columns.items():
            cursor.execute(f'UPDATE django_alkstore_{table} SET "{column}" = %s WHERE id = %s', [value, pk])


def test_f126_a_jobs_texts_are_shown_as_text(root: Browser) -> None:
    job = enqueue("mail", {HOSTILE: [HOSTILE]}, unique_key=HOSTILE)
    [handle] = claim_batch("mail", HOSTILE)
    for page in (root.page("job"), root.detail("job", job.id)):
        assert "<script>alert" not in page
    assert escape(HOSTILE) in root.detail("job", job.id)
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        handle.fail(error)
    tamper("job", job.id, schedule=HOSTILE, queue=HOSTILE)
    root.act("job", "requeue", [job.id])
    for page in (
        root.page("job"),
        root.page("job", q="<script>alert", queue=HOSTILE),
        root.detail("job", job.id),
        root.client.get(f"/admin/django_alkstore/job/{job.id}/history/").content.decode(),
    ):
        assert_harmless(page)


def test_f126_a_schedules_and_a_locks_texts_are_shown_as_text(root: Browser) -> None:
    row = schedule("nightly", "@every 1h", "mail", {HOSTILE: HOSTILE})
    tamper("schedule", row.pk, name=HOSTILE, spec=HOSTILE, queue=HOSTILE, last_error=HOSTILE, enabled=0)
    lock("report", owner=HOSTILE).acquire()
    said = root.said("schedule", "fire_now", [row.pk])
    assert said == "0 schedules fired; 0 no longer matched; 1 refused (InvalidName)."
    token = Lock.objects.get().pk
    for page in (
        root.page("schedule"),
        root.detail("schedule", row.pk),
        root.page("lock"),
        root.detail("lock", token),
    ):
        assert_harmless(page)


def test_the_payload_is_laid_out(root: Browser) -> None:
    job = enqueue("mail", {"order": {"total": 12, "name": "Zoë"}})
    page = root.detail("job", job.id).replace('<bdi dir="ltr">', "").replace("</bdi>", "")
    assert escape('{\n  "order": {\n    "total": 12,\n    "name": "Zoë"\n  }\n}') in page


@pytest.mark.parametrize(
    "payload",
    ["x" * 1_000_000, {"a": ["word "] * 100_000}, {"k" * 500_000: 1}, list(range(100_000))],
    ids=["string", "list", "key", "numbers"],
)
def test_a_large_payload_is_cut_with_a_note(root: Browser, payload: Any) -> None:
    job = enqueue("mail", payload)
    page = root.detail("job", job.id)
    assert len(page) < MAX_JSON * 10
    assert "Cut after 20,000 characters. As stored, the whole has" in page


def test_deep_nesting_is_shown(root: Browser) -> None:
    payload: Any = "the end"
    for _ in range(400):
        payload = [payload]
    job = enqueue("mail", payload)
    assert "Cut after" in root.detail("job", job.id)
    tamper("job", job.id, payload="[" * 500_000)
    assert "Not JSON" in root.detail("job", job.id)


def test_a_payload_that_is_not_json_is_shown_as_it_is(root: Browser) -> None:
    job = enqueue("mail", None)
    tamper("job", job.id, payload="{not json <script>alert(1)")
    page = root.detail("job", job.id)
    assert "Not JSON: " in page
    assert_harmless(page)
    assert root.ids() == [job.id]


def test_text_from_right_to_left_keeps_to_itself(root: Browser) -> None:
    job = enqueue("mail", {"שם": "שלום \u202e turned"}, unique_key="مفتاح")
    page = root.detail("job", job.id)
    assert '<bdi dir="ltr">&quot;שם&quot;</bdi>' in page
    assert "<bdi>مفتاح</bdi>" in page
    assert "\u202e" not in page
    assert "\\u202e turned" in page


def test_each_failed_attempt_is_shown_with_its_traceback(root: Browser, clock: ManualClock) -> None:
    job = enqueue("mail", None, backoff_base=0)
    for message in ("first", "second"):
        [handle] = claim_batch("mail", "w")
        try:
            raise ValueError(message)
        except ValueError as error:
            handle.retry(error)
        clock.advance(60)
    page = root.detail("job", job.id)
    assert page.index("Attempt 2") < page.index("Attempt 1")
    assert page.count("Traceback (most recent call last)") == 2
    assert "ValueError: first" in page
    assert "March 1, 2026, 13:01:00" in page


@pytest.mark.parametrize(
    "history",
    [
        "not json <script>alert(1)",
        '{"a": "<script>alert(1)"}',
        '["<script>alert(1)"]',
        '[{"at": 7, "error": ["<script>alert(1)"]}]',
    ],
)
def test_a_history_that_something_else_wrote_is_shown_too(root: Browser, history: str) -> None:
    job = enqueue("mail", None)
    tamper("job", job.id, errors=history)
    assert_harmless(root.detail("job", job.id))


# Why has it not run?


def test_a_delayed_job_says_until_when(root: Browser, clock: ManualClock) -> None:
    assert "Not due until March 1, 2026, 13:01:30." in root.detail("job", enqueue("mail", None, delay=90).id)


def test_a_retry_says_that_it_is_one(root: Browser, clock: ManualClock) -> None:
    job = enqueue("mail", None)
    claim_batch("mail", "w")[0].retry("no", delay=30)
    assert "Not due until March 1, 2026, 13:00:30. Its last attempt failed." in root.detail("job", job.id)


def test_a_due_job_says_if_there_is_no_worker_or_no_handler_for_it(root: Browser, clock: ManualClock) -> None:
    job, letter = enqueue("lonely", None), outbox("lonely").enqueue(None)
    since = "Due since March 1, 2026, 13:00:00. No worker is alive for "
    with isolated_registry():
        said = root.in_short("job", job.id)
        assert said == f"{since}queue lonely, and no handler for it is registered in the installed apps."
        handler("lonely")(lambda job: None)
        assert root.in_short("job", job.id) == f"{since}queue lonely: manage.py run_queue lonely starts one."
        delivery("lonely")(lambda job: None)
        said = root.in_short("job", letter.id)
        assert said == f"{since}outbox lonely: manage.py run_outbox lonely starts one."


def test_a_due_job_says_what_is_before_it_where_a_worker_is_there(root: Browser, clock: ManualClock) -> None:
    presence.leave("default", "worker", ["mail"])
    low, first, urgent = (enqueue("mail", None, priority=priority).id for priority in (-1, 0, 1))
    clock.advance(1)
    second = enqueue("mail", None).id
    enqueue("mail", None, priority=9, delay=60)
    enqueue("post", None, priority=9)
    for job, place in ((urgent, "and next in line"), (first, "behind 1 other"), (second, "behind 2 others"),
                       (low, "behind 3 others")):  # fmt: skip
        assert f", {place}. A worker is there for queue mail." in root.in_short("job", job)
    assert [job.id for job in claim_batch("mail", "w", 9)] == [urgent, first, second, low]


def test_no_more_than_a_thousand_before_a_job_are_counted(root: Browser, clock: ManualClock) -> None:
    presence.leave("default", "worker", ["mail"])
    last = enqueue_many("mail", [None] * 1_002)[-1]
    assert "behind 1,000 or more others." in root.in_short("job", last)


def test_a_schedule_says_why_it_does_not_fire(root: Browser, clock: ManualClock) -> None:
    schedule("hourly", "@every 1h", "mail")
    row = Schedule.objects.get()
    nobody = "No worker is alive for queue mail: manage.py run_queue mail starts one."
    at = f"on {show.when(row.next_fire_at)}"
    nobody_leads = "no scheduler leads: manage.py run_schedules starts one."

    def said() -> str:
        return root.in_short("schedule", row.pk)

    with isolated_registry():
        handler("mail")(lambda job: None)
        assert said() == f"Fires next {at}, but {nobody_leads} {nobody}"
        LockHandle(names.LEADERSHIP_LOCK, 10, "host:8", "default").acquire()
        assert said() == f"Fires next {at}. {nobody}"
        presence.leave("default", "worker", ["mail"])
        assert said() == f"Fires next {at}."
        clock.advance(3_600)
        presence.leave("default", "worker", ["mail"])
        assert said() == f"Due since {at.removeprefix('on ')}, and {nobody_leads}"
        LockHandle(names.LEADERSHIP_LOCK, 10, "host:8", "default").acquire()
        assert said() == f"Due since {at.removeprefix('on ')}, with the scheduler's next look."
        pause_schedule("hourly")
        assert said() == "Paused: it fires again once it is resumed."
        Schedule.objects.update(last_error="InvalidSpec: no")
        assert said().startswith("Paused, since it cannot be read: declare it again")


def test_a_leased_job_names_its_worker(root: Browser, clock: ManualClock) -> None:
    job = enqueue("mail", None)
    claim_batch("mail", "host:7")
    assert "Leased to host:7 until March 1, 2026, 13:05:00." in root.detail("job", job.id)
    clock.advance(400)
    assert "The lease of host:7 ran out on March 1, 2026, 13:05:00. It will be tried again" in root.detail(
        "job", job.id
    )
    Job.objects.update(max_attempts=1)
    assert "It will be dead, its attempts being spent," in root.detail("job", job.id)


def test_an_expired_job_says_so_before_and_after_it_is_dead(root: Browser, clock: ManualClock) -> None:
    job = enqueue("mail", None, expires_in=60)
    clock.advance(61)
    assert "Expired on March 1, 2026, 13:01:00." in root.detail("job", job.id)
    claim_batch("mail", "w")
    assert "Dead: it expired on March 1, 2026, 13:01:00, before" in root.detail("job", job.id)


def test_a_finished_job_says_how_it_ended(root: Browser, clock: ManualClock) -> None:
    done, dead, cancelled = (enqueue(queue, None).id for queue in ("a", "b", "c"))
    claim_batch("a", "w")[0].ack()
    claim_batch("b", "w")[0].fail("ValueError: no")
    cancel(cancelled)
    assert "Completed on March 1, 2026, 13:00:00." in root.detail("job", done)
    assert "after 1 of 3 attempts: ValueError: no" in root.detail("job", dead)
    assert "Cancelled on March 1, 2026, 13:00:00." in root.detail("job", cancelled)


def test_a_moment_that_no_clock_reaches_is_shown(root: Browser) -> None:
    job = enqueue("mail", None)
    Job.objects.filter(pk=job.id).update(run_at=LAST_MOMENT - timedelta(days=1))
    assert "9999" in root.detail("job", job.id)
    Job.objects.filter(pk=job.id).update(run_at=LAST_MOMENT)
    assert "9999" in root.detail("job", job.id)
    assert "9999" in root.page("job")


def test_a_schedules_page(root: Browser) -> None:
    row = schedule("a/b:c", "@every 1h", "mail", {"n": 1}, max_attempts=7)
    page = root.detail("schedule", row.pk)
    for shown in ("a/b:c", "@every 1h", "&quot;n&quot;", ">On<"):
        assert shown in page
    Schedule.objects.update(enabled=False, last_error="InvalidSpec: what")
    page = root.detail("schedule", row.pk)
    assert ">Broken<" in page
    assert "InvalidSpec: what" in page


@pytest.mark.parametrize("name", ["a/b:c", "_5F", "x@y+z", "a" * 128])
def test_f107_names_of_every_kind_can_be_looked_at_and_acted_on(root: Browser, name: str) -> None:
    job, row = enqueue(name, None), schedule(name, "@every 1h", name)
    lock(name).acquire()
    assert root.ids(queue=name) == root.ids(q=name) == [job.id]
    assert name in root.page("schedule", q=name)
    assert name in root.page("lock", q=name)
    assert root.said("schedule", "pause", [row.pk]) == "1 schedule paused; 0 no longer matched."
    assert root.said("lock", "force_release", [Lock.objects.get().pk]) == "1 lock released; 0 no longer matched."
