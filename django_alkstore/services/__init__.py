"""The public functions. Everything here takes `using`, a database alias; see docs/lifecycle.md for the states."""

from django_alkstore.services.claims import claim_batch, sweep
from django_alkstore.services.handles import JobHandle
from django_alkstore.services.leader import run_schedules
from django_alkstore.services.locks import LockHandle, force_release, lock
from django_alkstore.services.maintenance import delete_finished, prune
from django_alkstore.services.outboxes import Outbox, outbox, outbox_enqueue_tx
from django_alkstore.services.queues import (
    QueueStats,
    cancel,
    enqueue,
    enqueue_many,
    enqueue_tx,
    get_job,
    get_or_enqueue,
    next_claim_at,
    queue_stats,
    requeue,
    reschedule,
    run_now,
)
from django_alkstore.services.schedules import (
    fire_schedule,
    pause_schedule,
    resume_schedule,
    schedule,
    soonest,
    unschedule,
)
from django_alkstore.services.ticks import Fire, tick

__all__ = [
    "Fire",
    "JobHandle",
    "LockHandle",
    "Outbox",
    "QueueStats",
    "cancel",
    "claim_batch",
    "delete_finished",
    "enqueue",
    "enqueue_many",
    "enqueue_tx",
    "fire_schedule",
    "force_release",
    "get_job",
    "get_or_enqueue",
    "lock",
    "next_claim_at",
    "outbox",
    "outbox_enqueue_tx",
    "pause_schedule",
    "prune",
    "queue_stats",
    "requeue",
    "reschedule",
    "resume_schedule",
    "run_now",
    "run_schedules",
    "schedule",
    "soonest",
    "sweep",
    "tick",
    "unschedule",
]
