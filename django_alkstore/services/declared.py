"""Schedules that the code declares, and the rows that they have. Schedules that fire tasks."""

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple, Unpack

from django_alkstore import clock, registrations, signals
from django_alkstore.dialects.transactions import resolve_alias, write_transaction
from django_alkstore.exceptions import AlkstoreError, InvalidOption, shown
from django_alkstore.models import Schedule
from django_alkstore.names import validate_name
from django_alkstore.registrations import Declaration
from django_alkstore.services.schedules import ScheduleOptions, columns_of, declare


class Change(Enum):
    """What becomes of a row when it is brought in line with the code."""

    ADDED = "added"
    CHANGED = "changed"
    DISABLED = "disabled"  # no longer declared
    CONFLICT = "conflict"  # a row of `schedule()` has the name, and stands


class Difference(NamedTuple):
    """A difference between the code and the rows."""

    name: str
    change: Change
    declaration: Declaration | None


def task_payload(args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The payload of a task's job."""
    return {"args": list(args), "kwargs": dict(kwargs or {})}


def task_options(task: Any) -> dict[str, Any]:
    """The options of the jobs of a task, as its decorator gives them."""
    backoff = getattr(task, "backoff", None)
    options = {
        "priority": task.priority or None,
        "max_attempts": getattr(task, "max_attempts", None),
        "visibility_timeout": getattr(task, "visibility_timeout", None),
        "expires_in": getattr(task, "expires_in", None),
        "backoff_base": None if callable(backoff) else backoff,
    }
    return {name: value for name, value in options.items() if value is not None}


def schedule_task(
    name: str,
    spec: str,
    task: Any,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    using: str | None = None,
    **options: Unpack[ScheduleOptions],
) -> Schedule:
    """Declare a schedule, or change it: it enqueues the task at each boundary of `spec`. As `schedule`.

    Options that are left out are those of the task's decorator. `InvalidOption` if `task` is no task.
    """
    if not hasattr(task, "module_path"):
        raise InvalidOption(f"schedule_task needs a task of django.tasks, not {shown(task)}")
    chosen = {**task_options(task), **options}
    alias = using or getattr(task.get_backend(), "database", None)
    return declare(name, spec, task.queue_name, task_payload(args, kwargs), alias, chosen, task=task.module_path)


def check_declaration(declaration: Declaration) -> None:
    """Raise what is wrong with the options of `@scheduled`, where it is written."""
    validate_name("schedule", declaration.name)
    columns_of(declaration.spec, declaration.queue, declaration.payload, declaration.options, declaration.task)


def differences(using: str) -> Iterator[Difference]:
    """The differences between the schedules that the code declares and the rows of the database.

    If a module could not be imported, no row counts as no longer declared.
    """
    declared = {declaration.name: declaration for declaration in registrations.declarations()}
    rows = {row.name: row for row in Schedule.objects.using(using).all()}
    for name, declaration in declared.items():
        row = rows.get(name)
        if row is None:
            yield Difference(name, Change.ADDED, declaration)
        elif not row.from_code:
            yield Difference(name, Change.CONFLICT, declaration)
        elif row.undeclared_at is not None or _differs(row, declaration):
            yield Difference(name, Change.CHANGED, declaration)
    if registrations.broken_modules():
        return
    for name, row in rows.items():
        if row.from_code and row.undeclared_at is None and name not in declared:
            yield Difference(name, Change.DISABLED, None)


def _differs(row: Schedule, declaration: Declaration) -> bool:
    columns, _, _ = columns_of(
        declaration.spec, declaration.queue, declaration.payload, declaration.options, declaration.task
    )
    return any(getattr(row, name) != value for name, value in columns.items())


def bring_in_line(using: str | None = None) -> list[Difference]:
    """Make the rows what the code declares; what was changed. A pause stays, and no row is deleted."""
    alias = resolve_alias(using)
    made = []
    for difference in list(differences(alias)):
        try:
            _make(alias, difference)
        except AlkstoreError as error:
            signals.emit(signals.schedule_broken, name=difference.name, reason=f"{type(error).__name__}: {error}")
            continue
        made.append(difference)
        signals.emit(signals.schedule_brought_in_line, name=difference.name, change=difference.change.value)
    return made


def _make(alias: str, difference: Difference) -> None:
    declaration = difference.declaration
    if difference.change is Change.DISABLED:
        rows = Schedule.objects.using(alias).filter(name=difference.name, from_code=True)
        write_transaction(alias, lambda _: rows.update(undeclared_at=clock.now(), updated_at=clock.now()))
    elif difference.change is not Change.CONFLICT and declaration is not None:
        declare(
            declaration.name,
            declaration.spec,
            declaration.queue,
            declaration.payload,
            alias,
            declaration.options,
            task=declaration.task,
            from_code=True,
        )
