"""The handlers: nothing, nothing in a coroutine, and one row in the transaction of the ack."""

import itertools
import os
from pathlib import Path

from django_alkstore.registry import handler
from django_alkstore.services import JobHandle

from bench import notes
from bench.project.models import Done


@handler("noop")
def noop(job: JobHandle) -> None:
    notes.begun(job.payload)


@handler("async")
async def noop_async(job: JobHandle) -> None:
    notes.begun(job.payload)


@handler("atomic", atomic=True)
def store_row(job: JobHandle) -> None:
    notes.begun(job.payload)
    Done.objects.create(job=job.id)


@handler("memory")
def weigh(job: JobHandle) -> None:
    """Note the worker's own size after as many jobs as the environment says."""
    number = next(_numbers)
    if number in WEIGH_AFTER:
        notes.note(f"{number}:{resident_bytes()}")


WEIGH_AFTER = {int(number) for number in os.environ.get("BENCH_WEIGH_AFTER", "").split(",") if number}
_numbers = itertools.count(1)  # each next() is atomic


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
