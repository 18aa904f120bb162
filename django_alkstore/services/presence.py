"""A worker's signs of life: a row that lapses for each of its queues.

They are there for people and for the health check alone: no worker asks who else lives, and nobody's job is taken
for want of a sign. Leases decide that.
"""

from collections.abc import Sequence

from django.db import connections
from django.db.models import QuerySet

from django_alkstore import clock, names
from django_alkstore.clock import LAST_US, SECOND, from_us
from django_alkstore.dialects import Operations, vitals
from django_alkstore.dialects.transactions import write_transaction
from django_alkstore.models import Lock

TTL = 150.0
"""Seconds that a sign lasts: two and a half upkeep intervals, so that one may be missed."""


def leave(alias: str, worker_id: str, queues: Sequence[str]) -> None:
    """Let the worker's signs last for `TTL` from now, in one transaction."""

    def write(db: Operations) -> None:
        now = clock.now_us()
        started, ends = from_us(now), from_us(min(now + round(TTL * SECOND), LAST_US))
        mine = _signs_of(alias, worker_id)
        if mine.update(expires_at=ends) == len(queues):
            return
        mine.delete()
        Lock.objects.using(alias).bulk_create(
            Lock(name=names.sign_name(worker_id, queue), owner=worker_id, acquired_at=started, expires_at=ends)
            for queue in queues
        )

    write_transaction(alias, write)


def take_back(alias: str, worker_id: str) -> None:
    """Delete the worker's signs."""
    write_transaction(alias, lambda _: _signs_of(alias, worker_id).delete())


def remove_lapsed(alias: str) -> None:
    """Delete the signs that workers have left which ended without taking them back."""
    lapsed = signs(alias).filter(expires_at__lte=clock.now())
    if lapsed.exists():
        write_transaction(alias, lambda _: lapsed.delete())


def served(alias: str) -> set[str | None]:
    """The queues for which a worker has left a sign of life that lasts, or somebody has just claimed or renewed.

    A program of the project's own, which calls `claim_batch`, leaves no other sign.
    """
    now = clock.now_us()
    lasting = signs(alias).filter(expires_at__gt=from_us(now)).values_list("name", flat=True)
    recently = now - round(TTL * SECOND)
    fresh = [lease.queue for lease in vitals.last_leases(connections[alias], now) if lease.written > recently]
    return {*map(names.queue_of_sign, lasting), *fresh}


def signs(alias: str) -> QuerySet[Lock]:
    """Every worker's signs, the lapsed ones too."""
    return Lock.objects.using(alias).filter(name__gte=names.SIGN_PREFIX, name__lt=names.AFTER_SIGNS)


def locks(alias: str) -> QuerySet[Lock]:
    """The locks, without the signs."""
    return without_signs(Lock.objects.using(alias))


def without_signs(rows: QuerySet[Lock]) -> QuerySet[Lock]:
    """Those rows of the lock table that are locks."""
    return rows.exclude(name__gte=names.SIGN_PREFIX, name__lt=names.AFTER_SIGNS)


def _signs_of(alias: str, worker_id: str) -> QuerySet[Lock]:
    return signs(alias).filter(owner=worker_id)
