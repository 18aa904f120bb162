"""The handlers of a torture run. What a run of one does is decided by the seed, the job and the claim."""

import asyncio
import os
import random
import sys
import time
from contextlib import suppress

from django.db import transaction

from django_alkstore.exceptions import Discard, LeaseLost, Retry, Snooze
from django_alkstore.names import outbox_queue
from django_alkstore.registry import delivery, handler
from django_alkstore.services import JobHandle
from tests.torture import journal
from tests.torture.models import Effect

INJECTED = "injected"
"""Stands in each error that a handler is meant to raise."""

EXACT = {"own", "atomic", "beat-exact", outbox_queue("exact")}
"""Queues whose effects must be there exactly once."""
OUTSIDE = {outbox_queue("mail")}
"""Queues whose effects are outside the database, in the journal."""


class Injected(Exception):
    """A failure that is part of the run."""


def chance_of(job: JobHandle) -> random.Random:
    return random.Random(f"{os.environ['TORTURE_SEED']}:{job.id}:{job._fence}")


def reference_of(job: JobHandle) -> str:
    return job.payload["order"] if job.schedule is None else f"{job.schedule} {job.fire_at}"


def effect_of(job: JobHandle) -> Effect:
    return Effect(job_id=job.id, fence=job._fence, reference=reference_of(job))


def _work(chance: random.Random) -> None:
    """Mostly nothing; sometimes longer than a lease."""
    time.sleep(chance.choices((0, chance.uniform(0, 0.1), chance.uniform(0.1, 2.8)), (80, 15, 5))[0])


@handler("plain")
def plain(job: JobHandle) -> None:
    _work(chance_of(job))
    effect_of(job).save()


@handler("async")
async def plain_async(job: JobHandle) -> None:
    await asyncio.sleep(chance_of(job).choice((0, 0, 0, 0.1)))
    await effect_of(job).asave()


@handler("atomic", atomic=True)
def atomic(job: JobHandle) -> None:
    chance = chance_of(job)
    effect_of(job).save()
    time.sleep(chance.choices((0, 0.03, 0.3), (80, 15, 5))[0])
    if chance.random() < 0.15:
        raise Injected(f"{INJECTED}: after the row")


@handler("own")
def own(job: JobHandle) -> None:
    """Its row and its ack commit together, in a transaction of its own."""
    chance = chance_of(job)
    way = chance.choices(("commit", "roll back", "catch", "raise late"), (35, 15, 45, 5))[0]
    _work(chance)
    with transaction.atomic():
        effect_of(job).save()
        if chance.random() < 0.25:
            # Before whatever the ack may do after the commit: time to be killed in.
            transaction.on_commit(lambda: time.sleep(0.2))
        with suppress(LeaseLost) if way == "catch" else suppress():
            job.ack_tx()
        time.sleep(chance.choices((0, 0.03, 0.2), (80, 15, 5))[0])
        if way == "roll back":
            raise Injected(f"{INJECTED}: after the ack")
    if way == "raise late":
        raise Injected(f"{INJECTED}: after the commit")


@handler("moody")
def moody(job: JobHandle) -> None:
    mood = chance_of(job).random()
    if mood < 0.2:
        raise Injected(f"{INJECTED}: no luck")
    if mood < 0.25:
        sys.exit(INJECTED)
    if mood < 0.35:
        raise Retry(f"{INJECTED}: later", delay=0.2)
    if mood < 0.45:
        raise Snooze(0.2)
    if mood < 0.5:
        raise Discard(f"{INJECTED}: no use")
    effect_of(job).save()


@handler("doomed")
def doomed(job: JobHandle) -> None:
    raise Injected(f"{INJECTED}: as ever")


@handler("self-ack")
def self_ack(job: JobHandle) -> None:
    """Settles itself, and says whether that took effect."""
    chance = chance_of(job)
    way = chance.choices(("ack", "release", "retry"), (70, 15, 15))[0]
    _work(chance)
    if way == "ack":
        effect_of(job).save()
        done = job.ack()
    elif way == "release":
        done = job.release()
    else:
        done = job.retry(f"{INJECTED}: by itself", delay=0.1)
    journal.note("settled itself", job=job.id, fence=job._fence, way=way, done=done)


@handler("limited", time_limit=1.0)
def limited(job: JobHandle) -> None:
    """Now and then it ignores its time limit."""
    time.sleep(chance_of(job).choices((0, 1.8), (85, 15))[0])
    effect_of(job).save()


@delivery("mail")
def mail(job: JobHandle) -> None:
    chance = chance_of(job)
    _work(chance)
    if chance.random() < 0.1:
        raise Injected(f"{INJECTED}: refused")
    journal.note("delivered", job=job.id, fence=job._fence, reference=reference_of(job))


@delivery("exact", atomic=True)
def exact(job: JobHandle) -> None:
    effect_of(job).save()
    if chance_of(job).random() < 0.1:
        raise Injected(f"{INJECTED}: after the row")


@handler("beat")
def beat(job: JobHandle) -> None:
    effect_of(job).save()


@handler("beat-exact", atomic=True)
def beat_exact(job: JobHandle) -> None:
    effect_of(job).save()
