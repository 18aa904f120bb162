"""The one place that reads the time, and that sleeps.

There are two kinds of time. `now`, `now_us` and what is counted from them (delays, leases, schedules) follow a frozen
time: a `ManualClock`, and tools such as freezegun and time-machine, which replace functions of the module `time`. Waits
for locks, sleeps and time limits take real seconds, which those tools do not replace here: a process that waits for
another one must end its wait although no clock of the test moves.

Moments are aware datetimes in UTC for people and microseconds since the epoch for the database; the
conversions between the two live here too, because both are exact and everything needs them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Protocol

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
SECOND = 1_000_000
"""Microseconds in a second: the unit of every stored moment."""

FIRST_MOMENT = datetime.min.replace(tzinfo=UTC)
LAST_MOMENT = datetime.max.replace(tzinfo=UTC)


def _choose_real_monotonic() -> Callable[[], float]:
    if hasattr(time, "clock_gettime"):
        return partial(time.clock_gettime, time.CLOCK_MONOTONIC)
    # In a partial: freezegun replaces each name of a module that refers to `time.monotonic`.
    return partial(time.monotonic)


real_monotonic = _choose_real_monotonic()
"""`time.monotonic`, which freezegun would replace: real seconds on a clock that never goes back."""

sleep = time.sleep
"""Real seconds. No tool that freezes time replaces it."""


class Clock(Protocol):
    """What the library asks of a clock."""

    def now(self) -> datetime:
        """The wall clock, as an aware datetime in UTC."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""


class SystemClock:
    """The machine's own clocks. A tool that freezes time replaces the wall clock, and not the other one."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return real_monotonic()


class ManualClock:
    """A clock that moves only when told to, for tests.

    `advance` moves both clocks; `step` moves the wall clock alone, back too, as an operator or NTP would.
    """

    def __init__(self, now: datetime) -> None:
        """`now`: an aware datetime, at which the clock begins."""
        if now.tzinfo is None:
            raise ValueError(f"a ManualClock needs an aware datetime, and {now!r} has no time zone")
        self._now = now.astimezone(UTC)
        self._monotonic = 0.0

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self._now += timedelta(seconds=seconds)
        self._monotonic += seconds

    def advance_to(self, moment: datetime) -> None:
        """Let the time until `moment` pass."""
        self._monotonic += (moment - self._now).total_seconds()
        self._now = moment.astimezone(UTC)

    def step(self, seconds: float) -> None:
        """Set the wall clock forward, or back if `seconds` is negative. No time passes."""
        self._now += timedelta(seconds=seconds)


_system = SystemClock()
_clock: Clock = _system


waiting_from = real_monotonic
"""Real monotonic time, even under a ManualClock: waiting for a database lock takes real seconds."""


def waited_since(start: float) -> float:
    """Seconds that have really passed since `waiting_from`."""
    return real_monotonic() - start


def installed() -> Clock:
    """The clock that the library reads now."""
    return _clock


def now() -> datetime:
    return _clock.now()


def monotonic() -> float:
    return _clock.monotonic()


def now_us() -> int:
    """The wall clock in microseconds since the epoch."""
    # The same clock, and no datetime made of it.
    return time.time_ns() // 1_000 if _clock is _system else to_us(_clock.now())


def to_us(moment: datetime) -> int:
    """An aware datetime as microseconds since the epoch, exactly (a float would round)."""
    return (moment - EPOCH) // MICROSECOND


def from_us(us: int) -> datetime:
    """Microseconds since the epoch as an aware datetime in UTC. `OverflowError` outside years 1 to 9999."""
    return EPOCH + timedelta(microseconds=us)


LAST_US = to_us(LAST_MOMENT)
FIRST_US = to_us(FIRST_MOMENT)


def readable(stored: object) -> datetime:
    """A stored moment as the nearest that a date can hold: what something else has written must not stop a list."""
    return from_us(min(max(stored, FIRST_US), LAST_US)) if isinstance(stored, int) else LAST_MOMENT


@contextmanager
def use(clock: Clock) -> Iterator[None]:
    """Let the whole process read `clock` inside the block."""
    global _clock  # noqa: PLW0603  one process has one time
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
