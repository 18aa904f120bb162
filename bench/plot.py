"""Two charts from the figures of `make bench`: the cost of a claim, and a worker's throughput, against table size.

`python -m bench.plot RESULTS.json FOLDER` writes `claim-cost.svg` and `throughput.svg`. Written by hand, since two
lines over five points need no library. Ground and text follow the reader's light or dark scheme.
"""

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from bench.results import figure

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 56, 52
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
  .ground { fill: #ffffff }
  .title { font-size: 15px; font-weight: 600 }
  .grid { stroke: #d1d9e0 } .axis { stroke: #59636e }
  .ours { stroke: #0969da; fill: #0969da } .floor { stroke: #bc4c00; fill: #bc4c00 }
  path { fill: none !important; stroke-width: 2 } text.ours, text.floor { stroke: none }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117 }
    text { fill: #f0f6fc }
    .grid { stroke: #3d444d } .axis { stroke: #9198a1 }
    .ours { stroke: #4493f8; fill: #4493f8 } .floor { stroke: #f0883e; fill: #f0883e }
  }
"""


@dataclass(frozen=True)
class Series:
    """One line of a chart: the medians, and the least and greatest of the runs, by table size."""

    style: str
    name: str
    runs: Mapping[int, Sequence[float]]

    def points(self) -> list[tuple[int, float, float, float]]:
        return [(size, statistics.median(run), min(run), max(run)) for size, run in sorted(self.runs.items())]


def chart(title: str, across: str, series: Sequence[Series]) -> str:
    """The SVG of a chart whose lower axis is logarithmic and whose upright one begins at 0."""
    sizes = sorted({size for one in series for size in one.runs})
    top = nice_top(max(value for one in series for run in one.runs.values() for value in run))
    parts = [f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="6"/>']
    parts.append(f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>')
    for step in range(5):
        value = top * step / 4
        y = _y(value, top)
        style = "grid" if step else "axis"
        parts.append(f'<line class="{style}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{figure(value) if value else 0}</text>')
    for size in sizes:
        anchor = "end" if size == sizes[-1] else "middle"
        x = _x(size, sizes) + (12 if size == sizes[-1] else 0)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 28}" text-anchor="{anchor}">{size:,}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(across)}</text>'
    )
    for number, one in enumerate(series):
        parts += _line(one, sizes, top)
        x = LEFT + number * 250
        parts.append(f'<line class="{one.style}" stroke-width="3" x1="{x}" x2="{x + 20}" y1="38" y2="38"/>')
        parts.append(f'<text x="{x + 26}" y="42">{escape(one.name)}</text>')
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' role="img" aria-label="{escape(title)}">\n  <style>{STYLE}  </style>\n  {body}\n</svg>\n'
    )


def _line(one: Series, sizes: Sequence[int], top: float) -> list[str]:
    parts = []
    places = []
    for size, median, least, greatest in one.points():
        x, y = _x(size, sizes), _y(median, top)
        places.append(f"{x:.1f},{y:.1f}")
        bar = f'y1="{_y(least, top):.1f}" y2="{_y(greatest, top):.1f}"'
        parts.append(f'<line class="{one.style}" x1="{x:.1f}" x2="{x:.1f}" {bar}/>')
        parts.append(
            f'<circle class="{one.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{figure(median)}</title></circle>'
        )
    return [f'<path class="{one.style}" d="M{" L".join(places)}"/>', *parts]


def _x(size: int, sizes: Sequence[int]) -> float:
    least, greatest = math.log10(sizes[0]), math.log10(sizes[-1])
    share = (math.log10(size) - least) / ((greatest - least) or 1)
    return LEFT + 20 + share * (WIDTH - LEFT - RIGHT - 40)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def nice_top(value: float) -> float:
    """The least of 1, 2, 4, 6 and 8 times a power of ten that is not below `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value)


def main() -> None:
    results, folder = Path(sys.argv[1]), Path(sys.argv[2])
    lines = {line["name"]: line for line in json.loads(results.read_text())["lines"]}

    def runs(prefix: str, whose: str) -> dict[int, list[float]]:
        return {int(n.removeprefix(prefix)): line[whose] for n, line in lines.items() if n.startswith(prefix)}

    claims = [
        Series("ours", "in the table of this size", runs("sizes-claim-", "ours")),
        Series("floor", "by turns: with 10 jobs", runs("sizes-claim-", "floor")),
    ]
    throughput = [
        Series("ours", "run_queue, 4 handlers at once", runs("sizes-drain-", "ours")),
        Series("floor", "sqlite3, claim and ack one by one", runs("sizes-drain-", "floor")),
    ]
    across = "jobs waiting in the table"
    (folder / "claim-cost.svg").write_text(chart("A claim, in microseconds", across, claims))
    (folder / "throughput.svg").write_text(chart("Jobs a second", across, throughput))


if __name__ == "__main__":
    main()
