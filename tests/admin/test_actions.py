"""What can be done in the admin: through the services, with a permission, counted, logged."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_alkstore.clock import ManualClock
from django_alkstore.models import Job, Lock, Schedule
from django_alkstore.services import (
    cancel,
    claim_batch,
    enqueue,
    enqueue_many,
    get_job,
    lock,
    pause_schedule,
    requeue,
    schedule,
)
from tests.admin.conftest import Browser, list_url

pytestmark = pytest.mark.django_db


def state_of(job_id: int) -> str:
    job = get_job(job_id)
    assert job is not None
    return job.state


def dead(queue: str = "mail", **options: Any) -> int:
    job_id = enqueue(queue, None, **options).id
    [handle] = claim_batch(queue, "w")
    assert handle.fail("no")
    return job_id


def logged() -> list[tuple[str, str]]:
    return [(entry.object_id or "", entry.get_change_message()) for entry in LogEntry.objects.order_by("object_id")]


def test_requeue_revives_the_dead_and_the_cancelled(root: Browser) -> None:
    first, second, pending = dead(), enqueue("mail", None).id, enqueue("mail", None).id
    cancel(second)
    assert root.said("job", "requeue", [first, second, pending]) == "2 jobs requeued; 1 no longer matched."
    assert [state_of(first), state_of(second), state_of(pending)] == ["pending"] * 3
    assert logged() == [(str(first), "Requeued."), (str(second), "Requeued.")]


def test_a_log_entry_names_the_job_and_the_user(root: Browser) -> None:
    job_id = dead()
    root.act("job", "requeue", [job_id])
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_repr) == (root.user, f"job {job_id} in queue mail")
    assert entry.is_change()
    history = root.client.get(reverse("admin:django_alkstore_job_history", args=[job_id])).content.decode()
    assert "Requeued." in history


def test_a_live_duplicate_is_counted_apart(root: Browser) -> None:
    taken, free = dead(unique_key="a"), dead(unique_key="b")
    enqueue("mail", None, unique_key="a")
    said = root.said("job", "requeue", [taken, free])
    assert said == "1 job requeued; 1 left alone, since a live job has the same unique key."
    assert (state_of(taken), state_of(free)) == ("dead", "pending")
    assert logged() == [(str(free), "Requeued.")]


def test_cancel_takes_what_is_live(root: Browser) -> None:
    leased, pending, finished = enqueue("mail", None).id, enqueue("other", None).id, dead("third")
    [handle] = claim_batch("mail", "w")
    assert root.said("job", "cancel", [leased, pending, finished]) == "2 jobs cancelled; 1 no longer matched."
    assert handle.ack() is False
    assert [state_of(leased), state_of(pending), state_of(finished)] == ["cancelled", "cancelled", "dead"]


def test_run_now_takes_what_is_delayed(root: Browser, clock: ManualClock) -> None:
    delayed, due = enqueue("mail", None, delay=500).id, enqueue("mail", None).id
    assert root.said("job", "run_now", [delayed, due]) == "1 job made due now; 1 no longer matched."
    job = get_job(delayed)
    assert job is not None
    assert job.run_at == clock.now()


def test_rows_that_left_the_filter_or_the_table_no_longer_match(root: Browser) -> None:
    kept, requeued, deleted = dead(), dead(), dead()
    requeue(requeued)
    Job.objects.filter(pk=deleted).delete()
    said = root.said("job", "requeue", [kept, requeued, deleted], "?state=dead")
    assert said == "1 job requeued; 2 no longer matched."


def test_schedules_are_paused_and_resumed(root: Browser) -> None:
    on, off = schedule("on", "@every 1h", "mail"), schedule("off", "@every 1h", "mail")
    pause_schedule("off")
    assert root.said("schedule", "pause", [on.pk, off.pk]) == "1 schedule paused; 1 no longer matched."
    assert not Schedule.objects.filter(enabled=True).exists()
    assert root.said("schedule", "resume", [on.pk, off.pk]) == "2 schedules resumed."
    assert Schedule.objects.filter(enabled=True).count() == 2
    assert [message for _, message in logged()].count("Resumed.") == 2


def test_a_schedule_is_fired_now(root: Browser) -> None:
    row = schedule("nightly", "@every 1d", "mail", {"a": 1})
    assert root.said("schedule", "fire_now", [row.pk]) == "1 schedule fired."
    job = Job.objects.get()
    assert (job.schedule, job.queue, job.payload) == ("nightly", "mail", {"a": 1})
    assert logged() == [(str(row.pk), "Fired.")]


def test_a_schedule_that_cannot_be_read_is_refused_and_stops_no_other(root: Browser) -> None:
    broken, good = schedule("broken", "@every 1h", "mail"), schedule("good", "@every 1h", "mail")
    for name in ("broken", "good"):
        pause_schedule(name)
    Schedule.objects.filter(name="broken").update(spec="@never")
    said = root.said("schedule", "resume", [broken.pk, good.pk])
    assert said.startswith("1 schedule resumed; 1 refused (schedule broken: ")
    assert "@never" in said
    assert list(Schedule.objects.filter(enabled=True)) == [good]


def test_a_lock_is_released_by_force(root: Browser) -> None:
    handle = lock("report", ttl=600)
    handle.acquire()
    row = Lock.objects.get()
    assert root.said("lock", "force_release", [row.pk]) == "1 lock released."
    assert handle.release() is False
    assert logged() == [(str(row.pk), "Released.")]


def test_a_lock_taken_anew_by_another_is_not_released(root: Browser) -> None:
    lock("report", ttl=600).acquire()
    seen = Lock.objects.get().pk
    Lock.objects.all().delete()
    lock("report", ttl=600).acquire()
    assert root.said("lock", "force_release", [seen]) == "0 locks released; 1 no longer matched."
    assert Lock.objects.count() == 1


@pytest.mark.parametrize(("action", "found"), [("requeue", "dead"), ("cancel", "pending")], ids=["requeue", "cancel"])
def test_f125_select_all_works_on_5000_jobs_with_default_settings(root: Browser, action: str, found: str) -> None:
    ids = enqueue_many("mail", [None] * 5_000)
    others = enqueue_many("other", [None] * 3)
    if found == "dead":
        moment = Job.objects.earliest("pk").created_at
        Job.objects.update(state="dead", finished_at=moment)
    shown = root.ids(queue="mail", state=found)
    assert len(shown) == 100
    said = root.said("job", action, shown, f"?queue=mail&state={found}", select_across="1")
    assert said == f"5,000 jobs {'requeued' if action == 'requeue' else 'cancelled'}."
    changed = "pending" if action == "requeue" else "cancelled"
    assert Job.objects.filter(pk__in=[ids[0], ids[-1]], state=changed).count() == 2
    assert Job.objects.filter(queue="mail", state=changed).count() == 5_000
    assert Job.objects.filter(pk__in=others, state=found).count() == 3
    assert LogEntry.objects.count() == 5_000


def test_select_all_reads_no_payload(root: Browser) -> None:
    ids = enqueue_many("mail", [{"secret": "x"}] * 3)
    with CaptureQueriesContext(connection) as queries:
        root.act("job", "cancel", ids, select_across="1")
    assert not [q["sql"] for q in queries if '"payload"' in q["sql"] or '"errors"' in q["sql"]]


# From a row's own page


def press(root: Browser, model: str, pk: object, action: str) -> Any:
    """Press a button of the row's page, as its form does."""
    return root.act(model, action, [pk], follow=True, alkstore_from_page="yes")


def test_a_page_offers_what_can_be_done_to_the_row(root: Browser) -> None:
    pending, delayed, leased = (enqueue(queue, None, delay=60 * (queue == "b")).id for queue in ("a", "b", "c"))
    claim_batch("c", "w")
    done, gone = dead("d"), enqueue("e", None).id
    cancel(gone)
    assert root.buttons("job", pending) == ["cancel"]
    assert root.buttons("job", delayed) == ["run_now", "cancel"]
    assert root.buttons("job", leased) == ["cancel"]
    assert root.buttons("job", done) == root.buttons("job", gone) == ["requeue", "delete_finished"]
    row = schedule("nightly", "@every 1h", "mail")
    assert root.buttons("schedule", row.pk) == ["fire_now", "pause"]
    pause_schedule("nightly")
    assert root.buttons("schedule", row.pk) == ["fire_now", "resume"]
    lock("report", ttl=600).acquire()
    assert root.buttons("lock", Lock.objects.get().pk) == ["force_release"]


def test_a_button_does_its_work_and_leads_back_to_the_page(root: Browser) -> None:
    job_id = dead()
    response = press(root, "job", job_id, "requeue")
    assert response.redirect_chain == [(reverse("admin:django_alkstore_job_change", args=[job_id]), 302)]
    assert "1 job requeued." in response.content.decode()
    assert state_of(job_id) == "pending"


def test_a_row_that_is_gone_leads_back_to_the_list(root: Browser) -> None:
    lock("report", ttl=600).acquire()
    response = press(root, "lock", Lock.objects.get().pk, "force_release")
    assert response.redirect_chain == [(list_url("lock"), 302)]


def test_who_may_only_look_is_offered_no_button(staff: Callable[..., Browser]) -> None:
    assert staff("view_job").buttons("job", dead()) == []


# Deleting


def test_finished_jobs_are_deleted_after_a_confirmation(root: Browser) -> None:
    finished, pending = dead(), enqueue("mail", None).id
    asked = root.act("job", "delete_finished", [finished, pending])
    assert "Delete 2 jobs?" in asked.content.decode()
    assert Job.objects.count() == 2
    response = root.go_on(asked, list_url("job"))
    assert [str(message) for message in response.context["messages"]] == ["1 job deleted; 1 no longer matched."]
    assert list(Job.objects.values_list("pk", flat=True)) == [pending]
    entry = LogEntry.objects.get()
    assert entry.is_deletion()
    assert entry.get_change_message() == f"Deleted 1 job: among the jobs {finished}, {pending}."


def test_dead_jobs_of_a_queue_are_deleted_by_filter(root: Browser) -> None:
    ids = enqueue_many("gone", [None] * 1_200)
    Job.objects.update(state="dead", finished_at=Job.objects.earliest("pk").created_at)
    kept = [dead("mail"), enqueue("gone", None).id]
    query = "?queue=gone&state=dead"
    asked = root.act("job", "delete_finished", ids[:1], query, select_across="1")
    assert "Delete 1,200 jobs?" in asked.content.decode()
    response = root.go_on(asked, list_url("job") + query)
    while "data-alkstore-continue" in response.content.decode():
        response = root.go_on(response, list_url("job") + query)
    assert [str(message) for message in response.context["messages"]] == ["1,200 jobs deleted."]
    assert sorted(Job.objects.values_list("pk", flat=True)) == sorted(kept)
    assert query in LogEntry.objects.get().get_change_message()


def test_f128_a_running_job_is_not_deleted(root: Browser) -> None:
    job_id = enqueue("mail", None).id
    [handle] = claim_batch("mail", "w")
    said = root.said("job", "delete_finished", [job_id], alkstore_confirmed="yes")
    assert said == "0 jobs deleted; 1 no longer matched."
    assert handle.ack() is True
    assert not LogEntry.objects.exists()


def test_a_page_of_a_job_that_was_deleted_leads_to_the_list(root: Browser) -> None:
    job_id = dead()
    asked = root.act("job", "delete_finished", [job_id], alkstore_from_page="yes")
    response = root.go_on(asked, list_url("job"))
    assert response.redirect_chain == [(list_url("job"), 302)]


# Actions that take long


def test_a_long_action_is_done_in_several_requests(root: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_alkstore.admin.base.ACTION_SECONDS", 0)
    ids = enqueue_many("mail", [None] * 250)
    response = root.act("job", "cancel", ids[:1], "?queue=mail", select_across="1")
    late = enqueue("mail", None).id
    shown = []
    while "data-alkstore-continue" in response.content.decode():
        shown.append(response.context["title"])
        assert Job.objects.filter(state="cancelled").count() == 100 * len(shown)
        if len(shown) == 1:
            cancel(ids[-1])
            cancel(ids[-1])
            Job.objects.filter(pk=ids[-1]).update(state="completed")
        response = root.go_on(response, list_url("job") + "?queue=mail")
    assert shown == ["100 of 250 jobs are done", "200 of 250 jobs are done"]
    assert [str(m) for m in response.context["messages"]] == ["249 jobs cancelled; 1 no longer matched."]
    assert state_of(late) == "pending"
    assert LogEntry.objects.count() == 249


def test_the_progress_of_an_action_cannot_be_made_up(root: Browser) -> None:
    job_id = enqueue("mail", None).id
    assert root.act("job", "cancel", [job_id], alkstore_progress="[0, 9]").status_code == 400
    assert state_of(job_id) == "pending"


# Permissions


def something(model: str) -> object:
    """A row that each action of the model would change."""
    if model == "schedule":
        return schedule("nightly", "@every 1h", "mail").pk
    if model == "lock":
        lock("report", ttl=600).acquire()
        return Lock.objects.get().pk
    return enqueue("mail", None, delay=500).id


def everything() -> list[Any]:
    return [list(model.objects.values()) for model in (Job, Lock, Schedule)]


ACTIONS = [
    ("job", "cancel", "change_job"),
    ("job", "run_now", "change_job"),
    ("job", "requeue", "change_job"),
    ("job", "delete_finished", "delete_job"),
    ("schedule", "pause", "change_schedule"),
    ("schedule", "resume", "change_schedule"),
    ("schedule", "fire_now", "change_schedule"),
    ("lock", "force_release", "delete_lock"),
]
ALL_PERMISSIONS = [
    f"{verb}_{model}" for verb in ("add", "change", "delete", "view") for model in ("job", "schedule", "lock")
]


@pytest.mark.parametrize(("model", "action", "needed"), ACTIONS)
def test_an_action_needs_its_permission(staff: Callable[..., Browser], model: str, action: str, needed: str) -> None:
    pk = something(model)
    if action in ("requeue", "delete_finished"):
        cancel(int(str(pk)))
    if action == "resume":
        pause_schedule("nightly")
    before = everything()
    # Everything but what it needs, and to be able to see the page.
    user = staff(*[name for name in ALL_PERMISSIONS if name != needed])
    assert f'value="{action}"' not in user.page(model)
    assert user.said(model, action, [pk], alkstore_confirmed="yes") in ("", "No action selected.")
    assert everything() == before
    assert not LogEntry.objects.exists()
    allowed = staff(needed)
    assert f'value="{action}"' in allowed.page(model)
    assert allowed.said(model, action, [pk], alkstore_confirmed="yes").startswith("1 ")
    assert everything() != before


@pytest.mark.parametrize(("model", "action", "needed"), ACTIONS)
def test_who_may_only_look_sees_no_action(staff: Callable[..., Browser], model: str, action: str, needed: str) -> None:
    pk = something(model)
    user = staff(f"view_{model}")
    assert "_selected_action" not in user.page(model)
    before = everything()
    assert user.act(model, action, [pk]).status_code == 200
    assert everything() == before


@pytest.mark.parametrize("model", ["job", "schedule", "lock"])
def test_who_may_not_look_sees_nothing(staff: Callable[..., Browser], model: str) -> None:
    pk = something(model)
    user = staff()
    assert user.get(model).status_code == 403
    assert user.client.get(reverse(f"admin:django_alkstore_{model}_change", args=[pk])).status_code == 403
    assert user.act(model, "cancel", [pk]).status_code == 403


@pytest.mark.parametrize("model", ["job", "schedule", "lock"])
def test_f128_nothing_is_added_edited_or_deleted_by_form(root: Browser, model: str) -> None:
    pk = something(model)
    before = everything()
    address = f"admin:django_alkstore_{model}"
    assert root.client.get(reverse(f"{address}_add")).status_code == 403
    assert root.client.post(reverse(f"{address}_add"), {"name": "x", "queue": "mail"}).status_code == 403
    assert root.client.post(reverse(f"{address}_change", args=[pk]), {"queue": "x"}).status_code == 403
    assert root.client.post(reverse(f"{address}_delete", args=[pk]), {"post": "yes"}).status_code == 403
    assert root.said(model, "delete_selected", [pk], post="yes") == "No action selected."
    assert everything() == before
    page = root.detail(model, pk)
    for button in ("_save", "_continue", "_addanother", "deletelink"):
        assert f'"{button}"' not in page
    assert "delete_selected" not in root.page(model)
