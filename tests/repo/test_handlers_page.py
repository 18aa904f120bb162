"""docs/handlers.md: its code runs, in the order of the page, and does what the page says."""

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import django
import pytest
from asgiref.sync import async_to_sync
from django.core import mail
from django.test import override_settings

from django_alkstore import conf
from django_alkstore.conf import OUTBOX_DEFAULTS, PLAIN_DEFAULTS
from django_alkstore.models import Job
from django_alkstore.registrations import DEFAULT_TIME_LIMIT
from django_alkstore.registry import Handler, HandlerOptions
from django_alkstore.testing import isolated_registry, run_pending

PAGE = (Path(__file__).parent.parent.parent / "docs" / "handlers.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
MAIL: dict[str, Any] = {}
if django.VERSION >= (6, 1):
    # A project without this setting is warned at each mail.
    MAIL = {"MAILERS": {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}}
MODULE, SETTINGS = "# shop/alkstore.py", "# settings.py"


@pytest.fixture
def names(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the code of the page has defined, with its settings in force."""
    for name in ("shop", "shop.alkstore"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    found: dict[str, Any] = {"__name__": "page"}
    with isolated_registry(), ExitStack() as settings:
        settings.enter_context(override_settings(**MAIL))
        for block in BLOCKS:
            if block.startswith(MODULE):
                exec(block, vars(sys.modules["shop.alkstore"]))
            elif block.startswith(SETTINGS):
                written: dict[str, Any] = {}
                exec(block, written)
                assert list(conf.problems(written["ALKSTORE"])) == []
                merged = {**found.get("ALKSTORE", {}), **written["ALKSTORE"]}
                settings.enter_context(override_settings(ALKSTORE=merged))
                found["ALKSTORE"] = merged
            else:
                exec(block, found)
        yield found


def jobs(queue: str) -> list[Job]:
    return list(Job.objects.filter(queue=queue).order_by("pk"))


def test_the_code_enqueues_what_the_page_says(names: dict[str, Any]) -> None:
    assert [job.payload["month"] for job in jobs("reports")] == [f"2027-0{month}" for month in range(1, 6)]
    assert [job.priority for job in jobs("reports")] == [0, 10, 10, 0, 0]
    assert {job.max_attempts for job in jobs("reports")} == {4}
    (sent,) = jobs("__alkstore_outbox:mail")
    assert (sent.max_attempts, sent.backoff_base, sent.visibility_timeout) == (12, 60.0, 60.0)
    (resized,) = jobs("resize")
    assert resized.payload == {"image": "cat.png", "width": 200}
    assert names["created"] is True
    assert Job.objects.count() == 7


def test_the_jobs_of_the_page_run(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run_pending()
    assert [message.to for message in mail.outbox] == [["ada@example.com"]]
    assert "the report of 2027-05" in capsys.readouterr().out
    (resized,) = jobs("resize")
    assert (resized.state, resized.last_error) == ("pending", "Retry: the image is not uploaded yet")


def test_the_async_example_enqueues(names: dict[str, Any]) -> None:
    async_to_sync(names["order"])(None)
    assert jobs("reports")[-1].payload == {"month": "2027-06"}
    assert jobs("__alkstore_outbox:mail")[-1].unique_key == "welcome-bob"


def test_the_errors_are_raised_as_the_page_shows_them(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    (misfit, unknown) = [
        block for block in BLOCKS if block.startswith(("try:", "from django_alkstore.exceptions import Unk"))
    ]
    exec(misfit, names)
    assert "does not fit" in capsys.readouterr().out
    exec(unknown, names)
    assert capsys.readouterr().out.strip() == unknown.rsplit("  # ", 1)[1].strip()


def test_every_option_is_listed_with_its_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \|", PAGE, re.MULTILINE)
    listed = {name: (queue, outbox) for name, queue, outbox in rows}
    assert set(listed) == HandlerOptions.__optional_keys__ | {"unpack"}
    for name in PLAIN_DEFAULTS._fields:
        defaults = (getattr(PLAIN_DEFAULTS, name), getattr(OUTBOX_DEFAULTS, name))
        assert listed[name] == tuple("never" if value is None else f"{value:g}" for value in defaults), name
    assert listed["time_limit"] == (f"{DEFAULT_TIME_LIMIT:g}",) * 2


def test_every_method_of_a_handler_is_named() -> None:
    methods = [name for name in vars(Handler) if "enqueue" in name]
    assert len(methods) == 8
    assert [name for name in methods if not re.search(rf"`{name}[`(]", PAGE)] == []
