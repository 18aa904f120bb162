"""Tasks of the package `django_tasks` run through this backend, on Django 6 beside Django's own."""

from collections.abc import Callable
from typing import Any

import pytest
from django.test import override_settings

from django_alkstore.testing import run_pending
from tests.ledger import tasks
from tests.ledger.tools import variant, wait_for_state
from tests.processes import Process
from tests.tasks.conftest import TASKS

with override_settings(TASKS=TASKS):
    import django_tasks

    from tests.ledger import package_tasks


@pytest.mark.django_db
def test_both_kinds_of_tasks_run_under_one_setting() -> None:
    of_package, of_django = package_tasks.multiply.enqueue(6, 7), tasks.add.enqueue(6, 7)
    assert isinstance(of_package, django_tasks.TaskResult)
    described = package_tasks.describe.enqueue("hi")
    run_pending()
    results: list[Any] = [of_package, of_django, described]
    for result in results:
        result.refresh()
    assert [result.return_value for result in results] == [42, 13, ["hi", 1, int(described.id)]]
    assert isinstance(package_tasks.multiply.get_result(of_package.id), django_tasks.TaskResult)


@pytest.mark.django_db
def test_the_signals_of_the_package_are_sent_for_its_tasks() -> None:
    from django_tasks.signals import task_finished

    seen: list[str] = []

    def receive(task_result: Any, **_: Any) -> None:
        seen.append(task_result.id)

    task_finished.connect(receive)
    try:
        result = package_tasks.multiply.enqueue(1, 2)
        run_pending()
    finally:
        task_finished.disconnect(receive)
    assert seen == [result.id]


def test_a_worker_runs_both(start: Callable[..., Process]) -> None:
    worker = start("run_queue", **variant(TASKS=TASKS))
    worker.wait_for("worker started")
    of_package, of_django = package_tasks.multiply.enqueue(6, 7), tasks.add.enqueue(6, 7)
    wait_for_state("completed", int(of_package.id), int(of_django.id))
    of_package.refresh()
    assert of_package.return_value == 42
