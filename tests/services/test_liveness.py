"""The liveness file: who makes it, what is known by it, and when leases decide alone."""

import errno
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from django.db import connections
from django.test import override_settings

from django_alkstore.dialects import liveness as module
from django_alkstore.dialects.liveness import Liveness, LivenessView
from django_alkstore.names import unique_owner
from django_alkstore.services import enqueue
from tests.ledger.tools import database

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(sys.platform != "linux", reason="crash detection works on Linux only"),
]

NOBODY = 65534


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the settings say that the database is: a file of its own folder, which is empty so far."""
    path = tmp_path / "data" / "shop.sqlite3"
    path.parent.mkdir()
    path.touch()
    monkeypatch.setitem(connections["default"].settings_dict, "NAME", path)
    return path


def beside(path: Path) -> Path:
    return path.with_name(f"{path.name}-alkstore")


@contextmanager
def living() -> Iterator[Liveness]:
    with Liveness("default") as liveness:
        assert liveness.reason is None
        assert liveness.file is not None
        yield liveness


# The file


def test_the_file_is_empty_and_has_the_owner_and_the_mode_of_the_database(place: Path) -> None:
    place.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(place, NOBODY, NOBODY)
    with living() as liveness:
        made, database = beside(place).stat(), place.stat()
    assert stat.S_IMODE(made.st_mode) == 0o640
    assert (made.st_uid, made.st_gid) == (database.st_uid, database.st_gid)
    assert made.st_size == 0
    assert liveness.holder


def test_the_file_is_beside_the_database_and_not_beside_a_link_to_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = place.parent.parent / "link.sqlite3"
    link.symlink_to(place)
    monkeypatch.setitem(connections["default"].settings_dict, "NAME", f"file:{link}?mode=rw")
    monkeypatch.setitem(connections["default"].settings_dict["OPTIONS"], "uri", True)
    with living():
        assert beside(place).exists()
    assert not beside(link).exists()


def test_workers_that_start_at_once_have_one_file_and_a_byte_each(place: Path) -> None:
    together, made = threading.Barrier(8), []

    def make() -> None:
        together.wait()
        made.append(Liveness("default"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with ExitStack() as stack:
        for each in made:
            stack.enter_context(each)
        assert {each.file for each in made} == {made[0].file}
        assert made[0].file is not None
        assert len({each.holder for each in made}) == 8
        assert all(one.knows(other.holder, other.file) for one in made for other in made)


def test_a_view_makes_no_file_and_finds_no_fault(place: Path) -> None:
    with LivenessView("default") as view:
        assert (view.file, view.reason) == (None, None)
        assert view.knows(unique_owner(), None) is None
    assert not beside(place).exists()


# What is known


def test_each_of_two_workers_in_a_process_lives_until_it_is_closed(place: Path) -> None:
    with living() as one, living() as other, LivenessView("default") as view:
        for observer in (one, other, view):
            assert observer.knows(one.holder, one.file)
            assert observer.knows(other.holder, other.file)
        file = one.file
        one.close()
        for observer in (other, view):
            assert observer.is_dead(one.holder, file)
            assert observer.knows(other.holder, other.file)
        assert one.knows(other.holder, other.file) is None
        assert (one.file, one.fileno(), one.take_events()) == (None, None, False)
        one.close()


def test_nobody_knows_of_another_file_or_another_kind_of_id(place: Path) -> None:
    with living() as liveness:
        dead = unique_owner()
        assert liveness.is_dead(dead, liveness.file)
        for holder, file in (
            (dead, None),
            (dead, "1:1"),
            ("worker", liveness.file),
            ("", liveness.file),
            ("hand made -1", liveness.file),
            ("Zoë", liveness.file),
        ):
            assert liveness.knows(holder, file) is None
            assert not liveness.is_dead(holder, file)


def test_a_taken_byte_is_left_to_its_holder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with living() as first:
        ids = [first.holder, first.holder, unique_owner()]
        monkeypatch.setattr(module, "unique_owner", lambda: ids.pop(0))
        with living() as second:
            assert second.holder != first.holder
            assert not ids
        assert second.knows(first.holder, first.file) is None
        assert first.knows(first.holder, first.file)


def test_code_that_opens_copies_and_closes_the_file_changes_nothing(place: Path) -> None:
    with living() as liveness, LivenessView("default") as view:
        shutil.copy(beside(place), place.parent / "copy")
        with beside(place).open("r+") as opened:
            opened.write("x")
        assert view.knows(liveness.holder, liveness.file)


def test_a_file_that_was_deleted_leaves_those_who_have_it_open_as_they_were(place: Path) -> None:
    with living() as before:
        beside(place).unlink()
        with living() as after:
            assert after.file != before.file
            assert after.knows(before.holder, before.file) is None
            assert before.knows(after.holder, after.file) is None
            assert before.knows(before.holder, before.file)


# What wakes others


def test_a_file_that_is_closed_wakes_others_and_a_question_or_a_commit_does_not(transactional_db: None) -> None:
    with living() as liveness:
        liveness.take_events()
        with LivenessView("default"):
            enqueue("mail", None)
        assert not liveness.take_events()
        Liveness("default").close()
        assert liveness.take_events()
        assert not liveness.take_events()
        Path(f"{database()}-alkstore").unlink()
        assert liveness.take_events()


@pytest.mark.parametrize("error", [OSError, RuntimeError, ImportError])
def test_without_inotify_a_worker_lives_too(
    place: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr("inotify_simple.INotify", refuse)
    with living() as liveness:
        assert (liveness.fileno(), liveness.take_events()) == (None, False)
        assert liveness.knows(liveness.holder, liveness.file)


def test_without_a_watch_a_worker_lives_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "the limit of watches is reached")

    monkeypatch.setattr("inotify_simple.INotify.add_watch", refuse)
    with living() as liveness:
        assert liveness.fileno() is None
        assert liveness.knows(liveness.holder, liveness.file)


# When leases decide alone


def unavailable(place: Path, why: str) -> None:
    """Neither a worker nor a command can use the file, and each says why."""
    with Liveness("default") as liveness:
        assert liveness.file is None
        assert liveness.reason is not None
        assert why in liveness.reason
        assert liveness.fileno() is None
        assert not liveness.take_events()
        assert not liveness.is_dead(unique_owner(), "1:1")
        assert not liveness.is_dead(liveness.holder, None)


def test_it_can_be_switched_off(place: Path) -> None:
    with override_settings(ALKSTORE={"LIVENESS": False}):
        unavailable(place, 'ALKSTORE["LIVENESS"] is False')
        with LivenessView("default") as view:
            assert view.reason == 'ALKSTORE["LIVENESS"] is False'
    assert not beside(place).exists()


def test_a_database_in_memory_has_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections["default"].settings_dict, "NAME", ":memory:")
    unavailable(Path(":memory:"), "in memory")


def no_permission(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    place.parent.chmod(0o555)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "open", open_as_nobody)
    return "Permission denied"


_open = os.open


def open_as_nobody(path: object, flags: int, mode: int = 0o777) -> int:
    """As `os.open`; the liveness file is opened by a user with no rights."""
    if not str(path).endswith("-alkstore"):
        return _open(path, flags, mode)  # type: ignore[arg-type]
    os.seteuid(NOBODY)
    try:
        return _open(path, flags, mode)  # type: ignore[arg-type]
    finally:
        os.seteuid(0)


def no_local_file_system(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    table = place.parent / "mounts"
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    before_and_after = [line.split(" - ", 1) for line in lines]
    table.write_text("".join(f"{before} - nfs4 {after.split(' ', 1)[1]}\n" for before, after in before_and_after))
    monkeypatch.setattr(module, "MOUNTS", table)
    return f"the file system of {place.parent} (nfs4) is not known to be local"


def no_mount_table(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(module, "MOUNTS", place.parent / "nothing")
    return "(unknown) is not known to be local"


def no_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    beside(place).mkdir()
    return "Is a directory"


def a_link(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    beside(place).symlink_to(place)
    return "symbolic link"


def no_database(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    place.unlink()
    return "No such file"


def no_such_locks(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delattr("fcntl.F_OFD_SETLK")
    return "Linux only"


def locks_that_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("fcntl.F_OFD_SETLK", 9_999)
    return "Invalid argument"


def locks_that_are_not_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(module, "_take", lambda *_: True)
    return "keeps no locks"


@pytest.mark.parametrize(
    "lack",
    [
        no_permission,
        no_local_file_system,
        no_mount_table,
        no_file,
        a_link,
        no_database,
        no_such_locks,
        locks_that_are_refused,
        locks_that_are_not_kept,
    ],
)
def test_where_it_cannot_be_set_up_leases_decide_alone_and_it_says_why(
    place: Path, monkeypatch: pytest.MonkeyPatch, lack: Callable[[Path, pytest.MonkeyPatch], str]
) -> None:
    with monkeypatch.context() as patch:
        why = lack(place, patch)
        before = set(os.listdir("/proc/self/fd"))
        unavailable(place, why)
        assert set(os.listdir("/proc/self/fd")) == before, "nothing stays open"
        if lack in (no_permission, no_local_file_system, no_mount_table, no_database, no_such_locks):
            assert not beside(place).exists(), "nothing is created"
    place.parent.chmod(0o755)
