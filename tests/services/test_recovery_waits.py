"""Jobs that were taken from a dead worker a second time wait by the retry curve, with its random extra."""

import random
from typing import cast

import pytest

from django_alkstore import backoff
from django_alkstore.clock import ManualClock, to_us
from django_alkstore.dialects.liveness import Liveness
from django_alkstore.dialects.transactions import write_operations
from django_alkstore.models import Job
from django_alkstore.services import enqueue_many
from tests.claimer import recover

pytestmark = pytest.mark.django_db(transaction=True)


class AllDead:
    """A liveness file in which no byte is taken."""

    file = "1:2"

    def is_dead(self, holder: str, file: str | None) -> bool:
        return True


def die(clock: ManualClock) -> None:
    """A worker claims all jobs, dies and is noticed."""
    write_operations("default", lambda db: db.claim("mail", "worker", 50, to_us(clock.now()), AllDead.file))
    assert recover(cast("Liveness", AllDead())) == 50


def test_what_killed_its_worker_twice_comes_back_by_the_curve_and_not_all_at_once(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "rng", random.Random(1))
    enqueue_many("mail", range(50), backoff_base=100)
    die(clock)
    assert {job.run_at for job in Job.objects.all()} == {clock.now()}
    die(clock)
    waits = {(job.run_at - clock.now()).total_seconds() for job in Job.objects.all()}
    assert len(waits) == 50
    assert 200 <= min(waits) < max(waits) <= 220
