"""What the worker tests share: the test database seen from outside, and settings for one child."""

import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from django.db import connections

from django_alkstore import clock
from django_alkstore.models import Job
from django_alkstore.services import get_job
from tests.processes import Process, wait_until


def database() -> str:
    return str(connections["default"].settings_dict["NAME"])


def variant(**settings: Any) -> dict[str, str]:
    """The environment of a child whose settings differ from the suite's."""
    return {"DJANGO_SETTINGS_MODULE": "tests.ledger.variant", "ALKSTORE_TEST_VARIANT": json.dumps(settings)}


def row(job_id: int) -> Job:
    job = get_job(job_id)
    assert job is not None
    return job


def state(job_id: int) -> str:
    return row(job_id).state


def wait_for_state(wanted: str, *job_ids: int) -> None:
    def reached() -> bool:
        return Job.objects.filter(pk__in=job_ids, state=wanted).count() == len(job_ids)

    try:
        wait_until(reached, f"{wanted}: {job_ids}")
    except AssertionError:
        found = list(Job.objects.filter(pk__in=job_ids).values("id", "queue", "payload", "state", "attempts", "errors"))
        raise AssertionError(f"not {wanted}: {found}") from None


def wait_past(moment: Any) -> None:
    """Until the wall clock has passed `moment`: the one way for a lease to end."""
    wait_until(lambda: clock.now() > moment, f"{moment} has passed")


def end_leases(*job_ids: int) -> None:
    """As if their time had passed. One that is short enough to be waited for may be over before a test has looked."""
    held = Job.objects.filter(pk__in=job_ids, state="processing")
    assert held.update(lease_expires_at=clock.now()) == len(job_ids)


@contextmanager
def writer_lock() -> Iterator[None]:
    """Somebody else holds the writer lock for the length of the block."""
    with closing(sqlite3.connect(database(), isolation_level=None, timeout=30)) as raw:
        raw.execute("BEGIN IMMEDIATE")
        yield
        raw.execute("ROLLBACK")


def can_write_at_once() -> bool:
    """Can another process write without waiting for anybody?"""
    with closing(sqlite3.connect(database(), isolation_level=None, timeout=0)) as raw:
        try:
            raw.execute("BEGIN IMMEDIATE")
            raw.execute("INSERT INTO ledger_entry (text) VALUES ('from outside')")
            raw.execute("COMMIT")
        except sqlite3.OperationalError:
            return False
    return True


@contextmanager
def counted_claims() -> Iterator[Any]:
    """Inside the block the database itself counts, at each claim, how many jobs are claimed; yields the maximum."""
    with connections["default"].cursor() as cursor:
        cursor.execute("CREATE TABLE claims_seen (held INTEGER)")
        cursor.execute(
            "CREATE TRIGGER count_claims AFTER UPDATE OF state ON django_alkstore_job "
            "WHEN new.state = 'processing' AND old.state <> 'processing' BEGIN "
            "INSERT INTO claims_seen SELECT count(*) FROM django_alkstore_job WHERE state = 'processing'; END"
        )
    try:
        yield _most_claimed
    finally:
        with connections["default"].cursor() as cursor:
            cursor.execute("DROP TRIGGER count_claims")
            cursor.execute("DROP TABLE claims_seen")


def _most_claimed() -> int:
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT max(held) FROM claims_seen")
        return int(cursor.fetchone()[0])


PATIENT_END = """
import sys
from django.core.management import call_command
from django_alkstore.runtime import worker
worker.LAST_WRITES = 60.0
call_command(*sys.argv[1:])
"""
"""Runs a command that waits longer, at a hard end, until the writer lock is taken from a handler."""


def freeze(process: Process) -> None:
    """SIGSTOP, at a moment at which it holds no lock on the file."""
    while True:
        process.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # all its threads stand
        if _nobody_holds_a_lock(0.2):
            return
        process.signal(signal.SIGCONT)
        _nobody_holds_a_lock(30)  # so that it gets as far as to give it up


def _nobody_holds_a_lock(patience: float) -> bool:
    with closing(sqlite3.connect(database(), timeout=patience, isolation_level=None)) as raw:
        try:
            raw.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            return False
        raw.execute("ROLLBACK")
        return True
