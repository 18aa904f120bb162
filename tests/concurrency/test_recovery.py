"""Crash detection without the worker around it: real processes that claim, die, stop, fork and live on."""

import signal
from collections.abc import Callable
from contextlib import closing

import pytest

from django_alkstore.dialects.liveness import Liveness
from django_alkstore.models import Job
from django_alkstore.services import enqueue_many
from tests.claimer import claim, watch_for_deaths
from tests.processes import Process

pytestmark = pytest.mark.django_db(transaction=True)

CLAIM = """
from tests.claimer import *
liveness = claim_and_tell("mail")
"""
LISTEN = CLAIM + "obey(die=die)"
SOON = 10.0
"""Seconds, for what happens within one. A lease lasts 300."""

Start = Callable[..., Process]


def jobs(state: str) -> int:
    return Job.objects.filter(state=state).count()


def all_recovered() -> bool:
    return jobs("processing") == 0


@pytest.mark.parametrize("death", ["kill", "exit"])
def test_the_jobs_of_a_dead_process_are_claimable_soon(start: Start, death: str) -> None:
    enqueue_many("mail", range(4))
    with closing(Liveness("default")) as liveness:
        worker = start("-c", LISTEN)
        worker.wait_for("claimed 4")
        watch_for_deaths(liveness, all_recovered, 0)
        assert jobs("processing") == 4, "a living process keeps its claims"
        if death == "kill":
            worker.signal(signal.SIGKILL)
        else:
            worker.tell("die")
        watch_for_deaths(liveness, all_recovered, SOON)
        assert jobs("pending") == 4
        assert len(claim(liveness, "mail")) == 4
    for job in Job.objects.all():
        assert (job.attempts, job.last_error) == (2, "worker died")
