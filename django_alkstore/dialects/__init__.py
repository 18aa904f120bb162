"""What a database must be able to do (`base`), and each database's way of doing it."""

from django.db import NotSupportedError
from django.db.backends.base.base import BaseDatabaseWrapper

from django_alkstore.dialects.base import Dialect, Operations
from django_alkstore.dialects.sqlite import SQLite

__all__ = ["Dialect", "Operations", "dialect_of"]

_DIALECTS: dict[str, Dialect] = {"sqlite": SQLite()}


def dialect_of(connection: BaseDatabaseWrapper) -> Dialect:
    """The dialect of a connection. `NotSupportedError` if there is none for its database."""
    try:
        return _DIALECTS[connection.vendor]
    except KeyError:
        raise NotSupportedError(
            f"django-alkstore works on SQLite; the database {connection.alias!r} is {connection.vendor}"
        ) from None
