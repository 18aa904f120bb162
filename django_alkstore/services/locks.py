"""Named locks with a time to live and a fencing token."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime
from functools import wraps
from types import TracebackType
from typing import Any, Self, TypeVar

from asgiref.sync import sync_to_async
from django.db import DatabaseError
from django.db.models import QuerySet
from django.dispatch import Signal

from django_alkstore import clock, signals
from django_alkstore.clock import from_us
from django_alkstore.dialects import Operations
from django_alkstore.dialects.liveness import Liveness
from django_alkstore.dialects.transactions import resolve_alias, write_transaction
from django_alkstore.durations import Duration, moment_after, seconds
from django_alkstore.exceptions import LockHeld, LockLost
from django_alkstore.models import Lock
from django_alkstore.names import unique_owner, validate_name
from django_alkstore.services.events import told
from django_alkstore.services.options import check_text
from django_alkstore.services.twins import twin

__all__ = ["LockHandle", "force_release", "holder", "lock", "unique_owner"]


T = TypeVar("T")

_greatest_token = 0
"""The greatest token that this process was given, in a transaction that was rolled back too."""


def _least_next_token(now: int) -> int:
    """Where tokens go on. Rows alone forget one that was rolled back, though somebody may have seen it."""
    return max(now, _greatest_token + 1)


def _not_if_cancelled(
    take: "Callable[[LockHandle], Coroutine[Any, Any, T]]",
) -> "Callable[[LockHandle], Coroutine[Any, Any, T]]":
    """The same twin, which does not leave the lock taken if its task is cancelled."""

    @wraps(take)
    async def take_it(self: "LockHandle") -> T:
        token = self.token
        try:
            return await take(self)
        except asyncio.CancelledError:
            # In the same thread as `take`, and so after it: it runs to its end.
            await sync_to_async(self._undo)(token)
            raise

    return take_it


class LockHandle:
    """One would-be holder of a lock. `lock()` makes them.

    Not re-entrant: `acquire` of a held lock is `False` for its holder too.
    """

    def __init__(self, name: str, ttl: float, owner: str, using: str, liveness: Liveness | None = None) -> None:
        """`liveness`: the scheduler's, whose `holder` is the owner. Leases alone decide about other locks."""
        self.name = name
        self.ttl = ttl
        self.owner = owner
        self.using = using
        self._liveness = liveness
        self._given_back = False
        self.token: int | None = None
        """The fencing token of the last acquisition, which grows with each one of any holder; `None` before."""

    def __repr__(self) -> str:
        return f"<LockHandle {self.name}, owner {self.owner}, token {self.token}>"

    def acquire(self) -> bool:
        """Take the lock if it is free or has lapsed. In a transaction that rolls back, it was never taken."""
        taken = write_transaction(self.using, self._take)
        if isinstance(taken, Lock):
            return False
        self._keep(taken)
        return True

    def _take(self, db: Operations) -> int | Lock:
        """The new token, or the holder's row."""
        token = self._acquire(db)
        if token is not None:
            return token
        held = Lock.objects.using(self.using).get(name=self.name)
        if self._liveness is None or not self._liveness.is_dead(held.owner, held.liveness):
            return held
        held.delete()
        return self._acquire(db) or held

    def _acquire(self, db: Operations) -> int | None:
        now = clock.now_us()
        ends = moment_after("ttl", now, self.ttl)
        file = None if self._liveness is None else self._liveness.file
        return db.acquire_lock(self.name, self.owner, now, ends, _least_next_token(now), file)

    def _keep(self, token: int) -> None:
        global _greatest_token  # noqa: PLW0603  tokens are the process's, whichever handle asks
        self.token = token
        self._given_back = False
        _greatest_token = max(_greatest_token, token)
        if self._liveness is None:  # of the leadership, `leader_elected` tells
            self._tell(True, signals.lock_acquired)

    def _tell(self, changed: bool, signal: Signal) -> bool:
        return told(changed, self.using, signal, name=self.name, owner=self.owner, token=self.token)

    def renew(self, ttl: Duration | None = None) -> bool:
        """Let the lock end `ttl` seconds (default: its own) from now; `False` if it has lapsed or is another's."""
        lasting = self.ttl if ttl is None else seconds("ttl", ttl, zero=False)

        def extend(db: Operations) -> int:
            now = clock.now_us()
            ends = moment_after("ttl", now, lasting)
            return self._held(now).update(expires_at=from_us(ends))

        return self._tell(write_transaction(self.using, extend) == 1, signals.lock_renewed)

    def release(self) -> bool:
        """Free the lock; `False`, with nothing changed, if it has lapsed or is another's."""

        def free(db: Operations) -> int:
            return self._held(clock.now_us()).delete()[0]

        released = write_transaction(self.using, free) == 1
        self._given_back = self._given_back or released
        return self._tell(released, signals.lock_released)

    def _held(self, now: int) -> QuerySet[Lock]:
        # A token of 0 is nobody's: the database counts from 1.
        mine = Lock.objects.using(self.using).filter(name=self.name, token=self.token or 0, owner=self.owner)
        return mine.filter(expires_at__gt=from_us(now))

    def __enter__(self) -> Self:
        taken = write_transaction(self.using, self._take)
        if isinstance(taken, Lock):
            raise LockHeld(self.name, taken.owner, taken.expires_at)
        self._keep(taken)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._given_back:
            return
        try:
            released = self.release()
        except DatabaseError as failure:
            if error is None:
                raise
            error.add_note(f"{self!r} could not be released ({failure}); it lapses by itself")
        else:
            if not released and error is None:
                raise LockLost(self.name)

    def _undo(self, token: int | None) -> None:
        """Release the lock if it was taken since the handle had this token."""
        if self.token != token:
            self.release()

    aacquire = _not_if_cancelled(twin(acquire))
    arenew = twin(renew)
    arelease = twin(release)
    __aenter__ = _not_if_cancelled(twin(__enter__))
    __aexit__ = twin(__exit__)


def lock(name: str, ttl: Duration = 60.0, owner: str | None = None, *, using: str | None = None) -> LockHandle:
    """A handle on the lock `name`, which is not taken yet: use it by `with` or `async with`, or `acquire` it.

    `ttl`: seconds that an acquisition lasts unless renewed. `owner`: a name for people to see (default: one
    unique to the handle). Raises `InvalidName`, `InvalidOption`.
    """
    validate_name("lock", name)
    lasting = seconds("ttl", ttl, zero=False)
    holder = unique_owner() if owner is None else check_text("owner", owner)
    return LockHandle(name, lasting, holder, resolve_alias(using))


def force_release(name: str, *, using: str | None = None) -> bool:
    """Take the lock away from its holder; `False` if it has none. This works for the scheduler's leadership, too."""
    alias = resolve_alias(using)
    taken = write_transaction(alias, lambda _: Lock.objects.using(alias).filter(name=name).delete()[0]) > 0
    return told(taken, alias, signals.lock_taken_away, name=name)


def holder(name: str, *, using: str | None = None) -> tuple[str, datetime] | None:
    """Owner and end of a lock that is held now, or `None`."""
    row = Lock.objects.using(resolve_alias(using)).filter(name=name, expires_at__gt=clock.now()).first()
    return None if row is None else (row.owner, row.expires_at)
