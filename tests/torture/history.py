"""The database's own record of what became of each job.

Triggers write it in the transaction of each change. So nothing that commits escapes it, nothing that rolls back is
in it, and its order is the order of the commits; what is pruned stays known.
"""

from django.db import connection

from django_alkstore.models import Job, Lock
from django_alkstore.names import LEADERSHIP_LOCK
from tests.torture.models import History

NOW = "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)"
ALWAYS = ("state", "attempts", "max_attempts", "fence", "worker_id", "lease_expires_at", "run_at", "last_error")
AT_INSERT = ("queue", "payload", "unique_key", "schedule", "fire_at", "created_at")


def install() -> None:
    """Create the triggers."""
    with connection.cursor() as cursor:
        for change, event, row in (("I", "INSERT", "NEW"), ("U", "UPDATE", "NEW"), ("D", "DELETE", "OLD")):
            cursor.execute(_trigger(change, event, row))


def _trigger(change: str, event: str, row: str) -> str:
    columns = ALWAYS + (AT_INSERT if change == "I" else ())
    leader = f"(SELECT owner FROM {Lock._meta.db_table} WHERE name = '{LEADERSHIP_LOCK}')"
    return (
        f"CREATE TRIGGER torture_history_{event.lower()} AFTER {event} ON {Job._meta.db_table} BEGIN "
        f"INSERT INTO {History._meta.db_table} (at, change, job_id, errors, leader, {', '.join(columns)}) "
        f"VALUES ({NOW}, '{change}', {row}.id, json_array_length({row}.errors), {leader}, "
        f"{', '.join(f'{row}.{column}' for column in columns)}); END"
    )
