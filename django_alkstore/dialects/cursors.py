"""A cursor for the hot path.

Django's cursor costs more than the short statements that this library runs. It rewrites the placeholders of each
statement by regular expressions, and passes it through several layers that other code can hook into. If nothing has
hooked into them, statements go to the driver's own cursor here, with Django's errors and Django's checks. If something
has (`connection.queries`, `assertNumQueries`, execute wrappers, a patched cursor, a database backend of the project's
own), they go through Django's cursor, so that it sees them.
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
    """The driver's own cursor, or Django's if something watches the statements."""
    return cast("Cursor", connection.cursor()) if _is_watched(connection) else _open_direct(connection)


@lru_cache(maxsize=16)
def _is_djangos_own(method: Callable[..., Any]) -> bool:
    """True if Django has defined the method. Only the file of its code tells: a wrapper copies everything else."""
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
        """A transaction that Django does not know of. This saves half the cost of a short one.

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
            self.wrapper.close()  # as Django does: closing the connection ends the transaction

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
    """Open the driver's cursor, after the checks that Django's makes."""
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
    """`%s` as `?`, `%(name)s` as `:name`, `%%` as `%`. Cached, since the statements are few and long."""

    def rewrite(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%"
        return f":{match[1]}" if match[1] else "?"

    return _PLACEHOLDER.sub(rewrite, text)
