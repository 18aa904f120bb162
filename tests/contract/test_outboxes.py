"""Section 7: outboxes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, OperationalError, connection, connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from django_alkstore.clock import ManualClock
from django_alkstore.exceptions import (
    Discard,
    DuplicateJob,
    InvalidName,
    InvalidOption,
    InvalidPayload,
    ReservedName,
    Retry,
    Snooze,
    TransactionRequired,
)
from django_alkstore.models import Job, Schedule
from django_alkstore.services import (
    JobHandle,
    Outbox,
    cancel,
    claim_batch,
    enqueue,
    enqueue_many,
    enqueue_tx,
    fire_schedule,
    get_job,
    get_or_enqueue,
    next_claim_at,
    outbox,
    outbox_enqueue_tx,
    queue_stats,
    requeue,
    schedule,
    sweep,
)
from tests.ledger.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)

QUEUE = "__alkstore_outbox:mail"


class Boom(Exception):
    pass


@contextmanager
def autocommit_off() -> Iterator[None]:
    transaction.set_autocommit(False)
    try:
        yield
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


def put(payload: Any = 1, **options: Any) -> Job:
    return outbox("mail").enqueue(payload, **options)


def accept(job: JobHandle) -> None:
    """A delivery that succeeds."""


def reload(job: Job) -> Job:
    found = get_job(job.pk)
    assert found is not None
    return found


# Names, and the queue that nobody else reaches


def test_an_outbox_is_the_queue_of_its_derived_name() -> None:
    box = outbox("mail")
    assert isinstance(box, Outbox)
    assert put().queue == QUEUE


@pytest.mark.parametrize("name", ["m", "x" * 128, "a.b_c-d:e/f@g+h"])
def test_every_name_of_the_rule_is_an_outbox(name: str) -> None:
    box = outbox(name)
    job = box.enqueue(1)
    assert reload(job).queue == f"__alkstore_outbox:{name}"
    assert box.run_once("w", accept) is True


BAD_NAMES = [(n, InvalidName) for n in ("", "x" * 129, "a b", "-a", "é", "a\n", None, 5, b"a")]
RESERVED = [(n, ReservedName) for n in ("__alkstore_outbox:mail", "__alkstore_", "__alkstore_scheduler")]


@pytest.mark.parametrize(("name", "error"), [*BAD_NAMES, *RESERVED])
@pytest.mark.parametrize("inside", [True, False])
def test_a_name_outside_the_rule_or_of_the_library_is_refused(name: Any, error: type[Exception], inside: bool) -> None:
    with pytest.raises(error) as caught:
        outbox(name)
    if error is InvalidName:
        assert not isinstance(caught.value, ReservedName)
    if inside:
        with transaction.atomic(), pytest.raises(error):
            outbox_enqueue_tx(name, 1)
    else:
        with pytest.raises((error, TransactionRequired)):
            outbox_enqueue_tx(name, 1)
    assert Job.objects.count() == 0


@pytest.mark.parametrize(
    "reach",
    [
        lambda: enqueue(QUEUE, 1),
        lambda: enqueue_tx(QUEUE, 1),
        lambda: enqueue_many(QUEUE, [1, 2]),
        lambda: get_or_enqueue(QUEUE, "key", 1),
        lambda: claim_batch(QUEUE, "w"),
        lambda: claim_batch(QUEUE, "w", 10),
        lambda: next_claim_at(QUEUE),
        lambda: sweep(QUEUE),
        lambda: schedule("report", "@every 1h", QUEUE),
    ],
    ids=["enqueue", "enqueue_tx", "enqueue_many", "get_or_enqueue", "claim", "claim 10", "next", "sweep", "schedule"],
)
@pytest.mark.parametrize("inside", [True, False])
def test_the_public_functions_do_not_reach_an_outboxs_queue(reach: Callable[[], object], inside: bool) -> None:
    job = put()
    before = list(Job.objects.values())
    if inside:
        with transaction.atomic(), pytest.raises(ReservedName):
            reach()
    else:
        with pytest.raises(ReservedName):
            reach()
    assert list(Job.objects.values()) == before
    assert Schedule.objects.count() == 0
    assert outbox("mail").run_once("w", accept) is True
    assert reload(job).state == "completed"


def test_get_job_cancel_and_requeue_take_an_outboxs_job_by_its_id() -> None:
    job = put()
    assert reload(job).queue == QUEUE
    assert cancel(job.pk) is True
    assert outbox("mail").run_once("w", accept) is False
    assert requeue(job.pk) is True
    assert outbox("mail").run_once("w", accept) is True


def test_queue_stats_count_an_outbox_under_its_queue() -> None:
    put()
    (stats,) = queue_stats()
    assert (stats.queue, stats.pending) == (QUEUE, 1)


def test_outboxes_and_queues_of_the_same_name_have_nothing_to_do_with_each_other() -> None:
    put("to the outbox")
    outbox("post").enqueue("to another")
    enqueue("mail", "to the queue")
    seen: list[Any] = []
    while outbox("mail").run_once("w", lambda job: seen.append(job.payload)):
        pass
    assert seen == ["to the outbox"]
    assert [job.payload for job in claim_batch("mail", "w", 10)] == ["to the queue"]


# What is stamped


@pytest.mark.parametrize("way", ["function", "enqueue_tx", "enqueue"])
@pytest.mark.parametrize("own", [False, True])
def test_sixty_seconds_five_attempts_and_five_seconds_are_stamped_unless_the_call_says_otherwise(
    clock: ManualClock, way: str, own: bool
) -> None:
    options: dict[str, Any] = (
        {"visibility_timeout": timedelta(seconds=7), "max_attempts": 2, "backoff_base": 0, "priority": 3}
        | {"expires_in": 100, "delay": 10, "unique_key": "k"}
        if own
        else {}
    )
    with transaction.atomic():
        if way == "function":
            job = outbox_enqueue_tx("mail", {"to": ["a"]}, **options)
        elif way == "enqueue_tx":
            job = outbox("mail").enqueue_tx({"to": ["a"]}, **options)
        else:
            job = outbox("mail").enqueue({"to": ["a"]}, **options)
    assert isinstance(job, Job)
    expected = (7.0, 2, 0.0, 3) if own else (60.0, 5, 5.0, 0)
    stored = Job.objects.get()
    for seen in (job, stored):
        assert (seen.visibility_timeout, seen.max_attempts, seen.backoff_base, seen.priority) == expected
        assert seen.payload == {"to": ["a"]}
        assert seen.run_at == clock.now() + timedelta(seconds=10 if own else 0)
        assert seen.expires_at == (seen.run_at + timedelta(seconds=100) if own else None)
        assert seen.unique_key == ("k" if own else None)
    names = [field.attname for field in Job._meta.concrete_fields]
    assert [getattr(job, name) for name in names] == [getattr(stored, name) for name in names]


@pytest.mark.parametrize("way", ["function", "enqueue_tx", "enqueue"])
def test_an_outboxs_own_defaults_come_from_the_settings_and_the_calls_options_win(settings: Any, way: str) -> None:
    configured = {"max_attempts": 12, "backoff_base": 30, "expires_in": timedelta(days=1)}
    settings.ALKSTORE = {"QUEUES": {"outbox:mail": configured, "outbox:other": {"max_attempts": 1}}}
    ways: dict[str, Callable[..., Job]] = {
        "function": lambda **options: outbox_enqueue_tx("mail", None, **options),
        "enqueue_tx": lambda **options: outbox("mail").enqueue_tx(None, **options),
        "enqueue": lambda **options: outbox("mail").enqueue(None, **options),
    }
    with transaction.atomic():
        made = [ways[way](), ways[way](max_attempts=2), ways[way](max_attempts=None)]
    for job, attempts in zip(made, (12, 2, 12), strict=True):
        assert (job.max_attempts, job.visibility_timeout, job.backoff_base) == (attempts, 60.0, 30.0)
        assert job.expires_at == job.run_at + timedelta(days=1)


def test_a_queue_that_is_really_named_like_an_outboxs_key_has_a_queues_defaults(settings: Any) -> None:
    settings.ALKSTORE = {"QUEUES": {"outbox:mail": {"max_attempts": 12, "visibility_timeout": 7}}}
    job = enqueue("outbox:mail", None)
    assert (job.max_attempts, job.visibility_timeout) == (3, 300.0)
    schedule("s", "@every 1h", "outbox:mail")
    fired = fire_schedule("s")
    assert fired is not None
    assert fired.max_attempts == 3


def test_the_defaults_of_queues_are_not_those_of_outboxes(settings: Any) -> None:
    settings.ALKSTORE = {"QUEUES": {"mail": {"max_attempts": 9, "visibility_timeout": 9, "backoff_base": 9}}}
    job = put()
    assert (job.visibility_timeout, job.max_attempts, job.backoff_base) == (60.0, 5, 5.0)


@pytest.mark.parametrize("way", ["function", "enqueue_tx", "enqueue"])
@pytest.mark.parametrize(
    ("payload", "options", "error"),
    [
        ({1: 2}, {}, InvalidPayload),
        (object(), {}, InvalidPayload),
        (float("nan"), {}, InvalidPayload),
        (1, {"max_attempts": 0}, InvalidOption),
        (1, {"visibility_timeout": 0}, InvalidOption),
        (1, {"backoff_base": -1}, InvalidOption),
        (1, {"delay": -1}, InvalidOption),
        (1, {"expires_in": 0}, InvalidOption),
        (1, {"priority": 2**31}, InvalidOption),
    ],
)
def test_what_is_invalid_is_refused_and_the_callers_transaction_goes_on(
    way: str, payload: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with transaction.atomic():
        Entry.objects.create(text="the caller's")
        with pytest.raises(error):  # noqa: PT012
            if way == "function":
                outbox_enqueue_tx("mail", payload, **options)
            elif way == "enqueue_tx":
                outbox("mail").enqueue_tx(payload, **options)
            else:
                outbox("mail").enqueue(payload, **options)
    assert Job.objects.count() == 0
    assert Entry.objects.count() == 1


# In the caller's transaction

PUT_TX: list[Callable[..., Job]] = [
    lambda **options: outbox_enqueue_tx("mail", 1, **options),
    lambda **options: outbox("mail").enqueue_tx(1, **options),
]
both_ways = pytest.mark.parametrize("put_tx", PUT_TX, ids=["function", "method"])
with_or_without_key = pytest.mark.parametrize("options", [{}, {"unique_key": "order-1"}], ids=["plain", "keyed"])


@both_ways
@with_or_without_key
def test_outside_a_transaction_it_is_refused_and_nothing_is_written(
    put_tx: Callable[..., Job], options: dict[str, Any]
) -> None:
    with pytest.raises(TransactionRequired):
        put_tx(**options)
    assert Job.objects.count() == 0


@both_ways
@with_or_without_key
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("rows_first", [True, False])
def test_the_job_exists_exactly_when_the_business_rows_do(
    put_tx: Callable[..., Job], options: dict[str, Any], commit: bool, rows_first: bool
) -> None:
    try:
        with transaction.atomic():
            if rows_first:
                Entry.objects.create(text="order")
            put_tx(**options)
            if not rows_first:
                Entry.objects.create(text="order")
            if not commit:
                raise Boom
    except Boom:
        assert not commit
    assert (Entry.objects.count(), Job.objects.count()) == ((1, 1) if commit else (0, 0))


@both_ways
@with_or_without_key
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("rows_first", [True, False])
def test_autocommit_off_is_an_open_transaction_too(
    put_tx: Callable[..., Job], options: dict[str, Any], commit: bool, rows_first: bool
) -> None:
    with autocommit_off():
        if rows_first:
            Entry.objects.create(text="order")
        put_tx(**options)
        if not rows_first:
            Entry.objects.create(text="order")
        (transaction.commit if commit else transaction.rollback)()
    assert (Entry.objects.count(), Job.objects.count()) == ((1, 1) if commit else (0, 0))


@both_ways
@with_or_without_key
@pytest.mark.parametrize("inner_commits", [True, False])
@pytest.mark.parametrize("outer_commits", [True, False])
def test_savepoints_take_the_job_with_them(
    put_tx: Callable[..., Job], options: dict[str, Any], inner_commits: bool, outer_commits: bool
) -> None:
    try:
        with transaction.atomic():
            Entry.objects.create(text="outer")
            try:
                with transaction.atomic():
                    Entry.objects.create(text="inner")
                    put_tx(**options)
                    if not inner_commits:
                        raise Boom
            except Boom:
                pass
            if not outer_commits:
                raise Boom
    except Boom:
        pass
    kept = inner_commits and outer_commits
    assert Job.objects.count() == kept
    assert Entry.objects.filter(text="inner").count() == kept
    assert Entry.objects.filter(text="outer").count() == outer_commits


def test_a_business_error_after_the_enqueue_takes_the_job_away() -> None:
    Entry.objects.create(text="there", job_id=1)
    with pytest.raises(IntegrityError), transaction.atomic():  # noqa: PT012
        outbox_enqueue_tx("mail", 1)
        Entry.objects.create(text="again", job_id=1)
    assert Job.objects.count() == 0


def test_nobody_delivers_a_job_before_its_transaction_is_committed() -> None:
    second = connections.create_connection("default")
    second.connect()
    try:
        with transaction.atomic():
            outbox_enqueue_tx("mail", 1)
            with second.cursor() as cursor:
                cursor.execute(f"SELECT count(*) FROM {Job._meta.db_table}")
                assert cursor.fetchone() == (0,)
    except OperationalError:
        # An EXCLUSIVE transaction in rollback-journal mode: nobody even reads meanwhile.
        assert "EXCLUSIVE" in str(connection.settings_dict["OPTIONS"].get("transaction_mode"))
    finally:
        second.close()


@both_ways
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_f057_a_transaction_on_another_database_is_none(put_tx: Callable[..., Job]) -> None:
    with transaction.atomic(using="other"), pytest.raises(TransactionRequired):
        put_tx()
    with transaction.atomic(), pytest.raises(TransactionRequired, match="other"):
        outbox_enqueue_tx("mail", 1, using="other")
    with transaction.atomic(), pytest.raises(TransactionRequired):
        outbox("mail", using="other").enqueue_tx(1)
    assert Job.objects.using("default").count() == 0
    assert Job.objects.using("other").count() == 0


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize("commit", [True, False])
def test_an_outbox_of_another_database_joins_that_ones_transaction(commit: bool) -> None:
    box = outbox("mail", using="other")
    try:
        with transaction.atomic(using="other"):
            outbox_enqueue_tx("mail", 1, using="other")
            box.enqueue_tx(2)
            if not commit:
                raise Boom
    except Boom:
        pass
    seen: list[Any] = []
    while box.run_once("w", lambda job: seen.append(job.payload)):
        pass
    assert seen == ([1, 2] if commit else [])
    assert Job.objects.using("default").count() == 0


def order_view(request: HttpRequest) -> HttpResponse:
    Entry.objects.create(text="order")
    outbox_enqueue_tx("mail", 1)
    if "decline" in request.GET:
        raise Boom
    return HttpResponse("ok")


@transaction.non_atomic_requests
def unprotected_view(request: HttpRequest) -> HttpResponse:
    return order_view(request)


urlpatterns = [path("order", order_view), path("unprotected", unprotected_view)]


@pytest.fixture
def atomic_requests(settings: Any) -> Iterator[Client]:
    settings.ROOT_URLCONF = __name__
    before = connection.settings_dict["ATOMIC_REQUESTS"]
    connection.settings_dict["ATOMIC_REQUESTS"] = True
    yield Client(raise_request_exception=False)
    connection.settings_dict["ATOMIC_REQUESTS"] = before


@pytest.mark.filterwarnings("default")
def test_f056_with_atomic_requests_the_request_is_the_transaction(atomic_requests: Client) -> None:
    assert atomic_requests.get("/order").status_code == 200
    assert (Entry.objects.count(), Job.objects.count()) == (1, 1)
    assert atomic_requests.get("/order?decline").status_code == 500
    assert (Entry.objects.count(), Job.objects.count()) == (1, 1)


def test_a_view_outside_of_atomic_requests_is_refused(atomic_requests: Client) -> None:
    assert atomic_requests.get("/unprotected").status_code == 500
    assert Job.objects.count() == 0


@pytest.mark.parametrize("commit", [True, False])
def test_enqueue_joins_an_open_transaction_and_commits_by_itself_otherwise(commit: bool) -> None:
    outbox("mail").enqueue("by itself")
    try:
        with transaction.atomic():
            outbox("mail").enqueue("joined")
            if not commit:
                raise Boom
    except Boom:
        pass
    assert set(Job.objects.values_list("payload", flat=True)) == ({"by itself", "joined"} if commit else {"by itself"})


def test_a_unique_key_holds_for_one_live_job_of_the_outbox(clock: ManualClock) -> None:
    first = put(unique_key="order-1")
    with transaction.atomic():
        Entry.objects.create(text="the caller's")
        with pytest.raises(DuplicateJob) as caught:
            outbox_enqueue_tx("mail", 2, unique_key="order-1")
        assert caught.value.job_id == first.pk
    assert Entry.objects.count() == 1
    outbox("post").enqueue(1, unique_key="order-1")
    assert outbox("mail").run_once("w", accept)
    assert put(unique_key="order-1").pk != first.pk


# Delivering


def test_run_once_is_false_when_there_was_nothing_to_claim(clock: ManualClock) -> None:
    calls: list[Any] = []
    assert outbox("mail").run_once("w", calls.append) is False
    put(delay=10)
    assert outbox("mail").run_once("w", calls.append) is False
    assert calls == []


def test_run_once_delivers_one_job_and_acks_it(clock: ManualClock) -> None:
    first, second = put({"n": 1}), put({"n": 2})
    clock.advance(3)
    seen: list[JobHandle] = []
    assert outbox("mail").run_once("worker-1", seen.append) is True
    (job,) = seen
    assert isinstance(job, JobHandle)
    assert (job.id, job.queue, job.payload, job.attempt, job.max_attempts) == (first.pk, QUEUE, {"n": 1}, 1, 5)
    assert (job.enqueued_at, job.run_at) == (first.created_at, first.run_at)
    assert job.lease_expires_at == clock.now() + timedelta(seconds=60)
    done = reload(first)
    assert (done.state, done.attempts, done.finished_at, done.errors) == ("completed", 1, clock.now(), [])
    assert reload(second).state == "pending"


def test_while_it_is_delivered_the_job_is_leased_to_the_worker_and_no_transaction_is_open(clock: ManualClock) -> None:
    job = put()
    seen = []

    def look(handle: JobHandle) -> None:
        row = reload(job)
        seen.append((row.state, row.worker_id, row.attempts, connection.in_atomic_block))
        assert outbox("mail").run_once("another", accept) is False

    assert outbox("mail").run_once("worker-1", look)
    assert seen == [("processing", "worker-1", 1, False)]


class Deliverer:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def deliver(self, job: JobHandle) -> str:
        self.seen.append(job.id)
        return "whatever it returns"


def test_an_object_with_deliver_is_a_delivery() -> None:
    job, deliverer = put(), Deliverer()
    assert outbox("mail").run_once("w", deliverer) is True
    assert deliverer.seen == [job.pk]
    assert reload(job).state == "completed"


@pytest.mark.parametrize("returned", [None, False, True, 0, "no", {"a": object}], ids=repr)
def test_whatever_a_delivery_returns_is_an_ack(returned: object) -> None:
    job = put()
    assert outbox("mail").run_once("w", lambda _: returned) is True
    assert reload(job).state == "completed"


class Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


def fail_with(error: BaseException) -> Callable[[JobHandle], None]:
    def deliver(job: JobHandle) -> None:
        raise error

    return deliver


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (ValueError("no route"), "ValueError: no route"),
        (OperationalError("database is locked"), "OperationalError: database is locked"),
        (StopIteration(), "StopIteration"),
        (ValueError("nul \x00 and \ud800"), "ValueError: nul \ufffd and \ufffd"),
        (ExceptionGroup("two", [ValueError("a"), ValueError("b")]), "ExceptionGroup: two (2 sub-exceptions)"),
    ],
    ids=str,
)
def test_an_exception_is_a_failed_attempt_with_its_error_and_traceback_kept(
    clock: ManualClock, error: Exception, kept: str
) -> None:
    job = put()
    assert outbox("mail").run_once("w", fail_with(error)) is True
    row = reload(job)
    assert (row.state, row.attempts, row.last_error) == ("pending", 1, kept)
    (entry,) = row.errors
    assert (entry["attempt"], entry["error"]) == (1, kept)
    assert "fail_with" in entry["traceback"] or "deliver" in entry["traceback"]
    assert row.run_at == clock.now() + timedelta(seconds=5)


def test_an_exception_without_a_text_does_not_harm_the_loop() -> None:
    job = put()
    assert outbox("mail").run_once("w", fail_with(Hostile())) is True
    row = reload(job)
    assert row.state == "pending"
    assert str(row.last_error).startswith("Hostile")


def test_it_is_tried_again_by_the_curve_under_one_id_and_the_last_failure_leaves_it_dead_with_that_error(
    clock: ManualClock,
) -> None:
    job = put("x")
    ids = []

    def fail(handle: JobHandle) -> None:
        ids.append(handle.id)
        assert handle.last_error == (None if handle.attempt == 1 else f"Boom: attempt {handle.attempt - 1}")
        raise Boom(f"attempt {handle.attempt}")

    box = outbox("mail")
    for attempt, wait in enumerate([5, 10, 20, 40, None], start=1):
        assert box.run_once("w", fail) is True
        row = reload(job)
        assert row.last_error == f"Boom: attempt {attempt}"
        assert box.run_once("w", fail) is False
        if wait is not None:
            assert (row.state, row.run_at) == ("pending", clock.now() + timedelta(seconds=wait))
            clock.advance(wait - 0.001)
            assert box.run_once("w", fail) is False
            clock.advance(0.001)
    assert (row.state, row.finished_at) == ("dead", clock.now())
    assert [(entry["attempt"], entry["error"]) for entry in row.errors] == [
        (n, f"Boom: attempt {n}") for n in range(1, 6)
    ]
    clock.advance(86_400)
    assert box.run_once("w", fail) is False
    assert ids == [job.pk] * 5


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("attempts", [1, 5])
def test_an_interrupt_gives_the_job_back_unspent_and_goes_on_up(
    clock: ManualClock, error: BaseException, attempts: int
) -> None:
    job = put(max_attempts=attempts)
    with pytest.raises(type(error)) as caught:
        outbox("mail").run_once("w", fail_with(error))
    assert caught.value is error
    row = reload(job)
    assert (row.state, row.attempts, row.errors, row.last_error) == ("pending", 0, [], None)
    assert row.run_at == job.run_at
    seen: list[JobHandle] = []
    assert outbox("mail").run_once("w", seen.append) is True
    assert (seen[0].id, seen[0].attempt) == (job.pk, 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_an_interrupt_goes_up_also_where_the_job_cannot_be_given_back(error: BaseException) -> None:
    """The lease brings it back; whoever pressed Ctrl-C must not get a database error instead."""
    options = connection.settings_dict["OPTIONS"]
    before = options["timeout"]
    connection.close()
    options["timeout"] = 0.05
    second = connections.create_connection("default")
    second.connect()

    def interrupt(job: JobHandle) -> None:
        second.cursor().execute("BEGIN IMMEDIATE")
        raise error

    try:
        job = put()
        with pytest.raises(type(error)):
            outbox("mail").run_once("w", interrupt)
        second.cursor().execute("ROLLBACK")
        assert reload(job).state == "processing"
    finally:
        second.close()
        connection.close()
        options["timeout"] = before


def test_retry_says_when(clock: ManualClock) -> None:
    job = put()
    assert outbox("mail").run_once("w", fail_with(Retry("busy", delay=77))) is True
    row = reload(job)
    assert (row.state, row.attempts, row.run_at) == ("pending", 1, clock.now() + timedelta(seconds=77))
    assert "busy" in str(row.last_error)


def test_retry_on_the_last_attempt_is_the_end(clock: ManualClock) -> None:
    job = put(max_attempts=1)
    assert outbox("mail").run_once("w", fail_with(Retry("busy", delay=77))) is True
    assert reload(job).state == "dead"


def test_discard_gives_up_at_once(clock: ManualClock) -> None:
    job = put()
    assert outbox("mail").run_once("w", fail_with(Discard("no such address"))) is True
    row = reload(job)
    assert (row.state, row.attempts) == ("dead", 1)
    assert "no such address" in str(row.last_error)


def test_snooze_spends_no_attempt(clock: ManualClock) -> None:
    job = put(max_attempts=1)
    for _ in range(3):
        assert outbox("mail").run_once("w", fail_with(Snooze(timedelta(seconds=30)))) is True
        row = reload(job)
        assert (row.state, row.attempts, row.errors) == ("pending", 0, [])
        assert row.run_at == clock.now() + timedelta(seconds=30)
        assert outbox("mail").run_once("w", accept) is False
        clock.advance(30)
    assert outbox("mail").run_once("w", accept) is True


@pytest.mark.parametrize("kind", [Retry, Snooze])
@pytest.mark.parametrize(
    "delay", [-1, float("nan"), float("inf"), "soon", 2.53e11, timedelta(days=366 * 7_990)], ids=repr
)
def test_a_request_that_is_out_of_range_is_a_failed_attempt(clock: ManualClock, kind: Any, delay: Any) -> None:
    job = put()

    def ask(handle: JobHandle) -> None:
        raise kind(delay=delay)

    assert outbox("mail").run_once("w", ask) is True
    row = reload(job)
    assert row.state == "pending"
    assert len(row.errors) == 1
    clock.advance(3_600)
    assert outbox("mail").run_once("w", accept) is True
    assert reload(job).state == "completed"


# Leases


def test_nothing_renews_the_lease_but_the_deliverys_own_heartbeat(clock: ManualClock) -> None:
    job = put()
    other: list[JobHandle] = []

    def slow(handle: JobHandle) -> None:
        for _ in range(5):
            clock.advance(50)
            assert handle.heartbeat() is True
            assert reload(job).lease_expires_at == clock.now() + timedelta(seconds=60) == handle.lease_expires_at
            assert outbox("mail").run_once("other", other.append) is False
        assert handle.heartbeat(extend=5) is True
        assert reload(job).lease_expires_at == clock.now() + timedelta(seconds=5)

    assert outbox("mail").run_once("w", slow) is True
    assert other == []
    assert reload(job).state == "completed"


@pytest.mark.parametrize("ending", [None, Boom("late"), Snooze(5), Discard("late")], ids=repr)
@pytest.mark.parametrize("taken", [True, False])
def test_a_delivery_that_lost_its_lease_changes_nothing_any_more(
    clock: ManualClock, ending: Exception | None, taken: bool
) -> None:
    job = put()
    inner: list[tuple[int, int]] = []
    states = []

    def too_slow(handle: JobHandle) -> None:
        clock.advance(61)
        if taken:
            outbox("mail").run_once("other", lambda again: inner.append((again.id, again.attempt)))
        assert handle.heartbeat() is False
        states.append(Job.objects.values().get())
        if ending is not None:
            raise ending

    assert outbox("mail").run_once("w", too_slow) is True
    assert Job.objects.values().get() == states[0]
    assert inner == ([(job.pk, 2)] if taken else [])
    if taken:
        assert reload(job).state == "completed"
    else:
        assert outbox("mail").run_once("w", accept) is True
        row = reload(job)
        assert row.state == "completed"
        assert [entry["error"] for entry in row.errors] == ["lease expired"]


def test_a_job_cancelled_during_its_delivery_stays_cancelled(clock: ManualClock) -> None:
    job = put()
    assert outbox("mail").run_once("w", lambda handle: cancel(handle.id)) is True
    assert reload(job).state == "cancelled"


SETTLE: dict[str, tuple[Callable[[JobHandle], object], str]] = {
    "ack": (lambda job: job.ack(), "completed"),
    "fail": (lambda job: job.fail("no"), "dead"),
    "retry": (lambda job: job.retry("later", delay=9), "pending"),
    "release": (lambda job: job.release(), "pending"),
}


@pytest.mark.parametrize("how", SETTLE)
@pytest.mark.parametrize("ending", [None, Boom("afterwards")], ids=repr)
def test_a_delivery_that_settles_its_job_itself_has_the_last_word(
    clock: ManualClock, how: str, ending: Exception | None
) -> None:
    settle, state = SETTLE[how]
    job = put()
    after = []

    def deliver(handle: JobHandle) -> None:
        assert settle(handle) is True
        after.append(Job.objects.values().get())
        if ending is not None:
            raise ending

    assert outbox("mail").run_once("w", deliver) is True
    assert Job.objects.values().get() == after[0]
    assert reload(job).state == state


@pytest.mark.parametrize("commit", [True, False])
def test_ack_tx_in_the_deliverys_own_transaction_commits_or_rolls_back_with_its_rows(
    clock: ManualClock, commit: bool
) -> None:
    job = put()

    def deliver(handle: JobHandle) -> None:
        with transaction.atomic():
            Entry.objects.create(text="effect", job_id=handle.id)
            handle.ack_tx()
            if not commit:
                raise Boom("undone")

    assert outbox("mail").run_once("w", deliver) is True
    row = reload(job)
    if commit:
        assert (row.state, Entry.objects.count()) == ("completed", 1)
    else:
        assert (row.state, row.last_error, Entry.objects.count()) == ("pending", "Boom: undone", 0)


@pytest.mark.parametrize("way", ["atomic", "autocommit off"])
def test_it_is_refused_inside_an_open_transaction_and_claims_nothing(way: str) -> None:
    job = put()
    calls: list[JobHandle] = []
    with transaction.atomic() if way == "atomic" else autocommit_off(), pytest.raises(RuntimeError):
        outbox("mail").run_once("w", calls.append)
    assert calls == []
    assert reload(job).attempts == 0


@pytest.mark.parametrize("worker_id", ["", "x" * 256, None, 5, "nul\x00"], ids=repr)
def test_a_workers_name_that_no_database_can_hold_is_refused(worker_id: Any) -> None:
    job = put()
    with pytest.raises(InvalidOption):
        outbox("mail").run_once(worker_id, accept)
    assert reload(job).attempts == 0


# Order and poison


def test_jobs_go_by_priority_then_by_their_moment_then_by_id(clock: ManualClock) -> None:
    late = put("late", delay=5)
    low, first, second, high = put("low", priority=-1), put("first"), put("second"), put("high", priority=1)
    clock.advance(10)
    seen: list[int] = []
    while outbox("mail").run_once("w", lambda job: seen.append(job.id)):
        pass
    assert seen == [high.pk, first.pk, second.pk, late.pk, low.pk]


def test_f149_poison_at_the_head_does_not_keep_the_good_ones_back_and_dies_after_its_attempts(
    clock: ManualClock,
) -> None:
    box = outbox("mail")
    for number in range(200):
        box.enqueue({"poison": number})
    clock.advance(1)
    good = [box.enqueue({"good": number}).pk for number in range(50)]
    delivered: list[int] = []

    def deliver(job: JobHandle) -> None:
        if "poison" in job.payload:
            raise Boom("poison")
        delivered.append(job.id)

    def one_pass(batch: int) -> int:
        return sum(box.run_once("w", deliver) for _ in range(batch))

    # Two hundred fail first, then none of them is in the way.
    assert [one_pass(100), one_pass(100), one_pass(100)] == [100, 100, 50]
    assert delivered == good
    for _ in range(4):
        clock.advance(3_600)
        while box.run_once("w", deliver):
            pass
    assert Job.objects.filter(state="dead", attempts=5, last_error="Boom: poison").count() == 200
    assert delivered == good
    clock.advance(3_600)
    assert box.run_once("w", deliver) is False


def test_a_stored_payload_that_cannot_be_read_stops_no_other(clock: ManualClock) -> None:
    bad, good = put("x"), put("y")
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {Job._meta.db_table} SET payload = 'not json' WHERE id = %s", [bad.pk])
    seen: list[Any] = []
    for _ in range(3):
        outbox("mail").run_once("w", lambda job: seen.append(job.payload))
    assert seen == ["y"]
    assert reload(good).state == "completed"
    assert Job.objects.values_list("state", flat=True).get(pk=bad.pk) == "dead"
