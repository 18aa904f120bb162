"""A torture run: `python -m tests.torture --minutes 5 --seed 7`, or `make torture`.

Producers, workers, schedulers, pruning and an app with rows of its own, all real processes on one SQLite file, are
killed, frozen, shut out and started again, in an order that the seed decides. Then they may finish, and the account
is taken: status 0 where nothing is lost and nothing doubled, else 1, with every discrepancy in a line and all files
kept.

ALKSTORE_TEST_JOURNAL and ALKSTORE_TEST_TRANSACTION_MODE choose the modes, as for the suite.
"""

import argparse
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import django
from django.core.management import call_command

from tests.torture.children import Children, die_with_parent

if TYPE_CHECKING:
    from tests.torture.account import Account

PRODUCE = "tests.torture.produce"
ROLES = {
    "orders-1": ("-m", PRODUCE, "orders", "{name}"),
    "orders-2": ("-m", PRODUCE, "orders", "{name}"),
    "notes": ("-m", PRODUCE, "notes", "{name}"),
    "queues-1": ("-m", "django", "run_queue", "--grace", "3"),
    "queues-2": ("-m", "django", "run_queue", "--grace", "3"),
    "outboxes": ("-m", "django", "run_outbox", "--grace", "3"),
    "everything": ("-m", "django", "run_alkstore", "--grace", "3", "--concurrency", "2"),
    "scheduler-1": ("-m", "django", "run_schedules"),
    "scheduler-2": ("-m", "django", "run_schedules"),
    "prune": ("-m", "django", "alkstore_prune"),
}
PRODUCERS = ("orders-1", "orders-2", "notes")
SCHEDULERS = ("everything", "scheduler-1", "scheduler-2")
WORKERS = ("queues-1", "queues-2", "outboxes")

PATIENCE = 120.0
"""Seconds that each step of coming to rest may take on a busy machine before it counts as stuck."""


class Stopped(BaseException):
    """A signal asked the run to end. Like KeyboardInterrupt, not for `except Exception` to catch."""


class Run:
    """One run, in one folder."""

    def __init__(self, seed: str, seconds: float, folder: Path) -> None:
        self.seed = seed
        self.seconds = seconds
        self.folder = folder
        self.database = str(folder / "torture.sqlite3")
        self.journal_mode = os.environ.get("ALKSTORE_TEST_JOURNAL", "wal")
        self.transaction_mode = os.environ.get("ALKSTORE_TEST_TRANSACTION_MODE", "IMMEDIATE")
        os.environ |= {
            "DJANGO_SETTINGS_MODULE": "tests.torture.settings",
            "ALKSTORE_TEST_DATABASE": self.database,
            "TORTURE_SEED": seed,
        }
        self.children = Children(folder, {"PYTHONUNBUFFERED": "1"}, ROLES)
        self.done: dict[str, int] = {}

    def prepare(self) -> None:
        """A new database, its triggers and its schedules."""
        django.setup()
        call_command("migrate", run_syncdb=True, verbosity=0)
        from django_alkstore.services import schedule
        from tests.torture import history
        from tests.torture.models import Counter
        from tests.torture.settings import SCHEDULES

        history.install()
        Counter.objects.create()
        for name, spec, queue in SCHEDULES:
            schedule(name, spec, queue)

    def torment(self) -> None:
        from tests.torture.tormentor import Tormentor

        for role in ROLES:
            if role != "prune":
                self.children.start(role)
        self._wait("every process is up", (), lambda: all(child.up for child in self.children.running()))
        tormentor = Tormentor(self.children, self.database, self.seed, self.folder)
        tormentor.run(self.seconds)
        self.done = dict(tormentor.done)

    def come_to_rest(self) -> None:
        """Nothing is tormented any more: producers end, boundaries are caught up with, and what is live is done."""
        from django_alkstore import clock
        from django_alkstore.models import Job
        from django_alkstore.services import soonest

        self._revive((*SCHEDULERS, *WORKERS))
        self.children.stop(PRODUCERS, PATIENCE)
        self._wait("the schedules catch up", SCHEDULERS, lambda: (soonest() or clock.now()) > clock.now())
        self.children.stop(SCHEDULERS, PATIENCE)
        self._wait("no job is live", WORKERS, lambda: not Job.objects.live().exists())
        self.children.stop((*WORKERS, "prune"), PATIENCE)

    def _wait(self, what: str, roles: tuple[str, ...], reached: Callable[[], bool]) -> None:
        from django.db import OperationalError

        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self._revive(roles)
            try:
                if reached():
                    return
            except OperationalError:
                pass  # in rollback-journal mode a writer shuts the reader out
            time.sleep(0.05)
        self.children.unexpected_ends.append(f"never came true in {PATIENCE:.0f} s: {what}")

    def _revive(self, roles: tuple[str, ...]) -> None:
        self.children.reap()
        for role in roles:
            if role not in self.children.by_role:
                self.children.start(role)

    def account(self) -> "Account":
        from tests.torture.account import Account

        account = Account(self.folder, self.children.unexpected_ends)
        account.take()
        return account


def say(text: str = "") -> None:
    print(text, flush=True)


def tell(run: Run, account: "Account") -> None:
    starts = run.children.starts
    rows = [("processes", f"{starts.total()} started, of {len(starts)} roles"), *_torments(run.done), *account.table]
    width = max(len(what) for what, _ in rows)
    for what, text in rows:
        say(f"  {what:<{width}}  {text}")


def _torments(done: dict[str, int]) -> list[tuple[str, str]]:
    listed = ", ".join(f"{what} {number}" for what, number in sorted(done.items()))
    return [("torments", f"{sum(done.values())}: {listed}")]


def stop_at_signal(number: int, frame: FrameType | None) -> None:
    raise Stopped(signal.Signals(number).name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.torture", description="Torture the library, and take the account.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", default="", help="Repeats the order of the torments. Default: a new one.")
    parser.add_argument("--folder", type=Path, help="Where the files go, and stay. Default: a new one, kept on faults.")
    options = parser.parse_args()
    seed = options.seed or str(secrets.randbelow(10**6))
    folder = options.folder or Path(tempfile.mkdtemp(prefix="alkstore-torture-"))
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(seed, options.minutes * 60, folder)
    say(f"torture: seed {seed}, {run.seconds:.0f} s, journal {run.journal_mode}, "
        f"transaction mode {run.transaction_mode or 'unset'}, files in {folder}")  # fmt: skip
    die_with_parent()
    signal.signal(signal.SIGTERM, stop_at_signal)
    try:
        run.prepare()
        run.torment()
        run.come_to_rest()
    except (Stopped, KeyboardInterrupt) as stopped:
        say(f"stopped: {stopped or 'SIGINT'}; files in {folder}")
        return 1
    finally:
        run.children.kill_all()
    account = run.account()
    tell(run, account)
    repeat = f"make torture MINUTES={options.minutes:g} SEED={seed}"
    if account.faults:
        say(f"\n{len(account.faults)} discrepancies; files kept in {folder}; to repeat: {repeat}\n")
        for fault in account.faults:
            say(f"  {fault}")
        return 1
    say(f"\nnothing lost, nothing doubled; to repeat: {repeat}")
    if options.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
