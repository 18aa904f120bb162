"""Contract, section 4: what a handle can do while its lease is held, and that it changes nothing afterwards."""
# ruff: noqa: PT012, PT017  what is raised must leave an open transaction, so the block holds more than one statement

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings

from django_alkstore import backoff, registry, signals
from django_alkstore import clock as clock_module
from django_alkstore.clock import ManualClock
from django_alkstore.exceptions import InvalidOption, LeaseLost, Retry, Snooze, TransactionRequired
from django_alkstore.models import Job
from django_alkstore.services import JobHandle, cancel, claim_batch, enqueue, enqueue_many, get_job, requeue, sweep
from django_alkstore.testing import run_pending

pytestmark = pytest.mark.django_db(transaction=True)


def claim(worker: str = "w") -> JobHandle:
    [handle] = claim_batch("mail", worker)
    return handle


def claimed(**options: Any) -> JobHandle:
    enqueue("mail", {"a": 1}, **options)
    return claim()


def rows() -> list[dict[str, Any]]:
    """Every column of every job."""
    return list(Job.objects.order_by("id").values())


# While the lease is held


def test_an_acked_job_is_completed(clock: ManualClock) -> None:
    handle = claimed()
    clock.advance(1)
    assert handle.ack() is True
    job = get_job(handle.id)
    assert (job.state, job.finished_at, job.attempts, job.last_error, job.errors) == (
        "completed",
        clock.now(),
        1,
        None,
        [],
    )
    assert (job.worker_id, job.lease_expires_at) == (None, None)
    assert claim_batch("mail", "w") == []


def test_a_failed_job_is_dead_whatever_attempts_are_left(clock: ManualClock) -> None:
    handle = claimed(max_attempts=9)
    assert handle.fail("no use") is True
    job = get_job(handle.id)
    assert (job.state, job.last_error, job.attempts, job.finished_at) == ("dead", "no use", 1, clock.now())
    assert job.errors == [
        {"attempt": 1, "at": clock.now().isoformat(), "error": "no use", "traceback": "", "exception": ""}
    ]


def test_a_retried_job_is_pending_again_after_the_delay(clock: ManualClock) -> None:
    handle = claimed()
    clock.advance(1)
    assert handle.retry("later", delay=timedelta(minutes=1)) is True
    job = get_job(handle.id)
    assert (job.state, job.attempts, job.last_error, job.finished_at) == ("pending", 1, "later", None)
    assert (job.worker_id, job.lease_expires_at) == (None, None)
    assert job.run_at == clock.now() + timedelta(minutes=1)
    clock.advance(59.999_999)
    assert claim_batch("mail", "w") == []
    clock.advance(0.000_001)
    again = claim()
    assert (again.attempt, again.last_error) == (2, "later")


def test_a_retry_without_an_error_is_a_failed_attempt_too(clock: ManualClock) -> None:
    handle = claimed(max_attempts=2)
    assert handle.retry() is True
    assert [entry["attempt"] for entry in get_job(handle.id).errors] == [1]
    assert get_job(handle.id).last_error


@pytest.mark.parametrize("delay", [None, 5])
def test_a_retry_with_no_attempts_left_is_death_with_that_error(delay: Any, clock: ManualClock) -> None:
    handle = claimed(max_attempts=1)
    assert handle.retry("last", delay=delay) is True
    job = get_job(handle.id)
    assert (job.state, job.last_error, job.attempts, job.finished_at) == ("dead", "last", 1, clock.now())
    assert claim_batch("mail", "w") == []


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_f046_max_attempts_is_the_number_of_runs(attempts: int, clock: ManualClock) -> None:
    enqueue("mail", None, max_attempts=attempts)
    runs = 0
    while handles := claim_batch("mail", "w"):
        runs += 1
        handles[0].retry("always")
        clock.advance(3600)
    assert runs == attempts
    assert Job.objects.get().state == "dead"


def test_f044_by_default_a_job_that_always_fails_runs_three_times(clock: ManualClock) -> None:
    enqueue("mail", None)
    runs = 0
    for _ in range(30 * 24):
        for handle in claim_batch("mail", "w"):
            runs += 1
            handle.retry("always")
        clock.advance(3600)
    assert (runs, Job.objects.get().state) == (3, "dead")


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({}, [5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600]),
        ({"backoff_base": 0}, [0, 0, 0]),
        ({"backoff_base": 0.5}, [0.5, 1, 2]),
        ({"backoff_base": 10_000}, [3600, 3600]),
    ],
)
def test_the_wait_doubles_from_the_base_up_to_the_cap(options: Any, waits: list[float], clock: ManualClock) -> None:
    enqueue("mail", None, max_attempts=20, **options)
    for wait in waits:
        handle = claim()
        clock.advance(1)
        assert handle.retry("again")
        assert get_job(handle.id).run_at == clock.now() + timedelta(seconds=wait)
        clock.advance(wait)


@override_settings(ALKSTORE={"MAX_BACKOFF": 7})
def test_the_cap_is_the_settings(clock: ManualClock) -> None:
    handle = claimed(backoff_base=5)
    handle.retry("x")
    assert get_job(handle.id).run_at == clock.now() + timedelta(seconds=5)
    clock.advance(5)
    handle = claim()
    handle.retry("x")
    assert get_job(handle.id).run_at == clock.now() + timedelta(seconds=7)


def _next_waits(count: int, **options: Any) -> list[float]:
    """The waits of jobs that all fail at one moment, in seconds."""
    enqueue_many("mail", range(count), **options)
    failed_at = clock_module.now()
    for handle in claim_batch("mail", "w", limit=count):
        assert handle.retry("the server is down")
    return [(job.run_at - failed_at).total_seconds() for job in Job.objects.filter(state="pending")]


def test_jobs_that_failed_in_one_second_do_not_come_back_in_one_second(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "rng", random.Random(1))
    waits = _next_waits(500, backoff_base=100)
    assert min(waits) >= 100
    assert max(waits) <= 110
    in_one_second = Counter(int(wait) for wait in waits)
    assert in_one_second.keys() == set(range(100, 110))
    assert max(in_one_second.values()) < 100


@pytest.mark.parametrize(("jitter", "most"), [(0, 100), (0.5, 150), (1, 200)])
def test_the_extra_is_at_most_the_settings_share_of_the_wait(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, jitter: float, most: float
) -> None:
    monkeypatch.setattr(backoff, "rng", random.Random(1))
    with override_settings(ALKSTORE={"BACKOFF_JITTER": jitter}):
        waits = _next_waits(200, backoff_base=100)
    assert 100 <= min(waits) <= max(waits) <= most
    assert len(set(waits)) == (200 if jitter else 1)


def test_the_extra_comes_on_top_of_the_cap(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "rng", random.Random(1))
    with override_settings(ALKSTORE={"MAX_BACKOFF": 60}):
        waits = _next_waits(200, backoff_base=1_000)
    assert 60 <= min(waits) < 61 < max(waits) <= 66


def test_a_delay_that_was_given_has_no_extra(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "rng", random.Random(1))
    handle = claimed()
    assert handle.retry("x", delay=100)
    assert get_job(handle.id).run_at == clock.now() + timedelta(seconds=100)
    clock.advance(100)

    def ask_for_a_delay(job: JobHandle) -> None:
        raise Retry(delay=7) if job.attempt == 2 else Snooze(9)

    with registry.isolated():
        registry.handler("mail")(ask_for_a_delay)
        run_pending("mail", limit=1)
        assert get_job(handle.id).run_at == clock.now() + timedelta(seconds=7)
        clock.advance(7)
        run_pending("mail", limit=1)
        assert get_job(handle.id).run_at == clock.now() + timedelta(seconds=9)


def test_what_is_announced_is_the_wait_that_is_on_the_row(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "rng", random.Random(1))
    announced: dict[int, float] = {}

    def note(job: JobHandle, retry_in: float, **_: Any) -> None:
        announced[job.id] = retry_in

    enqueue_many("mail", range(20))
    with registry.isolated():
        registry.handler("mail")(_fail)
        signals.job_retried.connect(note)
        try:
            run_pending("mail")
        finally:
            signals.job_retried.disconnect(note)
    stored = {job.id: (job.run_at - clock.now()).total_seconds() for job in Job.objects.all()}
    assert len(set(announced.values())) == 20
    assert announced == pytest.approx(stored, abs=1e-6)


def _fail(job: JobHandle) -> None:
    raise ValueError("no luck")


# The idempotency key


def test_the_idempotency_key_is_the_same_on_every_delivery_and_on_the_job(clock: ManualClock) -> None:
    job = enqueue("mail", None)
    keys = {job.idempotency_key, get_job(job.id).idempotency_key}
    for end in ("retry", "release", "lapse"):
        clock.advance(1_000)
        handle = claim()
        keys.add(handle.idempotency_key)
        if end != "lapse":
            getattr(handle, end)()
    cancel(job.id)
    requeue(job.id)
    keys |= {claim().idempotency_key, get_job(job.id).idempotency_key}
    assert len(keys) == 1
    [key] = keys
    assert isinstance(key, str)
    assert key.isascii()
    assert key.replace("-", "").isdigit()


def test_two_jobs_of_one_moment_have_two_idempotency_keys(clock: ManualClock) -> None:
    enqueue_many("mail", range(100))
    assert len({handle.idempotency_key for handle in claim_batch("mail", "w", limit=100)}) == 100


def test_an_id_that_is_given_out_a_second_time_has_another_idempotency_key(clock: ManualClock) -> None:
    first = enqueue("mail", None)
    with connection.cursor() as cursor:  # as a restored backup does
        cursor.execute("DELETE FROM django_alkstore_job")
        cursor.execute("UPDATE sqlite_sequence SET seq = seq - 1 WHERE name = 'django_alkstore_job'")
    clock.advance(0.000_001)
    second = enqueue("mail", None)
    assert second.id == first.id
    assert second.idempotency_key != first.idempotency_key


def test_f043_the_curve_never_overflows_at_any_attempt(clock: ManualClock) -> None:
    job = enqueue("mail", None, max_attempts=2**31 - 1)
    for attempts in (1023, 10_000, 2**31 - 3):
        Job.objects.filter(pk=job.id).update(attempts=attempts)
        handle = claim()
        assert handle.retry("x")
        assert get_job(job.id).run_at == clock.now() + timedelta(seconds=3600)
        clock.advance(3600)


def test_an_explicit_delay_is_not_capped(clock: ManualClock) -> None:
    handle = claimed()
    handle.retry("x", delay=86_400)
    assert get_job(handle.id).run_at == clock.now() + timedelta(days=1)


def test_a_released_job_is_back_at_once_with_its_attempt_not_counted(clock: ManualClock) -> None:
    enqueue("mail", None, max_attempts=1)
    for _ in range(5):
        handle = claim()
        assert handle.attempt == 1
        clock.advance(1)
        assert handle.release() is True
        job = get_job(handle.id)
        assert (job.state, job.attempts, job.errors, job.last_error) == ("pending", 0, [], None)
        assert (job.worker_id, job.lease_expires_at) == (None, None)


@pytest.mark.parametrize(("extend", "seconds"), [(None, 300), (7, 7), (0.5, 0.5), (timedelta(hours=2), 7200)])
def test_a_heartbeat_ends_the_lease_that_long_from_now(extend: Any, seconds: float, clock: ManualClock) -> None:
    handle = claimed()
    clock.advance(299)
    assert handle.heartbeat(extend) is True
    ends = clock.now() + timedelta(seconds=seconds)
    assert handle.lease_expires_at == get_job(handle.id).lease_expires_at == ends
    assert get_job(handle.id).attempts == 1
    clock.advance(seconds - 0.000_001)
    assert claim_batch("mail", "other") == []
    clock.advance(0.000_001)
    assert claim("other").id == handle.id
    assert handle.heartbeat(extend) is False


def test_f030_a_job_that_renews_in_time_runs_once(clock: ManualClock) -> None:
    handle = claimed(visibility_timeout=3)
    for _ in range(10):
        clock.advance(2)
        assert handle.heartbeat()
        assert claim_batch("mail", "idle") == []
    assert handle.ack()
    assert get_job(handle.id).attempts == 1


# Bounds of the handles' options

DELAYS = [-1, -0.001, math.nan, math.inf, True, "5", Decimal(1), 1e18, 10**400, 10**5000, timedelta.max, timedelta(-1)]
EXTENSIONS = [0, 0.0, timedelta(0), *DELAYS]


def named(value: object) -> str:
    return type(value).__name__ if isinstance(value, int) and value > 10**30 else ascii(value)[:30]


@pytest.mark.parametrize("delay", [*DELAYS, 253_000_000_000], ids=named)
@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_retry_delay_out_of_range_is_refused_and_nothing_changes(
    delay: Any, max_attempts: int, clock: ManualClock
) -> None:
    handle = claimed(max_attempts=max_attempts)
    before = rows()
    with pytest.raises(InvalidOption, match="delay"):
        handle.retry("x", delay=delay)
    assert rows() == before
    assert handle.ack() is True


@pytest.mark.parametrize("extend", [*EXTENSIONS, 253_000_000_000], ids=named)
def test_an_extension_out_of_range_is_refused_and_nothing_changes(extend: Any, clock: ManualClock) -> None:
    handle = claimed()
    before, ends = rows(), handle.lease_expires_at
    with pytest.raises(InvalidOption, match="extend"):
        handle.heartbeat(extend)
    assert rows() == before
    assert handle.lease_expires_at == ends
    assert handle.ack() is True


# Once the lease is lost


def lapse(handle: JobHandle, clock: ManualClock) -> None:
    clock.advance(300)


def lapse_and_sweep(handle: JobHandle, clock: ManualClock) -> None:
    clock.advance(300)
    assert sweep() == 1


def lapse_and_be_taken(handle: JobHandle, clock: ManualClock) -> None:
    clock.advance(300)
    claim("b")


def lapse_and_take_it_oneself(handle: JobHandle, clock: ManualClock) -> None:
    clock.advance(300)
    claim("w")


def release_and_take_it_oneself(handle: JobHandle, clock: ManualClock) -> None:
    assert handle.release()
    claim("w")


def release(handle: JobHandle, clock: ManualClock) -> None:
    assert handle.release()


def retry(handle: JobHandle, clock: ManualClock) -> None:
    assert handle.retry("x", delay=0)


def retry_and_take_it_oneself(handle: JobHandle, clock: ManualClock) -> None:
    assert handle.retry("x", delay=0)
    claim("w")


def be_cancelled(handle: JobHandle, clock: ManualClock) -> None:
    assert cancel(handle.id)


def be_cancelled_requeued_and_taken(handle: JobHandle, clock: ManualClock) -> None:
    assert cancel(handle.id)
    assert requeue(handle.id)
    claim("w")


def be_deleted(handle: JobHandle, clock: ManualClock) -> None:
    Job.objects.filter(pk=handle.id).delete()


def ack(handle: JobHandle, clock: ManualClock) -> None:
    assert handle.ack()


def fail(handle: JobHandle, clock: ManualClock) -> None:
    assert handle.fail("x")


def ack_tx(handle: JobHandle, clock: ManualClock) -> None:
    with transaction.atomic():
        handle.ack_tx()


def be_taken_twice_over(handle: JobHandle, clock: ManualClock) -> None:
    for _ in range(2):
        clock.advance(300)
        claim("w")


def shorten_and_lapse(handle: JobHandle, clock: ManualClock) -> None:
    assert handle.heartbeat(1)
    clock.advance(1)


LOSSES = [
    lapse,
    lapse_and_sweep,
    lapse_and_be_taken,
    lapse_and_take_it_oneself,
    release,
    release_and_take_it_oneself,
    retry,
    retry_and_take_it_oneself,
    be_cancelled,
    be_cancelled_requeued_and_taken,
    be_deleted,
    ack,
    fail,
    ack_tx,
    be_taken_twice_over,
    shorten_and_lapse,
]


def late_ack_tx(handle: JobHandle) -> bool:
    try:
        with transaction.atomic():
            handle.ack_tx()
    except LeaseLost as lost:
        assert lost.job_id == handle.id
        return False
    return True


LATE_CALLS: dict[str, Callable[[JobHandle], bool]] = {
    "ack": lambda handle: handle.ack(),
    "retry": lambda handle: handle.retry("late"),
    "retry now": lambda handle: handle.retry(ValueError("late"), delay=0),
    "fail": lambda handle: handle.fail("late"),
    "heartbeat": lambda handle: handle.heartbeat(),
    "heartbeat far": lambda handle: handle.heartbeat(10_000),
    "release": lambda handle: handle.release(),
    "ack_tx": late_ack_tx,
}


@pytest.mark.parametrize("call", LATE_CALLS.values(), ids=LATE_CALLS.keys())
@pytest.mark.parametrize("lose", LOSSES)
def test_f021_f022_f128_a_late_call_is_false_and_changes_nothing(
    lose: Callable[[JobHandle, ManualClock], None], call: Callable[[JobHandle], bool], clock: ManualClock
) -> None:
    handle = claimed(max_attempts=9)
    enqueue("mail", "bystander", priority=-1, delay=10**6)
    lose(handle, clock)
    before = rows()
    for _ in range(2):
        assert call(handle) is False
        assert rows() == before
    clock.advance(0.5)
    assert call(handle) is False
    assert rows() == before


@pytest.mark.parametrize("lose", LOSSES)
def test_a_loss_of_one_claim_never_costs_a_later_one(
    lose: Callable[[JobHandle, ManualClock], None], clock: ManualClock
) -> None:
    handle = claimed(max_attempts=9)
    lose(handle, clock)
    for call in LATE_CALLS.values():
        call(handle)
    clock.advance(300)
    for later in claim_batch("mail", "w"):
        for call in LATE_CALLS.values():
            assert call(handle) is False
        assert later.ack() is True


@override_settings(ALKSTORE={"KEEP_COMPLETED": 0})
@pytest.mark.parametrize("lose", [lapse_and_be_taken, release_and_take_it_oneself, be_cancelled, ack])
def test_where_an_ack_deletes_a_late_one_deletes_nothing(
    lose: Callable[[JobHandle, ManualClock], None], clock: ManualClock
) -> None:
    handle = claimed()
    lose(handle, clock)
    before = rows()
    assert handle.ack() is False
    assert late_ack_tx(handle) is False
    assert rows() == before


def test_a_worker_that_holds_a_cancelled_job_sees_false_next(clock: ManualClock) -> None:
    handle = claimed()
    assert not handle.lease_lost.is_set()
    assert cancel(handle.id)
    assert handle.heartbeat() is False
    assert handle.lease_lost.is_set()


# Errors


class Shouting(Exception):
    pass


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoTextNoRepr(NoText):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class TextIsNoText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]  # noqa: PLE0307


class Quits(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def circular() -> BaseException:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


def chained(length: int) -> BaseException:
    error: BaseException = ValueError("root")
    for number in range(length):
        outer = ValueError(str(number))
        outer.__cause__ = error
        error = outer
    return error


def deep_group(depth: int) -> BaseException:
    error: Exception = ValueError("root")
    for _ in range(depth):
        error = ExceptionGroup("group", [error])
    return error


def recursing(depth: int) -> BaseException:
    def down(left: int) -> None:
        if not left:
            raise ValueError("bottom")
        down(left - 1)

    try:
        down(depth)
    except ValueError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize("end", ["retry", "fail"])
def test_an_exception_is_kept_as_its_class_and_message_with_the_traceback(end: str, clock: ManualClock) -> None:
    handle = claimed()
    assert getattr(handle, end)(raised(Shouting("boo")))
    job = get_job(handle.id)
    [entry] = job.errors
    assert set(entry) == {"attempt", "at", "error", "traceback", "exception"}
    assert entry["exception"] == f"{__name__}.Shouting"
    assert entry["error"] == job.last_error == "Shouting: boo"
    assert "Traceback" in entry["traceback"]
    assert "test_queues_handles.py" in entry["traceback"]
    moment = datetime.fromisoformat(entry["at"])
    assert moment == clock.now()
    assert moment.utcoffset() == timedelta(0)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: raised(NoText()), "NoText"),
        (lambda: raised(NoTextNoRepr()), "NoTextNoRepr"),
        (lambda: raised(TextIsNoText()), "TextIsNoText"),
        (lambda: raised(Quits()), "Quits"),
        (lambda: raised(KeyboardInterrupt()), "KeyboardInterrupt"),
        (lambda: raised(SystemExit(3)), "SystemExit: 3"),
        (NoText, "NoText"),
        (circular, "ValueError: one"),
        (lambda: chained(3_000), "ValueError: 2999"),
        (lambda: ExceptionGroup("group", [ValueError("a"), NoText()]), "ExceptionGroup: group"),
        (lambda: deep_group(1_000), "ExceptionGroup: group"),
        (lambda: recursing(900), "ValueError: bottom"),
        (lambda: ValueError("a\x00b\ud800c"), "ValueError: a\ufffdb\ufffdc"),
        (lambda: ValueError("x" * 5_000_000), "ValueError: xxx"),
        (lambda: "a\x00b\ud800c", "a\ufffdb\ufffdc"),
        (lambda: "x" * 5_000_000, "xxx"),
        (lambda: "", ""),
        (lambda: "emoji \U0001f600 'quoted' %s", "emoji \U0001f600 'quoted' %s"),
    ],
)
@pytest.mark.parametrize("end", ["retry", "fail"])
def test_f098_f104_f105_whatever_the_error_is_the_attempt_is_recorded(
    make: Callable[[], Any], told: str, end: str, clock: ManualClock
) -> None:
    handle = claimed()
    assert getattr(handle, end)(make()) is True
    job = get_job(handle.id)
    assert job.state == ("pending" if end == "retry" else "dead")
    [entry] = job.errors
    assert entry["error"] == job.last_error
    assert entry["error"].startswith(told)
    for text in (entry["error"], entry["traceback"]):
        assert len(text) <= 10_000
        assert "\x00" not in text
        text.encode()
    assert type(job.last_error) is str


def test_f104_a_long_text_is_cut_with_a_mark_and_one_of_10_000_characters_is_not(clock: ManualClock) -> None:
    def kept(text: str) -> str:
        Job.objects.all().delete()
        handle = claimed()
        handle.fail(text)
        return get_job(handle.id).errors[0]["error"]

    assert kept("\u00e9" * 10_000) == "\u00e9" * 10_000
    cut = kept("\u00e9" * 10_001)
    assert len(cut) == 10_000
    assert cut.strip("\u00e9")  # the mark
    assert "cut" in cut


def test_the_last_20_failed_attempts_are_kept(clock: ManualClock) -> None:
    enqueue("mail", None, max_attempts=100, backoff_base=0)
    for number in range(1, 26):
        handle = claim()
        assert handle.retry(f"error {number}")
        expected = [(n, f"error {n}") for n in range(max(1, number - 19), number + 1)]
        job = get_job(handle.id)
        assert [(entry["attempt"], entry["error"]) for entry in job.errors] == expected
        assert job.last_error == f"error {number}"


def test_a_lapse_and_a_failure_stand_in_one_history(clock: ManualClock) -> None:
    enqueue("mail", None, max_attempts=3, backoff_base=0)
    claim()
    clock.advance(300)
    claim().retry("second")
    claim().ack()
    job = Job.objects.get()
    assert [(entry["attempt"], entry["error"]) for entry in job.errors] == [(1, "lease expired"), (2, "second")]
    assert (job.state, job.last_error) == ("completed", "second")


@pytest.mark.parametrize("history", ["", "no json", "{}", "5", "[" * 100_000, "null"])
def test_f051_a_history_that_cannot_be_read_keeps_no_attempt_from_ending(history: str, clock: ManualClock) -> None:
    handle = claimed()
    handle.retry("x", delay=0)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_alkstore_job SET errors = %s", [history])
    assert claim().retry("y", delay=0)
    assert get_job(handle.id).errors[-1]["error"] == "y"
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_alkstore_job SET errors = %s", [history])
    claim()
    clock.advance(300)
    assert sweep() == 1
    assert get_job(handle.id).errors[-1]["error"] == "lease expired"


# ack_tx


def test_ack_tx_outside_a_transaction_is_refused_and_changes_nothing(clock: ManualClock) -> None:
    handle = claimed()
    before = rows()
    with pytest.raises(TransactionRequired):
        handle.ack_tx()
    assert rows() == before
    assert handle.ack() is True


def test_ack_tx_returns_none_and_the_job_is_completed_with_the_commit(clock: ManualClock) -> None:
    handle = claimed()
    with transaction.atomic():
        assert handle.ack_tx() is None
    job = get_job(handle.id)
    assert (job.state, job.finished_at) == ("completed", clock.now())


def test_ack_tx_rolled_back_is_no_ack_and_the_lease_is_still_held(clock: ManualClock) -> None:
    handle = claimed()
    before = rows()
    with pytest.raises(LookupError), transaction.atomic():
        handle.ack_tx()
        raise LookupError
    assert rows() == before
    assert handle.retry("once more", delay=0) is True
    assert claim().attempt == 2


@override_settings(ALKSTORE={"KEEP_COMPLETED": 0})
def test_ack_tx_deletes_where_nothing_is_kept(clock: ManualClock) -> None:
    handle = claimed()
    with transaction.atomic():
        handle.ack_tx()
    assert get_job(handle.id) is None


def test_the_stored_history_is_json_that_any_reader_takes(clock: ManualClock) -> None:
    handle = claimed()
    handle.fail("a\x00\ud800\u2028")
    with connection.cursor() as cursor:
        cursor.execute("SELECT errors, json_valid(errors) FROM django_alkstore_job")
        text, valid = cursor.fetchone()
    assert valid == 1
    assert isinstance(json.loads(text), list)
    assert datetime.fromisoformat(json.loads(text)[0]["at"]).astimezone(UTC) == clock.now()
