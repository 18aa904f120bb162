"""What processes say that they have done, in a file each: kept also where the process is killed right after.

One event is one line and one `write`. Of a process killed inside it the last line may be half there.
"""

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

VARIABLE = "TORTURE_JOURNAL"


@cache
def _descriptor() -> int:
    return os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def note(event: str, **data: Any) -> None:
    os.write(_descriptor(), json.dumps({"event": event, **data}).encode() + b"\n")


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """Every event of every process; each says in `file` where it stands."""
    for path in sorted(folder.glob("*.journal")):
        lines = path.read_text().split("\n")
        if lines[-1]:
            lines.pop()  # its process was killed inside the write
        for line in lines:
            if line:
                yield {"file": path.name, **json.loads(line)}
