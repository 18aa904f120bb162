"""Section 5: named locks with a time to live and a fencing token."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import IntegrityError, OperationalError, connection, connections, transaction

from django_alkstore.clock import ManualClock
from django_alkstore.exceptions import AlkstoreError, InvalidName, InvalidOption, LockHeld, LockLost, ReservedName
from django_alkstore.models import Lock
from django_alkstore.services import LockHandle, alock, force_release, lock
from tests.ledger.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)


def rows() -> list[dict[str, Any]]:
    return list(Lock.objects.order_by("name").values())


class Boom(Exception):
    """Raised by the bodies of these tests."""


@pytest.fixture
def other_writer() -> Iterator[Any]:
    """A second connection to the file, for taking the writer lock; the library waits for it a moment only."""
    options = connection.settings_dict["OPTIONS"]
    before = options["timeout"]
    connection.close()
    options["timeout"] = 0.05
    second = connections.create_connection("default")
    second.connect()
    yield second
    second.close()
    connection.close()
    options["timeout"] = before


# Taking and giving back


def test_a_taken_lock_is_a_row_with_owner_token_and_end_and_a_released_one_is_free(clock: ManualClock) -> None:
    handle = lock("report", ttl=30, owner="me")
    assert rows() == []
    assert handle.acquire() is True
    assert rows() == [
        {
            "name": "report",
            "owner": "me",
            "token": handle.token,
            "acquired_at": clock.now(),
            "expires_at": clock.now() + timedelta(seconds=30),
            "liveness": None,
        }
    ]
    assert isinstance(handle.token, int)
    assert handle.release() is True
    assert lock("report").acquire() is True


def test_the_default_ttl_is_a_minute(clock: ManualClock) -> None:
    lock("report").acquire()
    assert Lock.objects.get().expires_at == clock.now() + timedelta(seconds=60)


@pytest.mark.parametrize("ttl", [0.5, 2, timedelta(seconds=2), 1e-6, timedelta(days=365)])
def test_a_ttl_is_seconds_or_a_timedelta(clock: ManualClock, ttl: Any) -> None:
    assert lock("report", ttl=ttl).acquire()
    lasting = ttl if isinstance(ttl, timedelta) else timedelta(seconds=ttl)
    assert Lock.objects.get().expires_at == clock.now() + lasting


OUT_OF_RANGE = [
    0,
    0.0,
    -1,
    -0.001,
    math.nan,
    math.inf,
    -math.inf,
    10**400,
    1e300,
    timedelta(0),
    timedelta(seconds=-1),
    "60",
    None,
    True,
    Decimal(5),
]


@pytest.mark.parametrize("ttl", OUT_OF_RANGE, ids=repr)
def test_a_ttl_out_of_range_is_refused_and_nothing_is_written(ttl: Any) -> None:
    with pytest.raises(InvalidOption, match="ttl") as caught:
        lock("report", ttl=ttl)
    assert isinstance(caught.value, ValueError)
    assert rows() == []


@pytest.mark.parametrize("ttl", [value for value in OUT_OF_RANGE if value is not None], ids=repr)
def test_a_renewal_by_a_ttl_out_of_range_is_refused_and_changes_nothing(clock: ManualClock, ttl: Any) -> None:
    handle = lock("report")
    handle.acquire()
    before = rows()
    with pytest.raises(InvalidOption):
        handle.renew(ttl)
    assert rows() == before
    assert handle.release()


@pytest.mark.parametrize("take", ["acquire", "with", "renew"])
def test_a_ttl_that_ends_past_every_date_is_refused_and_changes_nothing(clock: ManualClock, take: str) -> None:
    far = timedelta(days=366 * 7_990)
    if take == "renew":
        handle = lock("report")
        handle.acquire()
    before = rows()
    with pytest.raises(InvalidOption):  # noqa: PT012
        if take == "acquire":
            lock("report", ttl=far).acquire()
        elif take == "with":
            with lock("report", ttl=far):
                pass
        else:
            handle.renew(far)
    assert rows() == before


@pytest.mark.parametrize("owner", ["", "x" * 256, "nul\x00", "\ud800", 5, b"me", ["me"]], ids=repr)
def test_an_owner_that_no_database_can_hold_is_refused(owner: Any) -> None:
    with pytest.raises(InvalidOption, match="owner"):
        lock("report", owner=owner)


@pytest.mark.parametrize("name", ["r", "_", "9", "a.b_c-d:e/f@g+h", "x" * 128, "_alkstore_", "__alkstor"])
def test_a_name_of_the_rule_can_be_locked(name: str) -> None:
    with lock(name):
        assert Lock.objects.get().name == name


@pytest.mark.parametrize(
    "name", ["", "x" * 129, " a", "a b", "-a", ".a", "a\n", "é", "a\u0661", "a\x00", "a%", None, 5, b"a"], ids=repr
)
def test_a_name_outside_the_rule_is_refused(name: Any) -> None:
    with pytest.raises(InvalidName) as caught:
        lock(name)
    assert isinstance(caught.value, ValueError)
    assert not isinstance(caught.value, ReservedName)


@pytest.mark.parametrize("name", ["__alkstore_scheduler", "__alkstore_", "__alkstore_outbox:mail"])
def test_a_name_of_the_library_is_reserved(name: str) -> None:
    with pytest.raises(ReservedName):
        lock(name)


def test_the_leadership_lock_cannot_be_taken_by_the_public_door() -> None:
    with pytest.raises(ReservedName), lock("__alkstore_scheduler"):
        pass
    assert rows() == []


# The context manager


def test_a_with_block_holds_the_lock_and_frees_it() -> None:
    with lock("report") as handle:
        assert isinstance(handle, LockHandle)
        assert Lock.objects.get().token == handle.token
        assert lock("report").acquire() is False
    assert lock("report").acquire() is True


def test_a_with_block_frees_the_lock_when_its_body_raises() -> None:
    with pytest.raises(Boom), lock("report"):
        raise Boom
    assert lock("report").acquire() is True


def test_a_taken_lock_raises_lock_held_with_its_holders_data_and_the_body_does_not_run(clock: ManualClock) -> None:
    holder = lock("report", ttl=30, owner="the night shift")
    holder.acquire()
    clock.advance(10)
    ran = []
    with pytest.raises(LockHeld, match="report") as caught, lock("report"):
        ran.append(1)
    assert ran == []
    assert isinstance(caught.value, AlkstoreError)
    assert caught.value.name == "report"
    assert caught.value.owner == "the night shift"
    assert caught.value.expires_at == clock.now() + timedelta(seconds=20)
    assert holder.release(), "the refused one changed nothing"


def test_f146_a_refused_handle_neither_renews_nor_frees_the_lock() -> None:
    holder = lock("report", owner="same")
    holder.acquire()
    before = rows()
    refused = lock("report", owner="same")
    assert refused.acquire() is False
    assert refused.renew() is False
    assert refused.release() is False
    assert rows() == before


def test_a_handle_that_never_acquired_has_no_token_and_nothing_to_renew_or_release() -> None:
    handle = lock("report")
    assert handle.token is None
    assert handle.renew() is False
    assert handle.release() is False


def test_the_same_owner_can_take_the_lock_again_after_giving_it_back() -> None:
    handle = lock("report")
    tokens = []
    for _ in range(3):
        with handle:
            tokens.append(handle.token)
    assert tokens == sorted(set(tokens))


def test_locks_of_different_names_have_nothing_to_do_with_each_other() -> None:
    with lock("a"), lock("b"), lock("A"):
        assert len(rows()) == 3


# Not re-entrant


def test_a_held_lock_is_refused_to_its_holder_too_who_still_holds_it() -> None:
    handle = lock("report")
    assert handle.acquire() is True
    token = handle.token
    assert handle.acquire() is False
    with pytest.raises(LockHeld), handle:
        pass
    assert handle.token == token
    assert handle.renew() is True
    assert handle.release() is True


def test_another_handle_with_the_same_owner_name_is_refused_and_cannot_renew_or_release() -> None:
    first, second = lock("report", owner="cron"), lock("report", owner="cron")
    assert first.acquire()
    assert not second.acquire()
    assert not second.renew()
    assert not second.release()
    assert first.release()


def test_the_default_owner_is_unique_to_the_handle() -> None:
    owners = set()
    for number in range(20):
        lock(f"l{number}").acquire()
    owners = set(Lock.objects.values_list("owner", flat=True))
    assert len(owners) == 20


# Tokens


def leave_by_release(handle: LockHandle, clock: ManualClock) -> None:
    assert handle.release()


def leave_by_lapse(handle: LockHandle, clock: ManualClock) -> None:
    clock.advance(61)


def leave_by_row_deletion(handle: LockHandle, clock: ManualClock) -> None:
    Lock.objects.all().delete()


def leave_by_force(handle: LockHandle, clock: ManualClock) -> None:
    assert force_release("report")


LEAVE: list[Callable[[LockHandle, ManualClock], None]] = [
    leave_by_release,
    leave_by_lapse,
    leave_by_row_deletion,
    leave_by_force,
]


@pytest.mark.parametrize("leave", LEAVE)
def test_the_token_grows_with_each_acquisition_however_the_lock_was_left(
    clock: ManualClock, leave: Callable[[LockHandle, ManualClock], None]
) -> None:
    tokens: list[int] = []
    for _ in range(4):
        handle = lock("report")
        assert handle.acquire()
        assert handle.token is not None
        tokens.append(handle.token)
        assert Lock.objects.get().token == handle.token
        leave(handle, clock)
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("same_owner", [False, True])
@pytest.mark.parametrize("leave", LEAVE)
def test_f139_a_handle_whose_lock_went_to_another_changes_nothing_any_more(
    clock: ManualClock, leave: Callable[[LockHandle, ManualClock], None], same_owner: bool
) -> None:
    names = ("cron", "cron") if same_owner else ("a", "b")
    first, second = (lock("report", owner=name) for name in names)
    assert first.acquire()
    leave(first, clock)
    assert second.acquire()
    before = rows()
    assert first.renew() is False
    assert first.release() is False
    assert rows() == before
    assert second.renew() is True
    assert second.release() is True


def test_a_refused_acquisition_of_a_lost_lock_leaves_the_new_holder_alone(clock: ManualClock) -> None:
    first, second = lock("report"), lock("report")
    first.acquire()
    clock.advance(61)
    second.acquire()
    assert first.acquire() is False
    assert first.release() is False
    assert second.release() is True


# Lapse


def test_a_lock_is_held_until_its_end_and_nobodys_from_then_on(clock: ManualClock) -> None:
    lock("report", ttl=60).acquire()
    clock.advance(59.999999)
    assert not lock("report").acquire()
    clock.advance(0.000001)
    assert lock("report").acquire()


def test_a_lapsed_lock_that_nobody_took_can_be_neither_renewed_nor_released(clock: ManualClock) -> None:
    handle = lock("report", ttl=60)
    handle.acquire()
    clock.advance(60)
    before = rows()
    assert handle.renew() is False
    assert handle.release() is False
    assert rows() == before


def test_f145_a_lock_is_renewed_before_its_end_by_its_own_ttl_or_another(clock: ManualClock) -> None:
    handle = lock("report", ttl=10)
    handle.acquire()
    for _ in range(5):
        clock.advance(9)
        assert handle.renew() is True
        assert not lock("report").acquire()
    assert Lock.objects.get().expires_at == clock.now() + timedelta(seconds=10)
    assert handle.renew(100) is True
    assert Lock.objects.get().expires_at == clock.now() + timedelta(seconds=100)
    assert handle.renew(timedelta(seconds=1)) is True
    assert Lock.objects.get().expires_at == clock.now() + timedelta(seconds=1)
    clock.advance(1)
    assert lock("report").acquire()


def test_a_renewal_keeps_the_token_and_the_moment_of_the_acquisition(clock: ManualClock) -> None:
    handle = lock("report")
    handle.acquire()
    before = rows()[0]
    clock.advance(5)
    handle.renew()
    after = rows()[0]
    assert {**after, "expires_at": None} == {**before, "expires_at": None}


@pytest.mark.parametrize("leave", LEAVE[1:])
@pytest.mark.parametrize("taken", [False, True])
def test_f139_leaving_a_with_block_whose_lock_was_lost_raises_lock_lost(
    clock: ManualClock, leave: Callable[[LockHandle, ManualClock], None], taken: bool
) -> None:
    second = lock("report")
    with pytest.raises(LockLost, match="report") as caught, lock("report") as handle:  # noqa: PT012
        leave(handle, clock)
        if taken:
            assert second.acquire()
    assert isinstance(caught.value, AlkstoreError)
    assert caught.value.name == "report"
    assert second.release() is taken


@pytest.mark.parametrize("leave", LEAVE[1:])
def test_an_error_of_the_body_goes_before_the_loss(
    clock: ManualClock, leave: Callable[[LockHandle, ManualClock], None]
) -> None:
    with pytest.raises(Boom), lock("report") as handle:  # noqa: PT012
        leave(handle, clock)
        raise Boom


def test_an_error_of_the_body_goes_first_where_the_lock_cannot_be_freed(other_writer: Any) -> None:
    with pytest.raises(Boom), lock("report"):  # noqa: PT012
        other_writer.cursor().execute("BEGIN IMMEDIATE")
        raise Boom
    other_writer.cursor().execute("ROLLBACK")


def test_an_error_of_the_body_goes_first_where_the_transaction_around_it_is_lost(clock: ManualClock) -> None:
    with pytest.raises(Boom), transaction.atomic(), lock("report"):  # noqa: PT012
        transaction.set_rollback(True)
        raise Boom
    assert lock("report").acquire()


def test_past_the_busy_timeout_every_function_raises_operational_error_and_has_changed_nothing(
    other_writer: Any,
) -> None:
    held, free = lock("held"), lock("free")
    held.acquire()
    before = rows()
    other_writer.cursor().execute("BEGIN IMMEDIATE")
    for call in (free.acquire, free.__enter__, held.renew, held.release, lambda: force_release("held")):
        with pytest.raises(OperationalError):
            call()
    other_writer.cursor().execute("ROLLBACK")
    assert rows() == before
    assert held.release()
    assert free.acquire()


# In a caller's transaction


def test_taken_in_a_transaction_that_commits_it_is_taken() -> None:
    handle = lock("report")
    with transaction.atomic():
        assert handle.acquire()
        assert not lock("report").acquire()
    assert not lock("report").acquire()
    assert handle.release()


@pytest.mark.parametrize("savepoint", [False, True])
def test_taken_in_a_transaction_or_savepoint_that_rolls_back_it_was_never_taken(savepoint: bool) -> None:
    handle = lock("report")
    with transaction.atomic():
        with pytest.raises(Boom), transaction.atomic(savepoint=savepoint):  # noqa: PT012
            assert handle.acquire()
            raise Boom
        if not savepoint:
            assert transaction.get_rollback()
        else:
            assert rows() == []
            Entry.objects.create(text="the caller goes on")
    assert rows() == []
    assert Entry.objects.count() == savepoint
    assert handle.release() is False
    assert handle.renew() is False
    assert lock("report").acquire()


@pytest.mark.parametrize("same_owner", [False, True])
@pytest.mark.parametrize("action", ["renew", "release"])
def test_a_handle_whose_acquisition_was_rolled_back_does_not_touch_the_next_holder(
    clock: ManualClock, action: str, same_owner: bool
) -> None:
    """The rolled back acquisition never was, so nobody may fence with its token: not against the same owner name."""
    first = lock("report", owner="cron")
    with pytest.raises(Boom), transaction.atomic():  # noqa: PT012
        assert first.acquire()
        raise Boom
    second = lock("report", owner="cron" if same_owner else "other")
    assert second.acquire()
    clock.advance(1)
    before = rows()
    assert getattr(first, action)() is False
    assert rows() == before
    assert second.release() is True


def test_a_token_given_out_in_a_transaction_that_rolled_back_is_not_given_out_again(clock: ManualClock) -> None:
    """A fencing token grows with each acquisition: something else may have seen the one that was rolled back."""
    first, second = lock("report"), lock("report")
    with pytest.raises(Boom), transaction.atomic():  # noqa: PT012
        assert first.acquire()
        seen = first.token
        raise Boom
    assert second.acquire()
    assert seen is not None
    assert second.token is not None
    assert second.token > seen


def test_released_in_a_transaction_that_rolls_back_it_is_held_still(clock: ManualClock) -> None:
    handle = lock("report")
    handle.acquire()
    with pytest.raises(Boom), transaction.atomic():  # noqa: PT012
        assert handle.release() is True
        raise Boom
    assert not lock("report").acquire()
    assert handle.renew() is True
    assert handle.release() is True


@pytest.mark.parametrize("way", ["call", "with"])
def test_f143_an_expired_row_is_taken_over_inside_an_open_transaction_which_stays_usable(
    clock: ManualClock, way: str
) -> None:
    old = lock("report", ttl=5)
    old.acquire()
    clock.advance(5)
    new = lock("report")
    with transaction.atomic():
        Entry.objects.create(text="before")
        if way == "call":
            assert new.acquire()
        else:
            with new:
                Entry.objects.create(text="inside")
        Entry.objects.create(text="after")
    assert Entry.objects.count() == (2 if way == "call" else 3)
    assert old.release() is False
    assert new.release() is (way == "call")


@pytest.mark.parametrize("way", ["call", "with"])
def test_f060_a_refused_acquisition_leaves_the_callers_transaction_usable(way: str) -> None:
    lock("report").acquire()
    with transaction.atomic():
        Entry.objects.create(text="before")
        if way == "call":
            assert lock("report").acquire() is False
        else:
            with pytest.raises(LockHeld), lock("report"):
                pass
        Entry.objects.create(text="after")
    assert Entry.objects.count() == 2


@pytest.mark.parametrize("commit", [True, False])
def test_autocommit_off_is_an_open_transaction_too(commit: bool) -> None:
    handle = lock("report")
    transaction.set_autocommit(False)
    try:
        assert handle.acquire()
        (transaction.commit if commit else transaction.rollback)()
    finally:
        transaction.set_autocommit(True)
    assert len(rows()) == commit
    assert handle.release() is commit


# By force, and on another database


def test_a_lock_can_be_taken_away_from_its_holder(clock: ManualClock) -> None:
    assert force_release("report") is False
    handle = lock("report")
    handle.acquire()
    assert force_release("report") is True
    assert handle.renew() is False
    assert lock("report").acquire()


def test_one_row_for_each_name_is_held_by_the_schema(clock: ManualClock) -> None:
    lock("report").acquire()
    with pytest.raises(IntegrityError):
        Lock.objects.create(name="report", owner="x", acquired_at=clock.now(), expires_at=clock.now())


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_lock_is_a_row_of_the_database_that_was_asked_for() -> None:
    here, there = lock("report"), lock("report", using="other")
    assert here.acquire()
    assert there.acquire()
    assert Lock.objects.using("other").get().owner != Lock.objects.using("default").get().owner
    assert there.renew()
    assert force_release("report", using="other")
    assert not there.release()
    assert here.release()


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_the_setting_names_the_database(settings: Any) -> None:
    settings.ALKSTORE = {"DATABASE": "other"}
    with lock("report"):
        assert Lock.objects.using("other").count() == 1
        assert Lock.objects.using("default").count() == 0


# The clock


@pytest.mark.parametrize("use_tz", [True, False])
@pytest.mark.parametrize("zone", ["Europe/Paris", "America/New_York", "Asia/Shanghai", "UTC"])
@pytest.mark.parametrize(
    "start", ["2026-03-29T00:59:30", "2026-10-25T00:59:30", "2026-10-25T01:59:30", "2026-11-01T05:59:30"]
)
def test_f082_a_lock_lasts_its_ttl_across_daylight_saving_changes(
    clock: ManualClock, settings: Any, use_tz: bool, zone: str, start: str
) -> None:
    settings.USE_TZ, settings.TIME_ZONE = use_tz, zone
    clock.step((datetime.fromisoformat(start).replace(tzinfo=UTC) - clock.now()).total_seconds())
    handle = lock("report", ttl=60)
    handle.acquire()
    clock.advance(59)
    assert not lock("report").acquire()
    assert handle.renew()
    clock.advance(59)
    assert not lock("report").acquire()
    with pytest.raises(LockHeld) as caught, lock("report"):
        pass
    assert caught.value.expires_at == clock.now() + timedelta(seconds=1)
    clock.advance(1)
    assert lock("report").acquire()


def test_a_lock_that_its_own_block_has_released_is_not_lost(clock: ManualClock) -> None:
    with lock("report") as held:
        assert held.release() is True
        assert held.release() is False
        assert lock("report").acquire()


def test_a_handle_can_be_entered_again_after_it_was_released(clock: ManualClock) -> None:
    handle = lock("report")
    with handle:
        handle.release()
    with pytest.raises(LockLost), handle:
        clock.advance(60)


# Async twins


@pytest.mark.parametrize("how", ["async with", "aacquire"])
def test_a_task_that_is_cancelled_while_it_takes_a_lock_leaves_it_free(transactional_db: None, how: str) -> None:
    async def take(handle: LockHandle) -> None:
        if how == "aacquire":
            await handle.aacquire()
            return
        async with handle:
            raise AssertionError("it was cancelled")

    taking, cancelled = threading.Event(), threading.Event()

    def slow(execute: Any, *args: Any) -> Any:
        taking.set()
        assert cancelled.wait(60)
        return execute(*args)

    async def play() -> bool:
        task = asyncio.ensure_future(take(alock("import")))
        await asyncio.to_thread(taking.wait, 60)
        task.cancel()
        await asyncio.sleep(0)
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await alock("import").aacquire()

    with connection.execute_wrapper(slow):
        assert async_to_sync(play)()
    assert Lock.objects.get().name == "import"


def test_a_second_taking_that_is_cancelled_does_not_free_the_lock_that_the_handle_holds(transactional_db: None) -> None:
    async def play() -> None:
        handle = alock("import")
        assert await handle.aacquire()
        task = asyncio.ensure_future(handle.aacquire())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await handle.arenew()

    async_to_sync(play)()
