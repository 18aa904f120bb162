"""Crash detection for SQLite on Linux: a lock that the kernel frees when the process that holds it ends.

Each worker and each scheduler locks one byte of an empty file beside the database. The offset of the byte is computed
from its random id. A claim names that id and the file, so any process that has the same file open can ask the kernel
whether the process that made the claim still lives.

The lock is an open-file-description lock (`F_OFD_SETLK`). The kernel frees it when the last descriptor of that one
`open()` is closed, in whatever way the process ends. A POSIX record lock would be lost as soon as any code in the
process, a handler for example, opened and closed the file.
"""

import os
import struct
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

from django.db import connections

from django_alkstore import clock, conf
from django_alkstore.dialects.forks import guard
from django_alkstore.dialects.sqlite import database_path
from django_alkstore.names import SHORT_ID_LENGTH, unique_owner

if sys.platform == "linux":
    import fcntl

SUFFIX = "-alkstore"
"""The file is named as the resolved path of the database, with this behind it."""
LOCAL_FILE_SYSTEMS = frozenset({"ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"})
"""Types of file systems on which each process sees the locks of all others. On a network file system, those of other
clients may not be seen."""
MOUNTS = Path("/proc/self/mountinfo")

_FLOCK = "hhqqi4x"
"""C's `struct flock`: l_type, l_whence, l_start, l_len, l_pid."""
_FLAGS = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)
_CREATOR_PAUSE = 0.05
"""Seconds. A file is created with mode 600 and gets the owner and the mode of the database a moment later."""


class Unavailable(Exception):
    """Crash detection cannot be set up. The text says why."""


class LivenessView:
    """Tells which workers and schedulers live, as far as this process can know. Never creates or changes anything."""

    def __init__(self, using: str) -> None:
        self.file: str | None = None
        """`device:inode` of the file, or `None` if it is absent or cannot be used."""
        self.reason: str | None = None
        """Why this object cannot tell which processes live; `None` if it can, or if nobody uses crash detection yet."""
        self.is_blind = False
        """True if only this process cannot open the file: the workers may well use it."""
        self._guard = guard()
        self._opened = ExitStack()
        self._probe: int | None = None
        # Under the guard: a child that another thread forks here would keep descriptors that are not in `_views` yet.
        with self._guard:
            try:
                self._set_up(using)
            except FileNotFoundError:
                self._close()
            except Unavailable as error:
                self._close()
                self.reason = str(error)
            except OSError as error:
                self._close()
                self.is_blind = True
                self.reason = f"the file {error.filename} cannot be opened: {error.strerror or error}"
            _views.add(self)

    def _set_up(self, using: str) -> None:
        self._open_probe(_path(using))

    def _open_probe(self, path: Path) -> None:
        """Open the file for questions. Read-only, so that closing it is no event for other processes."""
        self._probe = self._keep(os.open(path, os.O_RDONLY | os.O_NOFOLLOW))
        self.file = _identity(self._probe)

    def _keep(self, descriptor: int) -> int:
        self._opened.callback(os.close, descriptor)
        return descriptor

    def knows(self, holder: str, file: str | None) -> bool | None:
        """True if the holder's process lives, False if it is dead, `None` if this process cannot know.

        `holder` and `file`: as they were stamped on a claim, on a leadership or on a sign of life.
        """
        offset = _offset(holder)
        with self._guard:
            if self._probe is None or file is None or file != self.file or offset is None:
                return None
            return _is_locked(self._probe, offset)

    def is_dead(self, holder: str, file: str | None) -> bool:
        """True if the holder's process is known to be dead."""
        return self.knows(holder, file) is False

    def close(self) -> None:
        """Close the file. Another call changes nothing."""
        with self._guard:
            self._close()

    def abandon(self) -> None:
        """Close the copy of a forked child, which has no other thread. A thread of its parent may have the guard."""
        self._close()

    def _close(self) -> None:
        self._opened.close()
        self._probe = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Liveness(LivenessView):
    """One worker's or scheduler's sign that its process lives: a lock that the kernel frees when the process ends.

    If the environment lacks something, nothing is raised: `file` is `None`, and `reason` says why. Close it after the
    last write that concerns its claims. A forked child closes its copy by itself, and can tell nothing from then on.
    """

    def __init__(self, using: str) -> None:
        self.holder = unique_owner()
        """The unique id of this worker or scheduler."""
        self._events: Any = None
        super().__init__(using)

    def _set_up(self, using: str) -> None:
        path = _path(using)
        try:
            held = self._keep(_open_or_create(path, database_path(connections[using])))
            self._open_probe(path)
            self._take_byte(held)
        except OSError as error:
            raise Unavailable(f"the file {path} cannot be used: {error.strerror or error}") from error
        self._watch(path)

    def _take_byte(self, held: int) -> None:
        """Choose an id that no other process has, and lock its byte."""
        if _identity(held) != self.file:
            raise Unavailable("the file was replaced while it was being opened")
        while not _take(held, _own_offset(self.holder)):
            self.holder = unique_owner()
        if not self.knows(self.holder, self.file):
            raise Unavailable("its file system keeps no locks")

    def _watch(self, path: Path) -> None:
        """Let the kernel tell when a process closes the file. Without that, `fileno` is `None`."""
        try:
            from inotify_simple import INotify, flags  # noqa: PLC0415  it can be imported on Linux only

            events = INotify(nonblocking=True)
            self._opened.callback(events.close)
            # The file, and not its folder: in the folder, each commit is an event. ATTRIB tells of an unlink.
            events.add_watch(path, flags.CLOSE_WRITE | flags.ATTRIB | flags.DELETE_SELF | flags.MOVE_SELF)
        except Exception:  # noqa: BLE001  no ctypes, no inotify, or a limit is reached: look once a second instead
            return
        self._events = events

    def fileno(self) -> int | None:
        """A descriptor that can be read if a process may have ended, for a selector; `None` without inotify."""
        return None if self._events is None else int(self._events.fileno())

    def take_events(self) -> bool:
        """Read what the kernel has told; True if there was anything."""
        with self._guard:
            return self._events is not None and bool(self._events.read(timeout=0))

    def _close(self) -> None:
        super()._close()
        self.file = self._events = None


_views: "WeakSet[LivenessView]" = WeakSet()


def _close_in_child() -> None:
    """Let no forked child keep its parent's lock: the copies share it."""
    for view in list(_views):
        view.abandon()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_in_child)


def _path(using: str) -> Path:
    """The file's path. `Unavailable` if crash detection is switched off or does not work here."""
    if not conf.settings().liveness:
        raise Unavailable('ALKSTORE["LIVENESS"] is False')
    if sys.platform != "linux" or not hasattr(fcntl, "F_OFD_SETLK"):
        raise Unavailable("crash detection works on Linux only")
    database = database_path(connections[using])
    if database is None:
        raise Unavailable("the database is in memory")
    resolved = Path(os.path.realpath(database))
    kind = _file_system(resolved.parent)
    if kind not in LOCAL_FILE_SYSTEMS:
        raise Unavailable(f"the file system of {resolved.parent} ({kind or 'unknown'}) is not known to be local")
    return resolved.with_name(resolved.name + SUFFIX)


def _file_system(folder: Path) -> str | None:
    """The type of the file system that holds `folder`, by the mount table; `None` if it cannot be found."""
    try:
        descriptor = os.open(folder, os.O_PATH)
        try:
            facts = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        finally:
            os.close(descriptor)
        mount = next(line.split()[1] for line in facts.splitlines() if line.startswith("mnt_id:"))
        lines = [line.split(" ") for line in MOUNTS.read_text().splitlines()]
        return next(fields[fields.index("-") + 1] for fields in lines if fields[0] == mount)
    except (OSError, StopIteration):
        return None


def _open_or_create(path: Path, database: Path | None) -> int:
    """Open the file for writing; create it with the owner and the mode of the database if it is absent."""
    assert database is not None
    try:
        return _open_for_writing(path)
    except FileNotFoundError:
        like = os.stat(database)  # fails if there is no database: then no file is created
    try:
        created = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another process has created it in between
        return _open_for_writing(path)
    try:
        _make_like(created, like)
    except BaseException:
        os.close(created)
        raise
    return created


def _open_for_writing(path: Path) -> int:
    try:
        return os.open(path, _FLAGS)
    except PermissionError:
        clock.sleep(_CREATOR_PAUSE)
        return os.open(path, _FLAGS)


def _make_like(descriptor: int, database: os.stat_result) -> None:
    """Give the file the owner, the group and the mode of the database, as far as this user may."""
    for owner in (database.st_uid, -1):
        try:
            os.fchown(descriptor, owner, database.st_gid)
        except PermissionError:
            continue
        break
    os.fchmod(descriptor, database.st_mode & 0o777)


def _identity(descriptor: int) -> str:
    found = os.fstat(descriptor)
    return f"{found.st_dev}:{found.st_ino}"


def _own_offset(holder: str) -> int:
    return int(holder[-SHORT_ID_LENGTH:], 16)


def _offset(holder: str) -> int | None:
    """The byte of a holder; `None` for an id that no `Liveness` made."""
    try:
        return _own_offset(holder)
    except ValueError:
        return None


def _take(descriptor: int, offset: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0))
    except (BlockingIOError, PermissionError):  # POSIX allows both EAGAIN and EACCES
        return False
    return True


def _is_locked(descriptor: int, offset: int) -> bool:
    """True if a process holds the byte through another descriptor than this. Takes nothing."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
    answer: int = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0]
    return answer != fcntl.F_UNLCK
