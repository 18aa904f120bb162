"""Tasks for the tests."""

import asyncio
from decimal import Decimal
from typing import Any

from django.db import transaction

from django_alkstore.exceptions import Discard, Retry
from django_alkstore.tasks import task
from tests.ledger.models import Entry


@task
def add(x: int, y: int = 1) -> int:
    return x + y


@task
async def add_later(x: int, y: int = 1) -> int:
    await asyncio.sleep(0)
    return x + y


@task(takes_context=True)
def describe(context: Any, word: str) -> dict[str, Any]:
    return {"attempt": context.attempt, "id": context.task_result.id, "job": context.job.id, "word": word}


@task(max_attempts=2, backoff=0)
def fail(message: str) -> None:
    raise ValueError(message)


def wait_or_give_up(error: BaseException, task_result: Any) -> float | None:
    return None if "hopeless" in str(error) else 0.0


@task(max_attempts=4, backoff=wait_or_give_up)
def fail_with_backoff(message: str) -> None:
    raise ValueError(message)


@task
def return_what_json_cannot_hold() -> Decimal:
    return Decimal(1)


@task(atomic=True)
def record(job_id: int, *, fail: bool = False, misfit: bool = False) -> Any:
    Entry.objects.create(job_id=job_id)
    if fail:
        raise ValueError("no")
    return Decimal(1) if misfit else job_id


@task(queue_name="reports", priority=5, expires_in=60, visibility_timeout=40, time_limit=30)
def report() -> None: ...


@task
def discard() -> None:
    raise Discard("no such order")


@task
def retry_later() -> None:
    raise Retry("not yet", delay=3600)


@task(max_attempts=1)
def enqueue_another() -> str:
    with transaction.atomic():
        return str(add.enqueue(1, 1).id)


@task(max_attempts=1)
def fail_once(message: str) -> None:
    raise ValueError(message)


@task
def echo(value: Any) -> Any:
    return value
