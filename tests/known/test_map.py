"""docs/known-failures.md and the tests: each names the other, and no number is left without an answer."""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"\| (F\d{3}) \| (.+?) \| (.+) \|")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
REASONS = ("Not applicable: ", "Does not exist yet: ")

LISTED = {
    found[1]: found[3]
    for line in (ROOT / "docs/known-failures.md").read_text().splitlines()
    if (found := ROW.match(line))
}


@lru_cache
def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_page_lists_failures_in_order() -> None:
    assert len(LISTED) > 90
    assert list(LISTED) == sorted(LISTED)


@pytest.mark.parametrize(("number", "answer"), LISTED.items(), ids=LISTED)
def test_each_failure_has_tests_that_exist_or_a_reason(number: str, answer: str) -> None:
    tests = TEST.findall(answer)
    assert answer.count("::") == len(tests), "not the name of a test"
    assert tests or answer.startswith(REASONS)
    for file, name in tests:
        assert name in functions(ROOT / file)


def test_each_test_that_is_named_after_a_failure_is_on_the_page() -> None:
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in functions(file):
            for number in re.findall(r"_f(\d{3})(?=_)", name if name.startswith("test_") else ""):
                assert f"F{number}" in LISTED, f"{file}::{name}"


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/reliability.md"])
def test_each_test_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    named = TEST.findall(text)
    assert named
    assert text.count("::") == len(named), "not the name of a test"
    for file, name in named:
        assert name in functions(ROOT / file)
