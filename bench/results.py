"""What was measured, and whether it meets its goal: figures, tables, JSON."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Goal:
    """A bound on the median of what is judged."""

    sign: str
    """`>=` or `<=`."""
    bound: float
    unit: str = ""

    def is_met_by(self, value: float) -> bool:
        return value >= self.bound if self.sign == ">=" else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.sign == '>=' else '≤'} {self.bound:g}{self.unit}"


def at_least(bound: float, unit: str = " ×") -> Goal:
    return Goal(">=", bound, unit)


def at_most(bound: float, unit: str = " ×") -> Goal:
    return Goal("<=", bound, unit)


@dataclass
class Line:
    """One line of the table. Each list has one figure for each run, in the runs' order."""

    name: str
    what: str
    unit: str
    """Of the floor's and of our figures."""
    ours: list[float]
    floor: list[float] = field(default_factory=list)
    judged: list[float] = field(default_factory=list)
    """What the goal is about: the ratio of each pair, where there is a floor and nothing else is said."""
    judged_unit: str = " ×"
    goal: Goal | None = None
    note: str = ""
    peers: dict[str, list[float]] = field(default_factory=dict)
    peer_line: str = ""
    """Its column in the table of the peers; empty where they are not compared."""

    def __post_init__(self) -> None:
        if not self.judged and self.floor:
            self.judged = [ours / floor for ours, floor in zip(self.ours, self.floor, strict=True)]

    @property
    def is_met(self) -> bool | None:
        """`None`: there is no goal, or nothing to judge by."""
        return self.goal.is_met_by(statistics.median(self.judged)) if self.goal and self.judged else None

    def __str__(self) -> str:
        shown = [self.name, f"ours {median_of(self.ours, self.unit)}"]
        if self.floor:
            shown.append(f"floor {median_of(self.floor, self.unit)}")
        if self.judged:
            shown.append(f"{median_of(self.judged, self.judged_unit)} ({spread_of(self.judged)}), goal {self.goal}")
        shown += [f"{name} {median_of(values, self.unit)}" for name, values in self.peers.items()]
        return "; ".join([*shown, self.note] if self.note else shown)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "goal": str(self.goal) if self.goal else None, "is_met": self.is_met}


def figure(value: float) -> str:
    """A number as people read it: three digits that count, thousands apart."""
    if abs(value) >= 1_000:
        digits = 10 ** (len(str(int(abs(value)))) - 3)
        return f"{round(value / digits) * digits:,}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def median_of(values: Sequence[float], unit: str = "") -> str:
    return figure(statistics.median(values)) + unit if values else "–"


def spread_of(values: Sequence[float]) -> str:
    return f"{figure(min(values))} to {figure(max(values))}" if len(values) > 1 else "–"


def goals_table(lines: Iterable[Line]) -> str:
    """In Markdown: medians over the runs, and the least and greatest of what is judged."""
    rows = [["case", "what", "floor", "ours", "judged", "least to greatest", "goal", "met", "runs"]]
    for line in lines:
        met = {True: "yes", False: "**no**", None: "–"}[line.is_met]
        floor = median_of(line.floor, line.unit)
        judged = median_of(line.judged, line.judged_unit)
        rows.append([
            f"`{line.name}`",
            line.what,
            floor,
            median_of(line.ours, line.unit),
            judged,
            spread_of(line.judged),
            str(line.goal) if line.goal else "reported",
            met,
            str(len(line.ours)),
        ])  # fmt: skip
    return _markdown(rows, right={2, 3, 4, 5, 6})


def peers_table(lines: Iterable[Line], names: Sequence[str]) -> str:
    """In Markdown: one row for each contender, one column for each line that they share."""
    shared = [line for line in lines if line.peer_line]
    rows = [["", *(f"{line.peer_line}{f' ({line.unit.strip()})' if line.unit else ''}" for line in shared)]]
    rows.append(["floor", *(median_of(line.floor) for line in shared)])
    rows.append(["**django-alkstore**", *(median_of(line.ours) for line in shared)])
    rows += [[name, *(median_of(line.peers.get(name, [])) for line in shared)] for name in names]
    return _markdown(rows, right=set(range(1, len(shared) + 1)))


def _markdown(rows: list[list[str]], right: set[int]) -> str:
    head, *body = rows
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *body])
