"""Section 10: handlers that are called, their options, and the queues that nobody handles."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, cast

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import transaction
from django.test import override_settings

from django_alkstore import registrations, services
from django_alkstore.exceptions import (
    DuplicateJob,
    InvalidOption,
    InvalidPayload,
    TransactionRequired,
    UnknownQueue,
)
from django_alkstore.models import Job, Schedule
from django_alkstore.registry import Handler, delivery, handler
from django_alkstore.services import NEVER, JobHandle, enqueue, enqueue_many, outbox, schedule, tick
from django_alkstore.testing import isolated_registry, run_pending
from tests.ledger.tools import variant

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _alone() -> Any:
    with isolated_registry():
        yield


calls: list[Any] = []


def make(**options: Any) -> Handler[..., Any]:
    calls.clear()

    @handler("mail", **options)
    def send(job: JobHandle) -> None:
        calls.append(job.payload)

    return cast("Handler[..., Any]", send)


# Enqueueing by the handler


def test_a_handler_enqueues_into_its_own_queue() -> None:
    send = make()
    job = send.enqueue({"to": "ada"}, delay=5)
    assert (job.queue, job.payload, job.state) == ("mail", {"to": "ada"}, "pending")
    assert job.run_at > job.created_at


def test_enqueue_tx_of_a_handler_needs_a_transaction(transactional_db: None) -> None:
    send = make()
    with pytest.raises(TransactionRequired):
        send.enqueue_tx(1)
    with transaction.atomic():
        assert send.enqueue_tx(1).pk


def test_enqueue_many_of_a_handler() -> None:
    send = make()
    later = datetime(2090, 1, 1, tzinfo=UTC)
    assert len(send.enqueue_many([1, 2, 3], priority=4)) == 3
    (job_id,) = send.enqueue_many([4], run_ats=[later])
    assert Job.objects.get(pk=job_id).run_at == later
    assert set(Job.objects.values_list("priority", flat=True)) == {0, 4}


def test_get_or_enqueue_of_a_handler() -> None:
    send = make()
    first, created = send.get_or_enqueue("key", 1)
    again, created_again = send.get_or_enqueue("key", 2)
    assert (created, created_again, again.pk) == (True, False, first.pk)
    with pytest.raises(DuplicateJob):
        send.enqueue(3, unique_key="key")


def test_a_delivery_enqueues_into_its_outbox_with_an_outbox_s_defaults() -> None:
    @delivery("hooks")
    def post(job: JobHandle) -> None: ...

    job = post.enqueue(1)
    assert (job.queue, job.max_attempts, job.visibility_timeout) == ("__alkstore_outbox:hooks", 5, 60.0)
    assert len(post.enqueue_many([1, 2])) == 2
    assert post.get_or_enqueue("k", 1)[1]


def test_a_handler_s_jobs_run(django_capture_on_commit_callbacks: Any) -> None:
    send = make()
    send.enqueue("hello")
    assert len(run_pending()) == 1
    assert calls == ["hello"]


# Options of the decorator

OPTIONS: dict[str, Any] = {
    "max_attempts": 7,
    "visibility_timeout": timedelta(seconds=40),
    "backoff_base": 2,
    "priority": 9,
    "expires_in": 60,
}


def read(job: Job) -> tuple[Any, ...]:
    lifetime = None if job.expires_at is None else (job.expires_at - job.run_at).total_seconds()
    return job.max_attempts, job.visibility_timeout, job.backoff_base, job.priority, lifetime


def test_the_decorator_s_options_apply_by_name_and_by_handler_and_to_many() -> None:
    send = make(**OPTIONS)
    jobs = [send.enqueue(1), enqueue("mail", 1), *Job.objects.filter(pk__in=enqueue_many("mail", [1, 2]))]
    assert [read(job) for job in jobs] == [(7, 40.0, 2.0, 9, 60.0)] * 4


def test_the_setting_has_priority_over_the_decorator_and_the_call_over_both() -> None:
    send = make(**OPTIONS)
    with override_settings(ALKSTORE={"QUEUES": {"mail": {"max_attempts": 8, "priority": 1}}}):
        assert read(send.enqueue(1)) == (8, 40.0, 2.0, 1, 60.0)
        assert read(send.enqueue(1, max_attempts=2, priority=0)) == (2, 40.0, 2.0, 0, 60.0)
    assert read(send.enqueue(1)) == (7, 40.0, 2.0, 9, 60.0)


def test_the_setting_leaves_an_outbox_s_other_options_to_its_delivery() -> None:
    @delivery("hooks", backoff_base=1)
    def post(job: JobHandle) -> None: ...

    with override_settings(ALKSTORE={"QUEUES": {"outbox:hooks": {"max_attempts": 12}}}):
        assert read(outbox("hooks").enqueue(1)) == (12, 60.0, 1.0, 0, None)


def test_a_schedule_s_jobs_have_the_options_of_the_handler() -> None:
    make(**OPTIONS)
    schedule("often", "@every 1s", "mail")
    (fired,) = tick(Schedule.objects.get().next_fire_at)
    assert read(Job.objects.get(pk=fired.job_id))[:4] == (7, 40.0, 2.0, 9)


def test_a_handler_that_is_gone_takes_its_options_with_it() -> None:
    make(**OPTIONS)
    with isolated_registry():
        assert read(enqueue("mail", 1)) == (3, 300.0, 5.0, 0, None)
    assert read(enqueue("mail", 1))[0] == 7


@pytest.mark.parametrize(
    "options",
    [
        {"max_attempts": 0},
        {"priority": "high"},
        {"backoff_base": -1},
        {"expires_in": 0},
        {"visibility_timeout": 0},
        {"unpack": 1},
    ],
)
def test_a_wrong_option_is_refused_where_it_is_written(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        handler("mail", **options)


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"'retries'.*known are atomic, backoff_base"):
        handler("mail", retries=3)  # type: ignore[call-overload]


# NEVER


def test_never_is_no_expiry_whatever_the_defaults_are() -> None:
    send = make(expires_in=60)
    assert send.enqueue(1, expires_in=NEVER).expires_at is None
    with override_settings(ALKSTORE={"QUEUES": {"mail": {"expires_in": 30}}}):
        assert enqueue("mail", 1, expires_in=NEVER).expires_at is None
        (job_id,) = enqueue_many("mail", [1], expires_in=NEVER)
        assert Job.objects.get(pk=job_id).expires_at is None
        schedule("often", "@every 1s", "mail", expires_in=NEVER)
        (fired,) = tick(Schedule.objects.get().next_fire_at)
        assert Job.objects.get(pk=fired.job_id).expires_at is None
    assert repr(NEVER) == "NEVER"


def test_a_decorator_may_say_never() -> None:
    assert make(expires_in=NEVER).enqueue(1).expires_at is None


# unpack


def test_an_unpacked_handler_is_called_with_the_items_of_the_payload() -> None:
    found: list[Any] = []

    @handler("mail", unpack=True)
    def send(to: str, subject: str = "none") -> None:
        found.append((to, subject))

    send.enqueue({"to": "ada"})
    enqueue("mail", {"to": "bob", "subject": "hi"})
    run_pending()
    assert found == [("ada", "none"), ("bob", "hi")]


def test_an_unpacked_handler_that_asks_for_the_job_is_given_it() -> None:
    found: list[Any] = []

    @handler("mail", unpack=True)
    def send(to: str, *, job: JobHandle) -> None:
        found.append((to, job.attempt))

    send.enqueue({"to": "ada"})
    run_pending()
    assert found == [("ada", 1)]
    with pytest.raises(TypeError, match=r'payload\["job"\] is the argument'):
        send.enqueue({"to": "ada", "job": 1})


def test_an_unpacked_coroutine() -> None:
    found: list[Any] = []

    @handler("mail", unpack=True)
    async def send(to: str) -> None:
        await asyncio.sleep(0)
        found.append(to)

    assert iscoroutinefunction(send.function)
    send.enqueue({"to": "ada"})
    (job,) = run_pending()
    assert found == ["ada"]
    assert Job.objects.get(pk=job.id).state == "completed"


@pytest.mark.parametrize("payload", [{}, {"to": 1, "more": 2}, {"subject": 1}, [1], None, "text"])
def test_a_payload_that_does_not_fit_is_a_type_error_and_nothing_is_stored(payload: Any) -> None:
    @handler("mail", unpack=True)
    def send(to: str) -> None: ...

    for call in (send.enqueue, send.enqueue_tx, lambda payload: send.get_or_enqueue("k", payload)):
        with pytest.raises(TypeError, match=r"^payload "):
            call(payload)
    with pytest.raises(TypeError, match=r"^payloads\[1\] "):
        send.enqueue_many([{"to": 1}, payload])
    assert not Job.objects.exists()


def test_a_payload_that_is_enqueued_by_name_and_does_not_fit_fails_the_attempt() -> None:
    @handler("mail", unpack=True)
    def send(to: str) -> None: ...

    job = enqueue("mail", {"subject": 1})
    run_pending()
    assert "unexpected keyword argument" in str(Job.objects.get(pk=job.pk).last_error)


def test_an_unpacked_payload_is_still_json() -> None:
    @handler("mail", unpack=True)
    def send(to: object) -> None: ...

    with pytest.raises(InvalidPayload):
        send.enqueue({"to": object()})


# Queues that nobody handles


def test_a_required_handler() -> None:
    make()
    with override_settings(ALKSTORE={"REQUIRE_HANDLER": True}):
        enqueue("mail", 1)
        calls: list[Any] = [
            lambda: enqueue("mial", 1),
            lambda: enqueue_many("mial", [1]),
            lambda: services.get_or_enqueue("mial", "k", 1),
            lambda: services.enqueue_tx("mial", 1),
        ]
        for call in calls:
            with pytest.raises(UnknownQueue, match=r"for the queue mial\. Did you mean queue mail"):
                call()
        with pytest.raises(UnknownQueue, match="for the outbox hooks"):
            outbox("hooks").enqueue(1)
    assert Job.objects.count() == 1


def test_without_the_setting_any_queue_takes_jobs() -> None:
    make()
    assert enqueue("mial", 1).pk


def test_a_queue_without_a_handler_is_logged_once_with_debug(caplog: pytest.LogCaptureFixture) -> None:
    make()
    with override_settings(DEBUG=True), caplog.at_level(logging.WARNING, "django_alkstore"):
        enqueue("misspelt-mail-once", 1)
        enqueue("misspelt-mail-once", 1)
        enqueue("mail", 1)
    assert [record.getMessage() for record in caplog.records] == [
        "a job was enqueued into queue misspelt-mail-once, for which no handler is registered."
    ]


def test_a_project_without_handlers_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with override_settings(DEBUG=True), caplog.at_level(logging.WARNING, "django_alkstore"):
        enqueue("claimed-by-hand", 1)
    assert caplog.records == []


@pytest.mark.parametrize(("queue", "nearest"), [("mial", "queue mail"), ("x", None), ("q", None)])
def test_the_nearest_queue_is_named_if_its_name_is_similar(queue: str, nearest: str | None) -> None:
    make()
    with override_settings(ALKSTORE={"REQUIRE_HANDLER": True}), pytest.raises(UnknownQueue) as caught:
        enqueue(queue, 1)
    assert caught.value.nearest == nearest


# The first enqueue imports the modules


def test_a_second_thread_waits_for_the_first_one_s_discovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would store its job with the library's defaults, since the handler is not registered yet."""
    importing, go_on = threading.Event(), threading.Event()

    def slow_import(module: str) -> None:
        if registrations.registered():
            return
        importing.set()
        assert go_on.wait(60)
        make(max_attempts=9)

    monkeypatch.setattr(registrations, "_import", slow_import)
    monkeypatch.setattr(registrations, "_discovered", False)
    found: list[Any] = []
    first = threading.Thread(target=registrations.autodiscover)
    second = threading.Thread(target=lambda: found.append(registrations.registration_for("mail")))
    first.start()
    assert importing.wait(60)
    second.start()
    second.join(0.05)
    assert found == []
    go_on.set()
    for thread in (first, second):
        thread.join(60)
    assert [registration.options["max_attempts"] for registration in found] == [9]


def test_an_enqueue_while_a_module_is_imported_goes_on_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr(registrations, "_import", lambda module: jobs.append(enqueue("mail", 1)))
    monkeypatch.setattr(registrations, "_discovered", False)
    with override_settings(ALKSTORE={"REQUIRE_HANDLER": True}):
        registrations.autodiscover()
    assert {job.max_attempts for job in jobs} == {3}


def test_a_payload_by_name_with_a_key_job_fails_the_attempt() -> None:
    @handler("mail", unpack=True)
    def send(to: str = "", job: object = None) -> None: ...

    job = enqueue("mail", {"job": 1})
    run_pending()
    assert "is the argument by which" in str(Job.objects.get(pk=job.pk).last_error)


def test_a_callable_without_a_signature_cannot_be_unpacked() -> None:
    with pytest.raises(InvalidOption, match="unpack needs"):
        handler("mail", unpack=True)(dict)


FIRST_ENQUEUE = """
import django
django.setup()
import sys
assert not any(name.endswith(".alkstore") for name in sys.modules), "imported by setup"
from django.core.management import call_command
call_command("migrate", verbosity=0)
from django_alkstore.services import enqueue
enqueue("anything", None)
assert "tests.ledger.alkstore" in sys.modules
"""


def test_the_first_enqueue_of_a_process_imports_the_modules(tmp_path: Path) -> None:
    environment = {**os.environ, "ALKSTORE_TEST_DATABASE": str(tmp_path / "new.sqlite3")}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_ENQUEUE], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr


BROKEN_AT_FIRST_ENQUEUE = """
import django
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from django.test import override_settings
from django_alkstore.exceptions import UnknownQueue
from django_alkstore.services import enqueue
for queue in ("half", "mail", "mail"):
    print(enqueue(queue, None).queue)
with override_settings(ALKSTORE={"REQUIRE_HANDLER": True}):
    try:
        enqueue("half", None)
    except UnknownQueue as error:
        print(error)
"""


@pytest.mark.parametrize("breakage", ["error", "exit", "syntax", "missing"])
def test_a_module_that_cannot_be_imported_is_logged_once_and_the_first_enqueue_goes_on(
    tmp_path: Path, breakage: str
) -> None:
    environment = {
        **os.environ,
        **variant(FIRST_APPS=["tests.ledger.broken"]),
        "ALKSTORE_TEST_DATABASE": str(tmp_path / "new.sqlite3"),
        "ALKSTORE_TEST_BREAKAGE": breakage,
    }
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_AT_FIRST_ENQUEUE], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    *queues, unknown = done.stdout.splitlines()
    assert queues == ["half", "mail", "mail"]
    assert "Cannot be imported: tests.ledger.broken.alkstore" in unknown
    assert done.stderr.count("Traceback (most recent call last)") == 1


DISCOVERS = """
import django
django.setup()
from django.db import connections
from django.db.backends.signals import connection_created
from django_alkstore import registry
opened = []
connection_created.connect(lambda connection, **_: opened.append(connection.alias), weak=False)
print(len(registry.registrations()) > 1, opened)
connections["default"].ensure_connection()
print(opened)
"""


def test_discovery_opens_no_connection_to_a_database(tmp_path: Path) -> None:
    environment = {**os.environ, "ALKSTORE_TEST_DATABASE": str(tmp_path / "none.sqlite3")}
    done = subprocess.run(
        [sys.executable, "-c", DISCOVERS], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout.splitlines() == ["True []", "['default']"], done.stderr


# Async twins


@pytest.mark.parametrize("commits", [True, False])
def test_the_twins_of_enqueue_tx_join_a_transaction_that_is_open_on_django_s_thread(
    transactional_db: None, commits: bool
) -> None:
    send = make()

    async def play() -> None:
        block = transaction.atomic()
        await sync_to_async(block.__enter__)()
        try:
            await services.aenqueue_tx("mail", 1)
            await services.aoutbox_enqueue_tx("hooks", 2)
            await send.aenqueue_tx(3)
            assert await Job.objects.acount() == 3
        finally:
            if not commits:
                await sync_to_async(transaction.set_rollback)(True)
            await sync_to_async(block.__exit__)(None, None, None)
        with pytest.raises(TransactionRequired):
            await services.aenqueue_tx("mail", 4)

    async_to_sync(play)()
    assert sorted(job.payload for job in Job.objects.all()) == ([1, 2, 3] if commits else [])


def test_the_twins_do_what_their_functions_do(transactional_db: None) -> None:
    send = make()

    async def play() -> None:
        job = await services.aenqueue("mail", 1)
        assert await services.aget_job(job.pk) == job
        assert len(await services.aenqueue_many("mail", [1, 2])) == 2
        keyed, created = await services.aget_or_enqueue("mail", "k", 1)
        assert created
        assert await services.acancel(keyed.pk)
        assert await services.arequeue(keyed.pk)
        later = datetime(2090, 1, 1, tzinfo=UTC)
        assert await services.areschedule(keyed.pk, later)
        assert await services.arun_now(keyed.pk)
        with pytest.raises(TransactionRequired):
            await services.aenqueue_tx("mail", 1)
        with pytest.raises(TransactionRequired):
            await services.aoutbox_enqueue_tx("hooks", 1)
        await services.aschedule("often", "@every 1h", "mail")
        assert await services.apause_schedule("often")
        assert await services.aresume_schedule("often")
        assert await services.aunschedule("often")
        async with services.alock("import") as held:
            assert held.token
            assert await held.arenew()
            assert not await services.alock("import").aacquire()
        assert await services.alock("import").aacquire()
        assert (await services.aqueue_stats())[0].pending == 4
        first, second, third, fourth = await services.aclaim_batch("mail", "me", limit=4)
        assert await first.aheartbeat()
        assert await first.aack()
        assert await second.aretry("no", delay=0)
        assert await third.afail("no")
        assert await fourth.arelease()
        assert await send.aenqueue(1)
        assert await send.aenqueue_many([1])
        assert (await send.aget_or_enqueue("other", 1))[1]

    async_to_sync(play)()


def test_a_twin_is_named_and_documented_after_its_function() -> None:
    assert services.aenqueue.__name__ == "aenqueue"
    assert services.aenqueue.__doc__ == enqueue.__doc__
    assert iscoroutinefunction(services.aenqueue)
    assert JobHandle.aack.__qualname__ == "JobHandle.aack"


def test_an_enqueue_that_is_cancelled_halfway_leaves_a_whole_job_or_none(transactional_db: None) -> None:
    async def play() -> None:
        started = [asyncio.ensure_future(services.aenqueue("mail", {"number": number})) for number in range(20)]
        await asyncio.sleep(0)
        for task in started[::2]:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)

    async_to_sync(play)()
    stored = [job.payload["number"] for job in Job.objects.all()]
    assert set(range(1, 20, 2)) <= set(stored)
    assert len(stored) == len(set(stored))


def test_the_handle_shows_what_the_contract_names_and_nothing_else() -> None:
    shown = {name for name in dir(JobHandle) if not name.startswith("_")}
    values = (
        "id idempotency_key queue payload attempt max_attempts priority enqueued_at run_at lease_expires_at last_error"
    )
    assert shown == {
        *values.split(),
        *["schedule", "fire_at", "lease_lost", "stopping", "ack", "retry", "fail", "heartbeat", "release", "ack_tx"],
        *["aack", "aretry", "afail", "aheartbeat", "arelease"],
    }
