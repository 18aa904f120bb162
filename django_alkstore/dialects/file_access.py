"""Which of a SQLite database's files this process may not write, in words for a log line or an error."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

_COMPANIONS = ("-wal", "-shm", "-journal")
"""SQLite creates these beside the database as it needs them."""


def write_obstacle(database: Path) -> str | None:
    """Say which files this process cannot write, each by path with its owner; None if it may write all of them."""
    try:
        unwritable = [_describe(file) for file in _files(database) if not _is_writable(file)]
    except OSError:
        return None  # it cannot be found out; the database's own error has to do
    if not unwritable:
        return None
    return f"{_process_user()} cannot write {', '.join(unwritable)}"


def _files(path: Path) -> Iterator[Path]:
    """The folder and the files of a database, as far as they exist."""
    path = path.resolve()  # SQLite puts the companions beside the file that a symbolic link points to
    for file in (path.parent, path, *(path.with_name(path.name + suffix) for suffix in _COMPANIONS)):
        if file.exists():
            yield file


def _is_writable(file: Path) -> bool:
    needed = os.W_OK | os.X_OK if file.is_dir() else os.W_OK
    # By the effective user where the platform can tell, as SQLite itself is allowed or refused.
    return os.access(file, needed, effective_ids=os.access in os.supports_effective_ids)


def _describe(file: Path) -> str:
    found = file.stat()
    kind = "the folder " if stat.S_ISDIR(found.st_mode) else ""
    if hasattr(os, "statvfs") and os.statvfs(file).f_flag & os.ST_RDONLY:
        return f"{kind}{file} (on a read-only file system)"
    return f"{kind}{file} (owner {_user_name(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):04o})"


def _process_user() -> str:
    return f"user {_user_name(os.geteuid())}" if hasattr(os, "geteuid") else "this process"


def _user_name(uid: int) -> str:
    try:
        import pwd  # noqa: PLC0415  not on Windows

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)
