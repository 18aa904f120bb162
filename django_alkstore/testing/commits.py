"""Commits inside a test's transaction.

`TestCase` wraps each test in a transaction that is never committed. So the end of a block is a commit for the code
under test, and not for Django: `on_commit` callbacks would never run, and a handler could not open a durable block.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_alkstore import internals
from django_alkstore.dialects.transactions import is_open

logger = logging.getLogger("django_alkstore")


@contextmanager
def outside_transactions() -> Iterator[None]:
    """Let the code inside believe that no transaction is open, although the test has opened some.

    All that it writes stays in the test's transactions. If it breaks one, what it has written there is rolled back.
    """
    with ExitStack() as stack:
        for connection in connections.all(initialized_only=True):
            if is_open(connection):
                stack.enter_context(internals.block_of_a_test(connection.alias))
        stack.enter_context(blocks_commit())
        yield


@contextmanager
def blocks_commit() -> Iterator[None]:
    """Inside, the end of an outermost `atomic` block counts as a commit: the block's `on_commit` callbacks run then.

    The blocks that are open already are the test's, and are not counted.
    """
    with ExitStack() as stack:
        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block:
                stack.enter_context(_Commits(connection).watched())
        yield


class _Commits:
    """Runs the callbacks of one connection that is in a block of the test."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._depth = len(internals.open_blocks(connection))
        self._of_the_test = len(internals.commit_callbacks(connection))
        """Callbacks that were there before, which wait for a commit that never comes."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        connection = self._connection
        on_commit, savepoint_commit = connection.on_commit, connection.savepoint_commit

        def register(func: Callable[[], Any], robust: bool = False) -> None:
            on_commit(func, robust)
            self._run_if_committed()

        def release(sid: str) -> None:
            savepoint_commit(sid)
            self._run_if_committed()

        replaced = vars(connection)  # another watch may have replaced them before
        before = {name: own for name, own in replaced.items() if name in {"on_commit", "savepoint_commit"}}
        replaced.update(on_commit=register, savepoint_commit=release)
        try:
            yield
            self._run_if_committed()  # of blocks that have no savepoint
        finally:
            del replaced["on_commit"], replaced["savepoint_commit"]
            replaced.update(before)

    def _run_if_committed(self) -> None:
        if len(internals.open_blocks(self._connection)) > self._depth or self._connection.needs_rollback:
            return
        callbacks = internals.commit_callbacks(self._connection)
        committed = callbacks[self._of_the_test :]
        del callbacks[self._of_the_test :]
        for _, func, robust in committed:
            if robust:
                _run_robust(func)
            else:
                func()  # if it raises, the others do not run, as after a commit


def _run_robust(func: Callable[[], Any]) -> None:
    try:
        func()
    except Exception:
        logger.exception("an on_commit callback failed: %r", func)
