"""Every address of the admin opens, over data and over nothing, writes nothing and walks no table."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection

from django_alkstore.admin.lists import SITUATIONS
from django_alkstore.clock import ManualClock
from django_alkstore.models import Job, Lock, Schedule
from django_alkstore.services import (
    cancel,
    claim_batch,
    enqueue,
    enqueue_many,
    lock,
    outbox,
    queue_stats,
    schedule,
    sweep,
)
from tests.admin.conftest import Browser, list_url

pytestmark = pytest.mark.django_db

WALKING = ["", "?all=", "?o=1", "?o=-1", "?o=99", "?p=2", "?q=%00", "?situation=nonsense"]
"""The list of everything, along the primary key and with a limit."""
FILTERED = [
    *(f"?state={state}" for state in ("pending", "processing", "completed", "dead", "cancelled", "nonsense")),
    *(f"?situation={situation}" for situation in SITUATIONS),
    "?queue=mail",
    "?queue=__alkstore_outbox%3Ahooks",
    "?queue=absent",
    "?state=dead&queue=mail",
    "?state=dead&situation=due",
    "?state=dead&o=1",
    "?state=dead&p=2",
    "?state=dead&all=",
    "?queue=mail&p=2&o=1",
    "?q=order-1&state=pending&queue=mail&situation=due",
]
SEARCHED = [
    "?q=mail",
    "?q=hooks",
    "?q=1",
    "?q=order-1",
    "?q=order-1&state=dead",
    "?q=mail&p=2",
    "?q=%F4%8F%BF%BF",
    "?q=" + "9" * 30,
    "?q=%25_%27%22",
]
OTHERS = [
    *(("schedule", query) for query in ("", "?q=nightly", "?state=paused", "?o=1", "?o=-2", "?o=4", "?all=")),
    *(("lock", query) for query in ("", "?q=report", "?o=1", "?o=4", "?all=")),
]
PAGES = [("job", query) for query in WALKING + FILTERED + SEARCHED] + OTHERS


@pytest.fixture
def rows(db: None, clock: ManualClock) -> None:
    """Enough jobs in each state for a second page, and for the planner's choice to matter."""
    for state in ("completed", "dead", "cancelled"):
        enqueue_many("mail", [{}] * 150)
        Job.objects.filter(state="pending").update(state=state, finished_at=clock.now())
    enqueue_many("mail", [{}] * 200)
    claim_batch("mail", "w", 50)
    enqueue("mail", {}, unique_key="order-1")
    cancel(enqueue("mail", {}, unique_key="order-2").pk)
    enqueue("mail", {}, delay=600)
    outbox("hooks").enqueue({})
    schedule("nightly", "@every 1h", "reports")
    lock("report").acquire()


@contextmanager
def statements() -> Iterator[list[tuple[str, Any]]]:
    """Each statement with its parameters."""
    seen: list[tuple[str, Any]] = []

    def keep(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        seen.append((sql, parameters))
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(keep):
        yield seen


def opens(root: Browser, model: str, query: str) -> list[tuple[str, Any]]:
    """Open a list; what it asked of the database."""
    with statements() as seen:
        # A page that is not there leads back to the list.
        assert root.client.get(list_url(model) + query, follow=True).status_code == 200
    return seen


@pytest.mark.parametrize(("model", "query"), PAGES)
def test_opens_over_nothing(root: Browser, model: str, query: str) -> None:
    opens(root, model, query)


@pytest.mark.parametrize(("model", "query"), PAGES)
def test_f013_opens_over_rows_and_only_reads(root: Browser, rows: None, model: str, query: str) -> None:
    verbs = {sql.split()[0] for sql, _ in opens(root, model, query)}
    assert verbs <= {"SELECT", "SAVEPOINT", "RELEASE"}


def test_f013_a_jobs_page_only_reads(root: Browser, rows: None) -> None:
    for state in ("pending", "processing", "completed", "dead", "cancelled"):
        job = Job.objects.filter(state=state).latest("pk")
        with statements() as seen:
            root.detail("job", job.pk)
        assert {sql.split()[0] for sql, _ in seen} <= {"SELECT", "SAVEPOINT", "RELEASE"}


def walks(sql: str, parameters: Any) -> list[str]:
    """The steps of a statement that read the whole table of jobs."""
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN QUERY PLAN {sql}", parameters)
        steps = [row[3] for row in cursor.fetchall()]
    return [step for step in steps if step.startswith("SCAN django_alkstore_job") and "INDEX" not in step]


@pytest.mark.parametrize("query", [*WALKING, *FILTERED, *SEARCHED])
def test_f123_no_list_walks_the_table(root: Browser, rows: None, query: str) -> None:
    for sql, parameters in opens(root, "job", query):
        if "django_alkstore_job" in sql and walks(sql, parameters):
            assert query in WALKING, sql
            assert "LIMIT" in sql, sql
            assert "WHERE" not in sql, sql


@pytest.mark.parametrize("model", ["job", "schedule", "lock"])
def test_the_style_is_linked(root: Browser, model: str) -> None:
    assert 'href="/static/django_alkstore/admin.css"' in root.page(model)


@pytest.mark.parametrize("stored", ["CAST(X'FF66FE' AS TEXT)", "X'FF66FE'"], ids=["text", "blob"])
@pytest.mark.parametrize("table", ["job", "schedule"])
def test_a_payload_that_is_not_utf8_is_shown_as_far_as_it_can_be(root: Browser, table: str, stored: str) -> None:
    enqueue("mail", None)
    schedule("nightly", "@every 1h", "mail")
    model: Any = Job if table == "job" else Schedule
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE django_alkstore_{table} SET payload = {stored}")
        if table == "job":
            cursor.execute(f"UPDATE django_alkstore_job SET errors = {stored}")
    page = root.detail(table, model.objects.get().pk)
    assert "Not JSON" in page
    assert page.count("\ufffdf\ufffd") == (2 if table == "job" else 1)
    assert root.page(table)


@pytest.mark.parametrize("stored", ["", "NaN", "5", '"text"', "null", "[]"])
def test_a_payload_of_any_kind(root: Browser, stored: str) -> None:
    enqueue("mail", None)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_alkstore_job SET payload = %s", [stored])
    assert ("Not JSON" in root.detail("job", Job.objects.get().pk)) == (stored in ("", "NaN"))


@pytest.mark.parametrize("depth", [100, 900, 100_000])
def test_a_deep_payload_opens(root: Browser, depth: int) -> None:
    enqueue("mail", None)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_alkstore_job SET payload = %s", ["[" * depth + "]" * depth])
    assert "[" in root.detail("job", Job.objects.get().pk)


@pytest.mark.parametrize("errors", [{"a": 1}, "text", [1, None, {"at": 5}, {"attempt": [], "traceback": {}}], 7, None])
def test_a_history_of_any_shape(root: Browser, errors: Any) -> None:
    enqueue("mail", None)
    Job.objects.update(errors=errors)
    assert root.detail("job", Job.objects.get().pk)


def test_markup_in_a_message_or_on_the_index_is_text(root: Browser) -> None:
    hostile = "<script>alert(1)</script>"
    lock("report", owner=hostile).acquire()
    Lock.objects.update(name=hostile)
    response = root.act("lock", "force_release", [Lock.objects.get().pk], follow=True)
    for page in (response, root.client.get("/admin/"), root.client.get(list_url("job"), {"q": hostile})):
        assert "<script>alert" not in page.content.decode()
    assert not Lock.objects.exists()


NOT_UTF8 = "CAST(X'61FF62' AS TEXT)"
"""`a?b`, as a program in another encoding would have written it."""


def garble(table: str, *columns: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE django_alkstore_{table} SET " + ", ".join(f"{name} = {NOT_UTF8}" for name in columns))


@pytest.mark.parametrize("column", ["queue", "unique_key", "schedule", "last_error"])
def test_a_job_s_text_that_is_not_utf8_is_shown_as_far_as_it_can_be(root: Browser, column: str) -> None:
    job = enqueue("mail", {"n": 1})
    claim_batch("mail", "w")[0].fail("no")
    garble("job", column)
    shown = root.detail("job", job.pk)
    assert "a\ufffdb" in shown
    assert "&quot;n&quot;" in shown
    for query in ("", "?state=dead", f"?q={job.pk}", "?all=", "?o=1", "?queue=mail"):
        assert root.page("job", query)
    assert root.ids() == [job.pk]
    root.act("job", "requeue", [job.pk])
    assert Job.objects.filter(pk=job.pk, state="pending").exists()
    assert LogEntry.objects.get().get_change_message() == "Requeued."
    assert root.client.get(f"/admin/django_alkstore/job/{job.pk}/history/").status_code == 200


def test_a_live_job_in_a_queue_that_is_not_utf8_is_listed_and_counted(root: Browser) -> None:
    job = enqueue("mail", None)
    garble("job", "queue")
    assert "a\ufffdb" in root.page("job")
    assert root.ids() == root.ids(state="pending") == [job.pk]
    assert root.said("job", "cancel", [job.pk]) == "1 job cancelled."
    assert [(stats.queue, stats.cancelled) for stats in queue_stats()] == [("a\ufffdb", 1)]
    assert sweep() == 0


def test_a_worker_s_name_that_is_not_utf8_is_shown_as_far_as_it_can_be(root: Browser) -> None:
    job = enqueue("mail", None)
    claim_batch("mail", "w")
    garble("job", "worker_id")
    assert "by the worker a\ufffdb." in root.verdict("job", job.pk)[1]
    assert root.ids(state="processing") == [job.pk]
    assert root.said("job", "cancel", [job.pk]) == "1 job cancelled."


def test_one_row_that_is_not_utf8_hides_no_other(root: Browser) -> None:
    bad, good = enqueue("mail", None), enqueue("mail", None, delay=60)
    claim_batch("mail", "w")[0].fail("no")
    garble("job", "last_error")
    Job.objects.filter(pk=good.pk).update(last_error=None)
    assert root.ids() == [good.pk, bad.pk]
    assert root.said("job", "run_now", [good.pk, bad.pk]) == "1 job made due now; 1 no longer matched."


@pytest.mark.parametrize(
    ("table", "columns", "action"),
    [
        ("schedule", ["spec", "queue", "last_error"], "pause"),
        ("schedule", ["name"], ""),
        ("lock", ["owner"], "force_release"),
        ("lock", ["name"], ""),
    ],
)
def test_a_schedule_and_a_lock_whose_text_is_not_utf8_are_shown(
    root: Browser, table: str, columns: list[str], action: str
) -> None:
    schedule("nightly", "@every 1h", "mail")
    lock("report").acquire()
    garble(table, *columns)
    [pk] = (Schedule if table == "schedule" else Lock).objects.values_list("pk", flat=True)
    assert "a\ufffdb" in root.page(table)
    assert "a\ufffdb" in root.detail(table, pk)
    said = root.said(table, action or ("pause" if table == "schedule" else "force_release"), [pk])
    assert said.startswith("1 " if action else "0 ")
