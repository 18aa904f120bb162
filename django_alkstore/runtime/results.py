"""The results of a worker on their way to the database. Used with the lock of the shared state held."""

from django_alkstore.runtime.jobs import LONGEST_UNWRITTEN, Result
from django_alkstore.services import JobHandle
from django_alkstore.services.outcomes import ACK, Kind


class Results:
    """A result is in exactly one place: here, or in the hands of one writer, or on the row."""

    def __init__(self) -> None:
        self._waiting: list[Result] = []
        self._being_written = 0
        self._being_announced = 0
        """How many handler threads are sending the events of what was written."""
        self.completed = 0
        self.failed = 0

    def add(self, result: Result) -> None:
        """A handler has ended."""
        self._waiting.append(result)

    def take(self) -> list[Result]:
        """Hand everything to a writer, which calls `written` or `put_back`."""
        taken, self._waiting = self._waiting, []
        return self.hand_out(taken)

    def hand_out(self, results: list[Result]) -> list[Result]:
        """Hand results to a writer that were never here."""
        self._being_written += len(results)
        return results

    def put_back(self, results: list[Result]) -> None:
        """The writer could not write them."""
        self._being_written -= len(results)
        self._waiting[:0] = results

    def written(self, count: int, completed: int, failed: int) -> None:
        """The writer has written so many."""
        self._being_written -= count
        self.completed += completed
        self.failed += failed

    def count(self, job: JobHandle) -> None:
        """Count a job that its handler has settled itself."""
        outcome = job._settled_by or ACK
        self.completed += outcome.kind is Kind.ACK
        self.failed += outcome.is_failure

    def begin_announcing(self) -> None:
        self._being_announced += 1

    def end_announcing(self) -> None:
        self._being_announced -= 1

    @property
    def announcers(self) -> int:
        """Threads of handlers that are at receivers and log handlers."""
        return self._being_announced

    @property
    def are_written(self) -> bool:
        """True if nothing is left to be written."""
        return not (self._waiting or self._being_written)

    def any_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def write_by(self) -> float | None:
        """When the oldest result is to be written at the latest; None without one."""
        return self._waiting[0].ended_at + LONGEST_UNWRITTEN if self._waiting else None

    def are_old(self, now: float) -> bool:
        """True if a result has waited too long for a leader."""
        write_by = self.write_by
        return write_by is not None and now >= write_by
