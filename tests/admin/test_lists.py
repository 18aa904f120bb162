"""What the lists find, and what finding it costs."""

import importlib
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from html import unescape
from itertools import chain, product
from typing import Any

import pytest
from django.conf import settings
from django.contrib import admin
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import clear_url_caches

from django_alkstore.admin import JobAdmin
from django_alkstore.admin.lists import SITUATIONS
from django_alkstore.clock import ManualClock
from django_alkstore.models import Job, Lock, Schedule
from django_alkstore.registry import handler
from django_alkstore.services import (
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


@pytest.fixture
def crowd(clock: ManualClock) -> list[int]:
    """Jobs in every state, in queues and an outbox; one lease has lapsed."""
    for queue in ("mail", "mailer", "reports"):
        enqueue_many(queue, range(12))
        handles = claim_batch(queue, "w", limit=6)
        handles[0].ack()
        handles[1].fail("ValueError: no")
        handles[2].fail("KeyError: 'x'")
        cancel(handles[3].id)
        enqueue_many(queue, range(2), delay=900)
        enqueue(queue, None, unique_key="order-1")
    clock.advance(400)
    claim_batch("mail", "w", limit=1)
    outbox("mail").enqueue({"n": 1})
    return list(Job.objects.order_by("-pk").values_list("pk", flat=True))


def test_the_newest_come_first(root: Browser, crowd: list[int]) -> None:
    assert root.ids() == crowd
    assert root.ids(o="1") == crowd[::-1]


def test_the_columns(root: Browser, clock: ManualClock) -> None:
    enqueue("mail", None, max_attempts=3)
    clock.advance(125)
    [handle] = claim_batch("mail", "w")
    handle.fail("ValueError: no such address\nsecond line")
    page = root.page("job")
    assert '<span class="alkstore-badge alkstore-dead">Dead</span>' in page
    assert "1 of 3" in page
    assert "2\N{NO-BREAK SPACE}min" in page
    assert "ValueError: no such address …" in page
    assert "second line" not in page
    assert "March 1, 2026, 13:02:05" in page  # the project's zone is Paris


@pytest.mark.parametrize("state", ["pending", "processing", "completed", "dead", "cancelled", "nonsense"])
def test_the_filter_by_state(root: Browser, crowd: list[int], state: str) -> None:
    expected = Job.objects.filter(state=state).order_by("-pk").values_list("pk", flat=True)
    assert root.ids(state=state) == list(expected)


def test_the_filter_by_queue_offers_every_queue_that_holds_a_job(root: Browser, crowd: list[int]) -> None:
    Job.objects.filter(queue="reports").update(
        state="dead", finished_at=Job.objects.earliest("pk").created_at, worker_id=None, lease_expires_at=None
    )
    page = root.page("job")
    for name in ("mail", "mailer", "reports", "__alkstore_outbox%3Amail"):
        assert f"?queue={name}" in page
    assert "outbox mail" in page
    assert root.ids(queue="mailer") == list(
        Job.objects.filter(queue="mailer").order_by("-pk").values_list("pk", flat=True)
    )


def test_the_filter_by_situation(root: Browser, crowd: list[int], clock: ManualClock) -> None:
    now = clock.now()
    assert root.ids(situation="due") == list(Job.objects.due(now).order_by("-pk").values_list("pk", flat=True))
    assert len(root.ids(situation="delayed")) == 6
    lapsed = Job.objects.filter(state="processing", lease_expires_at__lte=now).order_by("-pk")
    assert root.ids(situation="lapsed") == list(lapsed.values_list("pk", flat=True)) != []


def test_the_search_is_by_id_queue_outbox_and_unique_key(root: Browser, crowd: list[int]) -> None:
    assert root.ids(q=str(crowd[3])) == [crowd[3]]
    assert set(root.ids(q="mail")) == set(Job.objects.filter(queue__contains="mail").values_list("pk", flat=True))
    assert len(root.ids(q="order-1")) == len(root.ids(q="order-")) == 3
    assert root.ids(q=" order-1 ") == root.ids(q="order-1")
    for nothing in ("rder-1", "ORDER-1", "order-2", "%", "m_il", "9" * 40, "٣", "<script>"):
        assert root.ids(q=nothing) == []


def test_the_search_finds_finished_jobs_by_their_unique_key(root: Browser) -> None:
    job_id = enqueue("mail", None, unique_key="order-7").id
    claim_batch("mail", "w")[0].fail("no")
    assert root.ids(q="order-7") == [job_id]


def test_a_job_that_matches_in_several_ways_is_found_once(root: Browser) -> None:
    job_id = enqueue("1", None).id
    Job.objects.filter(pk=job_id).update(queue=str(job_id), unique_key=str(job_id))
    response: Any = root.get("job", q=str(job_id))
    assert response.context_data["cl"].result_count == 1
    assert root.ids(q=str(job_id)) == [job_id]


def test_the_list_shows_what_select_all_takes(root: Browser, crowd: list[int]) -> None:
    """The page is found by one way and the actions' rows by another: they must agree."""
    states = [None, "pending", "processing", "dead", "nonsense"]
    queues = [None, "mail", "__alkstore_outbox:mail"]
    terms = [None, "mail", "order", str(crowd[3])]
    for state, queue, situation, term in product(states, queues, [None, *SITUATIONS], terms):
        query = {"state": state, "queue": queue, "situation": situation, "q": term}
        response: Any = root.get("job", **{key: value for key, value in query.items() if value is not None})
        shown = response.context_data["cl"]
        assert [job.pk for job in shown.result_list] == [job.pk for job in shown.queryset], query
        assert shown.result_count == len(shown.result_list), query


def test_pages(root: Browser) -> None:
    ids = enqueue_many("mail", range(350))[::-1]
    enqueue_many("other", range(10), delay=900)
    pages = [root.ids(queue="mail", p=page) for page in (1, 2, 3, 4)]
    assert [len(page) for page in pages] == [100, 100, 100, 50]
    assert [*chain(*pages)] == ids
    upwards = [root.ids(queue="mail", p=page, o="1") for page in (1, 2, 3, 4)]
    assert [*chain(*upwards)] == ids[::-1]
    everything = [*chain(*(root.ids(p=page) for page in (1, 2, 3, 4)))]
    assert everything == list(Job.objects.order_by("-pk").values_list("pk", flat=True))
    assert len(root.ids(state="pending", situation="delayed", all="")) == 10
    assert root.get("job", p=99).status_code == 302


def test_any_other_filter_in_the_address_is_refused(root: Browser) -> None:
    assert root.get("job", last_error__contains="x").status_code == 400


def test_what_no_column_holds_is_answered(root: Browser) -> None:
    for query in ({"q": "a\x00b"}, {"queue": "\x00"}, {"p": "x"}, {"state": ""}, {"q": "é" * 3000}):
        assert root.get("job", **query).status_code == 200
    for pk in ("0", "-1", "9" * 40, "x", "1_2F"):
        response = root.client.get(f"/admin/django_alkstore/job/{pk}/change/")
        assert response.status_code == 302


@pytest.mark.parametrize("model", ["job", "schedule", "lock"])
def test_an_empty_database(root: Browser, model: str) -> None:
    assert f"0 {model}s" in root.page(model)
    assert root.page(model, q="x", **({"state": "dead", "situation": "due", "queue": "mail"} if model == "job" else {}))


def test_schedules(root: Browser, clock: ManualClock) -> None:
    schedule("nightly", "@every 1d", "mail")
    schedule("off", "@every 1h", "reports")
    pause_schedule("off")
    page = root.page("schedule")
    for shown in ("nightly", "@every 1d", ">On<", ">Paused<", "March 2, 2026, 13:00:00", "in\xa01\xa0d"):
        assert shown in page
    assert "off" not in root.page("schedule", state="on").split("result_list")[1].split("</table>")[0]
    assert "nightly" not in root.page("schedule", state="paused").split("result_list")[1].split("</table>")[0]


def test_locks(root: Browser, clock: ManualClock) -> None:
    lock("held", ttl=600, owner="somebody").acquire()
    lock("lapsed", ttl=10).acquire()
    clock.advance(60)
    page = root.page("lock")
    for shown in ("somebody", ">Held<", ">Lapsed<", "1\N{NO-BREAK SPACE}min", "March 1, 2026, 13:10:00"):
        assert shown in page
    assert str(Lock.objects.get(name="held").token) in page


@pytest.fixture
def without_zones() -> Iterator[None]:
    with override_settings(USE_TZ=False):
        yield


def test_without_use_tz_moments_are_in_the_projects_zone_too(
    without_zones: None, root: Browser, clock: ManualClock
) -> None:
    job = enqueue("mail", None, delay=90)
    assert "March 1, 2026, 13:01:30" in root.page("job")
    page = root.detail("job", job.id)
    assert "not due until March 1, 2026, 13:01:30 (" in page
    schedule("nightly", "@every 1d", "mail")
    assert "March 2, 2026, 13:00:00" in root.page("schedule")


# At a glance


def glance(root: Browser, job_id: int) -> str:
    """What the list says beside the job's state."""
    row = re.search(rf">{job_id}</a></th>(.*?)</tr>", root.page("job", q=str(job_id)), re.DOTALL)
    assert row is not None
    found = re.search(r'field-status">.*?</span>(?: <span class="alkstore-(alarm|quiet)">(.*?)</span>)?</td>', row[1])
    assert found is not None
    return unescape(found[2] or "").replace("\xa0", " ") + ("!" if found[1] == "alarm" else "")


def test_the_list_says_why_a_job_has_not_run(root: Browser, clock: ManualClock) -> None:
    with isolated_registry():
        handler("mail")(lambda job: None)
        due, orphan = enqueue("mail", None).id, enqueue("gone", None).id
        assert (glance(root, due), glance(root, orphan)) == ("no worker!", "no handler!")
        assert root.ids(situation="no_worker") == [due]
        assert root.ids(situation="no_handler") == [orphan]
        presence.leave("default", "worker", ["mail"])
        assert glance(root, due) == "due"
        assert root.ids(situation="no_worker") == []
        delayed = enqueue("mail", None, delay=2 * 86_400).id
        assert glance(root, delayed) == "in 2 d"
        assert root.ids(situation="delayed") == [delayed]
        assert claim_batch("mail", "worker")[0].id == due
        clock.advance(90)
        assert glance(root, due) == "for 1 min 30 s"
        waiting = enqueue("mail", None).id
        clock.advance(10)
        assert glance(root, waiting) == "threads busy"


def test_the_list_tells_retries_and_lapsed_leases(root: Browser, clock: ManualClock) -> None:
    job, other = enqueue("mail", None), enqueue("other", None)
    claim_batch("other", "w")
    claim_batch("mail", "w")[0].retry("no", delay=30)
    assert glance(root, job.id) == "retries in 30 s"
    assert root.ids(situation="retrying") == root.ids(situation="failed") == [job.id]
    clock.advance(300)
    assert glance(root, other.id) == "lease lapsed!"
    assert root.ids(situation="lapsed") == [other.id]


def test_failed_before_finds_every_job_that_has_failed_whatever_became_of_it(root: Browser, clock: ManualClock) -> None:
    retried, died = enqueue("a", None), enqueue("b", None)
    enqueue("c", None)
    claim_batch("a", "w")[0].retry("no", delay=0)
    claim_batch("a", "w")[0].ack()
    claim_batch("b", "w")[0].fail("no")
    claim_batch("c", "w")[0].ack()
    assert root.ids(situation="failed") == [died.id, retried.id]
    assert root.ids(situation="failed", state="completed") == [retried.id]
    assert root.ids(situation="retrying") == []


# Projects that go their own way


@pytest.fixture
def own_admin(root: Browser) -> Iterator[Callable[[type[JobAdmin]], Browser]]:
    """Let a subclass of `JobAdmin` serve the jobs."""
    usual = admin.site._registry[Job]

    def use(chosen: type[JobAdmin]) -> Browser:
        admin.site._registry[Job] = chosen(Job, admin.site)
        clear_url_caches()
        importlib.reload(importlib.import_module(settings.ROOT_URLCONF))
        return root

    yield use
    admin.site._registry[Job] = usual
    clear_url_caches()
    importlib.reload(importlib.import_module(settings.ROOT_URLCONF))


class OwnJobAdmin(JobAdmin):
    list_filter = (*JobAdmin.list_filter, "priority")
    ordering = ("priority",)


class OwnSearch(JobAdmin):
    search_fields = ("last_error",)


def test_a_subclass_may_have_filters_and_an_ordering_of_its_own(own_admin: Callable[..., Browser]) -> None:
    high, low, other = (enqueue("mail", None, priority=priority).id for priority in (5, -5, 0))
    root = own_admin(OwnJobAdmin)
    assert root.ids() == [low, other, high]
    assert root.ids(priority__exact="5") == [high]
    assert root.ids(priority__exact="5", state="dead") == []
    assert root.ids(queue="mail", o="-1") == [other, low, high]
    said = root.said("job", "cancel", [high], "?priority__exact=5", select_across="1")
    assert said == "1 job cancelled."
    assert root.get("job", last_error__contains="x").status_code == 400


def test_a_subclass_may_search_in_fields_of_its_own(own_admin: Callable[..., Browser]) -> None:
    job_id = enqueue("mail", None).id
    claim_batch("mail", "w")[0].fail("ValueError: peculiar")
    root = own_admin(OwnSearch)
    assert root.ids(q="peculiar") == [job_id]
    assert root.ids(q="mail") == []


def test_an_id_is_shown_as_it_can_be_searched(root: Browser) -> None:
    job_id = enqueue_many("mail", [None] * 1_500)[-1]
    lock("report").acquire()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_alkstore_lock SET token = 12345")
    with override_settings(USE_THOUSAND_SEPARATOR=True):
        assert f">{job_id}</a>" in root.page("job")
        assert root.ids(q=str(job_id)) == [job_id]
        for page in (root.page("lock"), root.detail("lock", 12345)):
            assert "12345" in page
            assert "12,345" not in page
        assert f"Job {job_id} in queue mail" in root.detail("job", job_id)
        assert f"/{job_id}/" in root.page("job")


@pytest.mark.parametrize("model", ["job", "schedule", "lock"])
def test_an_empty_list_offers_no_action_and_counts_nothing(root: Browser, model: str) -> None:
    page = root.page(model)
    assert 'name="action"' not in page
    assert "Show all" not in page
    assert "Show all" in root.page(model, q="x")


@pytest.mark.parametrize("model", ["job", "schedule", "lock"])
def test_a_list_has_one_bar_of_actions(root: Browser, model: str) -> None:
    fill(1)
    assert root.page(model).count('name="action"') == 1


# Cost


def queries_of(work: Callable[[], Any]) -> list[str]:
    with CaptureQueriesContext(connection) as captured:
        work()
    return [query["sql"] for query in captured]


def fill(count: int) -> None:
    enqueue_many("mail", range(count))
    for number in range(count):
        schedule(f"s{number}", "@every 1h", "mail")
        lock(f"l{number}", ttl=600).acquire()


@pytest.mark.parametrize("model", ["job", "schedule", "lock"])
def test_f122_the_queries_of_a_list_do_not_grow_with_its_rows(staff: Callable[..., Browser], model: str) -> None:
    user = staff("view_job", "change_job", "view_schedule", "change_schedule", "view_lock", "delete_lock")
    fill(100)
    user.page(model)
    hundred = queries_of(lambda: user.page(model, all=""))
    fill_more(model)
    two_hundred = queries_of(lambda: user.page(model, all=""))
    assert len(two_hundred) == len(hundred) <= 10


def fill_more(model: str) -> None:
    for number in range(100, 200):
        if model == "job":
            enqueue("mail", number)
        elif model == "schedule":
            schedule(f"s{number}", "@every 1h", "mail")
        else:
            lock(f"l{number}", ttl=600).acquire()


@pytest.mark.parametrize("query", [{}, {"state": "dead"}, {"queue": "mail"}, {"situation": "lapsed"}, {"q": "mail"}])
def test_f013_a_list_only_reads_and_reads_no_payload(root: Browser, crowd: list[int], query: dict[str, str]) -> None:
    root.page("job")
    for sql in queries_of(lambda: root.page("job", **query)):
        assert sql.lstrip().startswith(("SELECT", "SAVEPOINT", "RELEASE")), sql
        assert '"payload"' not in sql
        assert '"errors"' not in sql


@pytest.mark.parametrize("model", ["schedule", "lock"])
def test_f013_the_other_lists_and_the_pages_only_read(root: Browser, crowd: list[int], model: str) -> None:
    schedule("nightly", "@every 1h", "mail")
    lock("report").acquire()
    pk = (Schedule if model == "schedule" else Lock).objects.get().pk
    root.page(model)
    for work in (lambda: root.page(model), lambda: root.detail(model, pk), lambda: root.detail("job", crowd[0])):
        for sql in queries_of(work):
            assert sql.lstrip().startswith(("SELECT", "SAVEPOINT", "RELEASE")), sql


BY_INDEX: list[dict[str, str]] = [
    {"state": "pending"},
    {"state": "processing"},
    {"state": "dead"},
    {"state": "completed", "p": "2"},
    {"queue": "mail"},
    {"queue": "mail", "state": "cancelled"},
    {"situation": "due"},
    {"situation": "delayed"},
    {"situation": "lapsed"},
    {"situation": "due", "queue": "mail"},
    {"situation": "no_worker"},
    {"situation": "no_handler"},
    {"situation": "retrying"},
    {"situation": "failed"},
    {"situation": "failed", "state": "completed"},
    {"situation": "worker_dead"},
]


@pytest.mark.parametrize("analysed", [False, True], ids=["fresh", "analysed"])
@pytest.mark.parametrize("query", BY_INDEX, ids=str)
def test_f123_no_filter_walks_the_table(root: Browser, query: dict[str, str], analysed: bool) -> None:
    big_crowd()
    with connection.cursor() as cursor:
        if analysed:
            cursor.execute("ANALYZE")
        sent = queries_of(lambda: root.page("job", **query))
        for sql in sent:
            if '"django_alkstore_job"' in sql:
                cursor.execute(f"EXPLAIN QUERY PLAN {sql}")
                for step in (row[3] for row in cursor.fetchall()):
                    assert not (step.startswith("SCAN django_alkstore_job") and "INDEX" not in step), (step, sql)
        if analysed:
            cursor.execute("DELETE FROM sqlite_stat1")
            cursor.execute("ANALYZE sqlite_master")


def big_crowd() -> None:
    ids = enqueue_many("mail", range(600))
    now = Job.objects.earliest("pk").created_at
    for state, some in (("completed", ids[:250]), ("dead", ids[250:400]), ("cancelled", ids[400:420])):
        Job.objects.filter(pk__in=some).update(state=state, finished_at=now)
    leased = Job.objects.filter(pk__in=ids[420:430])
    leased.update(state="processing", worker_id="w", lease_expires_at=now - timedelta(seconds=1))


def test_f123_without_a_filter_the_table_is_read_from_the_nearer_end(root: Browser) -> None:
    big_crowd()
    for page, offset in ((1, None), (2, "OFFSET 100"), (6, None)):
        [ids] = [sql for sql in queries_of(lambda p=page: root.page("job", p=p)) if "ORDER BY 1" in sql]
        assert "LIMIT 100" in ids
        assert ("OFFSET" in ids) == (offset is not None)
