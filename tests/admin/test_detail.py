"""One job, schedule or lock on its page; whatever it holds, it is shown as text."""

import re
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core.exceptions import ObjectDoesNotExist
from django.db import connection
from django.test import Client
from django.utils.html import escape

from django_alkstore import clock as clock_module
from django_alkstore import names
from django_alkstore.admin import show
from django_alkstore.admin.show import MAX_JSON
from django_alkstore.clock import LAST_MOMENT, ManualClock
from django_alkstore.dialects.liveness import Liveness
from django_alkstore.dialects.transactions import write_transaction
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
    requeue,
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
    assert said.startswith("0 schedules fired; 1 refused (schedule <script>")
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


NOON = "March 1, 2026, 13:00:00"
"""The clock's first moment in the project's time zone."""


def test_a_delayed_job_says_until_when(root: Browser, clock: ManualClock) -> None:
    with isolated_registry():
        headline, *_ = root.verdict("job", enqueue("mail", None, delay=90).id)
    assert headline == "Waiting: not due until March 1, 2026, 13:01:30 (in 1\xa0min\xa030\xa0s)."


def test_a_retry_says_that_it_is_one_and_why(root: Browser, clock: ManualClock) -> None:
    job = enqueue("mail", None)
    claim_batch("mail", "w")[0].retry("no", delay=30)
    headline, *details = root.verdict("job", job.id)
    assert headline == "Waiting: it is tried again on March 1, 2026, 13:00:30 (in 30\xa0s)."
    assert details[:2] == ["Attempt 2 of 3.", "The last attempt failed: no"]


def test_a_due_job_says_if_there_is_no_worker_or_no_handler_for_it(root: Browser, clock: ManualClock) -> None:
    job, letter = enqueue("lonely", None), outbox("lonely").enqueue(None)
    since = f"Due since {NOON}."
    with isolated_registry():
        assert root.verdict("job", job.id) == [
            "Waiting: no installed app has a handler for queue lonely, and no worker is running for it.",
            since,
        ]
        handler("lonely")(lambda job: None)
        assert root.verdict("job", job.id) == [
            "Waiting: no worker is running for queue lonely.",
            since,
            "To start one: manage.py run_queue lonely",
        ]
        delivery("lonely")(lambda job: None)
        assert root.verdict("job", letter.id) == [
            "Waiting: no worker is running for outbox lonely.",
            since,
            "To start one: manage.py run_outbox lonely",
        ]


def test_a_due_job_says_what_is_before_it_where_a_worker_is_there(root: Browser, clock: ManualClock) -> None:
    presence.leave("default", "worker", ["mail"])
    low, first, urgent = (enqueue("mail", None, priority=priority).id for priority in (-1, 0, 1))
    clock.advance(1)
    second = enqueue("mail", None).id
    enqueue("mail", None, priority=9, delay=60)
    enqueue("post", None, priority=9)
    for job, place in ((urgent, "and next in line"), (first, "behind 1 other"), (second, "behind 2 others"),
                       (low, "behind 3 others")):  # fmt: skip
        headline, line, worker = root.verdict("job", job)
        assert (headline, worker) == ("Due now.", "A worker is running for queue mail.")
        assert line.endswith(f", {place}.")
    assert [job.id for job in claim_batch("mail", "w", 9)] == [urgent, first, second, low]


def test_no_more_than_a_thousand_before_a_job_are_counted(root: Browser, clock: ManualClock) -> None:
    presence.leave("default", "worker", ["mail"])
    last = enqueue_many("mail", [None] * 1_002)[-1]
    assert root.verdict("job", last)[1].endswith("behind 1,000 or more others.")


def test_a_job_that_waits_for_a_thread_says_what_the_threads_are_busy_with(root: Browser, clock: ManualClock) -> None:
    presence.leave("default", "worker-7", ["mail", "reports"])
    presence.leave("default", "worker-8", ["other"])
    report = enqueue("reports", None).id
    claim_batch("reports", "worker-7")
    clock.advance(60)
    letter = enqueue("mail", None).id
    claim_batch("mail", "worker-7")
    enqueue("other", None)
    claim_batch("other", "worker-8")
    waiting = enqueue("mail", None).id
    clock.advance(60)
    assert root.verdict("job", waiting) == [
        "Waiting: all threads are busy.",
        "Due since March 1, 2026, 13:01:00, and next in line.",
        "The worker worker-7 is running 2 jobs.",
    ]
    page = root.detail("job", waiting)
    named = re.findall(r'<li><a href="[^"]*/(\d+)/change/">Job \d+</a>\s+in <bdi>(.*?)</bdi>, for (.*?)</li>', page)
    assert named == [(str(report), "queue reports", "2\xa0min"), (str(letter), "queue mail", "1\xa0min")]


def test_a_page_names_the_longest_running_jobs_and_counts_the_others(root: Browser, clock: ManualClock) -> None:
    presence.leave("default", "w", ["mail"])
    enqueue_many("mail", [None] * 9)
    claim_batch("mail", "w", 8)
    clock.advance(60)
    waiting = Job.objects.get(state="pending")
    page = root.detail("job", waiting.pk)
    assert len(re.findall(r"<li><a [^>]*>Job ", page)) == 5
    assert "and 3 more" in page


def test_a_running_job_says_for_how_long_and_by_which_worker(root: Browser, clock: ManualClock) -> None:
    job = enqueue("mail", None)
    claim_batch("mail", "host:7")
    clock.advance(240)
    assert root.verdict("job", job.id) == [
        "Running for 4\xa0min.",
        "Attempt 1 of 3, by the worker host:7.",
        "Its lease ends on March 1, 2026, 13:05:00.",
    ]


def test_a_lapsed_job_says_what_becomes_of_it(root: Browser, clock: ManualClock) -> None:
    job = enqueue("mail", None)
    claim_batch("mail", "host:7")
    clock.advance(400)
    headline, attempt, then, *_ = root.verdict("job", job.id)
    assert headline == "Its lease ran out on March 1, 2026, 13:05:00 (1\xa0min\xa040\xa0s ago)."
    assert attempt == "Attempt 1 of 3 was made by the worker host:7."
    assert then == "It will be tried again when a worker next looks at its queue."
    Job.objects.update(max_attempts=1)
    assert "It will be dead, since no attempt is left," in root.verdict("job", job.id)[2]


def test_a_job_whose_worker_is_dead_says_so(root: Browser) -> None:
    liveness = Liveness("default")
    assert liveness.reason is None
    job = enqueue("mail", None)
    write_transaction("default", lambda db: db.claim("mail", liveness.holder, 1, clock_module.now_us(), liveness.file))
    assert root.verdict("job", job.id)[0].startswith("Running for")
    assert root.ids(situation="worker_dead") == []
    liveness.close()  # the kernel frees its lock, as at the end of its process
    assert root.verdict("job", job.id)[0] == "Its worker is dead."
    assert root.ids(situation="worker_dead") == [job.id]
    assert "worker dead" in root.page("job")


def test_a_job_whose_worker_is_suspended_says_so(root: Browser, clock: ManualClock) -> None:
    with isolated_registry(), Liveness("default") as liveness:
        handler("mail")(lambda job: None)
        presence.leave("default", liveness.holder, ["mail"], liveness.file)
        job = enqueue("mail", None)
        assert root.verdict("job", job.id)[0] == "Due now."
        clock.advance(presence.TTL + 1)
        headline, _, advice = root.verdict("job", job.id)
        assert headline == "Waiting: the worker for queue mail is suspended."
        assert advice.startswith("Its process lives")
        assert "worker suspended" in root.page("job")


def test_a_schedule_says_why_it_does_not_fire(root: Browser, clock: ManualClock) -> None:
    schedule("hourly", "@every 1h", "mail")
    row = Schedule.objects.get()
    nobody = ["No worker is running for queue mail.", "To start one: manage.py run_queue mail"]
    nobody_leads = "No scheduler is running. To start one: manage.py run_schedules"
    next_fire = f"Fires next on {show.when(row.next_fire_at)} (in 1\xa0h)."
    due = f"Due since {show.when(row.next_fire_at)}."

    def said() -> list[str]:
        return root.verdict("schedule", row.pk)

    with isolated_registry():
        handler("mail")(lambda job: None)
        assert said() == [next_fire, nobody_leads, *nobody]
        LockHandle(names.LEADERSHIP_LOCK, 10, "host:8", "default").acquire()
        assert said() == [next_fire, *nobody]
        presence.leave("default", "worker", ["mail"])
        assert said() == [next_fire]
        clock.advance(3_600)
        presence.leave("default", "worker", ["mail"])
        assert said() == [due, nobody_leads]
        LockHandle(names.LEADERSHIP_LOCK, 10, "host:8", "default").acquire()
        assert said() == [due, "The scheduler fires it in its next round."]
        pause_schedule("hourly")
        assert said() == ["Paused.", "It fires again after somebody resumes it."]
        Schedule.objects.update(last_error="InvalidSpec: no")
        assert said()[0] == "Paused: the library cannot read its row."


def test_a_lock_says_who_holds_it_until_when(root: Browser, clock: ManualClock) -> None:
    lock("report", ttl=60, owner="host:8").acquire()
    pk = Lock.objects.get().pk
    assert root.verdict("lock", pk)[0] == "Held until March 1, 2026, 13:01:00."
    assert "host:8" in root.verdict("lock", pk)[1]
    clock.advance(61)
    assert root.verdict("lock", pk)[1] == "It is free: anybody can take it."


def test_an_expired_job_says_so_before_and_after_it_is_dead(root: Browser, clock: ManualClock) -> None:
    job = enqueue("mail", None, expires_in=60)
    clock.advance(61)
    assert root.verdict("job", job.id)[0] == "Expired on March 1, 2026, 13:01:00 (1\xa0s ago)."
    claim_batch("mail", "w")
    assert root.verdict("job", job.id)[0] == "Dead: it expired before a worker took it."


def test_a_finished_job_says_how_it_ended(root: Browser, clock: ManualClock) -> None:
    done, dead, cancelled = (enqueue(queue, None).id for queue in ("a", "b", "c"))
    [first], [second] = claim_batch("a", "w"), claim_batch("b", "w")
    clock.advance(3)
    first.ack()
    second.fail("ValueError: no")
    cancel(cancelled)
    then = "March 1, 2026, 13:00:03 (0\xa0s ago)"
    assert root.verdict("job", done) == [f"Completed on {then}.", "Attempt 1 of 3 took 3\xa0s."]
    assert root.verdict("job", dead) == ["Dead: ValueError: no", f"It died on {then}, after 1 of 3 attempts."]
    assert root.verdict("job", cancelled) == [f"Cancelled on {then}."]


# What became of its attempts


def fail(queue: str, *messages: str) -> None:
    """Fail one attempt of the queue's only job with each message."""
    for message in messages:
        [handle] = claim_batch(queue, "w")
        try:
            raise ValueError(message)
        except ValueError as error:
            handle.retry(error, delay=0)


def history_of(page: str) -> str:
    return page.split(">History</h2>")[1].split(">Payload</h2>", maxsplit=1)[0]


def test_equal_failures_are_folded_and_each_message_is_shown_once(root: Browser, clock: ManualClock) -> None:
    job = enqueue("mail", {"n": 1}, max_attempts=4)
    fail("mail", "first", "again", "again", "again")
    page = root.detail("job", job.id)
    assert root.verdict("job", job.id)[0] == "Dead: ValueError: again"
    shown = history_of(page)
    assert [unescape(heading.strip()) for heading in re.findall(r"<summary>(.*?) <span", shown)] == [
        "Attempts 2, 3 and 4 failed in the same way: <bdi></bdi>",
        "Attempt 1: <bdi>ValueError: first</bdi>",
    ]
    assert shown.count("Traceback (most recent call last)") == 2
    assert page.count("ValueError: again") == 1
    assert page.count("ValueError: first") == 1
    assert page.index(">History</h2>") < page.index(">Payload</h2>")
    assert shown.count("<details") == 2
    assert shown.count('<details class="alkstore-failure" open>') == 1


def test_the_history_says_where_a_job_was_requeued_and_by_whom(root: Browser, clock: ManualClock) -> None:
    job = enqueue("mail", None, max_attempts=2)
    fail("mail", "no", "no")
    root.act("job", "requeue", [job.id])
    LogEntry.objects.update(action_time=clock.now())
    clock.advance(1)
    fail("mail", "no", "no")
    shown = history_of(root.detail("job", job.id))
    assert shown.count("failed in the same way") == 2
    assert shown.count("Requeued") == 1
    first, second = (match.start() for match in re.finditer("Attempts 1 and 2", shown))
    assert first < shown.index("<bdi>Requeued by root</bdi> on March 1, 2026, 13:00:00.") < second


def test_the_history_names_the_module_of_an_exception_once(root: Browser) -> None:
    job = enqueue("mail", None)
    [handle] = claim_batch("mail", "w")
    try:
        message = "no such customer"
        raise ObjectDoesNotExist(message)
    except ObjectDoesNotExist as error:
        handle.fail(error)
    page = root.detail("job", job.id)
    assert page.count("django.core.exceptions.ObjectDoesNotExist") == 1
    assert page.count("ObjectDoesNotExist: no such customer") == 1


def test_the_history_says_that_a_program_requeued_a_job(root: Browser) -> None:
    job = enqueue("mail", None, max_attempts=1)
    fail("mail", "no")
    requeue(job.id)
    assert history_of(root.detail("job", job.id)).count("Requeued") == 1
    fail("mail", "no")
    shown = history_of(root.detail("job", job.id))
    first, second = (match.start() for match in re.finditer("Attempt 1", shown))
    assert first < shown.index("<bdi>Requeued</bdi>.") < second
    assert shown.count("Requeued") == 1


def test_the_history_says_who_cancelled_a_job(root: Browser) -> None:
    job = enqueue("mail", None)
    assert ">History</h2>" not in root.detail("job", job.id)
    root.act("job", "cancel", [job.id])
    assert "<bdi>Cancelled by root</bdi>" in history_of(root.detail("job", job.id))


def test_the_wait_of_the_latest_attempt_is_shown_where_it_is_known(root: Browser, clock: ManualClock) -> None:
    def wait() -> str | None:
        found = re.search(r"<label>Wait:</label>.*?readonly\">(.*?)</div>", root.detail("job", job.id), re.DOTALL)
        return None if found is None else found[1]

    job = enqueue("mail", None, delay=10)
    assert wait() is None
    clock.advance(15)
    assert wait() == "5\xa0s"
    [handle] = claim_batch("mail", "w")
    clock.advance(60)
    assert wait() == "5\xa0s"
    handle.retry("no", delay=10)
    clock.advance(12)
    claim_batch("mail", "w")
    assert wait() == "2\xa0s"
    Job.objects.update(run_at=Job.objects.get().created_at)
    assert wait() is None


def test_a_page_leaves_out_what_it_has_nothing_to_say_about(root: Browser) -> None:
    job = enqueue("mail", None)
    page = root.detail("job", job.id)
    for label in ("Finished", "Worker", "Leased until", "Unique key", "Boundary", "Run time", "First attempt"):
        assert f">{label}:</label>" not in page
    claim_batch("mail", "w")
    page = root.detail("job", job.id)
    for label in ("Worker", "Leased until", "Run time", "First attempt"):
        assert f">{label}:</label>" in page


def test_run_time_and_workers_are_shown(root: Browser, clock: ManualClock) -> None:
    job = enqueue("mail", None)
    claim_batch("mail", "host:1")[0].retry("no", delay=0)
    [handle] = claim_batch("mail", "host:2")
    clock.advance(75)
    handle.ack()
    page = root.detail("job", job.id)
    assert "1\xa0min\xa015\xa0s" in page
    assert "<div><bdi>host:1</bdi></div><div><bdi>host:2</bdi></div>" in page
    assert "took 1\xa0min\xa015\xa0s" in root.page("job")


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
    assert root.said("schedule", "pause", [row.pk]) == "1 schedule paused."
    assert root.said("lock", "force_release", [Lock.objects.get().pk]) == "1 lock released."


def test_a_task_s_page_and_its_line_name_the_task_and_show_what_it_returned(admin_client: Client) -> None:
    job = enqueue("default", {"args": [1], "kwargs": {}})
    Job.objects.filter(pk=job.pk).update(
        task="shop.tasks.resize", result={"width": 640}, state="completed", finished_at=clock_module.now()
    )
    page = admin_client.get(f"/admin/django_alkstore/job/{job.pk}/change/").content.decode()
    assert "shop.tasks.resize" in page
    assert "640" in page
    assert (
        'title="shop.tasks.resize">default: resize<' in admin_client.get("/admin/django_alkstore/job/").content.decode()
    )
    plain = enqueue("default", None)
    page = admin_client.get(f"/admin/django_alkstore/job/{plain.pk}/change/").content.decode()
    assert "Result" not in page
