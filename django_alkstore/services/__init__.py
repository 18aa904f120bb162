"""The public functions. Everything here takes `using`, a database alias; see docs/lifecycle.md for the states."""

from django_alkstore.services.claims import claim_batch, sweep
from django_alkstore.services.declared import schedule_task
from django_alkstore.services.handles import JobHandle
from django_alkstore.services.leader import run_schedules
from django_alkstore.services.locks import LockHandle, force_release, lock
from django_alkstore.services.maintenance import delete_finished, prune
from django_alkstore.services.options import NEVER
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
    next_boundaries,
    pause_schedule,
    resume_schedule,
    schedule,
    soonest,
    unschedule,
)
from django_alkstore.services.ticks import Fire, tick
from django_alkstore.services.twins import twin

acancel = twin(cancel)
aclaim_batch = twin(claim_batch)
aenqueue = twin(enqueue)
aenqueue_many = twin(enqueue_many)
aenqueue_tx = twin(enqueue_tx)
afire_schedule = twin(fire_schedule)
aget_job = twin(get_job)
aget_or_enqueue = twin(get_or_enqueue)
aoutbox_enqueue_tx = twin(outbox_enqueue_tx)
apause_schedule = twin(pause_schedule)
aqueue_stats = twin(queue_stats)
arequeue = twin(requeue)
areschedule = twin(reschedule)
aresume_schedule = twin(resume_schedule)
arun_now = twin(run_now)
aschedule = twin(schedule)
aunschedule = twin(unschedule)
alock = lock
"""For `async with`. A lock's handle has async twins of its methods."""

__all__ = [
    "NEVER",
    "Fire",
    "JobHandle",
    "LockHandle",
    "Outbox",
    "QueueStats",
    "acancel",
    "aclaim_batch",
    "aenqueue",
    "aenqueue_many",
    "aenqueue_tx",
    "afire_schedule",
    "aget_job",
    "aget_or_enqueue",
    "alock",
    "aoutbox_enqueue_tx",
    "apause_schedule",
    "aqueue_stats",
    "arequeue",
    "areschedule",
    "aresume_schedule",
    "arun_now",
    "aschedule",
    "aunschedule",
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
    "next_boundaries",
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
    "schedule_task",
    "soonest",
    "sweep",
    "tick",
    "unschedule",
]
