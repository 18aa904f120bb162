"""Tasks in real workers, and tasks that a worker does not know."""

import json
import logging
import signal
from collections.abc import Callable
from typing import Any

import pytest
from django.core import checks
from django.core.management import call_command
from django.db import transaction
from django.test import override_settings

from django_alkstore.models import Job
from django_alkstore.registry import handler
from django_alkstore.services import cancel
from django_alkstore.tasks import AlkstoreBackend
from django_alkstore.tasks.apis import primary
from django_alkstore.testing import isolated_registry, run_pending
from tests.ledger import tasks
from tests.ledger.tools import row, variant, wait_for_state
from tests.processes import Process
from tests.tasks.conftest import TASKS

Start = Callable[..., Process]
api = primary()
WITH_TASKS = variant(TASKS=TASKS)
EVERY_QUEUE = variant(TASKS={"default": {**TASKS["default"], "QUEUES": []}})


@pytest.mark.parametrize("command", ["run_queue", "run_alkstore"])
def test_a_worker_without_names_takes_the_queues_of_the_setting(start: Start, command: str) -> None:
    worker = start(command, **WITH_TASKS)
    worker.wait_for("worker started")
    result, later = tasks.add.enqueue(2, 3), tasks.add_later.enqueue(4)
    report = tasks.report.enqueue()
    wait_for_state("completed", int(result.id), int(later.id), int(report.id))
    result.refresh()
    later.refresh()
    assert (result.return_value, later.return_value) == (5, 5)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_a_worker_takes_a_queue_of_tasks_by_its_name(start: Start) -> None:
    worker = start("run_queue", "reports", **WITH_TASKS)
    worker.wait_for("worker started")
    report, other = tasks.report.enqueue(), tasks.add.enqueue(1)
    wait_for_state("completed", int(report.id))
    assert row(int(other.id)).state == "pending"


def test_a_new_queue_is_noticed_by_a_worker_that_takes_every_queue(start: Start) -> None:
    worker = start("run_queue", **EVERY_QUEUE)
    worker.wait_for("worker started")
    with override_settings(TASKS={"default": {**TASKS["default"], "QUEUES": []}}):
        first = tasks.add.using(queue_name="made-up-now").enqueue(1)
        wait_for_state("completed", int(first.id))
        second = tasks.add.using(queue_name="and-another").enqueue(1)
        wait_for_state("completed", int(second.id))


def test_a_killed_worker_s_task_runs_again(start: Start) -> None:
    result = tasks.fail.enqueue("first")
    worker = start("run_queue", **WITH_TASKS)
    wait_for_state("dead", int(result.id))
    worker.popen.kill()
    result.refresh()
    assert result.attempts == 2


# Unknown tasks

UNKNOWN = {
    "tests.ledger.tasks.gone": "cannot be imported",
    "os.system": "the module os belongs to no installed app",
    "tests.ledger.models.Entry": "is not a task",
    "tests.ledger.broken_tasks.x": "cannot be imported",
    "nonsense": "is not the path",
    "tests.ledger.tasks.add()": "is not the path",
}


@pytest.mark.django_db
@pytest.mark.parametrize("path", UNKNOWN)
def test_a_job_whose_task_is_unknown_goes_back_and_spends_nothing(path: str, caplog: pytest.LogCaptureFixture) -> None:
    result = tasks.add.enqueue(1)
    Job.objects.update(task=path)
    with caplog.at_level(logging.WARNING, "django_alkstore"):
        run_pending()
    job = row(int(result.id))
    assert (job.state, job.attempts, job.errors) == ("pending", 0, [])
    assert 29 <= (job.run_at - job.created_at).total_seconds() <= 90
    assert UNKNOWN[path] in caplog.text


@pytest.mark.django_db(transaction=True)
def test_status_and_health_name_an_unknown_task(capsys: pytest.CaptureFixture[str]) -> None:
    tasks.add.enqueue(1)
    Job.objects.update(task="tests.ledger.tasks.gone")
    call_command("alkstore_status")
    assert "jobs of the task tests.ledger.tasks.gone, which no worker" in capsys.readouterr().out
    call_command("alkstore_health")
    assert "unknown_task" in capsys.readouterr().out


# Signals


@pytest.mark.django_db(transaction=True)
def test_django_s_signals_are_sent() -> None:
    seen: list[tuple[str, str, str]] = []

    def listen(name: str) -> Callable[..., None]:
        def receive(sender: Any, task_result: Any, **_: Any) -> None:
            assert sender is AlkstoreBackend
            seen.append((name, task_result.id, str(task_result.status)))

        return receive

    receivers = [
        (api.task_enqueued, listen("enqueued")),
        (api.task_started, listen("started")),
        (api.task_finished, listen("finished")),
    ]
    for each, receive in receivers:
        each.connect(receive, weak=False)
    try:
        done, failed, cancelled = tasks.add.enqueue(1), tasks.fail.enqueue("x"), tasks.report.enqueue()
        cancel(int(cancelled.id))
        run_pending()
    finally:
        for each, receive in receivers:
            each.disconnect(receive)
    assert [entry for entry in seen if entry[1] == done.id] == [
        ("enqueued", done.id, "READY"),
        ("started", done.id, "RUNNING"),
        ("finished", done.id, "SUCCESSFUL"),
    ]
    assert [entry[0] for entry in seen if entry[1] == failed.id] == ["enqueued", "started", "started", "finished"]
    assert [entry for entry in seen if entry[1] == cancelled.id][-1] == ("finished", cancelled.id, "FAILED")


@pytest.mark.django_db(transaction=True)
def test_task_enqueued_is_sent_after_the_commit_and_not_after_a_rollback() -> None:
    seen: list[str] = []

    def receive(task_result: Any, **_: Any) -> None:
        seen.append(task_result.id)

    api.task_enqueued.connect(receive)
    try:
        with transaction.atomic():
            result = tasks.add.enqueue(1)
            assert seen == []
        assert seen == [result.id]
        with transaction.atomic():
            tasks.add.enqueue(1)
            transaction.set_rollback(True)
        assert seen == [result.id]
    finally:
        api.task_enqueued.disconnect(receive)


# Checks


def test_a_queue_with_a_handler_and_tasks_is_an_error() -> None:
    with isolated_registry():

        @handler("default")
        def handle(job: object) -> None: ...

        found = [message for message in checks.run_checks(tags=["alkstore"]) if message.id == "alkstore.E005"]
    assert len(found) == 1
    assert "'default'" in found[0].msg


@pytest.mark.parametrize("options", [{"max_attempts": 0}, {"retries": 3}, {"database": "nowhere"}])
def test_wrong_options_of_the_backend_are_an_error(options: dict[str, Any]) -> None:
    with override_settings(TASKS={"default": {**TASKS["default"], "OPTIONS": options}}):
        found = [message for message in checks.run_checks(tags=["alkstore"]) if message.id == "alkstore.E006"]
    assert len(found) == 1


@pytest.mark.django_db(transaction=True)
def test_the_status_lists_the_job_s_queue(capsys: pytest.CaptureFixture[str]) -> None:
    tasks.add.enqueue(1)
    call_command("alkstore_status", "--json")
    assert json.loads(capsys.readouterr().out)["queues"][0]["queue"] == "default"
