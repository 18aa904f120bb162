"""Section 6: `run_schedules`, the leader loop, in this process. Several processes: concurrency/test_leaders.py."""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction

from django_alkstore import clock as wall
from django_alkstore import signals
from django_alkstore.dialects import transactions
from django_alkstore.dialects.liveness import LivenessView
from django_alkstore.exceptions import AlkstoreError, LeadershipLost
from django_alkstore.models import Job, Lock, Schedule
from django_alkstore.services import (
    claim_batch,
    enqueue,
    error_backoff,
    force_release,
    leader,
    run_schedules,
    schedule,
    tick,
    ticks,
)
from tests.processes import PATIENCE, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

LEADERSHIP = "__alkstore_scheduler"
Wrapper = Callable[..., Any]


class Runner:
    """`run_schedules` in a thread of its own, with a connection of its own."""

    def __init__(self, using: str | None = None, wrapper: Wrapper | None = None) -> None:
        self.stop = threading.Event()
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.result: object = "not ended"
        self._using = using
        self._wrapper = wrapper
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                if self._wrapper is not None:
                    stack.enter_context(connections[self._using or "default"].execute_wrapper(self._wrapper))
                self.result = run_schedules(self.stop, using=self._using)  # type: ignore[func-returns-value]
        except BaseException as error:
            self.error = error
        finally:
            connections.close_all()
            self.ended.set()

    def __enter__(self) -> "Runner":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def wait(self) -> None:
        assert self.ended.wait(PATIENCE), "the runner goes on"


@contextmanager
def heard(signal: Any) -> Iterator[list[dict[str, Any]]]:
    """What was announced inside the block."""
    news: list[dict[str, Any]] = []

    def listen(**data: Any) -> None:
        news.append(data)

    signal.connect(listen)
    try:
        yield news
    finally:
        signal.disconnect(listen)


@contextmanager
def second_connection() -> Iterator[sqlite3.Connection]:
    """Somebody else on the same file, who waits for nobody."""
    raw = sqlite3.connect(connection.settings_dict["NAME"], timeout=0, isolation_level=None)
    try:
        yield raw
    finally:
        raw.close()


def leads(alias: str = "default") -> bool:
    return Lock.objects.using(alias).filter(name=LEADERSHIP).exists()


def due_now(name: str, behind: float = 0.5) -> None:
    Schedule.objects.filter(name=name).update(next_fire_at=wall.now() - timedelta(seconds=behind))


def fired(name: str) -> int:
    return Job.objects.filter(schedule=name).count()


def wait_for_first_tick(name: str = "first") -> None:
    """A schedule that is due already is fired by the leader's first tick."""
    wait_until(lambda: fired(name) > 0, "the leader's first tick")


def declare_due(name: str = "first") -> None:
    schedule(name, "@every 1h", "mail", name)
    due_now(name)


# Leading, and stopping


def test_a_leader_fires_what_is_due_into_its_queue_where_the_ordinary_functions_claim_it() -> None:
    declare_due()
    boundary = Schedule.objects.get().next_fire_at
    with Runner() as runner:
        wait_for_first_tick()
        (job,) = claim_batch("mail", "w")
        assert (job.schedule, job.fire_at, job.payload) == ("first", boundary, "first")
        assert job.ack()
        assert not runner.ended.is_set()
    assert fired("first") == 1


def test_the_leadership_is_a_row_while_it_leads_and_a_clean_stop_returns_none_and_frees_it() -> None:
    with Runner() as runner:
        wait_until(leads, "it leads")
        row = Lock.objects.get()
        assert row.name == LEADERSHIP
        assert row.expires_at - row.acquired_at >= timedelta(seconds=10)
        runner.stop.set()
        runner.wait()
    assert runner.error is None
    assert runner.result is None
    assert not leads()


def test_a_stop_that_was_set_before_leaves_at_once_and_frees_the_lock() -> None:
    declare_due()
    stop = threading.Event()
    stop.set()
    assert run_schedules(stop) is None  # type: ignore[func-returns-value]
    assert not leads()


def test_after_a_clean_stop_the_next_runner_leads_at_once_under_another_owner() -> None:
    owners = []
    for number in range(3):
        declare_due(f"s{number}")
        with Runner() as runner:
            wait_for_first_tick(f"s{number}")
            owners.append(Lock.objects.get().owner)
        assert runner.error is None
    assert len(set(owners)) == 3


def test_a_stop_is_noticed_in_the_longest_sleep() -> None:
    schedule("far", "@every 365d", "mail")
    declare_due()
    with Runner() as runner:
        wait_for_first_tick()
        runner.stop.set()
        runner.wait()
    assert (runner.error, runner.result) == (None, None)
    assert not leads()


@pytest.mark.parametrize("way", ["atomic", "autocommit off"])
def test_it_is_refused_inside_an_open_transaction(way: str) -> None:
    declare_due()
    stop = threading.Event()
    stop.set()
    if way == "atomic":
        with transaction.atomic(), pytest.raises(RuntimeError):
            run_schedules(stop)
    else:
        transaction.set_autocommit(False)
        try:
            with pytest.raises(RuntimeError):
                run_schedules(stop)
        finally:
            transaction.rollback()
            transaction.set_autocommit(True)
    assert not leads()
    assert Job.objects.count() == 0


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_it_leads_the_database_that_it_was_given_and_no_other() -> None:
    declare_due()
    schedule("there", "@every 1h", "mail", using="other")
    Schedule.objects.using("other").update(next_fire_at=wall.now())
    with Runner(using="other") as runner:
        wait_until(lambda: Job.objects.using("other").exists(), "the other database's schedule fires")
        assert leads("other")
        assert not leads("default")
        runner.stop.set()
        runner.wait()
    assert runner.error is None
    assert not leads("other")
    assert Job.objects.count() == 0


# Another leader


def test_a_second_runner_is_refused_and_fires_nothing_and_the_first_goes_on() -> None:
    schedule("second", "@every 1h", "mail")
    declare_due()
    with Runner() as first:
        wait_for_first_tick()
        row = Lock.objects.get()
        with Runner() as second:
            second.wait()
        assert isinstance(second.error, LeadershipLost)
        assert isinstance(second.error, AlkstoreError)
        assert Lock.objects.get().token == row.token
        assert Lock.objects.get().owner == row.owner
        assert not first.ended.is_set()
        assert fired("second") == 0
        due_now("second")
        wait_until(lambda: fired("second") == 1, "the first still fires")


def take(raw: sqlite3.Connection, how: str) -> None:
    """Take the leadership away over a second connection, and make something due that a bad leader would fire."""
    lock, table = Lock._meta.db_table, Schedule._meta.db_table
    now = wall.now_us()
    raw.execute("BEGIN IMMEDIATE")
    try:
        if how == "owner changed":
            raw.execute(f"UPDATE {lock} SET owner = 'intruder' WHERE name = ?", (LEADERSHIP,))
        elif how == "row deleted":
            raw.execute(f"DELETE FROM {lock} WHERE name = ?", (LEADERSHIP,))
        else:
            raw.execute(f"DELETE FROM {lock} WHERE name = ?", (LEADERSHIP,))
            owner = "intruder"
            raw.execute(
                f"INSERT INTO {lock} (name, owner, acquired_at, expires_at) VALUES (?, ?, ?, ?)",
                (LEADERSHIP, owner, now, now + 600_000_000),
            )
        raw.execute(f"UPDATE {table} SET next_fire_at = ?", (now - 1,))
        raw.execute("COMMIT")
    except sqlite3.OperationalError:
        raw.execute("ROLLBACK")
        raise


HOW = ["owner changed", "row deleted", "row replaced"]


@pytest.mark.parametrize("how", HOW)
def test_leadership_taken_by_force_in_the_sleep_is_lost_before_anything_fires(how: str) -> None:
    schedule("then", "@every 1h", "mail")
    declare_due()
    with Runner() as runner, second_connection() as raw:
        wait_for_first_tick()
        jobs = Job.objects.count()
        raw.execute("PRAGMA busy_timeout = 20000")
        take(raw, how)
        runner.wait()
    assert isinstance(runner.error, LeadershipLost)
    assert Job.objects.count() == jobs
    assert fired("then") == 0
    assert leads() is (how != "row deleted"), "the new leader's row is left alone"


def test_leadership_taken_by_the_service_is_lost_before_anything_fires() -> None:
    schedule("then", "@every 1h", "mail")
    declare_due()
    with Runner() as runner:
        wait_for_first_tick()
        with transaction.atomic():
            assert force_release(LEADERSHIP)
            due_now("then")
        runner.wait()
    assert isinstance(runner.error, LeadershipLost)
    assert fired("then") == 0


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("statement", range(24))
def test_leadership_taken_between_any_two_statements_of_the_loop_fires_nothing_more(
    monkeypatch: pytest.MonkeyPatch, how: str, statement: int
) -> None:
    """At the n-th statement after its acquisition, or the first from there at which another can write at all."""
    # Renewals in the sleep are statements of the loop too.
    monkeypatch.setattr(leader, "RENEW_EVERY", 0.01)
    for name in ("a", "b", "c"):
        schedule(name, "@every 1h", "mail", name)
        due_now(name, behind=1.5 * 3_600)  # two boundaries each
    acquired = threading.Event()
    counted: list[int] = []
    jobs_then: list[int] = []

    def intrude(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if acquired.is_set():
            counted.append(1)
        if not jobs_then and len(counted) > statement:
            with second_connection() as raw:
                try:
                    take(raw, how)
                except sqlite3.OperationalError:
                    pass  # the leader is writing; nobody can take anything now
                else:
                    jobs_then.append(raw.execute(f"SELECT count(*) FROM {Job._meta.db_table}").fetchone()[0])
        result = execute(sql, params, many, context)
        if sql.lstrip().startswith("INSERT") and Lock._meta.db_table in sql:
            acquired.set()
        return result

    with Runner(wrapper=intrude) as runner:
        runner.wait()
    assert jobs_then, "the intruder never came"
    assert isinstance(runner.error, LeadershipLost)
    assert Job.objects.count() == jobs_then[0], "something fired on a stolen lease"


def test_the_renewal_is_the_first_statement_of_the_tick_and_both_are_one_transaction() -> None:
    declare_due()
    seen: list[str] = []

    def listen(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        seen.append(" ".join(sql.split()))
        return execute(sql, params, many, context)

    with Runner(wrapper=listen):
        wait_for_first_tick()
    fire = next(number for number, sql in enumerate(seen) if sql.startswith("INSERT") and Job._meta.db_table in sql)
    begin = max(number for number, sql in enumerate(seen[:fire]) if sql.startswith("BEGIN"))
    inside = seen[begin + 1 : fire]
    writes = [sql for sql in inside if "WHERE 0" not in sql]
    assert not inside[0].startswith("SELECT"), "the first statement writes"
    assert writes[0].startswith("UPDATE")
    assert Lock._meta.db_table in writes[0]


def test_a_lease_that_ran_out_and_that_nobody_took_is_still_its_own() -> None:
    schedule("then", "@every 1h", "mail")
    declare_due()
    with Runner() as runner:
        wait_for_first_tick()
        Lock.objects.update(expires_at=wall.now() - timedelta(hours=1))
        due_now("then")
        wait_until(lambda: fired("then") == 1, "it fires on")
        wait_until(lambda: Lock.objects.get().expires_at > wall.now(), "and renews")
        assert not runner.ended.is_set()


def test_a_lapsed_leadership_of_a_dead_runner_is_taken_over() -> None:
    now = wall.now()
    Lock.objects.create(name=LEADERSHIP, owner="dead", acquired_at=now, expires_at=now - timedelta(microseconds=1))
    declare_due()
    with Runner() as runner:
        wait_for_first_tick()
    assert runner.error is None


# The sleep


class Ahead(wall.SystemClock):
    """The wall clock, and as many seconds as it is put ahead of it."""

    seconds = 0.0
    passed = 0.0
    """Seconds that the other clock is put ahead."""

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return super().monotonic() + self.passed


def test_a_leader_that_sleeps_longer_than_its_lease_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two renewals a third of the lease is over, by a clock that is put ahead: by a stall it does not end."""
    monkeypatch.setattr(leader, "LEADERSHIP_TTL", 60.0)
    monkeypatch.setattr(leader, "RENEW_EVERY", 0.1)
    monkeypatch.setattr(leader, "SETTLE", 0.0)
    ahead = Ahead()
    renewals: list[str] = []
    looks: list[str] = []

    def count(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        kind = kind_of(sql)
        if kind == "the tick's reading":
            renewals.clear()
            looks.clear()
        elif kind == "the look at the soonest":
            looks.append(sql)
        elif kind == "the renewal" and len(renewals) < 12:
            renewals.append(sql)
            ahead.seconds += 20
        return result

    schedule("far", "@every 365d", "mail")
    declare_due()
    with wall.use(ahead), Runner(wrapper=count) as first:
        wait_for_first_tick()
        row = Lock.objects.get()
        wait_until(lambda: len(renewals) == 12, "a dozen renewals without a tick: more than the lease lasts")
        assert len(looks) <= 12 + 2, "its own commits are no news: it looks once after each"
        with Runner() as second:
            second.wait()
        assert isinstance(second.error, LeadershipLost)
        kept = Lock.objects.get()
        assert (kept.token, kept.owner) == (row.token, row.owner)
        assert kept.expires_at > row.acquired_at + timedelta(seconds=120)
        assert not first.ended.is_set()
    assert Job.objects.count() == 1


def change_by_save(name: str) -> None:
    row = Schedule.objects.get(name=name)
    row.next_fire_at = wall.now()
    row.save()


def change_by_bulk_update(name: str) -> None:
    rows = list(Schedule.objects.filter(name=name))
    for row in rows:
        row.next_fire_at = wall.now()
    Schedule.objects.bulk_update(rows, ["next_fire_at"])


def change_by_sql(name: str) -> None:
    with second_connection() as raw:
        raw.execute("PRAGMA busy_timeout = 20000")
        raw.execute(f"UPDATE {Schedule._meta.db_table} SET next_fire_at = ? WHERE name = ?", (wall.now_us(), name))


@pytest.mark.parametrize("change", [due_now, change_by_save, change_by_bulk_update, change_by_sql])
def test_f087_a_schedule_that_is_changed_wakes_the_sleeping_leader(change: Callable[[str], None]) -> None:
    schedule("then", "@every 1h", "mail")
    declare_due()
    with heard(signals.schedule_fired) as fires, Runner():
        wait_for_first_tick()
        for times in (1, 2, 3):
            change("then")
            wait_until(lambda times=times: fired("then") == times, "the change is noticed")  # type: ignore[misc]
        assert fired("first") == 1
    assert [news["fire"].name for news in fires] == ["first", "then", "then", "then"]


def test_a_schedule_that_is_added_wakes_the_sleeping_leader() -> None:
    declare_due()
    with Runner():
        wait_for_first_tick()
        schedule("new", "@every 1s", "mail")
        wait_until(lambda: fired("new") >= 2, "the new schedule fires")


def test_a_leader_without_any_schedule_waits_for_the_first() -> None:
    with Runner() as runner:
        wait_until(leads, "it leads")
        declare_due()
        wait_for_first_tick()
        assert not runner.ended.is_set()


def test_f087_a_schedule_that_is_paused_does_not_fire_again() -> None:
    schedule("then", "@every 1h", "mail")
    declare_due()
    with Runner():
        wait_for_first_tick()
        Schedule.objects.filter(name="then").update(enabled=False, next_fire_at=wall.now())
        declare_due("last")
        wait_for_first_tick("last")
    assert fired("then") == 0


def test_one_second_schedules_fire_each_boundary_once() -> None:
    first = schedule("seconds", "@every 1s", "mail").next_fire_at
    with Runner():
        wait_until(lambda: fired("seconds") >= 3, "three boundaries")
    moments = list(Job.objects.order_by("fire_at").values_list("fire_at", flat=True))
    assert moments == [first + timedelta(seconds=number) for number in range(len(moments))]


# Trouble


def test_a_broken_row_is_paused_and_the_leader_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    schedule("bad", "@every 1h", "mail")
    Schedule.objects.filter(name="bad").update(spec="hourly", next_fire_at=wall.now())
    declare_due()
    with caplog.at_level(logging.ERROR, "django_alkstore"), Runner() as runner:
        wait_for_first_tick()
        declare_due("then")
        wait_for_first_tick("then")
        assert not runner.ended.is_set()
    bad = Schedule.objects.get(name="bad")
    assert bad.enabled is False
    assert bad.last_error
    assert any("bad" in record.getMessage() for record in caplog.records)


KINDS = ["the tick's reading", "the look at the soonest", "the renewal", "the fire", "the pruning"]


def kind_of(sql: str) -> str | None:
    """Which of the loop's statements this is: by verb and table, whoever words it."""
    verb = sql.split(maxsplit=1)[0].upper()
    table = next((m for m in (Lock, Job, Schedule) if f'"{m._meta.db_table}"' in sql), None)
    if (verb, table) == ("SELECT", Schedule):
        return "the tick's reading" if "payload" in sql else "the look at the soonest"
    if (verb, table) == ("UPDATE", Lock) and "WHERE 0" not in sql:
        return "the renewal"
    return {("INSERT", Job): "the fire", ("DELETE", Job): "the pruning"}.get((verb, table))


@pytest.mark.parametrize(
    ("which", "failure"),
    [(which, n) for which in KINDS for n in (1, 2, 3, 5) if which != "the pruning" or n == 1],
)
def test_a_database_error_at_any_statement_is_logged_and_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, which: str, failure: int
) -> None:
    """`The runtime recovers by itself`: the n-th statement of this kind fails, in the tick, the sleep or upkeep."""
    monkeypatch.setattr(leader, "RENEW_EVERY", 0.05)
    monkeypatch.setattr(error_backoff, "FIRST_PAUSE", 0.01)
    failed = threading.Event()
    count: list[int] = []

    with heard(signals.leader_elected) as elected, caplog.at_level(logging.WARNING, "django_alkstore"):

        def fail(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            if kind_of(sql) == which and elected and not failed.is_set():
                count.append(1)
                if len(count) == failure:
                    failed.set()
                    raise OperationalError("disk I/O error")
            return execute(sql, params, many, context)

        names = ["first"]
        declare_due()
        with Runner(wrapper=fail) as runner:
            over = (failed.is_set, runner.ended.is_set)
            while not any(is_set() for is_set in over) and len(names) < 10:
                # Each is another round, another look in the sleep, and another insert.
                names.append(f"s{len(names)}")
                declare_due(names[-1])
                wait_until(lambda: fired(names[-1]) == 1 or any(is_set() for is_set in over), "it fires")
            assert failed.wait(PATIENCE)
            names.append("after")
            declare_due("after")
            wait_until(lambda: fired("after") == 1 or runner.ended.is_set(), "it goes on after the error")
    assert runner.error is None
    assert "disk I/O error" in caplog.text
    assert {name: fired(name) for name in names} == dict.fromkeys(names, 1)
    assert not leads()


def test_a_database_error_in_the_look_that_a_commit_woke_it_for_is_logged_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first look comes after the tick. Nothing is due, so the second is taken in the sleep."""
    schedule("far", "@every 365d", "mail")
    looks: list[str] = []

    def fail(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if kind_of(sql) == "the look at the soonest":
            looks.append(sql)
            if len(looks) == 2:
                raise OperationalError("disk I/O error")
        return execute(sql, params, many, context)

    with caplog.at_level(logging.WARNING, "django_alkstore"), Runner(wrapper=fail) as runner:
        wait_until(lambda: len(looks) >= 1, "the look after the tick")
        enqueue("mail", "somebody commits something")
        wait_until(lambda: len(looks) >= 2, "the look in the sleep")
        declare_due("after")
        wait_until(lambda: fired("after") == 1 or runner.ended.is_set(), "it goes on after the error")
    assert runner.error is None
    assert fired("after") == 1
    assert "disk I/O error" in caplog.text


def test_the_leadership_is_freed_when_the_loop_ends_by_an_error_that_is_not_the_databases() -> None:
    declare_due()

    def fail(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if kind_of(sql) == "the tick's reading":
            raise ZeroDivisionError
        return execute(sql, params, many, context)

    with Runner(wrapper=fail) as runner:
        runner.wait()
    assert isinstance(runner.error, ZeroDivisionError)
    assert not leads()
    assert Job.objects.count() == 0
    assert len(tick()) == 1


def messages(caplog: pytest.LogCaptureFixture, doing: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if f"database trouble while {doing}" in record.message]


def test_a_leadership_that_can_not_be_freed_is_said_to_lapse_and_not_to_be_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith(f'DELETE FROM "{Lock._meta.db_table}"') and runner.stop.is_set():
            raise OperationalError("disk I/O error")
        return execute(sql, params, many, context)

    declare_due()
    runner = Runner(wrapper=fail)
    with runner:
        wait_for_first_tick()
    assert leads()
    assert messages(caplog, "freeing the leadership") == [
        "database trouble while freeing the leadership, which lapses within 10 s: disk I/O error"
    ]


def test_a_renewal_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "RENEW_EVERY", 0.05)
    renewals = 0

    def fail(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal renewals
        if kind_of(sql) == "the renewal":
            renewals += 1
            if renewals == 2:  # the first is the first step's
                raise OperationalError("disk I/O error")
        return execute(sql, params, many, context)

    with Runner(wrapper=fail) as runner:
        wait_until(lambda: renewals >= 3 or runner.ended.is_set(), "it goes on")
    assert len(messages(caplog, "ticking")) == 1


# Steps


def due_boundaries(name: str, count: int) -> None:
    schedule(name, "@every 1h", "mail", name)
    due_now(name, behind=(count - 1) * 3_600 + 1)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticks, "JOBS_IN_STEP", 5)


@contextmanager
def after_fires(number: int, act: Callable[[], object]) -> Iterator[None]:
    """Inside the block, `act` is called in the leader's thread once so many fires have been announced."""
    told: list[object] = []

    def listen(**_: object) -> None:
        told.append(None)
        if len(told) == number:
            act()

    signals.schedule_fired.connect(listen)
    try:
        yield
    finally:
        signals.schedule_fired.disconnect(listen)


@pytest.mark.usefixtures("small_steps")
def test_each_step_of_a_tick_begins_with_the_renewal() -> None:
    for name in ("a", "b"):
        due_boundaries(name, 11)
    seen: list[str] = []

    def listen(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        kind = "begin" if sql.startswith("BEGIN") else kind_of(sql)
        if kind in ("begin", "the renewal", "the tick's reading", "the fire"):
            seen.append(str(kind))
        return execute(sql, params, many, context)

    with Runner(wrapper=listen):
        wait_until(lambda: fired("a") + fired("b") == 22, "all are fired")
    steps = " ".join(seen).split("begin")
    firing = [step.split(" the ") for step in steps if "the fire" in step]
    assert [step.count("fire") + step.count("fire ") for step in firing] == [5, 5, 5, 5, 2]
    assert {(step[1], step[2]) for step in firing} == {("renewal", "tick's reading")}


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("how", HOW)
def test_leadership_taken_between_two_steps_of_a_tick_is_lost_and_nothing_more_fires(how: str) -> None:
    for name in ("a", "b"):
        due_boundaries(name, 11)

    def steal() -> None:
        with second_connection() as raw:
            raw.execute("PRAGMA busy_timeout = 20000")
            take(raw, how)

    with after_fires(7, steal), Runner() as runner:
        runner.wait()
    assert isinstance(runner.error, LeadershipLost)
    assert Job.objects.count() == 10, "two steps are kept, and there is no third"


@pytest.mark.usefixtures("small_steps")
def test_a_stop_is_noticed_between_two_steps_of_a_tick() -> None:
    for name in ("a", "b"):
        due_boundaries(name, 11)
    runner = Runner()
    with after_fires(7, runner.stop.set), runner:
        runner.wait()
    assert (runner.error, runner.result) == (None, None)
    assert Job.objects.count() == 10
    assert not leads()
    assert len(tick()) == 12, "nothing is lost"


@pytest.mark.usefixtures("small_steps")
def test_f076_the_leader_fires_64_boundaries_of_a_backlog_and_goes_on_after_now() -> None:
    due_boundaries("then", 200)
    before = Schedule.objects.get().next_fire_at
    with Runner():
        wait_until(lambda: Schedule.objects.get().next_fire_at > wall.now(), "it is past the backlog")
        declare_due()
        wait_for_first_tick()
    moments = list(Job.objects.filter(schedule="then").order_by("fire_at").values_list("fire_at", flat=True))
    assert moments == [before + timedelta(hours=n) for n in range(64)]
    assert Schedule.objects.get(name="then").next_fire_at == before + timedelta(hours=200)


@pytest.mark.parametrize("failing", [False, True])
def test_the_lease_is_renewed_while_slow_receivers_are_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    """A receiver after which a renewal is due each time. That it fails decides nothing."""
    monkeypatch.setattr(leader, "RENEW_EVERY", 60.0)
    due_boundaries("then", 10)
    ahead = Ahead()
    renewals: list[str] = []
    told: list[object] = []

    def count(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if kind_of(sql) == "the renewal" and told:
            renewals.append(sql)
            if failing and len(renewals) == 3:
                raise OperationalError("disk I/O error")
        return execute(sql, params, many, context)

    def listen(**_: object) -> None:
        ahead.passed += 61
        told.append(None)

    signals.schedule_fired.connect(listen)
    try:
        with wall.use(ahead), Runner(wrapper=count) as runner:
            wait_until(lambda: len(renewals) >= 10 or runner.ended.is_set(), "a renewal after each of ten fires")
            declare_due()
            wait_for_first_tick()
    finally:
        signals.schedule_fired.disconnect(listen)
    assert runner.error is None
    assert len(messages(caplog, "renewing the leadership")) == (1 if failing else 0)


# The writer lock is held by another process


@pytest.mark.parametrize("at", ["the acquisition", "a step", "the sleep"])
def test_it_leaves_soon_after_the_stop_though_another_process_holds_the_writer_lock(at: str) -> None:
    """The busy timeout is 20 s."""
    schedule("far", "@every 365d", "mail")
    declare_due()
    begins = threading.Event()

    def listen(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("BEGIN"):
            begins.set()
        return execute(sql, params, many, context)

    with second_connection() as raw:
        runner = Runner(wrapper=listen)
        if at == "the acquisition":
            raw.execute("BEGIN IMMEDIATE")
        with runner:
            if at != "the acquisition":
                wait_for_first_tick()
                raw.execute("PRAGMA busy_timeout = 20000")
                if at == "a step":
                    due_now("far", behind=-0.3)
                raw.execute("BEGIN IMMEDIATE")
                begins.clear()
            if at != "the sleep":
                assert begins.wait(PATIENCE)
            started = time.monotonic()
            runner.stop.set()
            runner.wait()
            assert time.monotonic() - started < 5
        raw.execute("ROLLBACK")
    assert (runner.error, runner.result) == (None, None)
    assert leads() is (at != "the acquisition"), "it lapses"
    assert fired("far") == 0


def test_the_waits_of_the_thread_that_led_are_what_they_were_before() -> None:
    stop = threading.Event()
    stop.set()
    run_schedules(stop)
    assert transactions.longest_wait(connections["default"]) == 20.0
    with connection.cursor() as cursor:
        assert cursor.execute("PRAGMA busy_timeout").fetchone()[0] == 20_000


# Crash detection


def test_the_leadership_names_the_liveness_file_and_a_holder_that_is_known_to_live_until_it_has_stopped() -> None:
    with LivenessView("default") as view:
        assert view.file is None or view.reason is None
    with Runner():
        wait_until(leads, "it leads")
        row = Lock.objects.get()
        with LivenessView("default") as view:
            assert row.liveness == view.file is not None
            assert view.knows(row.owner, row.liveness) is True
    with LivenessView("default") as view:
        assert view.knows(row.owner, row.liveness) is False


def test_without_crash_detection_one_line_says_why(caplog: pytest.LogCaptureFixture, settings: Any) -> None:
    settings.ALKSTORE = {"LIVENESS": False}
    declare_due()
    with heard(signals.crash_detection_off) as news, Runner():
        wait_for_first_tick()
        assert Lock.objects.get().liveness is None
    assert [one["reason"] for one in news] == ['ALKSTORE["LIVENESS"] is False']
    assert len([line for line in caplog.messages if "crash detection is off" in line]) == 1
