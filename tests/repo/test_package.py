"""Rules that the whole package keeps: F074, F130, F131, and the design's."""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from django.db import connection

import django_alkstore

PACKAGE = Path(django_alkstore.__file__).parent
ROOT = PACKAGE.parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "migrations" not in path.parts)
module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))


def run(code: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def names_used(path: Path) -> set[str]:
    """Every dotted name in the code of a module: `time.monotonic`, `datetime.now`, `qs.select_for_update`."""
    tree = ast.parse(path.read_text())
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    return {ast.unparse(node) for node in attributes} | names | imported


def without_comments(path: Path) -> str:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return " ".join(token.string for token in tokens if token.type != tokenize.COMMENT)


@module
def test_f015_nothing_selects_for_update(path: Path) -> None:
    assert "select_for_update" not in " ".join(names_used(path))
    assert "FOR UPDATE" not in without_comments(path).upper()


CLOCKS = {
    "time.time",
    "time.time_ns",
    "time.monotonic",
    "time.monotonic_ns",
    "time.perf_counter",
    "time.clock_gettime",
    "time.clock_gettime_ns",
    "time.sleep",
    "asyncio.sleep",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "date.today",
    "timezone.now",
    "timezone.localtime",
    "django.utils.timezone.now",
    "django.utils.timezone.localtime",
    "Now",
}


@module
def test_only_clock_reads_the_time_and_sleeps(path: Path) -> None:
    if path.name == "clock.py":
        return
    used = names_used(path)
    read = {name for name in used for clock in CLOCKS if name == clock or name.endswith(f".{clock}")}
    read -= {"clock.now", "clock.monotonic"}
    if path.name == "fields.py":
        read -= {"Now", "django.db.models.functions.Now"}  # somebody else's, which it stores
    assert not read
    text = without_comments(path).upper()
    text = text.replace("GET_CURRENT_TIMEZONE", "")
    text = text.replace("JULIANDAY(%(EXPRESSIONS)S)", "")  # makes a number of a text, and reads no clock
    for word in ("CURRENT_TIMESTAMP", "CURRENT_TIME", "CURRENT_DATE", "STRFTIME(", "JULIANDAY(", "UNIXEPOCH(", "'NOW'"):
        assert word not in text


ALLOWED = {"dialects", "checks.py"}


@module
def test_sqlite_is_named_where_it_belongs(path: Path) -> None:
    if ALLOWED & set(path.relative_to(PACKAGE).parts):
        return
    tree = ast.parse(path.read_text())
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([alias.name for alias in node.names] + [getattr(node, "module", None) or ""])
    }
    assert "sqlite3" not in imported
    assert not any(name.startswith("django.db.backends.sqlite3") for name in imported)


LOADED = """
import sqlite3, sys, threading
def refuse(*args, **kwargs):
    raise AssertionError("the app started something while it was loaded")
threading.Thread.start = refuse
sqlite3.connect = refuse
import django.db.backends.sqlite3.base as backend
backend.Database.connect = refuse
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
import django
django.setup()
import django_alkstore.services, django_alkstore.registry
from django.db import connections
assert threading.active_count() == 1, threading.enumerate()
assert all(connection.connection is None for connection in connections.all(initialized_only=True))
print("quiet")
"""


def test_f074_loading_the_app_starts_no_thread_no_connection_and_no_query() -> None:
    assert run(LOADED) == "quiet\n"


STARTED = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "bench.project.settings"
os.environ["BENCH_FOLDER"] = "."
import django
django.setup()
assert "django_alkstore.admin.jobs" in sys.modules
late = ("services", "registry", "runtime", "dialects", "conf", "checks")
print([name for name in sys.modules if name.startswith(tuple(f"django_alkstore.{module}" for module in late))])
"""


def test_a_start_imports_the_models_and_the_admin_alone() -> None:
    assert run(STARTED) == "[]\n"


def test_the_version_is_read_without_django() -> None:
    code = (
        "import sys, django_alkstore; assert django_alkstore.__version__; assert 'django' not in sys.modules; print(1)"
    )
    assert run(code) == "1\n"


CHECKED = """
import os, tests.settings as settings
settings.DEFAULT_AUTO_FIELD = {field!r}
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
import django
django.setup()
from django.conf import settings as read
assert read.DEFAULT_AUTO_FIELD == {field!r}
from django.core.management import call_command
call_command("makemigrations", "django_alkstore", check_changes=True, dry_run=True, verbosity=3)
from django.apps import apps
print({{model._meta.pk.__class__.__name__ for model in apps.get_app_config("django_alkstore").get_models()}})
"""


@pytest.mark.parametrize(
    "field",
    [
        "django.db.models.AutoField",
        "django.db.models.BigAutoField",
        "django.db.models.SmallAutoField",
        "tests.repo.custom_key.HouseKey",
    ],
)
def test_f130_makemigrations_finds_nothing_whatever_the_projects_key_is(field: str) -> None:
    output = run(CHECKED.format(field=field))
    assert "No changes detected" in output
    assert output.endswith("{'BigAutoField'}\n")


def test_there_is_one_initial_migration() -> None:
    found = sorted(path.name for path in (PACKAGE / "migrations").glob("[0-9]*.py"))
    assert found == ["0001_initial.py"]


@pytest.mark.django_db
@pytest.mark.parametrize("table", ["job", "lock", "schedule"])
def test_f131_every_table_counts_up_for_ever(table: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT sql FROM sqlite_master WHERE name = %s", [f"django_alkstore_{table}"])
        assert "PRIMARY KEY AUTOINCREMENT" in cursor.fetchone()[0]


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
