"""The signals of services that a program calls itself: after the commit, once, and never for what did not happen."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, transaction
from django.dispatch import Signal

from django_alkstore import services, signals
from django_alkstore.dialects.transactions import turn
from django_alkstore.exceptions import DuplicateJob, LeaseLost, LockHeld, Snooze
from django_alkstore.models import Job
from django_alkstore.registry import handler
from django_alkstore.services import JobHandle, LockHandle
from django_alkstore.services.events import tell
from django_alkstore.testing import isolated_registry, run_pending
from tests.ledger.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)

Sent = list[tuple[str, dict[str, Any]]]

ALL = {name: signal for name, signal in vars(signals).items() if isinstance(signal, Signal)}


@pytest.fixture(autouse=True)
def _nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of other tests connect receivers, which tell of cancelled tasks."""
    for signal in ALL.values():
        monkeypatch.setattr(signal, "receivers", [])
        signal.sender_receivers_cache.clear()


LATER = datetime(2030, 1, 1, tzinfo=UTC)


@contextmanager
def listening() -> Iterator[Sent]:
    """Every signal that is sent inside: its name and its arguments."""
    sent: Sent = []
    names = {signal: name for name, signal in ALL.items()}

    def receive(signal: Signal, sender: object, **data: Any) -> None:
        sent.append((names[signal], data))

    for signal in ALL.values():
        signal.connect(receive)
    try:
        yield sent
    finally:
        for signal in ALL.values():
            signal.disconnect(receive)


def pending(**options: Any) -> int:
    return services.enqueue("q", "x", **options).pk


def cancelled() -> int:
    job_id = pending()
    assert services.cancel(job_id)
    return job_id


def declared() -> str:
    return services.schedule("often", "@every 1h", "q").name


def paused() -> str:
    name = declared()
    assert services.pause_schedule(name)
    return name


def held() -> LockHandle:
    lock = services.lock("report", owner="me")
    assert lock.acquire()
    return lock


def free() -> LockHandle:
    return services.lock("report", owner="me")


def nothing() -> None:
    return None


Call = Callable[[Any], object]
Expected = Callable[[Any, Any], dict[str, Any]]


def of_the_lock(lock: Any, _: object) -> dict[str, Any]:
    return {"name": "report", "owner": "me", "token": lock.token}


def its_id(job_id: Any, _: object) -> dict[str, Any]:
    return {"job_id": job_id}


def its_name(name: Any, _: object) -> dict[str, Any]:
    return {"name": name}


def of_the_new_job(_: object, job: Any) -> dict[str, Any]:
    return {"queue": job.queue, "job_ids": [job.pk]}


OPERATIONS: dict[str, tuple[Callable[[], Any], Call, str, Expected]] = {
    "enqueue": (nothing, lambda _: services.enqueue("q", 1), "jobs_enqueued", of_the_new_job),
    "enqueue, keyed": (nothing, lambda _: services.enqueue("q", 1, unique_key="k"), "jobs_enqueued", of_the_new_job),
    "enqueue_many": (
        nothing,
        lambda _: services.enqueue_many("q", [1, 2, 3]),
        "jobs_enqueued",
        lambda _, ids: {"queue": "q", "job_ids": ids},
    ),
    "get_or_enqueue": (nothing, lambda _: services.get_or_enqueue("q", "k", 1)[0], "jobs_enqueued", of_the_new_job),
    "outbox": (nothing, lambda _: services.outbox("letters").enqueue(1), "jobs_enqueued", of_the_new_job),
    "cancel": (pending, services.cancel, "job_cancelled", its_id),
    "requeue": (cancelled, services.requeue, "job_requeued", its_id),
    "run_now": (lambda: pending(delay=60), services.run_now, "job_run_now", its_id),
    "reschedule": (
        pending,
        lambda job_id: services.reschedule(job_id, LATER),
        "job_rescheduled",
        lambda job_id, _: {"job_id": job_id, "run_at": LATER},
    ),
    "schedule": (nothing, lambda _: services.schedule("often", "@every 1h", "q"), "schedule_declared",
                 lambda _, row: {"name": row.name}),
    "unschedule": (declared, services.unschedule, "schedule_removed", its_name),
    "pause_schedule": (declared, services.pause_schedule, "schedule_paused", its_name),
    "resume_schedule": (paused, services.resume_schedule, "schedule_resumed", its_name),
    "lock.acquire": (free, lambda lock: lock.acquire(), "lock_acquired", of_the_lock),
    "lock.renew": (held, lambda lock: lock.renew(), "lock_renewed", of_the_lock),
    "lock.release": (held, lambda lock: lock.release(), "lock_released", of_the_lock),
    "force_release": (
        held, lambda _: services.force_release("report"), "lock_taken_away", lambda lock, _: {"name": "report"}
    ),
}  # fmt: skip


@pytest.fixture(params=OPERATIONS)
def operation(request: pytest.FixtureRequest) -> tuple[Callable[[], Any], Call, str, Expected]:
    return OPERATIONS[request.param]


def test_each_service_sends_its_event_once(operation: tuple[Callable[[], Any], Call, str, Expected]) -> None:
    prepare, call, name, expected = operation
    given = prepare()
    with listening() as sent:
        result = call(given)
    assert result
    assert sent == [(name, {"using": "default", **expected(given, result)})]


def test_in_a_transaction_it_is_sent_after_the_commit(
    operation: tuple[Callable[[], Any], Call, str, Expected],
) -> None:
    prepare, call, name, expected = operation
    given = prepare()
    with listening() as sent:
        with transaction.atomic():
            with transaction.atomic():
                result = call(given)
            assert sent == []
        assert sent == [(name, {"using": "default", **expected(given, result)})]


def test_what_is_rolled_back_is_not_told(operation: tuple[Callable[[], Any], Call, str, Expected]) -> None:
    prepare, call, _, _ = operation
    given = prepare()
    with listening() as sent:
        with suppress(ZeroDivisionError), transaction.atomic():
            call(given)
            raise ZeroDivisionError
        with transaction.atomic(), suppress(ZeroDivisionError), transaction.atomic():
            call(given)
            raise ZeroDivisionError
    assert sent == []


def test_nobody_listens_so_no_callback_is_registered(
    operation: tuple[Callable[[], Any], Call, str, Expected],
) -> None:
    prepare, call, _, _ = operation
    given = prepare()
    with transaction.atomic():
        call(given)
        assert connection.run_on_commit == []


def test_the_log_stays_quiet(
    operation: tuple[Callable[[], Any], Call, str, Expected], caplog: pytest.LogCaptureFixture
) -> None:
    prepare, call, _, _ = operation
    given = prepare()
    with listening() as sent, caplog.at_level(logging.INFO, "django_alkstore"):
        call(given)
    assert len(sent) == 1
    assert caplog.records == []


UNCHANGED: dict[str, Callable[[], object]] = {
    "cancel": lambda: services.cancel(10**9),
    "requeue": lambda: services.requeue(10**9),
    "run_now": lambda: services.run_now(10**9),
    "reschedule": lambda: services.reschedule(10**9, LATER),
    "enqueue_many": lambda: services.enqueue_many("q", []),
    "unschedule": lambda: services.unschedule("none"),
    "pause_schedule": lambda: services.pause_schedule("none"),
    "resume_schedule": lambda: services.resume_schedule("none"),
    "fire_schedule": lambda: services.fire_schedule("none"),
    "lock.renew": lambda: services.lock("report").renew(),
    "lock.release": lambda: services.lock("report").release(),
    "force_release": lambda: services.force_release("report"),
}


@pytest.mark.parametrize("call", UNCHANGED.values(), ids=UNCHANGED.keys())
def test_a_call_that_changes_nothing_sends_nothing(call: Callable[[], object]) -> None:
    with listening() as sent:
        assert not call()
    assert sent == []


def test_a_refused_call_sends_nothing() -> None:
    services.enqueue("q", 1, unique_key="k")
    held()
    with listening() as sent:
        with pytest.raises(DuplicateJob):
            services.enqueue("q", 1, unique_key="k")
        assert services.get_or_enqueue("q", "k", 1)[1] is False
        assert not free().acquire()
        with pytest.raises(LockHeld), free():
            pass
    assert sent == []


def test_a_lock_as_a_context_manager_sends_both_of_its_events() -> None:
    with listening() as sent:
        with free():
            assert [name for name, _ in sent] == ["lock_acquired"]
        assert [name for name, _ in sent] == ["lock_acquired", "lock_released"]


def test_a_schedule_that_is_fired_by_hand_tells_of_its_job_too() -> None:
    name = declared()
    with listening() as sent:
        job = services.fire_schedule(name)
    assert job is not None
    assert sent == [
        ("jobs_enqueued", {"using": "default", "queue": "q", "job_ids": [job.pk]}),
        ("schedule_fired_now", {"using": "default", "name": name, "job_id": job.pk}),
    ]


def test_in_manual_commit_nothing_is_sent_since_nobody_tells_of_the_commit() -> None:
    with listening() as sent:
        transaction.set_autocommit(False)
        try:
            services.enqueue("q", 1)
            transaction.rollback()
        finally:
            transaction.set_autocommit(True)
    assert sent == []
    assert not Job.objects.exists()


def test_the_async_twins_tell_the_same() -> None:
    async def call() -> None:
        job = await services.aenqueue("q", 1)
        await services.acancel(job.pk)

    with listening() as sent:
        async_to_sync(call)()
    assert [name for name, _ in sent] == ["jobs_enqueued", "job_cancelled"]


def test_a_receiver_sees_the_row_and_its_error_harms_nothing() -> None:
    seen: list[str] = []

    def receive(job_ids: list[int], **_: object) -> None:
        seen.extend(Job.objects.filter(pk__in=job_ids).values_list("state", flat=True))
        raise RuntimeError("of the receiver")

    signals.jobs_enqueued.connect(receive)
    try:
        with transaction.atomic():
            services.enqueue("q", 1)
        assert services.enqueue("q", 2).pk
    finally:
        signals.jobs_enqueued.disconnect(receive)
    assert seen == ["pending", "pending"]


def test_a_receiver_for_an_atomic_handler_s_call_runs_while_others_may_write() -> None:
    """The worker's threads write in turn. A receiver that blocks must not keep the turn."""
    turns: list[bool] = []

    def take_turn() -> None:
        with turn("default", 0) as got:
            turns.append(got)

    def receive(**_: object) -> None:
        other = threading.Thread(target=take_turn)
        other.start()
        other.join()

    signals.jobs_enqueued.connect(receive)
    try:
        with isolated_registry():
            handler("atomic", atomic=True)(lambda job: services.enqueue("q", 1))
            services.enqueue("atomic", None)
            assert len(run_pending("atomic", raise_errors=True)) == 1
    finally:
        signals.jobs_enqueued.disconnect(receive)
    assert turns == [True, True]


ENDS: dict[str, tuple[dict[str, Any], Callable[[JobHandle], bool], str]] = {
    "ack": ({}, lambda job: job.ack(), "job_completed"),
    "retry": ({}, lambda job: job.retry("no"), "job_retried"),
    "the last retry": ({"max_attempts": 1}, lambda job: job.retry("no"), "job_died"),
    "fail": ({}, lambda job: job.fail("no"), "job_died"),
    "release": ({}, lambda job: job.release(), "job_settled"),
}


@pytest.mark.parametrize(("options", "end", "name"), ENDS.values(), ids=ENDS.keys())
def test_a_claim_by_hand_tells_how_it_ended(
    options: dict[str, Any], end: Callable[[JobHandle], bool], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    pending(**options)
    (job,) = services.claim_batch("q", "me")
    with listening() as sent, caplog.at_level(logging.INFO, "django_alkstore"):
        assert end(job)
        assert not end(job)  # the second time changes nothing
    assert [(sent_name, data["job"]) for sent_name, data in sent] == [(name, job)]
    assert sent[0][1]["seconds"] >= 0
    assert sent[0][1].get("error", "no") == "no"
    assert caplog.records == []


def test_an_ack_in_the_caller_s_transaction_is_told_after_its_commit() -> None:
    first, second = pending(), pending()
    jobs = services.claim_batch("q", "me", 2)
    assert [job.id for job in jobs] == [first, second]
    with listening() as sent:
        with suppress(ZeroDivisionError), transaction.atomic():
            jobs[0].ack_tx()
            raise ZeroDivisionError
        with transaction.atomic():
            jobs[1].ack_tx()
            assert sent == []
        assert [(name, data["job"].id) for name, data in sent] == [("job_completed", second)]


def test_a_lost_lease_is_no_end() -> None:
    job_id = pending()
    (job,) = services.claim_batch("q", "me")
    services.cancel(job_id)
    with listening() as sent:
        assert not job.ack()
        with pytest.raises(LeaseLost), transaction.atomic():
            job.ack_tx()
    assert sent == []


def test_run_once_tells_how_its_delivery_ended() -> None:
    outbox = services.outbox("letters")

    def raise_error(job: JobHandle) -> None:
        raise ValueError("no")

    def snooze(job: JobHandle) -> None:
        raise Snooze(timedelta(hours=1))

    for payload in ("ack", "fail", "snooze"):
        outbox.enqueue(payload)
    with listening() as sent:
        assert outbox.run_once("me", lambda job: Entry.objects.create(text="sent"))
        assert outbox.run_once("me", raise_error)
        assert outbox.run_once("me", snooze)
    assert [name for name, _ in sent] == ["job_completed", "job_retried", "job_snoozed"]
    assert isinstance(sent[1][1]["exception"], ValueError)


def test_every_signal_of_a_service_is_tried_above() -> None:
    tried = {name for _, _, name, _ in OPERATIONS.values()} | {"schedule_fired_now"}
    assert tried == {name for name, signal in ALL.items() if signal not in signals._words}
    assert all(signal.receivers == [] for signal in ALL.values() if signal not in signals._words)


def test_a_signal_without_receivers_costs_no_look_at_the_connection() -> None:
    tell("there is no such database", signals.job_cancelled, job_id=1)
