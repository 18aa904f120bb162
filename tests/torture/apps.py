"""Has every process of a run say in its journal what its worker or scheduler says of itself."""

import os
from typing import Any

from django.apps import AppConfig
from django.dispatch import Signal

from django_alkstore import signals
from tests.torture import journal

ENDINGS = {
    "completed": signals.job_completed,
    "settled": signals.job_settled,
    "retried": signals.job_retried,
    "died": signals.job_died,
    "snoozed": signals.job_snoozed,
}


class TortureConfig(AppConfig):
    name = "tests.torture"

    def ready(self) -> None:
        if journal.VARIABLE not in os.environ:
            return
        for event, signal in ENDINGS.items():
            _note_job(event, signal)
        for signal in (signals.worker_started, signals.leader_elected, signals.standing_by):
            signal.connect(_note_up)
        signals.lease_lost.connect(_note_lost)
        signals.leader_elected.connect(_remember_term)
        signals.schedule_fired.connect(_note_fire)


def _note_up(**data: Any) -> None:
    journal.note("up")


def _note_job(event: str, signal: Signal) -> None:
    def receive(*, job: Any, **data: Any) -> None:
        journal.note(event, job=job.id, fence=job._fence)

    signal.connect(receive, weak=False)


def _note_lost(*, job: Any, what: str, **data: Any) -> None:
    journal.note("lost", job=job.id, fence=job._fence, what=what)


_term: list[str] = []
"""The owner names under which this process has led."""


def _remember_term(*, owner: str, **data: Any) -> None:
    _term.append(owner)
    journal.note("elected", owner=owner)


def _note_fire(*, fire: Any, **data: Any) -> None:
    journal.note("fired", job=fire.job_id, owner=_term[-1])
