"""The private names of frameworks stand in one module, and do there what it says."""

import ast
import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import connection, transaction
from django.db.models import CharField, IntegerField, Value
from django.db.models.query import ModelIterable
from django.test import TestCase

import django_alkstore
from django_alkstore import internals
from django_alkstore.models import Lock

PACKAGE = Path(django_alkstore.__file__).parent
DOCUMENTED = {"_meta", "_state", "_default_manager", "_exit", "_getframe", "_fields", "_make", "_replace", "_asdict"}
"""By Django and Python, for everybody."""


def sources() -> dict[Path, str]:
    return {path: path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "internals.py"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def test_no_other_module_uses_a_private_name_of_a_framework() -> None:
    texts = sources()
    own = {
        name for text in texts.values() for name in re.findall(r"(?:def|class|self\.|request\.|row\.) ?(_\w+)", text)
    }
    own |= {name for text in texts.values() for name in re.findall(r"^\s*(_\w+)\s*[:=]", text, re.MULTILINE)}
    found = []
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | DOCUMENTED:
                found.append(f"{path}:{node.lineno} {node.attr}")
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("django_alkstore"):
                found += [f"{path}:{node.lineno} {name.name}" for name in node.names if is_private(name.name)]
    assert found == []


@pytest.mark.django_db(transaction=True)
def test_a_block_of_a_test_bears_a_durable_block() -> None:
    with internals.block_of_a_test("default"), transaction.atomic(durable=True):
        assert [internals.is_of_a_test(block) for block in internals.open_blocks(connection)] == [True, False]
    assert internals.open_blocks(connection) == []


class TestBlocks(TestCase):
    def test_the_blocks_of_a_test_case_are_of_a_test(self) -> None:
        with transaction.atomic():
            blocks = internals.open_blocks(connection)
        assert [internals.is_of_a_test(block) for block in blocks][:2] == [True, True]


@pytest.mark.django_db(transaction=True)
def test_a_block_without_its_savepoint_passes_the_rollback_on() -> None:
    with transaction.atomic():
        Lock.objects.create(name="outer", owner="me", token=1, acquired_at=0, expires_at=0)
        with transaction.atomic():
            internals.forget_savepoints(connection, 1)
            transaction.set_rollback(True)
    assert not Lock.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_rollback_inside_blocks() -> None:
    with transaction.atomic():
        Lock.objects.create(name="outer", owner="me", token=1, acquired_at=0, expires_at=0)
        internals.roll_back_inside_blocks(connection)
        assert not Lock.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_callbacks_that_wait_for_the_commit() -> None:
    ran: list[int] = []
    with transaction.atomic():
        transaction.on_commit(lambda: ran.append(1), robust=True)
        (callback,) = internals.commit_callbacks(connection)
        _, func, robust = callback
        assert robust is True
        func()
        internals.commit_callbacks(connection).clear()
    assert ran == [1]


@pytest.mark.django_db
def test_rows_made_by_another_class() -> None:
    class Marked(ModelIterable):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            for row in super().__iter__():
                row.marked = True
                yield row

    Lock.objects.create(name="one", owner="me", token=1, acquired_at=0, expires_at=0)
    rows = Lock.objects.all()
    internals.make_rows_with(rows, Marked)
    assert [row.marked for row in rows] == [True]  # type: ignore[attr-defined]


def test_the_type_of_an_expression() -> None:
    assert isinstance(internals.type_of(Value(5)), IntegerField)
    assert isinstance(internals.type_of(Lock.objects.values("owner").query), CharField)
    assert internals.type_of(Value(object())) is None


def test_the_executor_of_a_context() -> None:
    async def play() -> None:
        context = ThreadSensitiveContext()
        async with context:
            assert internals.executor_of(context) is None
            await sync_to_async(len)("")
            executor = internals.executor_of(context)
            assert executor is not None
            assert executor.submit(len, "ab").result() == 2

    asyncio.run(play())
