"""System checks: what is unsafe in the project's settings, each with an id and what to do about it."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeGuard

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  the check framework's names
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.sqlite3.base import DatabaseWrapper

from django_alkstore import conf, registry
from django_alkstore.dialects.file_access import unfit_place, write_obstacle
from django_alkstore.dialects.sqlite import ENOUGH_TIMEOUT, MINIMUM_VERSION, database_path, is_missing
from django_alkstore.dialects.transactions import is_contention, resolve_alias
from django_alkstore.handled import conflicting_queues, wrong_task_options
from django_alkstore.models import Job

_OPTIONS_HINT = (
    "In DATABASES[{alias!r}]['OPTIONS'] set: 'transaction_mode': 'IMMEDIATE', 'timeout': 20, "
    "'init_command': 'PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;'."
)

_PATIENCE = 0.1
"""Seconds to wait for another process that has locked the file."""

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


def check_tasks(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    conflicts: list[CheckMessage] = [
        Error(
            f"The queue {queue!r} has a handler in an alkstore.py, and TASKS[{alias!r}]['QUEUES'] gives it to tasks.",
            hint="Rename one of the two: the handler would be called for the jobs of both.",
            id="alkstore.E005",
        )
        for alias, queue in conflicting_queues()
    ]
    return conflicts + [
        Error(
            f"TASKS[{alias!r}]['OPTIONS']: {problem}.",
            hint="The README has each option, what it takes and its default, under Tasks.",
            id="alkstore.E006",
        )
        for alias, problem in wrong_task_options()
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


def check_connection(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """What only a connection tells. Django names the databases to which checks may connect."""
    connected = [connections[alias] for alias in _ours(databases or ())]
    files = [connection for connection in connected if _is_file(connection)]
    return [message for file in files for message in (*_check_place(file), *_check_connection(file))]


def _ours(databases: Sequence[str]) -> list[str]:
    """Of these databases the library's own; without it, those that may have its tables: somebody named them."""
    with suppress(ImproperlyConfigured):  # check_setting says so
        own = resolve_alias(None)
        if own in databases:
            return [own]
    return [alias for alias in databases if router.allow_migrate_model(alias, Job)]


def _is_file(connection: BaseDatabaseWrapper) -> TypeGuard[DatabaseWrapper]:
    """True if the connection is to an SQLite file that exists. Connecting would make one that does not."""
    if not isinstance(connection, DatabaseWrapper) or connection.get_database_version() < MINIMUM_VERSION:
        return False  # check_database says so
    return not connection.is_in_memory_db() and not is_missing(connection)


def _check_place(connection: DatabaseWrapper) -> Iterator[CheckMessage]:
    path = database_path(connection)
    why = None if path is None else unfit_place(path)
    if why is not None:
        yield Warning(
            f"The file {path} of the database {connection.alias!r} {why}.",
            hint=(
                "Processes that share a database must see the same locks, and the same -wal and -shm files beside it; "
                "otherwise jobs are lost. Move the database to a folder on a local disk. For a container, mount that "
                "folder, not the file."
            ),
            id="alkstore.W006",
        )


def _check_connection(connection: DatabaseWrapper) -> Iterator[CheckMessage]:
    alias = connection.alias
    hint = _OPTIONS_HINT.format(alias=alias)
    try:
        timeout = _busy_timeout(connection)
        journal = _journal_mode(connection)
    except (DatabaseError, ImproperlyConfigured) as error:
        if isinstance(error, DatabaseError) and is_contention(alias, error):
            return  # another process has locked it, which is no fault of the file
        path = database_path(connection)
        obstacle = None if path is None else write_obstacle(path)
        yield Warning(
            f"The database {alias!r} cannot be read: {error}{f'; {obstacle}' if obstacle else ''}.",
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


def _busy_timeout(connection: DatabaseWrapper) -> float:
    """Seconds, as the options and `init_command` leave it. Asked in memory, so that it waits for nobody."""
    return float(_ask(connection, "PRAGMA busy_timeout", NAME=":memory:")) / 1000


def _journal_mode(connection: DatabaseWrapper) -> str:
    """The mode of the file once `init_command` has run. A file that another process has locked is not waited for."""
    options = {**connection.settings_dict["OPTIONS"], "timeout": _PATIENCE}
    return str(_ask(connection, "PRAGMA journal_mode", OPTIONS=options)).lower()


def _ask(connection: DatabaseWrapper, statement: str, **settings: Any) -> Any:
    """The answer on a connection of its own: this thread's may be inside a transaction, or a test's."""
    probe = connections.create_connection(connection.alias)
    probe.settings_dict = {**probe.settings_dict, **settings}
    try:
        with probe.cursor() as cursor:
            return cursor.execute(statement).fetchone()[0]
    finally:
        raw = probe.connection
        probe.close()
        if raw is not None:
            raw.close()  # Django keeps a connection to a database in memory open
