"""What is done to the processes and to the file, in an order that the seed alone decides."""

import random
import signal
import sqlite3
import time
from collections import Counter as Tally
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from django_alkstore.services.leader import LEADERSHIP_TTL
from tests.torture.children import Child, Children
from tests.torture.settings import BUSY_TIMEOUT, LEASE

WORKERS = {"queues-1", "queues-2", "outboxes", "everything"}
FIRST_DEPOSITION = 3.0
BETWEEN_DEPOSITIONS = 20.0
DEPOSED_FOR = LEADERSHIP_TTL + 1.5
"""Seconds. A deposed leader sleeps past the end of its leadership, and a standby has taken it when it wakes."""
BETWEEN_HOLDS = 2.0
"""Seconds in which the writer lock is left to the others."""
ENOUGH_CHANGES = 10
LONGEST_BREATHER = 2.0
"""Seconds. Between two torments there are so many changes of jobs, or so long a time."""


class Tormentor:
    """Torments `children` until `seconds` have passed, and starts again what has ended."""

    def __init__(self, children: Children, database: str, seed: str, folder: Path) -> None:
        self.children = children
        self.database = database
        self.chance = random.Random(seed)
        self.done: Tally[str] = Tally()
        self._log = (folder / "torments.txt").open("w")
        self._reader = self._connect()
        self._began = 0.0
        self._tormented_at = 0.0
        self._tormented_change = 0
        self._held_until = 0.0
        self._later: list[tuple[float, Callable[[], None]]] = []
        """What must be undone, and when."""
        self._torments: dict[Callable[[random.Random], None], int] = {
            self.kill: 30,
            self.freeze: 14,
            self.terminate: 10,
            self.hold_writer_lock: 8,
            self.pin_snapshot: 5,
            self.checkpoint: 12,
            self.vacuum: 5,
            self.prune: 8,
        }

    def run(self, seconds: float) -> None:
        self._began = time.monotonic()
        deadline = self._began + seconds
        next_deposition = self._began + FIRST_DEPOSITION
        next_torment = self._began + 1.0
        while (now := time.monotonic()) < deadline:
            self._undo(now)
            for role in self.children.reap():
                if role in self.children.roles and role != "prune":
                    self.children.start(role)
            if now >= next_deposition:
                # Not always is there a leader: then soon again.
                next_deposition = now + (BETWEEN_DEPOSITIONS if self.depose() else 0.5)
            if now >= next_torment and self._recovered(now):
                (torment,) = self.chance.choices(list(self._torments), list(self._torments.values()))
                # Each draws from a chance of its own: how many numbers one takes must not move the others.
                torment(random.Random(self.chance.random()))
                next_torment = now + self.chance.uniform(0.05, 0.6)
            time.sleep(0.02)
        self._undo(float("inf"))
        self._reader.close()
        self._log.close()

    def _recovered(self, now: float) -> bool:
        """Has anybody got on since the last torment? With torments alone there would be nothing to be broken."""
        latest = self._latest_change()
        if latest < self._tormented_change + ENOUGH_CHANGES and now < self._tormented_at + LONGEST_BREATHER:
            return False
        self._tormented_change, self._tormented_at = latest, now
        return True

    def _latest_change(self) -> int:
        try:
            return self._reader.execute("SELECT coalesce(max(id), 0) FROM torture_history").fetchone()[0]
        except sqlite3.OperationalError:
            return 0  # a writer that shuts readers out

    def _undo(self, now: float) -> None:
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            entry[1]()

    def _note(self, what: str, text: str = "") -> None:
        self.done[what] += 1
        self._log.write(f"{time.monotonic() - self._began:7.2f} {what} {text}\n")
        self._log.flush()

    def _pick(self, chance: random.Random) -> Child | None:
        """The first process that can be tormented now, in an order by chance, workers in front more often."""
        roles = [role for role in self.children.roles if role != "prune"]
        roles += [role for role in roles if role in WORKERS]
        chance.shuffle(roles)
        # Seldom one that has only started: on a busy machine there would be starts and no work.
        fresh_too = chance.random() < 0.1
        for child in map(self.children.by_role.get, roles):
            if child is not None and child.running and not child.frozen and (child.has_worked or fresh_too):
                return child
        return None

    def kill(self, chance: random.Random) -> None:
        if child := self._pick(chance):
            child.send(signal.SIGKILL)
            self._note("killed", child.log.stem)

    def terminate(self, chance: random.Random) -> None:
        if child := self._pick(chance):
            child.send(signal.SIGTERM)
            self._note("terminated", child.log.stem)
            if chance.random() < 0.3:
                self._at(0.1, lambda: child.running and child.send(signal.SIGTERM))

    def freeze(self, chance: random.Random) -> None:
        if child := self._pick(chance):
            self._freeze(child, chance.uniform(1.2 * LEASE, 2 * LEASE))
            self._note("frozen", child.log.stem)

    def depose(self) -> bool:
        """Freeze the leader for longer than its leadership lasts; was there one?"""
        leader = self._leader()
        for child in self.children.running():
            if leader == child.pid and not child.frozen:
                self._freeze(child, DEPOSED_FOR)
                self._note("deposed", child.log.stem)
                return True
        return False

    def _freeze(self, child: Child, seconds: float) -> None:
        child.freeze(time.monotonic() + seconds)
        self._at(seconds, lambda: child.running and child.thaw())

    def _leader(self) -> int | None:
        with closing(self._connect()) as raw:
            try:
                row = raw.execute(
                    "SELECT owner FROM django_alkstore_lock WHERE name = '__alkstore_scheduler'"
                ).fetchone()
            except sqlite3.OperationalError:
                return None
        return None if row is None else int(row[0].split(":")[-2])

    def _at(self, seconds: float, undo: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + seconds, lambda: undo() and None))

    def hold_writer_lock(self, chance: random.Random) -> None:
        """For longer than the busy timeout."""
        if time.monotonic() < self._held_until + BETWEEN_HOLDS:
            return
        seconds = chance.uniform(1.2, 1.8) * BUSY_TIMEOUT
        self._held_until = time.monotonic() + seconds
        self._hold("BEGIN IMMEDIATE", seconds, "held the writer lock")

    def pin_snapshot(self, chance: random.Random) -> None:
        """A reader that keeps the WAL from being reset; in rollback-journal mode, one that no writer can pass."""
        length = chance.uniform(0.5, 1.5) * BUSY_TIMEOUT
        self._hold("BEGIN; SELECT count(*) FROM torture_order", length, "pinned a snapshot")

    def _hold(self, text: str, seconds: float, what: str) -> None:
        raw = self._connect()
        try:
            for statement in text.split(";"):
                raw.execute(statement).fetchall()
        except sqlite3.OperationalError:
            raw.close()
            self._note(f"{what}: refused")
            return
        self._at(seconds, raw.close)
        self._note(what)

    def checkpoint(self, chance: random.Random) -> None:
        mode = chance.choice(("TRUNCATE", "TRUNCATE", "RESTART", "FULL"))
        self._execute(f"PRAGMA wal_checkpoint({mode})", "checkpointed")

    def vacuum(self, chance: random.Random) -> None:
        self._execute("VACUUM", "vacuumed")

    def _execute(self, text: str, what: str) -> None:
        with closing(self._connect()) as raw:
            try:
                raw.execute(text).fetchall()
            except sqlite3.OperationalError:
                what += ": refused"
        self._note(what, text)

    def prune(self, chance: random.Random) -> None:
        if "prune" not in self.children.by_role:
            self.children.start("prune")
            self._note("pruned")

    def _connect(self) -> sqlite3.Connection:
        # Half a busy timeout: it is to torment, and not to wait.
        return sqlite3.connect(self.database, isolation_level=None, timeout=BUSY_TIMEOUT / 2)
