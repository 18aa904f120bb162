"""What SECURITY.md says: nothing from the database is run, nobody acts without a permission, no payload is logged."""

import ast
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.urls import reverse

from django_alkstore import services
from django_alkstore.exceptions import InvalidPayload
from django_alkstore.models import Job, Lock, Schedule
from tests.faults.tools import everything
from tests.ledger.tools import wait_for_state
from tests.processes import Process

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "django_alkstore"

Start = Callable[..., Process]


# Nothing that is stored is run

RUNS_TEXT = {"eval", "exec", "compile", "__import__", "execfile"}
"""Built-in functions."""
RUNS_DATA = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "yaml", "subprocess", "code", "runpy"}
"""Modules that make more of data than data."""
IMPORTERS = {
    "registrations.py": {"import_module"},
    "conf.py": {"import_string"},
    "finding.py": {"import_module"},
    "apis.py": {"import_module"},
}
"""Modules that import by name: the installed apps' modules, a class that the settings name, the modules of tasks, and
one of Django's two APIs of tasks."""


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_unpickled_evaluated_or_imported_from_the_database(path: Path) -> None:
    imports: set[str] = set()
    used: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imports |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports.add((node.module or "").split(".")[0])
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Name):
            used.add(node.id)
    assert not imports & RUNS_DATA
    assert not used & RUNS_TEXT
    assert used & {"import_module", "import_string"} <= IMPORTERS.get(path.name, set())


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_text_is_called_safe_that_has_not_been_escaped(path: Path) -> None:
    tree = ast.parse(path.read_text())
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {node.func.id for node in called if isinstance(node.func, ast.Name)}
    assert not names & {"mark_safe", "SafeString", "SafeText"}
    constants = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in called:
        if isinstance(node.func, ast.Name) and node.func.id == "format_html":
            form = node.args[0]
            assert isinstance(form, ast.Constant) or (isinstance(form, ast.Name) and form.id in constants)


@pytest.mark.django_db(transaction=True)
def test_a_payload_that_looks_like_an_object_is_data(start: Start) -> None:
    payload = {"py/object": "os.system", "__class__": "subprocess.Popen", "__reduce__": ["os.system", ["exit 1"]]}
    job = services.enqueue("tell", payload)
    process = start("run_queue", "tell")
    wait_for_state("completed", job.pk)
    process.wait_for('"py/object": "os.system"')


@pytest.mark.django_db(transaction=True)
def test_a_queue_s_name_that_looks_like_a_function_runs_nothing(start: Start) -> None:
    """Whoever can write rows can choose among the registered handlers, and nothing else."""
    strangers = [services.enqueue(name, "touch /tmp/x") for name in ("os.system", "tests.ledger.alkstore:noop")]
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_alkstore_job SET queue = '__import__(''os'')' WHERE id = %s", [strangers[0].pk])
    start("run_alkstore")
    known = services.enqueue("noop", None)
    wait_for_state("completed", known.pk)
    assert set(Job.objects.exclude(pk=known.pk).values_list("state", "attempts")) == {("pending", 0)}


# Nobody acts in the admin without a permission

ACTIONS = {
    "job": ["cancel", "delete_finished", "run_now", "requeue"],
    "schedule": ["pause", "resume", "fire_now"],
    "lock": ["force_release"],
}
KINDS = ["nobody", "customer", "inactive", "other staff"]


def visitor(kind: str) -> Client:
    """Somebody who has no business in these pages."""
    client = Client()
    if kind == "nobody":
        return client
    user = User.objects.create_user(kind, is_staff=kind != "customer", is_active=kind != "inactive")
    if kind == "other staff":
        others = Permission.objects.exclude(content_type__app_label="django_alkstore")
        user.user_permissions.set(others)
    else:
        user.user_permissions.set(Permission.objects.all())
    client.force_login(user)
    return client


def rows_of_each_kind() -> dict[str, Any]:
    services.lock("report", ttl=600).acquire()
    return {
        "job": services.enqueue("mail", {"card": "4111"}, delay=500).pk,
        "schedule": services.schedule("nightly", "@every 1h", "mail").pk,
        "lock": Lock.objects.get().pk,
    }


def addresses(model: str, pk: object) -> list[str]:
    name = f"admin:django_alkstore_{model}"
    return [
        reverse(f"{name}_changelist"),
        reverse(f"{name}_add"),
        *(reverse(f"{name}_{page}", args=[pk]) for page in ("change", "history", "delete")),
    ]


@pytest.mark.django_db
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ACTIONS)
def test_whoever_has_no_business_in_the_admin_sees_and_changes_nothing_at_any_address(model: str, kind: str) -> None:
    pk = rows_of_each_kind()[model]
    client = visitor(kind)
    before = everything()
    for address in addresses(model, pk):
        posts: list[dict[str, Any]] = [{"post": "yes"}, {"name": "x", "queue": "mail", "_save": "1"}]
        posts += [
            {"action": action, "index": 0, "_selected_action": [pk], "select_across": across}
            for action in [*ACTIONS[model], "delete_selected"]
            for across in ("0", "1")
        ]
        for answer in [client.get(address), *(client.post(address, data) for data in posts)]:
            assert answer.status_code in (302, 403), address
            if answer.status_code == 302:
                assert "/login/" in answer.headers["Location"]
            assert b"4111" not in answer.content
    assert everything() == before
    assert not LogEntry.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize(("model", "action"), [(model, action) for model, some in ACTIONS.items() for action in some])
def test_an_action_from_another_site_is_refused(model: str, action: str) -> None:
    """Whatever middleware the project has: the admin itself asks for the token."""
    pk = rows_of_each_kind()[model]
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("root"))
    before = everything()
    data = {"action": action, "index": 0, "_selected_action": [pk]}
    assert client.post(reverse(f"admin:django_alkstore_{model}_changelist"), data).status_code == 403
    assert everything() == before


@pytest.mark.django_db
def test_the_models_have_no_action_and_no_address_that_these_tests_do_not_know() -> None:
    from django.contrib import admin
    from django.test import RequestFactory

    request = RequestFactory().get("/")
    request.user = User.objects.create_superuser("root")
    for model in (Job, Schedule, Lock):
        shown = admin.site.get_model_admin(model)
        kind = model._meta.model_name or ""
        assert sorted(shown.get_actions(request)) == sorted(ACTIONS[kind])
        names = {pattern.name for pattern in shown.urls if pattern.name}
        assert names == {
            f"django_alkstore_{kind}_{page}" for page in ("changelist", "add", "history", "delete", "change")
        }


# No payload is logged

SECRET = "hunter2-4111-1111"


@pytest.mark.django_db(transaction=True)
def test_no_payload_is_in_the_log_or_in_an_error_of_the_library_s_own(start: Start) -> None:
    done = services.enqueue("noop", SECRET)
    mailed = services.outbox("mail").enqueue(SECRET)
    failed = services.enqueue("hostile", "discard", max_attempts=1)
    broken = services.enqueue("noop", None)
    lapsed = services.enqueue("noop", SECRET, max_attempts=1, priority=9)
    services.claim_batch("noop", "ghost")
    Job.objects.filter(pk=lapsed.pk).update(lease_expires_at=lapsed.created_at)
    expired = services.enqueue("noop", SECRET, expires_in=1)
    Job.objects.filter(pk=expired.pk).update(expires_at=expired.created_at)
    services.schedule("often", "@every 1s", "noop", {"password": SECRET})
    services.schedule("bad", "@every 1s", "noop", {"password": SECRET})
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE django_alkstore_job SET payload = %s WHERE id = %s", [f'{{"password": "{SECRET}"', broken.pk]
        )
        cursor.execute(
            "UPDATE django_alkstore_schedule SET payload = %s WHERE name = 'bad'", [f'{{"password": "{SECRET}"']
        )
    process = start("run_alkstore", "-v", "2")
    wait_for_state("completed", done.pk, mailed.pk)
    wait_for_state("dead", failed.pk, broken.pk, lapsed.pk, expired.pk)
    process.wait_for("fired often")
    process.wait_for("schedule bad is paused")
    process.end()
    assert SECRET not in process.output
    for job in Job.objects.exclude(last_error=None).defer("payload"):
        assert SECRET not in f"{job.last_error}{job.errors}"
    assert SECRET not in (Schedule.objects.get(name="bad").last_error or "")
    for command in ("alkstore_status", "alkstore_prune"):
        shown = start(command)
        shown.wait()
        assert SECRET not in shown.output


@pytest.mark.parametrize(
    "payload",
    [
        {"card": Decimal("4111111111")},
        {"card": b"4111111111"},
        {"card": "4111111111\ud800"},
        {"card": {"4111111111"}},
        {"card": ["4111111111" * 200_000]},
        {"card": "4111111111", "total": float("nan")},
        ["4111111111", object()],
    ],
    ids=["Decimal", "bytes", "surrogate", "set", "too large", "NaN beside it", "object beside it"],
)
def test_a_refused_payload_is_named_by_its_place_and_not_by_its_value(payload: Any) -> None:
    with pytest.raises(InvalidPayload) as raised:
        services.enqueue("mail", payload)
    assert "4111111111" not in str(raised.value)


@pytest.mark.django_db
def test_neither_a_job_nor_its_handle_shows_its_payload_as_text() -> None:
    job = services.enqueue("mail", SECRET)
    [handle] = services.claim_batch("mail", "w")
    for shown in (job, handle, services.schedule("nightly", "@every 1h", "mail", SECRET)):
        assert SECRET not in f"{shown} {shown!r}"
