"""Full tables beside small ones, in one process, so that both are measured by turns from one moment to the next."""

import shutil
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from bench import floor
from bench.floor import DAY, now_us
from bench.ours import Ours
from bench.program import LONGEST, main

SMALL, BIG = "default", "big"
WARM_UP = 5
LEAST = 10
"""Claims that are timed in any case, however long they take."""
DUE = 10

SHAPES: dict[str, Callable[[], dict[str, str]]] = {
    "due": dict,
    "delayed": lambda: {"priority": "10", "run_at": f"{now_us() + DAY} + n"},
    "finished": lambda: {"state": "'completed'", "attempts": "1", "fence": "1", "finished_at": f"{now_us()} + n"},
    "other": lambda: {"queue": "'another'"},
    "queues": lambda: {"queue": "'queue-' || (n % 1000)"},
    "priorities": lambda: {"priority": "n + 1", "run_at": f"{now_us() + DAY}"},
}
"""What a full table is full of, besides the jobs that are claimed: column by column, as SQL over `n`."""


class Full(Ours):
    """The library, with a full database beside the small one."""

    def role_shape(self, shape: str, size: int) -> None:
        """Make the full database, and put as many due jobs into both."""
        small, big = self.folder / "bench.sqlite3", self.folder / "big.sqlite3"
        shutil.copy(small, big)
        connection = floor.connect(big)
        floor.fill(connection, size, **SHAPES[shape]())
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        for alias in (SMALL, BIG):
            self.services.enqueue_many("noop", [None] * DUE, using=alias)

    def role_claim_costs(self, count: int) -> dict[str, float]:
        """One claim in each by turns, microseconds: medians of the wall's clock, means of the processor's.

        What was claimed is acked, and another stored, without being timed: both tables stay as they are.
        """
        wall: dict[str, list[float]] = {SMALL: [], BIG: []}
        cpu = {SMALL: 0.0, BIG: 0.0}
        ends = time.monotonic() + LONGEST
        for number in range(-WARM_UP, count):
            if time.monotonic() > ends and len(wall[BIG]) >= LEAST:
                break
            for alias in (SMALL, BIG) if number % 2 else (BIG, SMALL):
                cpu_before, started = time.thread_time(), time.perf_counter()
                (job,) = self.services.claim_batch("noop", "bench", using=alias)
                seconds, cpu_seconds = time.perf_counter() - started, time.thread_time() - cpu_before
                job.ack()
                self.services.enqueue("noop", None, using=alias)
                if number >= 0:
                    wall[alias].append(seconds * 1e6)
                    cpu[alias] += cpu_seconds
        small, big = (statistics.median(wall[alias]) for alias in (SMALL, BIG))
        return {"small": small, "big": big, "ratio": big / small, "cpu_ratio": cpu[BIG] / cpu[SMALL]}

    def role_schedules(self, due: int, size: int) -> None:
        """As many schedules that are due each hour in both databases; in the full one, others that are not due."""
        shutil.copy(self.folder / "bench.sqlite3", self.folder / "big.sqlite3")
        for alias, count in ((SMALL, due), (BIG, size)):
            with self.transaction.atomic(using=alias):
                for number in range(count):
                    spec = "@every 1h" if number < due else "@every 300d"
                    self.services.schedule(f"schedule-{number}", spec, "noop", {"number": number}, using=alias)

    def role_tick_costs(self, count: int) -> dict[str, float]:
        """One tick in each by turns, an hour on each time, milliseconds: medians."""
        wall: dict[str, list[float]] = {SMALL: [], BIG: []}
        fires = set()
        start = self.services.soonest() or datetime.now(UTC)
        for number in range(-2, count):
            now = start + timedelta(hours=number + 2, minutes=30)
            for alias in (SMALL, BIG) if number % 2 else (BIG, SMALL):
                started = time.perf_counter()
                fires.add(len(self.services.tick(now, using=alias)))
                if number >= 0:
                    wall[alias].append((time.perf_counter() - started) * 1e3)
        if len(fires) != 1:
            raise RuntimeError(f"ticks fired unequal numbers of schedules: {sorted(fires)}")
        small, big = (statistics.median(wall[alias]) for alias in (SMALL, BIG))
        return {"small": small, "big": big, "ratio": big / small}


if __name__ == "__main__":
    main(Full)
