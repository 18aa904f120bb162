"""Where a worker's events are sent: never while a lock is held, and the keeper's in a thread of their own."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections

from django_alkstore import signals
from django_alkstore.runtime.events_thread import EventsThread
from django_alkstore.runtime.writing import Writer

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def seen() -> Iterator[list[Any]]:
    """What a receiver of `standby_ended` noted at each call, by `note`."""
    notes: list[Any] = []

    def receive(**_: object) -> None:
        notes.append(threading.current_thread().name)

    signals.standby_ended.connect(receive)
    yield notes
    signals.standby_ended.disconnect(receive)


def test_inside_the_turn_every_event_is_passed_on_and_none_is_sent(seen: list[Any]) -> None:
    passed_on: list[Callable[[], object]] = []
    writer = Writer(connections["default"], "w", None, passed_on.append)
    with writer.turn():
        signals.emit(signals.standby_ended)
        signals.emit(signals.standby_ended)
    assert (len(passed_on), seen) == (2, [])
    for send in passed_on:
        send()
    assert len(seen) == 2


def test_the_keeper_s_events_are_sent_by_the_events_thread_in_their_order(seen: list[Any]) -> None:
    thread = EventsThread()
    thread.start()
    writer = Writer(connections["default"], "w", None, thread.post)
    with thread.sends_for_this_thread():
        signals.emit(signals.standby_ended)
        with writer.turn():
            signals.emit(signals.standby_ended)
    thread.flush(60)
    thread.finish(60)
    assert seen == [thread.name] * 2
    assert not thread.is_alive()


def test_a_receiver_that_blocks_holds_up_the_flush_no_longer_than_it_may() -> None:
    thread, go_on = EventsThread(), threading.Event()

    def block(**_: object) -> None:
        go_on.wait(60)

    signals.standby_ended.connect(block)
    try:
        thread.start()
        with thread.sends_for_this_thread():
            signals.emit(signals.standby_ended)
        thread.flush(0.05)
        assert thread.is_alive()
    finally:
        signals.standby_ended.disconnect(block)
        go_on.set()
        thread.finish(60)
