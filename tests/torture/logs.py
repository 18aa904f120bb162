"""The log files of a run: everything in them is a kind that is expected, with its reason here, or a fault."""

import re
from collections import Counter as Tally
from collections.abc import Iterator
from pathlib import Path

RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")

LOCKED = "database is locked"

ERRORS = (
    # A handler's failure was its last. Whether it had a reason is asked of the history.
    (re.compile(r"dead: job \d+ in "), "dead jobs"),
    # `limited` ignores its time limit, with several threads at once now and then.
    (re.compile(r"every thread is held by a handler past its time limit"), "workers without a free thread"),
)
"""Lines at level ERROR."""

WARNINGS = (
    (re.compile(r"failed job \d+ in "), "failed attempts"),
    (re.compile(r"lost the lease on job \d+ in "), "leases lost"),
    (re.compile(r"the lease on job \d+ in .* ran out"), "leases run out"),
    (re.compile(r"worker \S+ died while it held job \d+ in "), "jobs left by the dead"),
    # A handler's own writing met a lock held for longer than the busy timeout.
    (re.compile(rf"locked out job \d+ in .*: OperationalError: {LOCKED}\."), "handlers locked out"),
    (re.compile(r"crash detection is off, .*: ALKSTORE\[.LIVENESS.\] is False$"), "starts without crash detection"),
    # `own` raises after its commit.
    (re.compile(r"job \d+ in .* was settled by its handler, and then failed"), "raised after settling"),
    # Terminated twice, while it was freeing the leadership or before it could.
    (re.compile(r"scheduler cut off at a second signal"), "schedulers cut off"),
    # The writer lock was held for longer than the busy timeout. Any other trouble is a fault.
    (re.compile(rf"database trouble while .*: {LOCKED}$"), "busy timeouts"),
)

TRACEBACKS = re.compile(
    # What the handlers of the run are meant to raise.
    r"tests\.torture\.alkstore\.Injected: injected|SystemExit: injected"
    r"|django_alkstore\.exceptions\.(Retry|Discard): injected"
    # A handler's own ack_tx, or an atomic handler's, after a freeze past the lease.
    r"|django_alkstore\.exceptions\.LeaseLost: "
    # A handler's own writing met a lock held for longer than the busy timeout.
    rf"|(django\.db\.utils|sqlite3)\.OperationalError: {LOCKED}"
)
"""The lines of a traceback that name an exception."""
CHAIN = re.compile(
    r"$|\s|Traceback \(most recent call last\):|During handling of the above exception|The above exception was the"
)
"""Its other lines."""
WITH_TRACEBACK = {"dead jobs", "failed attempts", "leases lost", "raised after settling"}

PLAIN = (
    # `alkstore_prune` prints what it has done.
    re.compile(r"(completed|dead|cancelled) +removed +\d+ +left +\d+ "),
    # Where it is shut out for longer than the busy timeout, it says so and ends.
    re.compile(rf"CommandError: the database 'default' was busy .*\({LOCKED}\); try again"),
)
"""Lines outside any record."""


def read(folder: Path) -> tuple[Tally[str], list[str]]:
    """How many of each kind there were, and every line that is of none."""
    counted: Tally[str] = Tally()
    unexpected: list[str] = []
    for path in sorted(folder.glob("*.log")):
        for record in _records(path):
            kind = _kind(record)
            if kind is None:
                unexpected.append(f"{path.name}: " + "\n    ".join(record[-40:]))
            elif kind:
                counted[kind] += 1
    return counted, unexpected


def _records(path: Path) -> Iterator[list[str]]:
    """Each record with the lines behind it; a line that is behind none, by itself."""
    lines = path.read_text(errors="replace").split("\n")
    lines.pop()  # empty, or cut short where its process was killed
    current: list[str] = []
    for line in lines:
        if RECORD.match(line) or not current:
            if current:
                yield current
            current = [line]
            continue
        current.append(line)
    if current:
        yield current


def _kind(record: list[str]) -> str | None:
    """What kind of record it is, empty for one that needs no counting, or `None` where it is unexpected."""
    first = RECORD.match(record[0])
    if first is None:
        return "" if all(any(p.match(line) for p in PLAIN) for line in record) else None
    level, text = first.groups()
    if level in ("DEBUG", "INFO"):
        behind = [line for line in record[1:] if not any(p.match(line) for p in PLAIN)]
        return None if behind else ""
    kinds = WARNINGS if level == "WARNING" else ERRORS
    kind = next((kind for pattern, kind in kinds if pattern.match(text)), None)
    return kind if len(record) == 1 or (kind in WITH_TRACEBACK and _expected_traceback(record[1:])) else None


def _expected_traceback(lines: list[str]) -> bool:
    """Does every exception in it, of a chain too, belong to the run?"""
    return all(CHAIN.match(line) or TRACEBACKS.match(line) for line in lines)
