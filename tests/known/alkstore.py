"""Handlers for the tests of known failures: for child processes with `tests.known` among their apps."""

import os
from pathlib import Path

from django.db import connections

from django_alkstore.registry import handler
from django_alkstore.services import JobHandle
from tests.ledger.models import Entry


@handler("finds")
def finds(job: JobHandle) -> None:
    """Fails where the row that its payload names is not there."""
    Entry.objects.filter(pk=job.payload).update(job_id=Entry.objects.get(pk=job.payload).pk)


@handler("forks")
def forks(job: JobHandle) -> None:
    """Uses the database before, in a child, and after it; the child's row says that it could."""
    Entry.objects.create(text="before")
    child = os.fork()
    if child == 0:
        try:
            connections.close_all()
            Entry.objects.create(text="child")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    Entry.objects.create(text="after")


@handler("a/b:c@x+y-z._1")
def oddly_named(job: JobHandle) -> None:
    Entry.objects.create(text="odd", job_id=job.id)


@handler("blocks")
def blocks(job: JobHandle) -> None:
    """Keeps its thread until the file of its payload exists."""
    Entry.objects.create(text="blocked")
    while not Path(job.payload).exists():
        job.lease_lost.wait(0.02)
