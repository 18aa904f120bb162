"""Random calls to the public API, each made of the library and of the model, which must agree after every one.

Transactions are steps of their own, so that every call is tried inside every kind of them: `atomic` blocks, savepoints,
blocks without a savepoint, manual commit, and what is left of one after `LeaseLost`.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Model as DatabaseModel
from django.test import override_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from django_alkstore import clock as clock_module
from django_alkstore import models, services
from django_alkstore.clock import ManualClock, to_us
from django_alkstore.exceptions import (
    Discard,
    DuplicateJob,
    InvalidOption,
    InvalidSpec,
    LeaseLost,
    LockHeld,
    LockLost,
    Retry,
    Snooze,
    TransactionRequired,
)
from tests.model import model
from tests.model.model import Claim, Defaults, Duration, Model, Rules

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)

CONFIGURED = Defaults(visibility_timeout=30.0, max_attempts=2, backoff_base=1.5, expires_in=600.0)
OUTBOX_QUEUE = model.OUTBOX_PREFIX + "post"
QUEUES = ("mail", "print")
JOB_FIELDS = tuple(f.name for f in fields(model.Job) if f.name != "claims")
SCHEDULE_FIELDS = tuple(f.name for f in fields(model.Schedule))
LOCK_FIELDS = tuple(f.name for f in fields(model.Lock))

queues = st.sampled_from(QUEUES)
# Few workers, so that one name often holds several claims.
workers = st.sampled_from(["ann", "bob"])
keys = st.sampled_from(["k1", "k2"])
payloads = st.sampled_from([None, 0, "é", [1, 2.5], {"order": {"id": 2**70}}])
short = st.sampled_from([60, 1, 0.5, timedelta(seconds=20), 3_600])
waits = st.sampled_from([0, 0.25, 20, timedelta(minutes=1)])
moments = st.sampled_from([0, -3_600, -1, 1, 30, 86_400])
"""Seconds from now."""
fire_options = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.sampled_from([0, 1, -1, 2**31 - 1]),
        "max_attempts": st.integers(1, 3),
        "visibility_timeout": short,
        "backoff_base": waits,
        "expires_in": st.sampled_from([None, 1, 60, timedelta(hours=1)]),
    },
)
when = st.sampled_from([{}, {}, {"delay": 0}, {"delay": timedelta(minutes=1)}, {"run_in": -3_600}, {"run_in": 30.5}])
unkeyed_options = st.tuples(fire_options, when).map(lambda both: both[0] | both[1])
job_options = st.tuples(unkeyed_options, st.none() | keys).map(lambda both: {**both[0], "unique_key": both[1]})
which = st.integers(0, 11)
"""Which of those that there are at the time."""
wrong_options = st.sampled_from(
    [
        {"delay": -1},
        {"delay": float("nan")},
        {"delay": 1, "run_at": START},
        {"run_at": START.replace(tzinfo=None)},
        {"max_attempts": 0},
        {"visibility_timeout": 0},
        {"expires_in": 0},
        {"backoff_base": -0.5},
        {"priority": 2**31},
    ]
)
wrong_specs = st.sampled_from(["@every 0s", "@every5s", "@every 99999999d", "hourly"])
errors = st.sampled_from(["boom", "", ValueError("bad"), KeyError("k")])
specs = st.sampled_from(["@every 60s", " @every  1m ", "@every 45s", "@every 1h", "@every 1d"])
names = st.sampled_from(["a", "b"])


def told(error: object) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)


def entries(errors: list[dict[str, Any]]) -> tuple[model.Failure, ...]:
    """A job's `errors` as the model has them."""
    assert all(set(entry) == {"attempt", "at", "error", "traceback", "exception"} for entry in errors)
    assert all(isinstance(entry["traceback"], str) for entry in errors)
    return tuple(model.Failure(e["attempt"], datetime.fromisoformat(e["at"]), e["error"]) for e in errors)


def row(instance: object, names: tuple[str, ...]) -> dict[str, Any]:
    """The fields of the library's instance or of the model's."""
    values = {name: getattr(instance, name) for name in names}
    if isinstance(values.get("errors"), list):
        values["errors"] = entries(values["errors"])
    return values


class Table:
    """Reads a whole table through the model's fields. The text is kept, and each row that was read before: to compile
    and convert anew at each step would cost more than all else."""

    def __init__(self, table: type[DatabaseModel], order: str, names: tuple[str, ...]) -> None:
        self.names = names
        self._known: dict[tuple[Any, ...], dict[str, Any]] = {}
        query = table.objects.order_by(order).values_list(*names).query
        self._text = str(query)
        self._readers = [
            (position, reader)
            for position, name in enumerate(names)
            for reader in table._meta.get_field(name).get_db_converters(connection)
        ]

    def rows(self) -> list[dict[str, Any]]:
        with connection.cursor() as cursor:
            return [self._known.get(stored) or self._read(stored) for stored in cursor.execute(self._text).fetchall()]

    def _read(self, stored: tuple[Any, ...]) -> dict[str, Any]:
        values = list(stored)
        for position, reader in self._readers:
            values[position] = reader(values[position], None, connection)
        found = dict(zip(self.names, values, strict=True))
        if "errors" in found:
            found["errors"] = entries(found["errors"])
        self._known[stored] = found
        return found


@dataclass(frozen=True)
class Held:
    """A handle, and the claim that it is in the model."""

    handle: services.JobHandle
    claim: Claim


@dataclass
class Block:
    """An open `atomic` block, and what its rollback goes back to."""

    atomic: Any
    before: Model
    savepoint: bool


def operation(**arguments: Any) -> Callable[[Any], Any]:
    """A rule for what a broken transaction does not let anybody do."""
    return lambda function: precondition(lambda machine: not machine.broken)(rule(**arguments)(function))


def on_a_handle(**arguments: Any) -> Callable[[Any], Any]:
    """Where there is one, or can be."""
    ready = precondition(lambda machine: machine.handles or not machine.open)
    return lambda function: ready(operation(**arguments)(function))


def on_a_job(**arguments: Any) -> Callable[[Any], Any]:
    return lambda function: precondition(lambda machine: machine.ids)(operation(**arguments)(function))


def on_a_schedule(**arguments: Any) -> Callable[[Any], Any]:
    return lambda function: precondition(lambda machine: machine.model.schedules)(operation(**arguments)(function))


def empty_tables() -> None:
    """In no order and without the count of ids, which goes on from one example to the next."""
    with connection.cursor() as cursor:
        for table in (models.Job, models.Lock, models.Schedule):
            cursor.execute(f"DELETE FROM {table._meta.db_table}")


class Alkstore(RuleBasedStateMachine):
    """The library beside the model."""

    lock_handles = Bundle("lock_handles")

    def __init__(self, outside: sqlite3.Connection | None) -> None:
        """`outside`: another connection to the file, where it may read while a transaction is open."""
        super().__init__()
        empty_tables()
        self.outside = outside
        self.clock = ManualClock(START)
        self.model = Model(START)
        self.blocks: list[Block] = []
        self.manual: Model | None = None
        """In manual commit: what is committed."""
        self.broken = False
        self.fences: dict[int, int] = {}
        self.tokens: dict[str, int] = {}
        """The greatest token of each lock that anybody was given, rolled back or not."""
        self.rows: list[dict[str, Any]] = []
        """The jobs after the last step."""
        self.ids: list[int] = []
        """Every id that was given, those that were rolled back too."""
        self.handles: list[Held] = []
        self.states_delivered: list[str] = []
        """Of the jobs delivered, before their claim."""
        self._tables = (
            Table(models.Job, "id", (*JOB_FIELDS, "fence")),
            Table(models.Lock, "name", LOCK_FIELDS),
            Table(models.Schedule, "name", SCHEDULE_FIELDS),
        )
        self._exits = ExitStack()
        self._exits.enter_context(clock_module.use(self.clock))

    def teardown(self) -> None:
        try:
            while self.blocks:
                self._leave(ValueError())
            if self.manual is not None:
                transaction.rollback()
                transaction.set_autocommit(True)
        finally:
            self._exits.close()

    @initialize(
        keep_completed=st.sampled_from([timedelta(days=1), 0, 60, None]),
        keep_dead=st.sampled_from([None, 0, 3_600]),
        max_backoff=st.sampled_from([3_600.0, 8.0]),
        scheduled=st.booleans(),
    )
    def configure(
        self, keep_completed: Duration | None, keep_dead: Duration | None, max_backoff: float, scheduled: bool
    ) -> None:
        self.model.rules = Rules(keep_completed, keep_dead, max_backoff, {"print": CONFIGURED})
        setting = {
            "KEEP_COMPLETED": keep_completed,
            "KEEP_DEAD": keep_dead,
            "MAX_BACKOFF": max_backoff,
            "BACKOFF_JITTER": 0,
            "QUEUES": {"print": vars(CONFIGURED)},
        }
        self._exits.enter_context(override_settings(ALKSTORE=setting))
        if scheduled:
            self._declare("a", "@every 60s", "mail", None, {})

    # Time

    @rule(seconds=st.sampled_from([0.5, 1, 5, 30, 60, 300, 3_600, 86_400]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.model.now = self.clock.now()

    @rule(seconds=st.sampled_from([-1, -30, -3_600, -86_400]))
    def the_clock_steps_back(self, seconds: float) -> None:
        self.clock.step(seconds)
        self.model.now = self.clock.now()

    @rule(which=which, beside=st.sampled_from([timedelta(), -MICROSECOND, MICROSECOND]))
    def the_clock_steps_to_an_edge(self, which: int, beside: timedelta) -> None:
        """To a moment at which something begins or ends, or the last or first moment beside it."""
        edges: set[datetime | None] = {schedule.next_fire_at for schedule in self.model.schedules.values()}
        edges.update(lock.expires_at for lock in self.model.locks.values())
        for job in self.model.jobs.values():
            if job.state in model.LIVE:
                edges.update((job.run_at, job.lease_expires_at, job.expires_at))
        ordered = sorted(edge for edge in edges if edge is not None)
        if ordered:
            self._step_to(ordered[which % len(ordered)] + beside)

    def _step_to(self, moment: datetime) -> None:
        self.clock.step((moment - self.clock.now()) / timedelta(seconds=1))
        self.model.now = self.clock.now()

    # Transactions

    @property
    def open(self) -> bool:
        return bool(self.blocks) or self.manual is not None

    @precondition(lambda self: len(self.blocks) < 3)
    @operation(savepoint=st.sampled_from([True, True, False]))
    def begin(self, savepoint: bool) -> None:
        """An `atomic` block. In manual commit a savepoint would begin the transaction and its release commit it, which
        is SQLite's way and not ours, so something is written first."""
        if self.manual is not None and not self.blocks:
            savepoint = True
            with connection.cursor() as cursor:
                cursor.execute(f"DELETE FROM {models.Lock._meta.db_table} WHERE 0")
        block = Block(transaction.atomic(savepoint=savepoint), self.model.copy(), savepoint or not self.blocks)
        block.atomic.__enter__()
        self.blocks.append(block)

    @precondition(lambda self: not self.open)
    @rule()
    def begin_manual_commit(self) -> None:
        transaction.set_autocommit(False)
        self.manual = self.model.copy()

    @precondition(lambda self: self.blocks)
    @rule(by_error=st.booleans())
    def leave(self, by_error: bool) -> None:
        """Leave the innermost block."""
        self._leave(ValueError() if by_error else None)

    def _leave(self, error: Exception | None) -> None:
        block = self.blocks.pop()
        block.atomic.__exit__(type(error) if error else None, error, None)
        if not (error or self.broken):
            return
        # Without a savepoint of its own, the block around it rolls back.
        self.broken = not block.savepoint
        if block.savepoint:
            self.model.restore(block.before)

    @precondition(lambda self: self.manual is not None and not self.blocks)
    @rule(commit=st.booleans(), stay=st.booleans())
    def end_manual_commit(self, commit: bool, stay: bool) -> None:
        assert self.manual is not None
        if commit and not self.broken:
            transaction.commit()
        else:
            transaction.rollback()
            self.model.restore(self.manual)
            self.broken = False
        self.manual = self.model.copy()
        if not stay:
            transaction.set_autocommit(True)
            self.manual = None

    # Jobs in

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        """With a `run_at` for what the strategy could only give as seconds from now."""
        given = dict(options)
        if "run_in" in given:
            given["run_at"] = self.clock.now() + timedelta(seconds=given.pop("run_in"))
        return given

    def _enqueued(self, job: models.Job, queue: str, payload: Any, options: dict[str, Any]) -> None:
        """The job that was returned is the model's, complete."""
        expected = self.model.add(job.id, queue, payload, **options)
        self.ids.append(job.id)
        assert row(job, JOB_FIELDS) == row(expected, JOB_FIELDS)

    @operation(
        way=st.sampled_from(["enqueue", "enqueue", "enqueue_tx", "outbox", "outbox_tx", "outbox_enqueue_tx"]),
        queue=queues,
        payload=payloads,
        options=job_options,
    )
    def enqueue(self, way: str, queue: str, payload: Any, options: dict[str, Any]) -> None:
        given = self._options(options)
        call: Callable[[], models.Job] = {
            "enqueue": lambda: services.enqueue(queue, payload, **given),
            "enqueue_tx": lambda: services.enqueue_tx(queue, payload, **given),
            "outbox": lambda: services.outbox("post").enqueue(payload, **given),
            "outbox_tx": lambda: services.outbox("post").enqueue_tx(payload, **given),
            "outbox_enqueue_tx": lambda: services.outbox_enqueue_tx("post", payload, **given),
        }[way]
        target = OUTBOX_QUEUE if way.startswith("outbox") else queue
        holder = self.model.holder(target, given["unique_key"])
        if way.endswith("tx") and not self.open:
            with pytest.raises(TransactionRequired):
                call()
        elif holder is not None:
            with pytest.raises(DuplicateJob) as refused:
                call()
            assert refused.value.job_id == holder
        else:
            self._enqueued(call(), target, payload, given)

    @operation(queue=queues, several=st.lists(payloads, max_size=3), options=unkeyed_options)
    def enqueue_many(self, queue: str, several: list[Any], options: dict[str, Any]) -> None:
        given = self._options(options)
        ids = services.enqueue_many(queue, several, **given)
        assert len(ids) == len(several)
        for job_id, payload in zip(ids, several, strict=True):
            self.model.add(job_id, queue, payload, **given)
        self.ids += ids

    @operation(queue=queues, run_ins=st.lists(moments, max_size=3), options=fire_options)
    def enqueue_many_at(self, queue: str, run_ins: list[float], options: dict[str, Any]) -> None:
        run_ats = [self.clock.now() + timedelta(seconds=run_in) for run_in in run_ins]
        ids = services.enqueue_many(queue, run_ins, run_ats=run_ats, **options)
        for job_id, payload, run_at in zip(ids, run_ins, run_ats, strict=True):
            self.model.add(job_id, queue, payload, run_at=run_at, **options)
        self.ids += ids

    @operation(queue=queues, key=keys, payload=payloads, options=unkeyed_options)
    def get_or_enqueue(self, queue: str, key: str, payload: Any, options: dict[str, Any]) -> None:
        given = self._options(options)
        holder = self.model.holder(queue, key)
        job, created = services.get_or_enqueue(queue, key, payload, **given)
        assert created is (holder is None)
        if holder is None:
            self._enqueued(job, queue, payload, {**given, "unique_key": key})
        else:
            assert row(job, JOB_FIELDS) == row(self.model.jobs[holder], JOB_FIELDS)

    @operation(queue=queues, options=wrong_options, spec=wrong_specs)
    def ask_for_nonsense(self, queue: str, options: dict[str, Any], spec: str) -> None:
        with pytest.raises(InvalidOption):
            services.enqueue(queue, None, **options)
        with pytest.raises(InvalidSpec):
            services.schedule("a", spec, queue)

    # Claims

    def _delivered(self, handle: services.JobHandle, expected: model.Job) -> Held:
        """The handle says what the model says."""
        assert (
            handle.id,
            handle.queue,
            handle.payload,
            handle.attempt,
            handle.max_attempts,
            handle.priority,
            handle.enqueued_at,
            handle.run_at,
            handle.lease_expires_at,
            handle.last_error,
            handle.schedule,
            handle.fire_at,
        ) == (
            expected.id,
            expected.queue,
            expected.payload,
            expected.attempts,
            expected.max_attempts,
            expected.priority,
            expected.created_at,
            expected.run_at,
            expected.lease_expires_at,
            expected.last_error,
            expected.schedule,
            expected.fire_at,
        )
        self.states_delivered += [found["state"] for found in self.rows if found["id"] == handle.id]
        return Held(handle, expected.claim)

    def _close(self) -> None:
        """Commit all that is open."""
        while self.blocks:
            self._leave(None)
        if self.manual is not None:
            self.end_manual_commit(commit=True, stay=False)

    def _claim(self, queue: str, worker: str, limit: int) -> None:
        handles = services.claim_batch(queue, worker, limit)
        expected = self.model.claim(queue, worker, limit)
        assert [handle.id for handle in handles] == [job.id for job in expected]
        self.handles += map(self._delivered, handles, expected)

    @operation(queue=queues, worker=workers, limit=st.integers(1, 4))
    def claim_batch(self, queue: str, worker: str, limit: int) -> None:
        """In a transaction it is refused. Most claims are to find one closed, so that it is then committed."""
        if self.open:
            with pytest.raises(RuntimeError):
                services.claim_batch(queue, worker, limit)
            self._close()
            self.jobs_agree()
        self._claim(queue, worker, limit)

    @precondition(lambda self: not self.open)
    @rule(queue=queues, payload=payloads, options=fire_options, worker=workers)
    def enqueue_and_claim(self, queue: str, payload: Any, options: dict[str, Any], worker: str) -> None:
        self._enqueued(services.enqueue(queue, payload, **options), queue, payload, options)
        self.jobs_agree()
        self._claim(queue, worker, 1)

    @precondition(lambda self: not self.open)
    @rule(
        worker=workers,
        enqueued=st.booleans(),
        ending=st.sampled_from(
            ["return", "ack", "ack, raise", "raise", "Retry", "Discard", "Snooze", "interrupt", "retry"]
        ),
        wait=waits,
        lasting=st.sampled_from([0, 0, 1, 60]),
        beat=st.booleans(),
    )
    def run_once(self, worker: str, enqueued: bool, ending: str, wait: Duration, lasting: float, beat: bool) -> None:
        """A delivery that lasts some seconds, asks for a new lease or not, and ends in one of all ways."""
        raised: dict[str, BaseException] = {
            "raise": ValueError("bad"),
            "ack, raise": ValueError("bad"),
            "Retry": Retry("later", delay=wait),
            "Discard": Discard("no use"),
            "Snooze": Snooze(wait),
            "interrupt": KeyboardInterrupt(),
        }
        if enqueued:
            self._enqueued(services.outbox("post").enqueue(1), OUTBOX_QUEUE, 1, {})
            self.jobs_agree()
        before = len(self.handles)

        def deliver(job: services.JobHandle) -> None:
            [expected] = self.model.claim(OUTBOX_QUEUE, worker, 1)
            held = self._delivered(job, expected)
            self.handles.append(held)
            self.time_passes(lasting)
            if beat:
                self._beat(held, None)
            if ending.startswith("ack"):
                self._ack(held)
            if ending == "retry":
                assert job.retry("own", wait) is self.model.retry(held.claim, "own", wait)
            if ending in raised:
                raise raised[ending]

        try:
            ran = services.outbox("post").run_once(worker, deliver)
        except KeyboardInterrupt:
            assert ending == "interrupt"
            ran = True
        assert ran is (len(self.handles) > before)
        if not ran:
            assert self.model.claim(OUTBOX_QUEUE, worker, 1) == []
            return
        claim = self.handles[-1].claim
        if ending == "return":
            self.model.ack(claim)
        elif ending in ("raise", "Retry"):
            self.model.retry(claim, told(raised[ending]), wait if ending == "Retry" else None)
        elif ending == "Discard":
            self.model.fail(claim, told(raised[ending]))
        elif ending in ("Snooze", "interrupt"):
            self.model.release(claim, wait if ending == "Snooze" else None)

    @precondition(lambda self: self.open and not self.broken)
    @rule(worker=workers)
    def run_once_in_a_transaction(self, worker: str) -> None:
        with pytest.raises(RuntimeError):
            services.outbox("post").run_once(worker, lambda job: pytest.fail(f"{job} was delivered"))

    @on_a_job(queue=st.none() | queues)
    def sweep(self, queue: str | None) -> None:
        assert services.sweep(queue) == self.model.sweep(queue)

    @precondition(lambda self: any(job.finished_at for job in self.model.jobs.values()))
    @operation()
    def prune(self) -> None:
        assert services.prune() == self.model.prune()

    @on_a_handle(which=which, early=st.booleans(), claiming=st.booleans(), worker=workers)
    def a_lease_runs_out(self, which: int, early: bool, claiming: bool, worker: str) -> None:
        """Or lacks one microsecond to it; and somebody looks."""
        job = self.model.held(self._handle(which).claim)
        if job is None or job.lease_expires_at is None:
            return
        self._step_to(job.lease_expires_at - early * MICROSECOND)
        if claiming and not self.open and job.queue in QUEUES:
            self._claim(job.queue, worker, 1)
        else:
            assert services.sweep() == self.model.sweep()

    # What a handle can do

    def _handle(self, which: int) -> Held:
        """Two in three calls are in time, on a new claim where there is no other; the rest are late, the more so where
        the job is with another claim by now."""
        current = self._current()
        late = [held for held in reversed(self.handles) if held not in current]
        if not current and not self.open and (which % 3 or not late):
            self.enqueue_and_claim("mail", None, {}, "ann")
            current = self._current()
        if current and (which % 3 or not late):
            return current[which // 3 % len(current)]
        taken = [held for held in late if any(held.handle.id == other.handle.id for other in current)]
        return (taken + late)[which // 3 % len(taken + late)]

    def _current(self) -> list[Held]:
        return [held for held in reversed(self.handles) if self.model.held(held.claim)]

    def _ack(self, held: Held) -> None:
        assert held.handle.ack() is self.model.ack(held.claim)

    def _beat(self, held: Held, extend: Duration | None) -> None:
        done = held.handle.heartbeat(extend)
        assert done is self.model.heartbeat(held.claim, extend)
        if done:
            assert held.handle.lease_expires_at == self.model.jobs[held.handle.id].lease_expires_at

    @on_a_handle(which=which)
    def ack(self, which: int) -> None:
        self._ack(self._handle(which))

    @on_a_handle(which=which, error=st.none() | errors, delay=st.none() | waits)
    def retry(self, which: int, error: Any, delay: Duration | None) -> None:
        """Without an error the attempt is kept all the same, as `retry`."""
        held = self._handle(which)
        text = "retry" if error is None else told(error)
        assert held.handle.retry(error, delay) is self.model.retry(held.claim, text, delay)

    @on_a_handle(which=which, error=errors)
    def fail(self, which: int, error: Any) -> None:
        held = self._handle(which)
        assert held.handle.fail(error) is self.model.fail(held.claim, told(error))

    @on_a_handle(which=which)
    def release(self, which: int) -> None:
        held = self._handle(which)
        assert held.handle.release() is self.model.release(held.claim)

    @on_a_handle(which=which, extend=st.none() | short)
    def heartbeat(self, which: int, extend: Duration | None) -> None:
        self._beat(self._handle(which), extend)

    @on_a_handle(which=which, savepoints=st.integers(0, 2))
    def ack_tx(self, which: int, savepoints: int) -> None:
        """After rows of the handler's own, where no transaction is open yet."""
        held = self._handle(which)
        if not self.open:
            with pytest.raises(TransactionRequired):
                held.handle.ack_tx()
            for _ in range(1 + savepoints):
                self.begin(savepoint=True)
                self._enqueued(services.enqueue_tx("mail", "effect"), "mail", "effect", {})
        if self.model.ack(held.claim):
            assert held.handle.ack_tx() is None
        else:
            with pytest.raises(LeaseLost):
                held.handle.ack_tx()
            self._lose_all()

    def _lose_all(self) -> None:
        """The whole transaction is marked for rollback, whatever savepoints there are: at its end or, in manual
        commit, at once."""
        self.broken = bool(self.blocks)
        for block in self.blocks:
            block.savepoint = False
        if self.manual is not None:
            self.model.restore(self.manual)
        elif self.blocks:
            self.blocks[0].savepoint = True

    # What anybody can do

    def _job_id(self, which: int, *states: str) -> int:
        """Two in three calls are for a job in one of the states, where there is any."""
        fitting = [job.id for job in reversed(self.model.jobs.values()) if job.state in states]
        chosen = fitting if fitting and which % 3 else self.ids[::-1]
        return chosen[which // 3 % len(chosen)]

    @on_a_job(which=which)
    def cancel(self, which: int) -> None:
        job_id = self._job_id(which, *model.LIVE)
        assert services.cancel(job_id) is self.model.cancel(job_id)

    @on_a_job(which=which)
    def requeue(self, which: int) -> None:
        job_id = self._job_id(which, *model.RETRIABLE)
        holder = self.model.in_the_way(job_id)
        if holder is None:
            assert services.requeue(job_id) is self.model.requeue(job_id)
        else:
            with pytest.raises(DuplicateJob) as refused:
                services.requeue(job_id)
            assert refused.value.job_id == holder

    @on_a_job(which=which)
    def run_now(self, which: int) -> None:
        job_id = self._job_id(which, "pending")
        assert services.run_now(job_id) is self.model.run_now(job_id)

    @on_a_job(which=which, run_in=moments)
    def reschedule(self, which: int, run_in: float) -> None:
        job_id = self._job_id(which, "pending")
        run_at = self.clock.now() + timedelta(seconds=run_in)
        assert services.reschedule(job_id, run_at) is self.model.reschedule(job_id, run_at)

    @on_a_job(which=which)
    def get_job(self, which: int) -> None:
        job_id = self._job_id(which)
        job, expected = services.get_job(job_id), self.model.jobs.get(job_id)
        assert (job and row(job, JOB_FIELDS)) == (expected and row(expected, JOB_FIELDS))

    # Locks

    @operation(target=lock_handles, name=names, ttl=short, owner=st.sampled_from(["ann", "ann", None]))
    def lock(self, name: str, ttl: Duration, owner: str | None) -> services.LockHandle:
        """Mostly under one owner's name, which must not make two handles one; and tried at once."""
        lock = services.lock(name, ttl) if owner is None else services.lock(name, ttl, owner)
        self._acquire(lock)
        return lock

    def _acquire(self, lock: services.LockHandle) -> None:
        free = self.model.lock_holder(lock.name) is None
        token = lock.token
        assert lock.acquire() is free
        if free:
            self._acquired(lock)
        else:
            assert lock.token == token

    def _acquired(self, lock: services.LockHandle) -> None:
        assert lock.token is not None
        assert lock.token > self.tokens.get(lock.name, 0), "a token came back"
        self.tokens[lock.name] = lock.token
        self.model.take_lock(lock.name, lock.owner, lock.ttl, lock.token)

    @operation(lock=lock_handles)
    def acquire(self, lock: services.LockHandle) -> None:
        self._acquire(lock)

    @operation(lock=lock_handles, ttl=st.none() | short)
    def renew(self, lock: services.LockHandle, ttl: Duration | None) -> None:
        assert lock.renew(ttl) is self.model.renew_lock(lock.name, lock.token, lock.ttl if ttl is None else ttl)

    @operation(lock=lock_handles)
    def release_lock(self, lock: services.LockHandle) -> None:
        assert lock.release() is self.model.release_lock(lock.name, lock.token)

    @operation(lock=lock_handles, lasting=st.sampled_from([0, 1, 60]), failing=st.booleans())
    def with_lock(self, lock: services.LockHandle, lasting: float, failing: bool) -> None:
        holder = self.model.lock_holder(lock.name)
        if holder is not None:
            with pytest.raises(LockHeld) as refused, lock:
                pytest.fail("a held lock was taken")
            error = refused.value
            assert (error.name, error.owner, error.expires_at) == (holder.name, holder.owner, holder.expires_at)
            return
        raised: Exception | None = None
        kept = False
        try:
            with lock:
                self._acquired(lock)
                self.time_passes(lasting)
                kept = self.model.release_lock(lock.name, lock.token)
                if failing:
                    raise ValueError
        except (ValueError, LockLost) as error:
            raised = error
        assert type(raised) is (ValueError if failing else type(None) if kept else LockLost)

    @precondition(lambda self: self.model.locks)
    @operation(name=names)
    def force_release(self, name: str) -> None:
        assert services.force_release(name) is self.model.force_release(name)

    # Schedules

    @operation(name=names, spec=specs, queue=queues, payload=payloads, options=fire_options)
    def schedule(self, name: str, spec: str, queue: str, payload: Any, options: dict[str, Any]) -> None:
        self._declare(name, spec, queue, payload, options)

    def _declare(self, name: str, spec: str, queue: str, payload: Any, options: dict[str, Any]) -> None:
        declared = services.schedule(name, spec, queue, payload, **options)
        expected = self.model.declare(name, spec, queue, payload, options)
        assert row(declared, SCHEDULE_FIELDS) == row(expected, SCHEDULE_FIELDS)

    @on_a_schedule(name=names)
    def unschedule(self, name: str) -> None:
        assert services.unschedule(name) is self.model.unschedule(name)

    @on_a_schedule(name=names)
    def pause_schedule(self, name: str) -> None:
        assert services.pause_schedule(name) is self.model.pause(name)

    @on_a_schedule(name=names)
    def resume_schedule(self, name: str) -> None:
        assert services.resume_schedule(name) is self.model.resume(name)

    @on_a_schedule(name=names)
    def fire_schedule(self, name: str) -> None:
        """Not in the contract's list but in the admin's: a job for no boundary."""
        job = services.fire_schedule(name)
        schedule = self.model.schedules.get(name)
        if schedule is None:
            assert job is None
        else:
            assert job is not None
            self._enqueued(job, schedule.queue, schedule.payload, {**schedule.options, "schedule": name})

    @on_a_schedule(
        lasting=st.sampled_from([None, 0, 300, 3_600, 172_800]),
        beside=st.sampled_from([timedelta(), -MICROSECOND]),
        ahead=st.none() | moments,
    )
    def tick(self, lasting: float | None, beside: timedelta, ahead: float | None) -> None:
        """After some time or at a boundary, by the clock or by the caller's own idea of it."""
        boundary = self.model.soonest()
        if lasting is not None:
            self.time_passes(lasting)
        elif boundary is not None:
            self._step_to(boundary + beside)
        now = self.clock.now() if ahead is None else self.clock.now() + timedelta(seconds=ahead)
        fires = services.tick() if ahead is None else services.tick(now)
        assert sorted((fire.name, fire.fire_at) for fire in fires) == sorted(self.model.due_boundaries(now))
        assert all(fire.queue == self.model.schedules[fire.name].queue for fire in fires)
        in_order = sorted(((fire.name, fire.fire_at, fire.job_id) for fire in fires), key=lambda fire: fire[2])
        self.model.tick(now, in_order)
        self.ids += [fire.job_id for fire in fires]

    # After every step

    @invariant()
    def jobs_agree(self) -> None:
        """First of all, since the others look at the rows that it has read."""
        if self.broken:
            return
        self.rows = self._tables[0].rows()
        expected = [row(job, JOB_FIELDS) for job in self.model.jobs.values()]
        assert [{name: found[name] for name in JOB_FIELDS} for found in self.rows] == expected

    @invariant()
    def locks_agree(self) -> None:
        """Those that are held: what is left of a lapsed one is nobody's business."""
        if not self.broken:
            held = [found for found in self._tables[1].rows() if found["expires_at"] > self.clock.now()]
            locks = [lock for name in sorted(self.model.locks) if (lock := self.model.lock_holder(name))]
            assert held == [row(lock, LOCK_FIELDS) for lock in locks]

    @invariant()
    def schedules_agree(self) -> None:
        if not self.broken:
            expected = [row(self.model.schedules[name], SCHEDULE_FIELDS) for name in sorted(self.model.schedules)]
            assert self._tables[2].rows() == expected
            if expected:
                assert services.soonest() == self.model.soonest()

    @invariant()
    def statistics_agree(self) -> None:
        if self.broken:
            return
        found = services.queue_stats()
        assert {each.queue: model.Stats(*astuple(each)) for each in found} == self.model.queue_stats()
        for queue in QUEUES:
            assert services.next_claim_at(queue) == self.model.next_claim_at(queue)

    @invariant()
    def rows_add_up(self) -> None:
        assert self.broken or len(self.rows) == self.model.added - self.model.removed

    @invariant()
    def a_fence_never_goes_back(self) -> None:
        for found in self.rows:
            assert found["fence"] >= self.fences.get(found["id"], 0)
            self.fences[found["id"]] = found["fence"]

    @invariant()
    def only_live_jobs_are_delivered(self) -> None:
        assert len(self.states_delivered) == len(self.handles)
        assert set(self.states_delivered) <= set(model.LIVE)

    @invariant()
    def at_most_one_live_job_has_a_key(self) -> None:
        live = [(r["queue"], r["unique_key"]) for r in self.rows if r["unique_key"] and r["state"] in model.LIVE]
        assert len(live) == len(set(live))

    @invariant()
    def at_most_one_job_is_for_a_boundary(self) -> None:
        fired = [(r["schedule"], r["fire_at"]) for r in self.rows if r["fire_at"]]
        assert len(fired) == len(set(fired))

    @invariant()
    def a_lease_has_a_worker_and_a_worker_a_lease(self) -> None:
        for found in self.rows:
            leased = found["state"] == "processing"
            assert leased is (found["worker_id"] is not None) is (found["lease_expires_at"] is not None)

    @invariant()
    def others_see_what_is_committed_and_nothing_else(self) -> None:
        if self.outside is None or not self.open:
            return
        committed = self.manual or self.blocks[0].before
        job, lock, schedule = (table._meta.db_table for table in (models.Job, models.Lock, models.Schedule))
        seen = self.outside.execute(f"SELECT id, state, attempts, run_at FROM {job} ORDER BY id").fetchall()
        assert seen == [(j.id, j.state, j.attempts, to_us(j.run_at)) for j in committed.jobs.values()]
        held = self.outside.execute(f"SELECT name FROM {lock} WHERE expires_at > ?", (to_us(self.clock.now()),))
        assert {name for (name,) in held} == {n for n, k in committed.locks.items() if k.expires_at > self.clock.now()}
        declared = self.outside.execute(f"SELECT name, next_fire_at, enabled FROM {schedule}").fetchall()
        assert set(declared) == {(s.name, to_us(s.next_fire_at), s.enabled) for s in committed.schedules.values()}


@contextmanager
def another_connection() -> Iterator[sqlite3.Connection | None]:
    """A second connection to the test database; `None` where its reads would be refused while another writes."""
    with connection.cursor() as cursor:
        mode = cursor.execute("PRAGMA journal_mode").fetchone()[0]
    if mode != "wal":
        yield None
        return
    other = sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)
    try:
        yield other
    finally:
        other.close()
