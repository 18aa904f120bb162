"""What a worker's queues may have to claim, and when it is worth asking them."""

from collections.abc import Callable, Iterable

from django_alkstore import clock
from django_alkstore.dialects.transactions import read

SETTLE = 0.025
"""Seconds after a look for work that found none, while others commit, until the next; at least."""
LOOKING_SHARE = 25
"""And at least so many times as long as the look took, however many queues there are."""

LOOK_AROUND = 0.1
"""Seconds. For so long a job in an empty queue may go unnoticed while another queue keeps the worker busy."""


class Prospects:
    """For each queue the moment from which there may be something to claim, as far as it is known."""

    def __init__(self, alias: str, queues: Iterable[str], version: Callable[[], object]) -> None:
        """`version`: the database's, which is another once anybody has committed."""
        self.alias = alias
        self._version = version
        self.seen = version()
        """The version before anything was learnt that is still held for true."""
        self._due: dict[str, int | None] = dict.fromkeys(queues, 0)
        """In microseconds; `None`: not known, ask."""
        self._guess: str | None = None
        """The queue that the last claim was from, if it brought anything."""
        self._has_written = False
        self._news_of_others = False
        """Has somebody committed, and not this worker itself, since the last look?"""
        self._look_again_at = 0.0
        self._look_around_at = 0.0
        self._rotation = 0

    def due(self) -> list[str]:
        """The queues that may have something to claim, a different one first each time."""
        now = clock.now_us()
        due = [queue for queue, moment in self._due.items() if moment is not None and moment <= now]
        if len(due) > 1:
            self._rotation = (self._rotation + 1) % len(due)
            due = due[self._rotation :] + due[: self._rotation]
        return due

    def due_in(self) -> float:
        """Seconds until a queue may have something, though nobody tells; 0 or less where one may already."""
        soonest = min((moment for moment in self._due.values() if moment is not None), default=_NEVER)
        return (soonest - clock.now_us()) / clock.SECOND

    def pause(self) -> float:
        """Seconds before which news of others is not worth a look: they keep committing what is no work of ours."""
        return self._look_again_at - clock.monotonic()

    def note_write(self) -> None:
        """The worker itself has committed: the next news is its own."""
        self._has_written = True

    def note_claim(self, queue: str | None) -> None:
        """A claim brought something from `queue`, or nothing from any: what the next news is of is guessed from it."""
        self._guess = queue
        if queue is not None:
            self._news_of_others = False

    def forget(self, queue: str) -> None:
        """It had less than was asked for."""
        self._due[queue] = None

    def look_around(self) -> None:
        """Now and then: has anybody committed? A worker that has its hands full does not wait for such news.

        `DatabaseReplaced` where the file is another one, or gone.
        """
        now = clock.monotonic()
        if now >= self._look_around_at:
            self._look_around_at = now + LOOK_AROUND
            if self._version() != self.seen:
                self.take_news()

    def take_news(self) -> None:
        """Somebody has committed: what was known about empty queues is out of date."""
        self.seen = self._version()
        self._news_of_others, self._has_written = not self._has_written, False
        now = clock.now_us()
        for queue, moment in self._due.items():
            if moment is not None and moment > now:
                # Where the last news was of a job, the next may be: it is claimed without a look first.
                self._due[queue] = now if self._news_of_others and queue == self._guess else None

    def look_ahead(self) -> None:
        """For each queue that was found empty: when is its next job due? Costs a read, only after news."""
        unknown = [queue for queue, moment in self._due.items() if moment is None]
        if not unknown:
            return
        started = clock.monotonic()
        for queue, moment in read(self.alias, lambda db: db.next_claims(unknown)).items():
            self._due[queue] = _NEVER if moment is None else moment
        if self._news_of_others and self.due_in() > 0:
            now = clock.monotonic()
            self._look_again_at = now + max(SETTLE, (now - started) * LOOKING_SHARE)
        self._news_of_others = False


_NEVER = 2**63 - 1
