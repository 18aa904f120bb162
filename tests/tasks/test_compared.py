"""The same tasks with Django's immediate backend and with this one: docs/tasks.md has the differences."""

from typing import Any

import pytest
from django.test import override_settings

from django_alkstore.tasks.apis import primary
from django_alkstore.testing import run_pending
from tests.ledger import tasks
from tests.tasks.conftest import TASKS

pytestmark = pytest.mark.django_db

api = primary()
IMMEDIATE = f"{api.base_backend.__module__.rsplit('.', 1)[0]}.immediate.ImmediateBackend"
BOTH = {**TASKS, "now": {"BACKEND": IMMEDIATE, "QUEUES": ["default", "reports"]}}
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("add", (2, 3), {}),
    ("add", (2,), {"y": 5}),
    ("add_later", (2,), {}),
    ("report", (), {}),
    ("return_what_json_cannot_hold", (), {}),
    ("fail_once", ("boo",), {}),
    ("echo", ({"a": [1, None, True, 1.5, "text"]},), {}),
    ("echo", ((1, 2),), {}),
    ("echo", (b"bytes",), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS)
def test_each_attribute_of_a_result_is_the_same(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with override_settings(TASKS=BOTH):
        task = getattr(tasks, name)
        now = task.using(backend="now").enqueue(*args, **kwargs)
        result = task.enqueue(*args, **kwargs)
        run_pending()
        result.refresh()
    for attribute in ("status", "args", "kwargs", "attempts", "is_finished"):
        assert getattr(result, attribute) == getattr(now, attribute), attribute
    for attribute in ("enqueued_at", "started_at", "finished_at", "last_attempted_at"):
        assert (getattr(result, attribute) is None) == (getattr(now, attribute) is None), attribute
    assert len(result.errors) == len(now.errors)
    if name != "return_what_json_cannot_hold":  # our own error, which names the function and the type
        assert [error.exception_class_path for error in result.errors] == [
            error.exception_class_path for error in now.errors
        ]
    assert result._return_value == now._return_value
    assert (result.task.func, result.task.queue_name, result.task.priority) == (
        now.task.func,
        now.task.queue_name,
        now.task.priority,
    )
    assert result.started_at <= result.last_attempted_at <= result.finished_at
