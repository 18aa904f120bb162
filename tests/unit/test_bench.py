"""The benchmarks' own arithmetic and machinery. Nothing is timed here."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import notes, plot
from bench.floor import COLUMNS, row
from bench.processes import Processes
from bench.results import Line, at_least, at_most, figure, goals_table, peers_table
from django_alkstore.models import Job

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (10_543.2, "10,500"),
        (999.7, "1,000"),
        (875.4, "875"),
        (0.4749, "0.475"),
        (15.0, "15"),
        (0.0, "0"),
        (-0.2, "-0.2"),
    ],
)
def test_a_figure_has_three_digits_that_count(value: float, shown: str) -> None:
    assert figure(value) == shown


def test_a_line_judges_the_ratio_of_each_pair_by_its_median() -> None:
    line = Line("case", "what", "/s", ours=[90.0, 50.0, 300.0], floor=[100.0, 100.0, 200.0], goal=at_least(0.9))
    assert line.judged == [0.9, 0.5, 1.5]
    assert line.is_met
    assert replace(line, goal=at_least(1)).is_met is False
    assert "| 0.9 × | 0.5 to 1.5 | ≥ 0.9 × | yes | 3 |" in goals_table([line])  # noqa: RUF001


def test_a_line_that_is_judged_by_its_own_figures_needs_no_floor() -> None:
    line = Line("case", "what", " ms", ours=[3.0], judged=[3.0], judged_unit=" ms", goal=at_most(1, " ms"))
    assert line.is_met is False
    assert "| – | 3 ms | 3 ms | – | ≤ 1 ms | **no** | 1 |" in goals_table([line])  # noqa: RUF001


def test_a_peer_without_a_figure_is_left_empty() -> None:
    line = Line("case", "what", "/s", [2.0], [1.0], peers={"one": [3.0]}, peer_line="shared")
    assert peers_table([line], ["one", "other"]).splitlines()[-2:] == ["| one | 3 |", "| other | – |"]  # noqa: RUF001


def test_notes_are_read_as_they_were_written_but_for_a_line_in_the_making(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(notes.FOLDER, str(tmp_path))
    monkeypatch.setattr(notes, "_file", None)
    notes.begun(None)
    notes.begun("first")
    notes.begun(7)
    (file,) = tmp_path.iterdir()
    with file.open("a") as half:
        half.write("8 12")
    os.close(notes._file)  # type: ignore[arg-type]
    assert [what for what, _ in notes.read(tmp_path)] == ["first", "7"]
    assert notes.count(tmp_path) == 2


def test_the_floor_stores_every_column_that_the_library_stores() -> None:
    assert {*COLUMNS, "id"} == {field.column for field in Job._meta.concrete_fields}
    assert row("7", priority=3)["priority"] == 3


def test_a_chart_holds_every_point_inside_its_frame() -> None:
    series = [plot.Series("ours", "a & b", {10: [1.0, 3.0], 1_000: [2.0], 1_000_000: [9.0, 10.0]})]
    root = ElementTree.fromstring(plot.chart("title", "across", series))
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 3
    assert all(0 <= float(circle.attrib["cx"]) <= plot.WIDTH for circle in circles)
    assert all(plot.TOP <= float(circle.attrib["cy"]) <= plot.HEIGHT - plot.BOTTOM for circle in circles)


@pytest.mark.parametrize(("value", "top"), [(9.5, 10), (10.0, 10), (201.0, 400), (0.7, 0.8), (3_900.0, 4_000)])
def test_the_upright_axis_ends_on_a_round_number(value: float, top: float) -> None:
    assert plot.nice_top(value) == pytest.approx(top)


def test_no_process_outlives_the_run_that_started_it(tmp_path: Path) -> None:
    with suppress(KeyboardInterrupt), Processes() as processes:
        command = [sys.executable, "-c", "print('up', flush=True); input()"]
        child = processes.start(command, {}, tmp_path / "log.txt", told=True)
        child.wait_for("up", timeout=60)
        raise KeyboardInterrupt
    assert child.popen.returncode == -signal.SIGKILL


def test_a_small_run_measures_floor_and_ours_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "loop", "drain-kept", "--scale", "0.001", "--runs", "1"]
    ran = subprocess.run(
        [*command, "--folder", str(tmp_path), "--json", str(tmp_path / "results.json")],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("/s | ") == 4, ran.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
