"""The private and undocumented names of Django and asgiref that this library needs. No other module uses any.

`tests/unit/test_internals.py` fails if a new version has changed one.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.expressions import BaseExpression

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.db.models.query import BaseIterable


def block_of_a_test(using: str) -> transaction.Atomic:
    """An `atomic` block like those that `TestCase` opens: a durable block may be inside it."""
    block = transaction.atomic(using=using)
    block._from_testcase = True  # type: ignore[attr-defined]
    return block


def is_of_a_test(block: transaction.Atomic) -> bool:
    """True if `TestCase` has opened the block."""
    return block._from_testcase  # type: ignore[attr-defined,no-any-return]


def open_blocks(connection: BaseDatabaseWrapper) -> list[transaction.Atomic]:
    """The `atomic` blocks that are open, the outermost first."""
    return connection.atomic_blocks


def forget_savepoints(connection: BaseDatabaseWrapper, count: int) -> None:
    """Let the innermost `count` blocks end as if they had no savepoint: they pass a rollback on to the block around."""
    for position in range(1, count + 1):
        connection.savepoint_ids[-position] = None  # type: ignore[call-overload]


def roll_back_inside_blocks(connection: BaseDatabaseWrapper) -> None:
    """Roll back now. `connection.rollback` refuses to inside an `atomic` block."""
    connection._rollback()  # type: ignore[attr-defined]


def commit_callbacks(connection: BaseDatabaseWrapper) -> list[tuple[set[str], Callable[[], Any], bool]]:
    """The callbacks that wait for the commit: savepoints, function, and whether an error is logged and passed over."""
    return connection.run_on_commit  # type: ignore[return-value]


def make_rows_with(rows: "QuerySet[Any]", iterable: "type[BaseIterable[Any]]") -> None:
    """Let `iterable` make the instances of the query."""
    rows._iterable_class = iterable


def type_of(expression: Any) -> Any:
    """The field of what an expression or a query gives. None if it has none; `FieldError` if its parts do not agree."""
    # A query, which may be compared with, says it by another name than an expression.
    name = "_output_field_or_none" if isinstance(expression, BaseExpression) else "output_field"
    return getattr(expression, name, None)


def executor_of(context: ThreadSensitiveContext) -> Executor | None:
    """What runs the sync functions of coroutines in this context. None until the first of them."""
    return SyncToAsync.context_to_thread_executor.get(context)
