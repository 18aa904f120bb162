"""A worker that sleeps until its next job is due hears of a job that is rescheduled."""

from collections.abc import Callable

import pytest

from django_alkstore import clock
from django_alkstore.services import enqueue, reschedule
from tests.ledger.tools import wait_for_state
from tests.processes import Process

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]


def test_a_job_that_is_brought_forward_wakes_a_sleeping_worker(start: Start) -> None:
    job = enqueue("record", "hello", delay=3_600)
    process = start("run_queue", "record")
    process.wait_for("worker started")
    assert reschedule(job.pk, clock.now())
    wait_for_state("completed", job.pk)
