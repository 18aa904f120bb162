"""Django's task API, as Django documents it, over jobs."""

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.test import override_settings

from django_alkstore import clock
from django_alkstore.exceptions import DuplicateJob
from django_alkstore.models import Job
from django_alkstore.services import NEVER, cancel, claim_batch, requeue
from django_alkstore.tasks import AlkstoreBackend, task
from django_alkstore.tasks.apis import primary
from django_alkstore.testing import run_pending
from tests.ledger import tasks
from tests.ledger.models import Entry
from tests.tasks.conftest import TASKS

pytestmark = pytest.mark.django_db

api = primary()


def job_of(result: Any) -> Job:
    return Job.objects.get(pk=result.id)


def run(result: Any) -> Any:
    run_pending()
    result.refresh()
    return result


def test_the_backend_says_what_it_can() -> None:
    backend = api.backends["default"]
    assert isinstance(backend, AlkstoreBackend)
    flags = ("supports_defer", "supports_async_task", "supports_get_result", "supports_priority")
    assert [getattr(backend, flag) for flag in flags] == [True] * 4


def test_an_enqueued_task_is_a_job() -> None:
    result = tasks.add.enqueue(2, y=3)
    job = job_of(result)
    assert (job.queue, job.task, job.payload) == (
        "default",
        "tests.ledger.tasks.add",
        {"args": [2], "kwargs": {"y": 3}},
    )
    assert (result.id, result.status, result.enqueued_at) == (str(job.pk), "READY", job.created_at)
    assert (result.args, result.kwargs, result.backend) == ([2], {"y": 3}, "default")
    assert (result.attempts, result.worker_ids, result.errors) == (0, [], [])
    assert (result.started_at, result.finished_at, result.last_attempted_at) == (None, None, None)
    assert not result.is_finished
    with pytest.raises(ValueError, match="not finished"):
        result.return_value


def test_a_successful_task() -> None:
    result = run(tasks.add.enqueue(2, 3))
    assert (result.status, result.return_value, result.attempts) == ("SUCCESSFUL", 5, 1)
    assert result.is_finished
    assert result.enqueued_at <= result.started_at == result.last_attempted_at <= result.finished_at
    assert len(result.worker_ids) == 1


def test_a_task_that_returns_none() -> None:
    result = run(tasks.report.enqueue())
    assert (result.status, result.return_value) == ("SUCCESSFUL", None)


def test_a_running_task_is_running() -> None:
    result = tasks.add.enqueue(1)
    (job,) = claim_batch("default", "me")
    result.refresh()
    assert (result.status, result.worker_ids) == ("RUNNING", ["me"])
    assert job.ack()


def test_a_task_that_fails_is_tried_again_and_keeps_each_error() -> None:
    result = run(tasks.fail.enqueue("boo"))
    assert (result.status, result.attempts) == ("FAILED", 2)
    assert [error.exception_class for error in result.errors] == [ValueError, ValueError]
    assert all("ValueError: boo" in error.traceback for error in result.errors)
    with pytest.raises(ValueError, match="Task failed"):
        result.return_value


def test_between_two_attempts_a_task_is_ready() -> None:
    result = tasks.retry_later.enqueue()
    run_pending()
    result.refresh()
    assert (result.status, result.attempts, len(result.errors)) == ("READY", 1, 1)
    assert job_of(result).run_at > clock.now() + timedelta(minutes=59)


def test_a_discarded_and_a_cancelled_task_have_failed() -> None:
    discarded, cancelled = tasks.discard.enqueue(), tasks.add.enqueue(1)
    assert cancel(int(cancelled.id))
    run_pending()
    for result in (discarded, cancelled):
        result.refresh()
        assert result.status == "FAILED"
        assert result.finished_at is not None


def test_a_requeued_task_forgets_its_workers_and_succeeds() -> None:
    result = run(tasks.fail.enqueue("boo"))
    assert requeue(int(result.id))
    result.refresh()
    assert (result.status, result.worker_ids) == ("READY", [])


def test_a_return_value_that_json_cannot_hold_fails_the_task_once_and_names_the_type() -> None:
    result = run(tasks.return_what_json_cannot_hold.enqueue())
    assert (result.status, result.attempts) == ("FAILED", 1)
    (error,) = result.errors
    assert error.exception_class_path == "django_alkstore.exceptions.InvalidReturnValue"
    assert "return_what_json_cannot_hold returned a Decimal" in error.traceback


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_atomic_task_commits_its_rows_and_its_end_together(number: int, transactional_db: None) -> None:
    options: dict[str, Any] = {1: {}, 2: {"fail": True}, 3: {"misfit": True}}[number]
    result = run(tasks.record.enqueue(7, **options))
    assert Entry.objects.count() == (1 if number == 1 else 0)
    assert result.status == {1: "SUCCESSFUL", 2: "READY", 3: "FAILED"}[number]
    if number == 1:
        assert result.return_value == 7


def test_the_context() -> None:
    result = run(tasks.describe.enqueue("hi"))
    assert result.return_value == {"attempt": 1, "id": result.id, "job": int(result.id), "word": "hi"}


def test_a_coroutine() -> None:
    assert run(tasks.add_later.enqueue(2, 3)).return_value == 5


def test_a_function_for_the_backoff_decides() -> None:
    hopeless, tried = tasks.fail_with_backoff.enqueue("hopeless"), tasks.fail_with_backoff.enqueue("try again")
    run_pending()
    hopeless.refresh()
    tried.refresh()
    assert (hopeless.status, hopeless.attempts) == ("FAILED", 1)
    assert (tried.status, tried.attempts) == ("FAILED", 4)


def test_the_caller_s_transaction_decides(transactional_db: None) -> None:
    with transaction.atomic():
        tasks.add.enqueue(1)
        transaction.set_rollback(True)
    assert not Job.objects.exists()


# Getting results


@pytest.mark.parametrize("bad", ["", "0", "01", "-1", "1.0", "abc", "9" * 30, "٣", None, 5, "1 ", "999999"])
def test_an_id_that_no_task_has_does_not_exist(bad: Any) -> None:
    with pytest.raises(api.result_does_not_exist):
        tasks.add.get_result(bad)


def test_a_job_without_a_task_is_no_result() -> None:
    from django_alkstore.services import enqueue

    with pytest.raises(api.result_does_not_exist):
        api.backends["default"].get_result(str(enqueue("default", 1).pk))


def test_a_result_of_another_task_is_a_mismatch() -> None:
    result = tasks.add.enqueue(1)
    with pytest.raises(Exception, match="Task does not match") as caught:
        tasks.fail.get_result(result.id)
    assert type(caught.value).__name__ == "TaskResultMismatch"
    assert tasks.add.get_result(result.id) == result


def test_a_task_that_cannot_be_imported_any_more_does_not_exist() -> None:
    result = tasks.add.enqueue(1)
    Job.objects.update(task="tests.ledger.tasks.gone")
    with pytest.raises(api.result_does_not_exist):
        tasks.add.get_result(result.id)


def test_the_async_methods(transactional_db: None) -> None:
    async def play() -> None:
        result = await tasks.add.aenqueue(1, 2)
        assert (await tasks.add.aget_result(result.id)).id == result.id
        await result.arefresh()
        assert len(await tasks.add.aenqueue_many([((1,), {}), ((2,), {})])) == 2

    async_to_sync(play)()


# What may be enqueued


def test_options_of_the_decorator_and_of_using() -> None:
    job = job_of(tasks.report.enqueue())
    assert (job.queue, job.priority, job.visibility_timeout) == ("reports", 5, 40.0)
    assert job.expires_at == job.run_at + timedelta(seconds=60)
    later = datetime(2090, 1, 1, tzinfo=UTC)
    moved = tasks.report.using(run_after=later, priority=-7, queue_name="default", unique_key="k", max_attempts=9)
    job = job_of(moved.enqueue())
    assert (job.run_at, job.priority, job.queue, job.unique_key, job.max_attempts) == (later, -7, "default", "k", 9)
    with pytest.raises(DuplicateJob):
        moved.enqueue()
    delayed = job_of(tasks.add.using(delay=60).enqueue(1))
    assert (delayed.run_at - delayed.created_at).total_seconds() == 60


def test_the_precedence_of_options() -> None:
    with override_settings(TASKS={"default": {**TASKS["default"], "OPTIONS": {"max_attempts": 11, "backoff": 7}}}):
        assert job_of(tasks.add.enqueue(1)).max_attempts == 11
        assert job_of(tasks.add.enqueue(1)).backoff_base == 7
        assert job_of(tasks.fail.enqueue("x")).max_attempts == 2
        with override_settings(ALKSTORE={"QUEUES": {"default": {"max_attempts": 12}}}):
            assert job_of(tasks.fail.enqueue("x")).max_attempts == 12
            assert job_of(tasks.fail.using(max_attempts=13).enqueue("x")).max_attempts == 13


def test_many_are_enqueued_together_or_not_at_all() -> None:
    results = tasks.add.enqueue_many([((1,), {}), ((2, 3), {}), ((), {"x": 4})])
    assert [result.args for result in results] == [[1], [2, 3], []]
    run_pending()
    for result in results:
        result.refresh()
    assert [result.return_value for result in results] == [2, 5, 5]
    with pytest.raises((TypeError, ValueError)):
        tasks.add.enqueue_many([((1,), {}), ((object(),), {})])
    assert Job.objects.count() == 3
    assert tasks.add.enqueue_many([]) == []


@pytest.mark.parametrize("argument", [object(), {1, 2}, datetime(2027, 1, 1, tzinfo=UTC), math.nan])
def test_arguments_that_are_not_json_are_refused(argument: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        tasks.add.enqueue(argument)
    assert not Job.objects.exists()


def module_level(x: int) -> int:
    return x


def test_a_function_that_no_worker_would_import_is_refused_with_a_hint() -> None:
    stray = task(module_level)
    with pytest.raises(
        api.invalid_task, match=r"tests\.tasks\.test_results belongs to no installed app.*\['modules'\]"
    ):
        stray.enqueue(1)


def test_a_module_that_the_options_list_may_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"default": {**TASKS["default"], "OPTIONS": {"modules": ["tests.tasks.test_results"]}}}
    with override_settings(TASKS=settings):
        listed = task(module_level)
        monkeypatch.setitem(globals(), "module_level", listed)
        assert run(listed.enqueue(4)).return_value == 4


@pytest.mark.parametrize(
    "options",
    [
        {"max_attempts": 0},
        {"backoff": -1},
        {"time_limit": 0},
        {"expires_in": -5},
        {"visibility_timeout": 0},
        {"atomic": 1},
        {"queue_name": "unknown"},
        {"priority": 101},
    ],
)
def test_a_wrong_option_of_a_task_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(api.invalid_task):
        task(**options)(module_level)


async def coroutine() -> None: ...


def test_an_atomic_coroutine_is_refused() -> None:
    with pytest.raises(api.invalid_task, match="a coroutine cannot be atomic"):
        task(atomic=True)(coroutine)


def test_a_nested_function_is_refused() -> None:
    with pytest.raises(api.invalid_task, match="module level"):
        task(lambda: None)


def test_never_expires() -> None:
    eternal = replace(tasks.report, expires_in=NEVER)
    with override_settings(TASKS={"default": {**TASKS["default"], "OPTIONS": {"expires_in": 5}}}):
        assert job_of(eternal.enqueue()).expires_at is None
        assert job_of(tasks.add.enqueue(1)).expires_at is not None
