"""Handlers for the tests of known failures: for child processes with `tests.known` among their apps."""

import os
import sqlite3
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

from django.db import connections
from django.db.backends.signals import connection_created
from django.dispatch import receiver

from django_alkstore import services, signals
from django_alkstore.dialects import forks as library_forks
from django_alkstore.models import Job
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
    _fork_and_write()
    Entry.objects.create(text="after")


def _fork_and_write() -> None:
    child = os.fork()
    if child == 0:
        try:
            connections.close_all()
            Entry.objects.create(text="child")
        except BaseException as error:
            sys.stderr.write(f"in the child: {error!r}\n")
            sys.stderr.flush()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


library_forks.LONGEST_WAIT = 60.0  # a stall of this machine is no fault

_pausing = threading.Event()
_paused = threading.Event()
_forking = threading.Event()


@receiver(connection_created)
def watch_commits(connection: Any, **kwargs: object) -> None:
    """Let the first commit of another thread, once it is asked for, wait until a fork is about to be, and a moment."""

    def trace(statement: str) -> None:
        if statement == "COMMIT" and _pausing.is_set() and threading.current_thread() is threading.main_thread():
            _pausing.clear()
            _paused.set()
            _forking.wait(20)
            threading.Event().wait(0.3)

    connection.connection.set_trace_callback(trace)


@handler("forks_meanwhile")
def forks_meanwhile(job: JobHandle) -> None:
    """Forks while the worker's loop is in the middle of a transaction."""
    # It is not due before the next line is reached, even where the machine is in no hurry.
    services.enqueue("record", "meanwhile", delay=4)
    _pausing.set()
    assert _paused.wait(20)
    _forking.set()
    _fork_and_write()


@handler("falls_through", atomic=True)
def falls_through(job: JobHandle) -> None:
    """Lets a child return from it, and looks whether that has ended its parent's transaction."""
    Entry.objects.create(text="in the transaction")
    child = os.fork()
    if child == 0:
        if job.payload == "raises":
            raise ValueError("in the child")
        return
    assert os.waitpid(child, 0)[1] == 0
    with closing(sqlite3.connect(connections["default"].settings_dict["NAME"])) as other:
        assert other.execute("SELECT count(*) FROM ledger_entry").fetchone() == (0,)
    assert Entry.objects.count() == 1


@receiver(signals.worker_stopped)
def say_states(**kwargs: object) -> None:
    """As one who listens, and may take long."""
    sys.stderr.write(f"states at the stop: {sorted(Job.objects.values_list('state', flat=True))}\n")


@handler("a/b:c@x+y-z._1")
def oddly_named(job: JobHandle) -> None:
    Entry.objects.create(text="odd", job_id=job.id)


@handler("blocks")
def blocks(job: JobHandle) -> None:
    """Keeps its thread until the file of its payload exists."""
    Entry.objects.create(text="blocked")
    while not Path(job.payload).exists():
        job.lease_lost.wait(0.02)
