"""When each queue of a worker may have a job to claim, as far as the worker knows. Used by the leader alone."""

from collections.abc import Callable, Container, Iterable, Iterator
from math import inf

from django_alkstore import clock
from django_alkstore.dialects import Operations

SHORTEST_PAUSE = 0.025
"""Seconds, at least, between two looks that find no job while other processes commit."""
PAUSE_PER_LOOK = 25
"""The pause is at least so many times as long as the look took, however many queues there are."""
LONGEST_PAUSE = 1.0
"""Seconds, at most: a look may take long because the machine was busy or the process was suspended."""
GATHER = 0.02
"""Seconds between two claims of a worker while jobs arrive faster than it looks for them."""
CHECK_EVERY = 0.1
"""Seconds between two checks for commits while the worker is busy."""
_NEVER = 2**63 - 1


class ClaimTimes:
    """For each queue the moment from which there may be something to claim."""

    def __init__(self, queues: Iterable[str], version: Callable[[], object]) -> None:
        """`version`: that of the database. It changes with each commit of another connection."""
        self._version = version
        self.seen = version()
        """The version before the last look."""
        self._due: dict[str, int | None] = dict.fromkeys(queues, 0)
        """In microseconds; None if it is unknown."""
        self._guess: str | None = None
        """The queue of the last claim that brought a job."""
        self._has_new_commit = True
        """True if there was a commit of another connection since `take_commit`."""
        self._has_written = False
        self._news_of_others = False
        """True if another process, and not this worker, has committed since the last look."""
        self._look_again_at = 0.0
        self._several_at = -inf
        self._gather_until = 0.0
        self._check_at = 0.0
        self._rotation = 0
        self.open: Container[str] = self._due
        """The queues from which a job could start at present. The others may be due, and are left alone."""

    def due(self) -> list[str]:
        """The queues that may have a job to claim, each time another one first."""
        now = clock.now_us()
        due = [queue for queue, moment in self._open() if moment is not None and moment <= now]
        if len(due) > 1:
            self._rotation = (self._rotation + 1) % len(due)
            due = due[self._rotation :] + due[: self._rotation]
        return due

    def _open(self) -> Iterator[tuple[str, int | None]]:
        return ((queue, moment) for queue, moment in self._due.items() if queue in self.open)

    def due_in(self) -> float:
        """Seconds until a queue may have a job without a further commit; 0 or less if one may have a job now."""
        soonest = min((moment for _, moment in self._open() if moment is not None), default=_NEVER)
        return (soonest - clock.now_us()) / clock.SECOND

    def pause(self) -> float:
        """Seconds for which a commit of others is not worth a look: they write something that is no job of ours."""
        return max(0.0, self._look_again_at - clock.monotonic())

    def note_several(self) -> None:
        """A claim of quick jobs took all that there were, and more than one.

        If the one before did so a moment ago, jobs gather until the next claim: fewer, larger claims cost less, and
        leave the writer lock to the processes that enqueue.
        """
        now = clock.monotonic()
        if now - self._several_at < 2 * GATHER:
            self._gather_until = now + GATHER
        self._several_at = now

    def gathering(self) -> float:
        """Seconds until the next claim if jobs are gathering; else 0."""
        return max(0.0, self._gather_until - clock.monotonic())

    def note_write(self) -> None:
        """The worker has committed: the next change of the version is its own."""
        self._has_written = True

    def note_claim(self, queue: str | None) -> None:
        """A claim brought jobs from `queue`, or from none."""
        self._guess = queue
        if queue is not None:
            self._news_of_others = False

    def forget(self, queue: str) -> None:
        """The queue had fewer jobs than were asked for."""
        self._due[queue] = None

    def check(self) -> None:
        """Look for commits every now and then, since a busy leader does not wait for them.

        Raises `DatabaseReplaced` if the database file is another one, or gone.
        """
        now = clock.monotonic()
        if now >= self._check_at:
            self._check_at = now + CHECK_EVERY
            if self._version() != self.seen:
                self.take_news()

    def take_news(self) -> None:
        """There was a commit: what is known about empty queues is out of date."""
        self.seen = self._version()
        self._has_new_commit = True
        self._news_of_others, self._has_written = not self._has_written, False
        now = clock.now_us()
        for queue, moment in self._due.items():
            if moment is not None and moment > now:
                # If the last news was of a job, the next may be too: the worker claims without a look first.
                self._due[queue] = now if self._news_of_others and queue == self._guess else None

    def take_commit(self) -> bool:
        """True if there was a commit of another connection since the last call."""
        had, self._has_new_commit = self._has_new_commit, False
        return had

    def add(self, queue: str) -> None:
        """Look after one queue more."""
        self._due[queue] = None

    def unknown(self) -> list[str]:
        """The queues about which the database must be asked."""
        return [queue for queue, moment in self._open() if moment is None]

    def look(self, db: Operations) -> None:
        """Ask the database when the next job of each unknown queue is due."""
        started = clock.monotonic()
        for queue, moment in db.next_claims(self.unknown()).items():
            self._due[queue] = _NEVER if moment is None else moment
        if self._news_of_others and self.due_in() > 0:
            now = clock.monotonic()
            self._look_again_at = now + min(max(SHORTEST_PAUSE, (now - started) * PAUSE_PER_LOOK), LONGEST_PAUSE)
        self._news_of_others = False
