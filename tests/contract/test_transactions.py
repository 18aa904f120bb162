"""Contract, sections 1 and 4: what is enqueued or acked in a caller's transaction shares its fate, and nothing else."""
# ruff: noqa: PT012, PT017  what is raised must leave an open transaction, so the block holds more than one statement

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import IntegrityError, connection, connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client, override_settings
from django.urls import path

from django_alkstore.clock import ManualClock
from django_alkstore.exceptions import DuplicateJob, LeaseLost, TransactionRequired
from django_alkstore.models import Job
from django_alkstore.services import (
    JobHandle,
    claim_batch,
    enqueue,
    enqueue_many,
    enqueue_tx,
    get_job,
    get_or_enqueue,
    outbox,
    outbox_enqueue_tx,
)
from tests.ledger.models import Entry

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

JOINERS: dict[str, Callable[[], object]] = {
    "enqueue": lambda: enqueue("mail", 1),
    "enqueue with a key": lambda: enqueue("mail", 1, unique_key="k"),
    "enqueue_tx": lambda: enqueue_tx("mail", 1),
    "enqueue_many": lambda: enqueue_many("mail", [1]),
    "get_or_enqueue": lambda: get_or_enqueue("mail", "k", 1),
    "outbox.enqueue": lambda: outbox("mail").enqueue(1),
    "outbox.enqueue_tx": lambda: outbox("mail").enqueue_tx(1),
    "outbox_enqueue_tx": lambda: outbox_enqueue_tx("mail", 1),
}
joiner = pytest.mark.parametrize("add", JOINERS.values(), ids=JOINERS.keys())


@contextmanager
def autocommit_off() -> Iterator[None]:
    """`set_autocommit(False)`; what is not committed at the end is rolled back."""
    transaction.set_autocommit(False)
    try:
        yield
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


def on_disk() -> int:
    """The jobs that another connection sees."""
    other = connections.create_connection("default")
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM django_alkstore_job")
            return cursor.fetchone()[0]
    finally:
        other.close()


def reads_first() -> None:
    assert Entry.objects.count() >= 0


# Joining


@joiner
def test_f052_a_job_is_there_with_the_callers_commit_and_not_before(add: Callable[[], object]) -> None:
    exclusive = connection.settings_dict["OPTIONS"].get("transaction_mode") == "EXCLUSIVE"
    wal = "wal" in connection.settings_dict["OPTIONS"]["init_command"]
    with transaction.atomic():
        Entry.objects.create(text="row")
        add()
        if wal or not exclusive:
            assert on_disk() == 0
    assert on_disk() == Entry.objects.count() == 1


@joiner
def test_f053_a_job_is_gone_with_the_callers_rollback(add: Callable[[], object]) -> None:
    with pytest.raises(LookupError), transaction.atomic():
        Entry.objects.create(text="row")
        add()
        raise LookupError
    assert on_disk() == Entry.objects.count() == 0
    with transaction.atomic():
        add()
        transaction.set_rollback(True)
    assert on_disk() == 0


@joiner
def test_a_job_follows_its_savepoint(add: Callable[[], object]) -> None:
    with transaction.atomic():
        Entry.objects.create(text="outer")
        with pytest.raises(LookupError), transaction.atomic():
            add()
            raise LookupError
        with transaction.atomic():
            add()
            transaction.set_rollback(True)
        assert Job.objects.count() == 0
        with transaction.atomic():
            add()
    assert on_disk() == Entry.objects.count() == 1


@joiner
@pytest.mark.parametrize("first", [reads_first, lambda: None], ids=["after a read", "as the first"])
def test_without_autocommit_a_job_is_there_with_the_commit_and_gone_with_the_rollback(
    add: Callable[[], object], first: Callable[[], None]
) -> None:
    with autocommit_off():
        first()
        add()
        transaction.rollback()
        assert Job.objects.count() == 0
        transaction.rollback()
    assert on_disk() == 0, "committed before the caller did"
    with autocommit_off():
        first()
        add()
        transaction.commit()
    assert on_disk() == 1


@joiner
def test_without_autocommit_an_atomic_block_inside_shares_the_fate_of_the_whole(add: Callable[[], object]) -> None:
    with autocommit_off():
        Entry.objects.create(text="row")
        with transaction.atomic():
            add()
        transaction.rollback()
    assert on_disk() == Entry.objects.count() == 0


@pytest.mark.parametrize("name", ["enqueue", "enqueue with a key", "enqueue_many", "get_or_enqueue", "outbox.enqueue"])
def test_outside_a_transaction_a_job_is_committed_at_once(name: str) -> None:
    JOINERS[name]()
    assert on_disk() == 1
    assert not connection.in_atomic_block
    assert connection.get_autocommit()


@pytest.mark.parametrize("name", ["enqueue_tx", "outbox.enqueue_tx", "outbox_enqueue_tx"])
def test_what_joins_a_transaction_refuses_to_work_without_one(name: str) -> None:
    with pytest.raises(TransactionRequired) as raised:
        JOINERS[name]()
    assert isinstance(raised.value, Exception)
    assert on_disk() == 0


@pytest.mark.parametrize("name", ["enqueue_tx", "outbox.enqueue_tx", "outbox_enqueue_tx"])
def test_f057_a_transaction_on_another_database_is_none(name: str) -> None:
    with transaction.atomic(using="other"), pytest.raises(TransactionRequired):
        JOINERS[name]()
    with transaction.atomic(), pytest.raises(TransactionRequired):
        enqueue_tx("mail", 1, using="other")
    with transaction.atomic(), override_settings(ALKSTORE={"DATABASE": "other"}), pytest.raises(TransactionRequired):
        JOINERS[name]()
    with transaction.atomic(using="other"):
        enqueue_tx("mail", 1, using="other")
    assert on_disk() == 0
    assert Job.objects.using("other").count() == 1


def test_f057_a_job_does_not_wait_for_a_transaction_on_another_database() -> None:
    with pytest.raises(LookupError), transaction.atomic(using="other"):
        enqueue("mail", 1)
        raise LookupError
    assert on_disk() == 1


def test_f053_where_the_insert_fails_the_business_row_goes_too() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON django_alkstore_job BEGIN SELECT RAISE(ABORT, 'refused'); END"
        )
    try:
        with pytest.raises(IntegrityError, match="refused"), transaction.atomic():
            Entry.objects.create(text="row")
            enqueue_tx("mail", 1)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TRIGGER refuse")
    assert Entry.objects.count() == Job.objects.count() == 0


# The caller's transaction stays usable


@pytest.mark.parametrize("off", [False, True], ids=["atomic", "autocommit off"])
def test_f060_a_taken_key_leaves_the_callers_transaction_usable(off: bool) -> None:
    holder = enqueue("mail", 1, unique_key="k")

    def body() -> None:
        Entry.objects.create(text="before")
        with pytest.raises(DuplicateJob) as raised:
            enqueue("mail", 2, unique_key="k")
        assert raised.value.job_id == holder.id
        assert get_or_enqueue("mail", "k", 3) == (holder, False)
        Entry.objects.create(text="after")
        enqueue("mail", 4)

    if off:
        with autocommit_off():
            body()
            transaction.commit()
    else:
        with transaction.atomic():
            body()
    assert [entry.text for entry in Entry.objects.order_by("id")] == ["before", "after"]
    assert sorted(Job.objects.values_list("id", "payload"))[0] == (holder.id, 1)
    assert Job.objects.count() == 2


def test_f060_a_key_taken_in_the_same_transaction_is_taken() -> None:
    with transaction.atomic():
        first = enqueue("mail", 1, unique_key="k")
        with pytest.raises(DuplicateJob) as raised:
            enqueue("mail", 2, unique_key="k")
        assert raised.value.job_id == first.id
    assert Job.objects.count() == 1


def test_f062_a_callback_of_the_caller_that_raises_costs_no_job() -> None:
    def broken() -> None:
        raise LookupError

    with pytest.raises(LookupError), transaction.atomic():
        transaction.on_commit(broken)
        enqueue("mail", 1)
        outbox_enqueue_tx("mail", 1)
    assert on_disk() == 2


# ATOMIC_REQUESTS


def shop(request: HttpRequest) -> HttpResponse:
    entry = Entry.objects.create(text="order")
    enqueue("mail", entry.pk)
    outbox_enqueue_tx("mail", entry.pk)
    if request.GET.get("fail"):
        raise LookupError("declined")
    return HttpResponse("ok")


urlpatterns = [path("shop/", shop)]


@override_settings(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["testserver"])
def test_f056_with_atomic_requests_a_job_exists_exactly_when_its_request_succeeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    client = Client(raise_request_exception=False)
    for number in range(6):
        response = client.get("/shop/", {"fail": "1"} if number % 3 == 0 else {})
        assert response.status_code == (500 if number % 3 == 0 else 200)
    assert Entry.objects.count() == 4
    kept = sorted(Entry.objects.values_list("pk", flat=True))
    for queue in ("mail", "__alkstore_outbox:mail"):
        assert sorted(Job.objects.filter(queue=queue).values_list("payload", flat=True)) == kept


# Acking in the handler's own transaction


def claimed(**options: Any) -> JobHandle:
    enqueue("mail", None, **options)
    [handle] = claim_batch("mail", "w")
    return handle


def test_the_effect_and_the_ack_commit_together_or_not_at_all() -> None:
    handle = claimed()
    with pytest.raises(LookupError), transaction.atomic():
        Entry.objects.create(text="effect", job_id=handle.id)
        handle.ack_tx()
        raise LookupError
    assert (Entry.objects.count(), get_job(handle.id).state) == (0, "processing")
    with transaction.atomic():
        Entry.objects.create(text="effect", job_id=handle.id)
        handle.ack_tx()
    assert (Entry.objects.count(), get_job(handle.id).state) == (1, "completed")


def test_ack_tx_refuses_a_transaction_on_another_database() -> None:
    handle = claimed()
    with transaction.atomic(using="other"), pytest.raises(TransactionRequired):
        handle.ack_tx()
    assert get_job(handle.id).state == "processing"


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("savepoint", [True, False])
def test_a_lost_lease_rolls_the_whole_transaction_back_also_when_it_is_caught(
    depth: int, savepoint: bool, clock: ManualClock
) -> None:
    handle = claimed()
    clock.advance(300)

    def descend(level: int) -> None:
        Entry.objects.create(text=f"level {level}")
        if level < depth:
            with transaction.atomic(savepoint=savepoint):
                descend(level + 1)
            return
        try:
            handle.ack_tx()
        except LeaseLost as lost:
            assert lost.job_id == handle.id

    before = Job.objects.values().get()
    with transaction.atomic():
        descend(1)
    assert Entry.objects.count() == 0
    assert Job.objects.values().get() == before
    # And the connection is as good as new.
    with transaction.atomic():
        Entry.objects.create(text="next")
    assert Entry.objects.count() == 1


def test_a_lost_lease_caught_outside_its_savepoint_rolls_everything_back_too(clock: ManualClock) -> None:
    handle = claimed()
    clock.advance(300)
    with transaction.atomic():
        Entry.objects.create(text="outer")
        with pytest.raises(LeaseLost), transaction.atomic():
            Entry.objects.create(text="inner")
            handle.ack_tx()
    assert Entry.objects.count() == 0


@pytest.mark.parametrize("inside", [False, True], ids=["plain", "in an atomic block"])
def test_a_lost_lease_without_autocommit_rolls_everything_back(inside: bool, clock: ManualClock) -> None:
    handle = claimed()
    clock.advance(300)
    with autocommit_off():
        Entry.objects.create(text="first")
        if inside:
            with transaction.atomic():
                Entry.objects.create(text="second")
                with pytest.raises(LeaseLost):
                    handle.ack_tx()
        else:
            with pytest.raises(LeaseLost):
                handle.ack_tx()
        transaction.commit()
    assert Entry.objects.count() == 0
    assert get_job(handle.id).state == "processing"


@pytest.mark.parametrize("commits", [True, False])
def test_ack_tx_joins_a_transaction_without_autocommit(commits: bool) -> None:
    handle = claimed()
    with autocommit_off():
        Entry.objects.create(text="effect", job_id=handle.id)
        handle.ack_tx()
        if commits:
            transaction.commit()
    assert Entry.objects.count() == int(commits)
    assert get_job(handle.id).state == ("completed" if commits else "processing")


CALLS: dict[str, Callable[[JobHandle], bool]] = {
    "ack": lambda handle: handle.ack(),
    "retry": lambda handle: handle.retry("x"),
    "fail": lambda handle: handle.fail("x"),
    "heartbeat": lambda handle: handle.heartbeat(1000),
    "release": lambda handle: handle.release(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("off", [False, True], ids=["atomic", "autocommit off"])
def test_a_handles_call_in_the_callers_transaction_is_rolled_back_with_it(
    call: Callable[[JobHandle], bool], off: bool
) -> None:
    handle = claimed()
    before = Job.objects.values().get()
    if off:
        with autocommit_off():
            assert call(handle) is True
            transaction.rollback()
    else:
        with transaction.atomic():
            assert call(handle) is True
            transaction.set_rollback(True)
    assert Job.objects.values().get() == before
    # The lease is what it was, and so is the handle's right to it.
    assert handle.ack() is True


@pytest.mark.django_db(transaction=False)
def test_in_a_test_case_claims_work_and_ack_tx_finds_its_transaction() -> None:
    handle = claimed()
    with transaction.atomic(), pytest.raises(RuntimeError):
        claim_batch("mail", "w")
    with transaction.atomic():
        handle.ack_tx()
    assert get_job(handle.id).state == "completed"


@pytest.mark.django_db(transaction=False)
def test_in_a_test_case_a_lost_lease_rolls_back_the_callers_block_and_not_the_test(clock: ManualClock) -> None:
    Entry.objects.create(text="fixture")
    handle = claimed()
    clock.advance(300)
    with transaction.atomic():
        Entry.objects.create(text="outer")
        with transaction.atomic(), pytest.raises(LeaseLost):
            handle.ack_tx()
    assert [entry.text for entry in Entry.objects.all()] == ["fixture"]
