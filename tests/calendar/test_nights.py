"""Schedulers in real processes, killed and stopped, while the clock moves through a night in which it changes.

The processes read one clock, which the test moves in steps, sometimes back. At the end, what was fired is compared
with the boundaries of the slow model: each exactly once.
"""

import mmap
import signal
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from zoneinfo import ZoneInfo

import pytest

from django_alkstore import clock
from django_alkstore.clock import from_us, to_us
from django_alkstore.models import Job, Schedule
from django_alkstore.services import schedule
from tests.calendar.model import MINUTE, by_minutes
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

SCHEDULER = """
import sys
from django.core.management import call_command
from django_alkstore import clock
from tests.calendar.test_nights import SharedClock
with clock.use(SharedClock(sys.argv[1])):
    call_command("run_schedules")
"""
ZONES = ("Europe/Berlin", "UTC")
CRONS = ("30 2 * * *", "0,20,40 2 * * *", "*/15 * * * *", "5 */2 * * *", "45 1-3 * * *")
NIGHTS = {
    "spring": datetime(2026, 3, 28, 22, tzinfo=UTC),
    "autumn": datetime(2026, 10, 24, 21, tzinfo=UTC),
}
HOURS = 7


class SharedClock:
    """A clock for all processes that map its file. Its wall clock stands until the test moves it."""

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)

    def now(self) -> datetime:
        return from_us(struct.unpack("q", self._memory)[0])

    def set(self, moment: datetime) -> None:
        self._memory[:] = struct.pack("q", to_us(moment))

    def monotonic(self) -> float:
        return clock.real_monotonic()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[tuple[SharedClock, str]]:
    path = tmp_path / "clock"
    path.write_bytes(bytes(8))
    made = SharedClock(str(path))
    with clock.use(made):
        yield made, str(path)


def declare(catch_up: str, **options: object) -> None:
    for zone in ZONES:
        for cron in CRONS:
            schedule(
                f"{catch_up}:{zone}:{CRONS.index(cron)}", cron, "mail", timezone=zone, catch_up=catch_up, **options
            )  # type: ignore[arg-type]


def wake_the_leader() -> None:
    """A commit: the leader looks at the schedules. It would notice the moved clock by itself within 2 s."""
    Schedule.objects.filter(name="all:UTC:0").update(last_error="")


def is_caught_up() -> bool:
    return not Schedule.objects.filter(next_fire_at__lte=clock.now()).exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("night", NIGHTS)
def test_each_boundary_of_the_night_fires_once(
    start: Callable[..., Process], shared: tuple[SharedClock, str], night: str
) -> None:
    now, path = shared
    random = Random(night)
    begin, end = NIGHTS[night], NIGHTS[night] + timedelta(hours=HOURS)
    now.set(begin)
    declare("all")
    declare("latest")
    declare("none", grace=600)
    schedulers = [start("-c", SCHEDULER, path) for _ in range(2)]
    schedulers[0].wait_for("leads")
    latest = begin
    while latest < end:
        latest = min(end, latest + timedelta(seconds=random.randrange(60, 2_400)))
        now.set(latest)
        if random.random() < 0.3:
            # An operator sets the clock back. What has fired does not fire again.
            wake_the_leader()
            now.set(latest - timedelta(seconds=random.randrange(10, 5_400)))
        victim = random.randrange(2)
        if random.random() < 0.4:
            schedulers[victim].signal(random.choice((signal.SIGKILL, signal.SIGTERM)))
            schedulers[victim].wait()
            schedulers[victim] = start("-c", SCHEDULER, path)
        now.set(latest)
        wake_the_leader()
        wait_until(is_caught_up, "the schedules catch up")
    for row in Schedule.objects.all():
        catch_up, zone, number = row.name.split(":")
        expected = [
            moment
            for moment in by_minutes(CRONS[int(number)], ZoneInfo(zone), begin - timedelta(hours=3), end + MINUTE)
            if moment > begin
        ]
        fired = Counter(Job.objects.filter(schedule=row.name).values_list("fire_at", flat=True))
        assert set(fired.values()) <= {1}, row.name
        assert set(fired) <= set(expected), row.name
        missed = len(expected) - len(fired)
        if catch_up == "all":
            assert missed == 0, row.name
        elif catch_up == "latest":
            assert (row.coalesced, row.too_late) == (missed, 0), row.name
            assert row.last_fire_at == expected[-1], row.name
        else:
            assert (row.coalesced, row.too_late) == (0, missed), row.name
        assert row.fired == len(fired), row.name
