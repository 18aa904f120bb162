"""The documentation says what the code says: names, settings, errors, checks and commands."""

import ast
import importlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import get_commands

from django_alkstore import conf, exceptions, services
from django_alkstore.backoff import backoff
from django_alkstore.models import Job, State
from django_alkstore.services.options import JobOptions

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> Iterator[str]:
    for page in PAGES:
        yield from re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(table: str) -> list[str]:
    """What stands in backticks in the first cell of each row."""
    rows = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("code", list(blocks("python")))
def test_every_python_example_is_python_and_imports_what_there_is(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("django", "django_alkstore")):
            module = importlib.import_module(node.module or "")
            for name in node.names:
                assert hasattr(module, name.name), f"{node.module} has no {name.name}"


@pytest.mark.django_db
def test_the_examples_of_an_isolated_registry_run() -> None:
    examples = [code for code in blocks("python") if "with isolated_registry():" in code]
    assert examples
    for example in examples:
        exec(example, {})  # it asserts by itself


def test_every_setting_is_listed_and_no_other() -> None:
    assert sorted(first_cells(section("Settings"))) == sorted(conf._READERS)


def test_the_readme_s_hours_until_a_job_is_dead_are_those_of_the_curve() -> None:
    rows = re.findall(r"^\| .*?(\d+) attempts, base (\d+) s \| .* \| (\d+) (seconds|hours) \|$", README, re.MULTILINE)
    assert len(rows) == 4
    cap = conf.Settings().max_backoff
    for attempts, base, said, unit in rows:
        waits = [backoff(float(base), attempt, cap) for attempt in range(1, int(attempts))]
        assert int(sum(waits) / {"seconds": 1, "hours": 3_600}[unit]) == int(said)
    listed = {(int(attempts), float(base)) for attempts, base, *_ in rows}
    for defaults in (conf.JobDefaults(), conf.OUTBOX_DEFAULTS):
        assert (defaults.max_attempts, defaults.backoff_base) in listed


def test_every_error_is_listed_and_no_other() -> None:
    named = set(first_cells(section("Errors")))
    assert named == set(exceptions.__all__) - {"AlkstoreError"}


def test_every_check_is_listed_and_no_other() -> None:
    source = (ROOT / "django_alkstore" / "checks.py").read_text()
    assert sorted(first_cells(section("System checks"))) == sorted(re.findall(r'id="(alkstore\.[EW]\d+)"', source))


def test_every_option_is_listed_and_no_other() -> None:
    options = section("Queues").split("| function | returns |")[0]
    assert set(first_cells(options)) == JobOptions.__required_keys__ | JobOptions.__optional_keys__


def test_every_command_is_listed_and_no_other() -> None:
    ours = {name for name, app in get_commands().items() if app == "django_alkstore"}
    assert {cell.split()[0] for cell in first_cells(section("Running it"))} == ours


def test_every_public_function_is_named_in_the_readme() -> None:
    classes = {"Fire", "JobHandle", "LockHandle", "Outbox", "QueueStats"}
    missing = [name for name in services.__all__ if name not in classes and f"{name}(" not in README]
    missing = [name for name in missing if f"`{name}`" not in README]
    assert missing == []


def _arguments(comment: str) -> set[str]:
    """The arguments that the comment beside a signal lists: names, up to a colon, in each part between semicolons."""
    names: set[str] = set()
    for part in re.sub(r"\(.*?\)", "", comment).split(";"):
        words = [word.strip() for word in part.split(":")[0].split(",")]
        if all(word.isidentifier() for word in words):
            names.update(words)
    return names


def test_every_signal_is_listed_with_its_arguments() -> None:
    source = (ROOT / "django_alkstore" / "signals.py").read_text()
    signals = dict(re.findall(r"^(\w+) = Signal\(\)(?:  # (.*))?$", source, re.MULTILINE))
    page = (ROOT / "docs" / "signals.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(signals)
    for name, listed in rows:
        assert _arguments(signals[name]) == set(re.findall(r"`(\w+)`", listed)), name


def test_make_without_a_target_lists_every_target_that_a_page_names() -> None:
    shown = subprocess.run(["make", "--silent"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = set(re.findall(r"^make ([a-z-]+)", shown, re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"(?:`|\$ )make ([a-z][a-z-]*)", page.read_text())}
    assert {"demo", "test", "check", "bench"} <= named
    assert named <= listed


def test_the_lifecycle_names_every_state_and_only_fields_that_there_are() -> None:
    page = (ROOT / "docs" / "lifecycle.md").read_text()
    assert all(f"`{state.value}`" in page for state in State)
    fields = {field.name for field in Job._meta.get_fields()}
    assert {"worker_id", "lease_expires_at", "finished_at", "attempts", "fence", "run_at"} <= fields


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        source = (ROOT / file).read_text()
        assert not name or f"def {name}(" in source, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("http"):
            file, _, anchor = target.partition("#")
            linked = page.parent / file if file else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
