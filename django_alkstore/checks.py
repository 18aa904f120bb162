"""System checks: what is unsafe in the project's settings, each with an id and what to do about it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  the check framework's names
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections
from django.db.backends.sqlite3.base import DatabaseWrapper

from django_alkstore import conf, registry
from django_alkstore.dialects.sqlite import ENOUGH_TIMEOUT, MINIMUM_VERSION, is_missing
from django_alkstore.dialects.transactions import is_contention, resolve_alias

_OPTIONS_HINT = (
    "In DATABASES[{alias!r}]['OPTIONS'] set: 'transaction_mode': 'IMMEDIATE', 'timeout': 20, "
    "'init_command': 'PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;'."
)

_SETTING_HINT = (
    "The README has each key, what it takes and its default, under Settings. A key that is left out keeps its default."
)


def check_setting(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    return [
        Error(f"{problem}.", hint=_SETTING_HINT, id="alkstore.E002") for problem in conf.problems(conf.raw_setting())
    ]


def check_modules(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    return [
        Error(
            f"{broken.module} cannot be imported: {broken.error}.",
            hint=(
                "Until it can, a worker ends with status 2; with --tolerant it runs the handlers of the other modules. "
                f"To see the traceback: python manage.py shell -c 'import {broken.module}'"
            ),
            id="alkstore.E003",
        )
        for broken in registry.broken_modules()
    ]


def check_database(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    try:
        alias = resolve_alias(None)
    except ImproperlyConfigured:
        return []  # check_setting says so
    connection = connections[alias]
    if not isinstance(connection, DatabaseWrapper):
        return [
            Error(
                f"The database {alias!r} is {connection.vendor}; django-alkstore works on SQLite, for now.",
                hint="Name a SQLite database in ALKSTORE['DATABASE'], and route the app's models to it.",
                id="alkstore.E004",
            )
        ]
    too_old = _check_version(connection)
    return too_old or list(_check_options(connection))


def _check_version(connection: DatabaseWrapper) -> list[CheckMessage]:
    version = connection.get_database_version()
    if version >= MINIMUM_VERSION:
        return []
    found, needed = (".".join(map(str, v)) for v in (version, MINIMUM_VERSION))
    return [
        Error(
            f"SQLite {found} is too old: django-alkstore needs {needed} or newer, for RETURNING.",
            hint=(
                "It is the one that Python's sqlite3 module was built with, or loads: "
                "take a newer Python, or a newer SQLite library for it."
            ),
            id="alkstore.E001",
        )
    ]


def _check_options(connection: DatabaseWrapper) -> Iterator[CheckMessage]:
    alias = connection.alias
    hint = _OPTIONS_HINT.format(alias=alias)
    mode = str(connection.settings_dict["OPTIONS"].get("transaction_mode") or "DEFERRED").upper()
    if mode != "IMMEDIATE":
        yield Warning(
            f"The database {alias!r} begins transactions in {mode} mode.",
            hint=(
                "The library's own transactions are right in every mode, but one of yours that reads and then "
                f"writes can be refused in DEFERRED, and EXCLUSIVE shuts out readers. {hint}"
            ),
            id="alkstore.W001",
        )
    if mode != "DEFERRED" and connection.settings_dict["ATOMIC_REQUESTS"]:
        yield Warning(
            f"ATOMIC_REQUESTS on the database {alias!r} in {mode} mode: each request takes the writer lock.",
            hint="Mark read-only views with @transaction.non_atomic_requests, or open transactions where you write.",
            id="alkstore.W003",
        )
    if connection.is_in_memory_db():
        return
    try:
        journal, timeout = _effective_pragmas(connection)
    except (DatabaseError, ImproperlyConfigured) as error:
        if isinstance(error, DatabaseError) and is_contention(alias, error):
            return  # somebody is at work in it: that says nothing against it
        yield Warning(
            f"The database {alias!r} cannot be read: {error}.",
            hint="Is the file a database, and may this user read and write it, and the folder that it is in?",
            id="alkstore.W005",
        )
        return
    if journal != "wal":
        yield Warning(
            f"The database {alias!r} is in journal mode {journal!r}, not WAL: readers and writers wait for each other.",
            hint=f"{hint} A network file system cannot hold a WAL database; move the file to a local disk.",
            id="alkstore.W002",
        )
    if timeout < ENOUGH_TIMEOUT:
        yield Warning(
            f"The busy timeout of the database {alias!r} is {timeout:g} s, below {ENOUGH_TIMEOUT:g} s.",
            hint=f"{hint} (Inside OPTIONS, not beside it.)",
            id="alkstore.W004",
        )


def _effective_pragmas(connection: DatabaseWrapper) -> tuple[str, float]:
    """Journal mode and busy timeout in seconds, as a live connection has them and not as the settings say.

    On a connection of its own: this thread's may be inside a transaction. A database that is not there yet is not
    made by looking at it: the settings are tried on a file for the purpose. `DatabaseError` where it cannot be read.
    """
    probe = connections.create_connection(connection.alias)
    with TemporaryDirectory() as folder:
        if is_missing(connection):
            probe.settings_dict = {**probe.settings_dict, "NAME": str(Path(folder) / "probe.sqlite3")}
        try:
            with probe.cursor() as cursor:
                journal = cursor.execute("PRAGMA journal_mode").fetchone()[0]
                timeout = cursor.execute("PRAGMA busy_timeout").fetchone()[0] / 1000
        finally:
            probe.close()
    return str(journal).lower(), timeout
