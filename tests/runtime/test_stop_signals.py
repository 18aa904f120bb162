"""Stop signals while a command starts, sent by this process to itself."""

import signal
from collections.abc import Iterator

import pytest

from django_alkstore.runtime.stop_signals import StoppedAtStart, StopSignals


@pytest.fixture
def stop_signals() -> Iterator[StopSignals]:
    one = StopSignals()
    with one.received():
        yield one


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_command_starts_is_raised_by_the_next_check(
    stop_signals: StopSignals, number: signal.Signals
) -> None:
    stop_signals.check()
    signal.raise_signal(number)
    with pytest.raises(StoppedAtStart, match=number.name):
        stop_signals.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_a_destructor_drops_is_raised_after_the_block(stop_signals: StopSignals) -> None:
    class Dropped:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    block = stop_signals.may_interrupt()
    block.__enter__()
    Dropped()
    with pytest.raises(StoppedAtStart, match="SIGTERM"):
        block.__exit__(None, None, None)


def test_a_signal_ends_code_that_may_be_interrupted(stop_signals: StopSignals) -> None:
    block = stop_signals.may_interrupt()
    block.__enter__()
    with pytest.raises(StoppedAtStart, match="SIGTERM"):
        signal.raise_signal(signal.SIGTERM)


def test_a_sleep_does_not_begin_after_a_signal(stop_signals: StopSignals) -> None:
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(StoppedAtStart):
        stop_signals.sleep(3_600)


def test_a_command_that_has_started_is_told_by_its_own_function(stop_signals: StopSignals) -> None:
    told: list[str] = []
    stop_signals.pass_to(told.append)
    signal.raise_signal(signal.SIGTERM)
    stop_signals.check()
    assert told == ["SIGTERM"]


def test_a_command_does_not_start_after_a_signal(stop_signals: StopSignals) -> None:
    signal.raise_signal(signal.SIGINT)
    told: list[str] = []
    with pytest.raises(StoppedAtStart, match="SIGINT"):
        stop_signals.pass_to(told.append)
    assert told == []
