"""Which of a SQLite database's files this process may not write, and where the database should not be.

The answers are words for a log line, an error or a system check.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

_COMPANIONS = ("-wal", "-shm", "-journal")
"""SQLite creates these beside the database as it needs them."""

UNFIT_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "cifs", "nfs", "nfs4", "smb3", "smbfs", "vboxsf"}
    | {"fuse.gcsfuse", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"}
)
"""Types of file systems on which locks or shared memory are not the same for all processes that have the file open."""

_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")
"""A space, a tab, a line feed or a backslash of a mount point, in the mount table."""


def write_obstacle(database: Path) -> str | None:
    """Say which files this process cannot write, each by path with its owner; None if it may write all of them."""
    try:
        unwritable = [_describe(file) for file in _files(database) if not _is_writable(file)]
    except OSError:
        return None  # it cannot be found out; the database's own error has to do
    if not unwritable:
        return None
    return f"{_process_user()} cannot write {', '.join(unwritable)}"


def unfit_place(database: Path) -> str | None:
    """Say why several processes cannot share a database at this place; None if nothing is known against it."""
    try:
        mounts = os.fsdecode(_MOUNTS.read_bytes())
    except OSError:
        return None  # not on Linux, or /proc is not mounted
    return _unfit_by(mounts, database.resolve())


def _unfit_by(mounts: str, database: Path) -> str | None:
    """The same by the text of a mount table, of which the last line for the deepest mount point counts."""
    point, kind = Path("/"), ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        mounted = Path(_ESCAPE.sub(lambda found: chr(int(found[1], 8)), fields[4]))
        if database.is_relative_to(mounted) and len(mounted.parts) >= len(point.parts):
            point, kind = mounted, fields[fields.index("-") + 1]
    if kind in UNFIT_FILE_SYSTEMS:
        return f"is on a file system of the type {kind}"
    if point == database:
        return "is itself a mount point"
    return None


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
