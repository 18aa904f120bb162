"""Every test here has this library as the backend of the project's tasks."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.test import override_settings

TASKS: dict[str, Any] = {
    "default": {
        "BACKEND": "django_alkstore.tasks.AlkstoreBackend",
        "QUEUES": ["default", "reports"],
    }
}

with override_settings(TASKS=TASKS):  # a task is checked against the setting when it is decorated
    import tests.ledger.tasks  # noqa: F401


@pytest.fixture(autouse=True)
def _backend() -> Iterator[None]:
    with override_settings(TASKS=TASKS):
        yield
