"""Begins transactions, waits for the writer lock, and says whether a transaction is open. No other module does.

A write is tried again only if the error's code says that another process was writing, for no longer than the busy
timeout, and never inside a caller's transaction: the caller alone can repeat that.
"""

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakKeyDictionary

from django.db import DatabaseError, OperationalError, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from django_alkstore import clock, conf, internals
from django_alkstore.dialects import Operations, dialect_of
from django_alkstore.dialects.forks import guard
from django_alkstore.exceptions import TransactionRequired
from django_alkstore.models import Job

T = TypeVar("T")

_random = random.Random()
_sleep = clock.sleep
_LONGEST_TURN = 0.05
"""Seconds. A thread that writes for longer runs a handler in its transaction; then SQLite's own wait is as good."""
_LONGEST_STEP = 0.032
"""Seconds. SQLite's own pauses grow to 0.1 s, so that the process which has waited longest is tried least often."""


def resolve_alias(using: str | None) -> str:
    """The database alias of a call: `using`, else the setting `DATABASE`, else the choice of the routers."""
    return using or resolve_default(conf.settings())


def resolve_default(settings: conf.Settings) -> str:
    """The database of a call that names none."""
    return settings.database or router.db_for_write(Job)


def is_open(connection: BaseDatabaseWrapper) -> bool:
    """True if a transaction of the caller is open: an `atomic` block, or `set_autocommit(False)`."""
    if connection.in_atomic_block:
        return True
    # `get_autocommit` would connect first. If the database file is gone, that would create an empty one.
    if connection.connection is None:
        return not connection.settings_dict["AUTOCOMMIT"]
    return not connection.autocommit


def is_left_open(connection: BaseDatabaseWrapper) -> bool:
    """True if the connection is in a transaction, by Django's means or past them, or in manual commit."""
    raw = connection.connection
    if connection.in_atomic_block or connection.needs_rollback:
        return True
    return raw is not None and (not connection.autocommit or _is_in_transaction(connection))


def refuse_if_ended(using: str) -> None:
    """Raise `TransactionManagementError` if an `atomic` block is open, and the database's own transaction is not."""
    connection = connections[using]
    if connection.in_atomic_block and not _is_in_transaction(connection):
        raise TransactionManagementError(
            "the transaction of this atomic block has been ended past Django: rows that it has written may be lost"
        )


def _is_in_transaction(connection: BaseDatabaseWrapper) -> bool:
    try:
        return bool(getattr(connection.connection, "in_transaction", False))
    except connection.Database.Error:  # type: ignore[attr-defined]  # somebody has closed the driver's connection, past Django
        return False


def require_open(using: str, what: str) -> None:
    """Raise `TransactionRequired` unless a transaction is open on this very database."""
    if not is_open(connections[using]):
        others = [c.alias for c in connections.all(initialized_only=True) if c.in_atomic_block]
        hint = f"; the open one is on {', '.join(map(repr, others))}" if others else ""
        raise TransactionRequired(
            f"{what} joins the caller's transaction, and none is open on the database {using!r}{hint}. "
            f"Call it inside transaction.atomic({hint and f'using={using!r}'})"
        )


def refuse_open(using: str, what: str) -> None:
    """Raise `RuntimeError` inside a transaction; one that `TestCase` opened does not count, as for `durable`."""
    connection = connections[using]
    blocks = internals.open_blocks(connection)
    if is_open(connection) and not (blocks and internals.is_of_a_test(blocks[-1])):
        raise RuntimeError(
            f"{what} cannot run inside an open transaction: no other process would see its lease before the commit"
        )


def mark_for_rollback(using: str) -> None:
    """Let the whole open transaction roll back at its end, even if the caller catches the error.

    `set_rollback` marks the innermost block alone, and a block with a savepoint rolls back to it and clears the mark.
    A block without a savepoint passes the mark on to the block around it. So the inner blocks lose their savepoints.
    """
    connection = connections[using]
    if not connection.in_atomic_block:
        connection.rollback()
        return
    if not connection.commit_on_exit:
        # Manual commit around the blocks: no block ends the transaction, so it is ended here.
        internals.roll_back_inside_blocks(connection)
    own = sum(not internals.is_of_a_test(block) for block in internals.open_blocks(connection))
    internals.forget_savepoints(connection, own - 1)
    connection.set_rollback(True)


def is_contention(using: str, error: DatabaseError) -> bool:
    """True if the error only says that another process or thread was writing."""
    return isinstance(error, OperationalError) and dialect_of(connections[using]).is_contention(error)


def busy_timeout(using: str) -> float:
    """Seconds that a call waits for another writer, as the project's settings say."""
    connection = connections[using]
    return dialect_of(connection).busy_timeout(connection)


def after_commit(using: str, announce: Callable[[], object]) -> None:
    """Call `announce` once the caller's transaction is committed, or now if none is open."""
    if connections[using].in_atomic_block:
        transaction.on_commit(announce, using=using, robust=True)
    else:
        announce()


def write_statement(using: str, statement: Callable[[Operations], T]) -> T:
    """Run one writing statement: in the caller's transaction if one is open, else by itself in autocommit."""
    connection = connections[using]
    dialect = dialect_of(connection)

    def run() -> T:
        with dialect.open_cursor(connection) as cursor:
            return statement(dialect.operations(cursor))

    return run() if is_open(connection) else _wait_in_line(connection, run)


def write_transaction(using: str, body: Callable[[Operations], T]) -> T:
    """Run `body` in one transaction with the writer lock held from its start, so that it may read and then write.

    If the caller has a transaction open, `body` joins it under a savepoint: all of it takes effect, or nothing.
    `body` may be called again after contention, so it must have no effect outside the database.
    """
    connection = connections[using]
    dialect = dialect_of(connection)
    nested = is_open(connection)

    def run() -> T:
        with dialect.open_cursor(connection) as cursor:
            if nested:
                # Before the savepoint: in manual commit, the savepoint itself would begin the transaction, and
                # releasing it would commit.
                dialect.take_writer_lock(connection, cursor, fresh=False)
            with transaction.atomic(using=using):
                if not nested:
                    dialect.take_writer_lock(connection, cursor, fresh=True)
                return body(dialect.operations(cursor))

    return run() if nested else _wait_in_line(connection, run)


def write_operations(using: str, body: Callable[[Operations], T]) -> T:
    """As `write_transaction`, for a body that uses nothing but its operations: no model, no service.

    Such a transaction needs no `atomic` block, which costs as much as a statement.
    """
    connection = connections[using]
    return write_transaction(using, body) if is_open(connection) else write_on(connection, body)


def write_on(connection: BaseDatabaseWrapper, body: Callable[[Operations], T]) -> T:
    """As `write_operations`, on a connection with no open transaction. It need not be that of this thread."""
    dialect = dialect_of(connection)

    def run() -> T:
        with dialect.open_cursor(connection) as cursor, dialect.begin(connection, cursor):
            return body(dialect.operations(cursor))

    return _wait_in_line(connection, run)


def read(using: str, body: Callable[[Operations], T]) -> T:
    """Run reading operations."""
    return read_on(connections[using], body)


def read_on(connection: BaseDatabaseWrapper, body: Callable[[Operations], T]) -> T:
    """As `read`, on a connection that need not be that of this thread."""
    dialect = dialect_of(connection)
    with dialect.open_cursor(connection) as cursor:
        return body(dialect.operations(cursor))


_limits: "WeakKeyDictionary[BaseDatabaseWrapper, tuple[object, float]]" = WeakKeyDictionary()
"""The longest wait on a connection that has been given one, with the driver's connection that it was set on."""


def limit_wait(using: str, seconds: float) -> None:
    """Let each call of this thread wait for another writer for at most so many seconds."""
    limit_wait_on(connections[using], seconds)


def limit_wait_on(connection: BaseDatabaseWrapper, seconds: float) -> None:
    """As `limit_wait`, on a connection that need not be that of this thread. Opens it."""
    connection.ensure_connection()
    raw, _ = _limits.get(connection, (None, 0.0))
    if raw is not connection.connection:
        _set_limit(connection, seconds)


@contextmanager
def limited_wait(using: str, seconds: float) -> Iterator[None]:
    """Inside the block, this thread's calls wait for another writer at most this long, or as long as before if less."""
    connection = connections[using]
    connection.ensure_connection()
    raw, before = connection.connection, longest_wait(connection)
    _set_limit(connection, min(seconds, before))
    try:
        yield
    finally:
        if connection.connection is raw:
            _set_limit(connection, before)


def _set_limit(connection: BaseDatabaseWrapper, seconds: float) -> None:
    dialect_of(connection).limit_wait(connection, seconds)
    _limits[connection] = (connection.connection, seconds)


def longest_wait(connection: BaseDatabaseWrapper) -> float:
    """Seconds that a call waits for another writer before it raises."""
    raw, seconds = _limits.get(connection, (None, 0.0))
    known = raw is not None and raw is connection.connection
    return seconds if known else dialect_of(connection).busy_timeout(connection)


_turns: "defaultdict[str, threading.RLock]" = defaultdict(guard)
"""For each database the lock that the threads of this process take in turn to write."""
_TURN_SLICE = 0.1
"""Seconds after which a thread that waits for its turn checks whether the turn was taken from its holder."""


@contextmanager
def turn(using: str, seconds: float) -> Iterator[bool]:
    """Wait at most `seconds` for this thread's turn among the writers of this process. Yields True if it got the turn.

    A thread that waits here is woken as soon as the other has written; SQLite would let it sleep and try again. The
    turn guarantees nothing: without it, the database's own lock decides.
    """
    started = clock.waiting_from()
    while True:
        lock = _turns[using]
        left = seconds - clock.waited_since(started)
        got = lock.acquire(timeout=max(0.0, min(left, _TURN_SLICE)))
        if got or left <= 0:
            break
    try:
        yield got
    finally:
        if got:
            lock.release()


def take_turn_away(using: str) -> None:
    """Take the turn away from the thread that has it. That thread can write nothing any more."""
    _turns[using] = guard()


def _wait_in_line(connection: BaseDatabaseWrapper, run: Callable[[], T]) -> T:
    """Call `run` when it is this thread's turn, and again while other processes write, for the longest wait at most."""
    lock = _turns[connection.alias]  # as `turn`, for less
    got = lock.acquire(blocking=False) or lock.acquire(timeout=min(_LONGEST_TURN, longest_wait(connection)))
    started = clock.waiting_from()
    tries = 0
    try:
        while True:
            try:
                return run()
            except OperationalError as error:
                waited = clock.waited_since(started)
                if not dialect_of(connection).is_contention(error) or waited >= longest_wait(connection):
                    raise
            # Short random pauses: SQLite's own grow with each try.
            tries += 1
            _sleep(_random.uniform(0, min(_LONGEST_STEP, 0.001 * 2**tries)))
    finally:
        if got:
            lock.release()
