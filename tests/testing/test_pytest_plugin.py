"""The pytest fixtures, in a project of its own: with pytest-django, and in one that knows nothing of Django."""

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PLUGIN = "django_alkstore.pytest_plugin"

PROJECT = """
from datetime import timedelta

import pytest

from django_alkstore.registry import handler
from django_alkstore.services import enqueue

pytestmark = pytest.mark.django_db


def test_run_pending(isolated_registry, run_pending, assert_enqueued, assert_nothing_enqueued):
    assert_nothing_enqueued()
    handler("probe")(lambda job: None)
    enqueue("probe", {"n": 1})
    assert_enqueued("probe", payload={"n": 1}, count=1)
    assert len(run_pending()) == 1


def test_immediately(isolated_registry, immediately):
    ran = []
    handler("probe")(lambda job: ran.append(job.payload))
    enqueue("probe", 1)
    assert ran == [1]


def test_frozen_clock(isolated_registry, frozen_clock, run_until):
    handler("probe")(lambda job: None)
    enqueue("probe", 1, delay=3_600)
    moment = frozen_clock.now() + timedelta(hours=2)
    assert len(run_until(moment)) == 1
    assert frozen_clock.now() == moment


def test_nothing_is_left_behind():
    from django_alkstore import clock, signals

    assert not isinstance(clock.installed(), clock.ManualClock)
    assert not signals.jobs_enqueued.receivers
"""

WITHOUT_DJANGO = """
import sys


def test_nothing_of_django_was_imported():
    assert "django_alkstore.pytest_plugin" in sys.modules
    assert [name for name in sys.modules if name == "django" or name.startswith("django.")] == []
    assert [name for name in sys.modules if name.startswith("django_alkstore.")] == ["django_alkstore.pytest_plugin"]
"""


def run_pytest(folder: Path, test: str, *options: str, **environment: str) -> str:
    (folder / "test_it.py").write_text(test)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", PLUGIN, *options, "--rootdir", str(folder),
         "-c", os.devnull, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_each_function_of_the_kit_is_a_fixture(tmp_path: Path) -> None:
    said = run_pytest(
        tmp_path, PROJECT, "-p", "pytest_django.plugin", "-W", "error", DJANGO_SETTINGS_MODULE="tests.settings"
    )
    assert "4 passed" in said


def test_without_django_the_plugin_imports_nothing_of_it(tmp_path: Path) -> None:
    environment = {name: "" for name in os.environ if name == "DJANGO_SETTINGS_MODULE"}
    assert "1 passed" in run_pytest(tmp_path, WITHOUT_DJANGO, "-W", "error", **environment)


def test_the_package_declares_the_plugin() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert [importlib.import_module(module).__name__ for module in declared.values()] == [PLUGIN]
