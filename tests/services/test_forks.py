"""Who forks waits until the library's own threads are at nothing that the child would keep for ever."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from django_alkstore.dialects import forks


@contextmanager
def held_elsewhere(lock: threading.RLock) -> Iterator[threading.Event]:  # type: ignore[valid-type]
    """By another thread, until the event is set or the block is left."""
    taken, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            let_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(60)
    try:
        yield let_go
    finally:
        let_go.set()
        thread.join()


def is_free(lock: threading.RLock) -> bool:  # type: ignore[valid-type]
    """For another thread than this one?"""
    found: list[bool] = []

    def try_it() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return found[0]


def test_a_fork_waits_for_a_guard_that_another_thread_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "LONGEST_WAIT", 60.0)
    guard = forks.guard()
    with held_elsewhere(guard) as let_go:
        threading.Timer(0.05, let_go.set).start()
        forks._hold()
    assert not is_free(guard)
    forks._release()
    assert is_free(guard)


def test_where_one_guard_is_not_to_be_had_a_fork_takes_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "LONGEST_WAIT", 0.0)
    kept, free = forks.guard(), forks.guard()
    with held_elsewhere(kept):
        forks._hold()
        assert not is_free(free)
        forks._release()
        assert is_free(free)


def test_who_has_a_guard_may_fork() -> None:
    guard = forks.guard()
    with guard:
        forks._hold()
        forks._release()
        assert not is_free(guard)
    assert is_free(guard)
