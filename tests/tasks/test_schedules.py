"""Schedules that fire tasks."""

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from django_alkstore.exceptions import InvalidOption
from django_alkstore.models import Job, Schedule
from django_alkstore.registry import scheduled
from django_alkstore.services import fire_schedule, run_now, schedule_task, tick
from django_alkstore.services.declared import bring_in_line
from django_alkstore.testing import isolated_registry, run_pending
from tests.ledger import tasks
from tests.ledger.tools import variant
from tests.processes import Process, wait_until
from tests.tasks.conftest import TASKS

Start = Callable[..., Process]


def next_boundary(name: str) -> datetime:
    found = Schedule.objects.get(name=name).next_fire_at
    assert found is not None
    return found


@pytest.mark.django_db
def test_a_schedule_fires_a_task_with_its_arguments_and_options() -> None:
    made = schedule_task("sum", "@every 1h", tasks.add, args=(2,), kwargs={"y": 5})
    assert (made.task, made.queue) == ("tests.ledger.tasks.add", "default")
    (fire,) = tick(next_boundary("sum"))
    by_hand = fire_schedule("sum")
    assert by_hand is not None
    assert run_now(fire.job_id)
    run_pending()
    for job_id in (fire.job_id, by_hand.pk):
        assert tasks.add.get_result(str(job_id)).return_value == 7
    schedule_task("report", "@every 1h", tasks.report)
    (fire,) = [fire for fire in tick(next_boundary("report") + timedelta(seconds=1)) if fire.name == "report"]
    job = Job.objects.get(pk=fire.job_id)
    assert (job.queue, job.priority, job.visibility_timeout) == ("reports", 5, 40.0)


@pytest.mark.django_db
def test_a_task_is_declared_in_code() -> None:
    with isolated_registry():
        assert scheduled("@every 1h", args=(1,))(tasks.add) is tasks.add
        bring_in_line()
    made = Schedule.objects.get()
    assert (made.name, made.task) == ("tests.ledger.tasks.add", "tests.ledger.tasks.add")
    assert made.payload == {"args": [1], "kwargs": {}}


def test_what_is_no_task_is_refused() -> None:
    with pytest.raises(InvalidOption, match="needs a task"):
        schedule_task("x", "@daily", print)


def test_a_scheduler_and_a_worker_run_a_scheduled_task(start: Start) -> None:
    schedule_task("often", "@every 1s", tasks.add, args=(1, 1))
    worker = start("run_alkstore", **variant(TASKS=TASKS))
    worker.wait_for("scheduler leads")
    wait_until(lambda: Job.objects.filter(schedule="often", state="completed").exists(), "the task has run")
