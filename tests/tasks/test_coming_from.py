"""docs/coming-from.md: each line of the right columns runs, and does what the left one did."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import get_commands, load_command_class
from django.utils import timezone

from django_alkstore import exceptions, services
from django_alkstore.models import Job
from django_alkstore.tasks import task
from django_alkstore.tasks.apis import primary
from django_alkstore.testing import immediately, run_pending
from tests.ledger import tasks

pytestmark = pytest.mark.django_db

PAGE = (Path(__file__).parent.parent.parent / "docs" / "coming-from.md").read_text()
ROWS = re.findall(r"^\| (.+) \| `([^`]+)` \|$", PAGE, re.MULTILINE)
COMMANDS = [code.removeprefix("manage.py ") for _, code in ROWS if code.startswith("manage.py ")]
RAISED = [code for _, code in ROWS if code.startswith("raise ")]
CODE = sorted({code for _, code in ROWS} - set(RAISED) - {f"manage.py {line}" for line in COMMANDS})


def names() -> dict[str, Any]:
    done = tasks.add.enqueue(5, 6)
    run_pending()
    return {
        **{name: getattr(services, name) for name in services.__all__},
        **{name: getattr(exceptions, name) for name in exceptions.__all__},
        "Job": Job,
        "add": tasks.add,
        "default_task_backend": primary().backends["default"],
        "id": done.id,
        "immediately": immediately,
        "moment": timezone.now() + timedelta(days=1),
        "task": task,
    }


def test_the_page_has_rows_of_all_four() -> None:
    assert len(ROWS) > 35
    assert len(COMMANDS) == 3
    assert len(RAISED) == 4


@pytest.mark.parametrize("code", CODE)
def test_a_line_runs(code: str) -> None:
    exec(code, names())


@pytest.mark.parametrize("code", RAISED)
def test_what_a_handler_raises_is_ours(code: str) -> None:
    with pytest.raises((exceptions.Retry, exceptions.Discard)):
        exec(code, names())


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_takes_these_arguments(line: str) -> None:
    name, *arguments = line.split()
    command = load_command_class(get_commands()[name], name)
    command.create_parser("manage.py", name).parse_args(arguments)
