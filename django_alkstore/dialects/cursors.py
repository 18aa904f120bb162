"""A cursor for the hot path.

Django's cursor costs more than the short statements that go through it here: each is rewritten from Django's
placeholders to SQLite's by regular expressions, and passes through the layers that let others look on. Where
nobody looks on, statements go to the driver's own cursor, with Django's errors and Django's guards; where
somebody does (`connection.queries`, `assertNumQueries`, execute wrappers, a patched cursor, a database backend
of the project's own), they go through Django's, and are seen.
"""

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, cast

from django.db.backends import utils
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.sqlite3.base import DatabaseWrapper
from django.db.backends.utils import CursorWrapper

Params = Sequence[Any] | Mapping[str, Any]


class Cursor(Protocol):
    """What the operations ask of a cursor. A context manager that closes it."""

    @property
    def rowcount(self) -> int: ...
    @property
    def lastrowid(self) -> int | None: ...
    def execute(self, text: str, params: Params = ..., /) -> Any: ...
    def executemany(self, text: str, params: Iterable[Params], /) -> Any: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


def open_cursor(connection: BaseDatabaseWrapper) -> Cursor:
    """The driver's own cursor, or Django's where anybody looks on."""
    return cast("Cursor", connection.cursor()) if _is_watched(connection) else _open_direct(connection)


@lru_cache(maxsize=16)
def _is_djangos_own(method: Callable[..., Any]) -> bool:
    """By the file of its code: what wraps it copies all else, and may have come before this module."""
    code = getattr(method, "__code__", None)
    return code is not None and code.co_filename == utils.__file__


def _is_watched(connection: BaseDatabaseWrapper) -> bool:
    return bool(
        connection.execute_wrappers
        or connection.queries_logged
        or "cursor" in vars(connection)
        or type(connection) is not DatabaseWrapper
        or not (_is_djangos_own(CursorWrapper.execute) and _is_djangos_own(CursorWrapper.executemany))
    )


class DirectCursor(sqlite3.Cursor):
    """The driver's cursor: Django's placeholders in, Django's errors out."""

    wrapper: BaseDatabaseWrapper

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.close()

    def execute(self, text: str, params: Any = (), /) -> Any:
        try:
            return super().execute(_driver_text(text), params)
        except sqlite3.Error:
            self._raise_as_django()

    def executemany(self, text: str, params: Any, /) -> Any:
        try:
            return super().executemany(_driver_text(text), params)
        except sqlite3.Error:
            self._raise_as_django()

    @contextmanager
    def transaction(self, begin: str) -> Iterator[None]:
        """A transaction that Django is not told of, which saves half of a short one's cost.

        Inside, only this cursor may be used: an `atomic` block would begin a transaction of its own.
        """
        self.execute(begin)
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        raw = self.wrapper.connection
        try:
            if raw.in_transaction:  # after some errors SQLite has rolled back itself
                raw.execute("ROLLBACK")
        except sqlite3.Error:
            self.wrapper.close()  # as Django does: with the connection goes the transaction

    def fetchone(self) -> Any:
        try:
            return super().fetchone()
        except sqlite3.Error:
            self._raise_as_django()

    def fetchall(self) -> list[Any]:
        try:
            return super().fetchall()
        except sqlite3.Error:
            self._raise_as_django()

    def _raise_as_django(self) -> NoReturn:
        """Inside an `except`: raise Django's error for the driver's, which becomes its cause."""
        with self.wrapper.wrap_database_errors:
            raise  # noqa: PLE0704  the caller's `except` has it


def _open_direct(connection: BaseDatabaseWrapper) -> DirectCursor:
    """With the guards of Django's own."""
    connection.validate_thread_sharing()
    if connection.health_check_enabled:  # type: ignore[attr-defined]
        connection.close_if_health_check_failed()
    connection.ensure_connection()  # refuses inside a running event loop, unless that is allowed
    if connection.needs_rollback:
        connection.validate_no_broken_transaction()
    cursor: DirectCursor = connection.connection.cursor(DirectCursor)
    cursor.wrapper = connection
    return cursor


_PLACEHOLDER = re.compile(r"%(?:s|%|\((\w+)\)s)")


@lru_cache(maxsize=512)
def _driver_text(text: str) -> str:
    """`%s` as `?`, `%(name)s` as `:name`, `%%` as `%`. Remembered: the texts are few and long."""

    def rewrite(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%"
        return f":{match[1]}" if match[1] else "?"

    return _PLACEHOLDER.sub(rewrite, text)
