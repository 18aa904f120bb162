"""Section 9: the system checks, each with its id and its condition, and none with the recommended options."""

import json
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.checks import CheckMessage, run_checks
from django.db import connections
from django.db.backends.sqlite3.base import Database, DatabaseWrapper
from django.test import override_settings

from django_alkstore.dialects import file_access
from django_alkstore.dialects.file_access import unfit_place
from tests.ledger.tools import variant
from tests.processes import Process, start_process

RECOMMENDED = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, django_db_blocker: Any) -> Iterator[dict[str, Any]]:
    """The settings of a database of its own, as recommended; tests change what they are about."""
    settings = connections.settings["default"]
    path = tmp_path / "project.sqlite3"
    path.touch()
    monkeypatch.setitem(settings, "NAME", path)
    monkeypatch.setitem(settings, "OPTIONS", dict(RECOMMENDED))
    monkeypatch.setitem(settings, "ATOMIC_REQUESTS", False)
    with django_db_blocker.unblock():
        yield settings


def found() -> list[CheckMessage]:
    messages = run_checks(databases=["default"])
    return [message for message in messages if str(message.id).startswith("alkstore.")]


def ids() -> list[str]:
    return [str(message.id) for message in found()]


@pytest.fixture
def manage() -> Iterator[Any]:
    started: list[Process] = []

    def run(*arguments: str, **environment: str) -> Process:
        started.append(start_process(arguments, environment))
        return started[-1]

    yield run
    for process in started:
        process.end()


# The database


def test_f020_with_the_recommended_options_and_the_default_settings_there_is_none(project: dict[str, Any]) -> None:
    assert ids() == []


@pytest.mark.parametrize("mode", [None, "DEFERRED", "EXCLUSIVE", "deferred"])
def test_w001_a_transaction_mode_that_is_not_immediate(project: dict[str, Any], mode: str | None) -> None:
    project["OPTIONS"].pop("transaction_mode")
    if mode:
        project["OPTIONS"]["transaction_mode"] = mode
    (message,) = found()
    assert message.id == "alkstore.W001"
    assert "IMMEDIATE" in (message.hint or "")


def test_w001_is_not_for_immediate_in_small_letters(project: dict[str, Any]) -> None:
    project["OPTIONS"]["transaction_mode"] = "immediate"
    assert ids() == []


def test_w002_a_journal_that_is_not_wal(project: dict[str, Any]) -> None:
    project["OPTIONS"]["init_command"] = "PRAGMA journal_mode=DELETE"
    (message,) = found()
    assert message.id == "alkstore.W002"
    assert "delete" in message.msg
    assert "WAL" in (message.hint or "")


def test_f133_w002_goes_by_the_journal_mode_that_the_file_really_has(project: dict[str, Any]) -> None:
    del project["OPTIONS"]["init_command"]
    assert ids() == ["alkstore.W002"]
    raw = sqlite3.connect(project["NAME"])
    raw.execute("PRAGMA journal_mode=WAL")
    raw.close()
    assert ids() == []  # a WAL file stays one, whatever the settings say


def test_a_file_that_is_not_there_is_not_made(project: dict[str, Any]) -> None:
    path = Path(project["NAME"])
    path.unlink()
    project["OPTIONS"] = {"transaction_mode": "IMMEDIATE"}
    assert ids() == []
    assert not path.exists()


def test_without_a_named_database_no_connection_is_opened(
    project: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: DatabaseWrapper, parameters: object) -> None:
        raise AssertionError("connected")

    project["OPTIONS"] = {"timeout": 1}
    monkeypatch.setattr(DatabaseWrapper, "get_new_connection", refuse)
    assert {message.id for message in run_checks(databases=[]) if str(message.id).startswith("alkstore.")} == {
        "alkstore.W001"
    }
    with pytest.raises(AssertionError, match="connected"):
        found()


def test_no_check_needs_a_folder_for_temporary_files(project: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", refuse)
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert ids() == []
    Path(project["NAME"]).unlink()
    assert ids() == []


def test_a_file_that_another_process_has_locked_is_not_waited_for(project: dict[str, Any]) -> None:
    del project["OPTIONS"]["init_command"]
    with closing(sqlite3.connect(project["NAME"], isolation_level=None)) as raw:
        raw.execute("BEGIN EXCLUSIVE")
        started = time.monotonic()
        ids()
        assert time.monotonic() - started < 10  # of 20 that the options allow


@pytest.mark.parametrize(
    ("command", "is_seen"),
    [(("check",), False), (("check", "--database", "default"), True), (("migrate", "--plan"), True),
     (("alkstore_prune",), True), (("run_queue", "no-such-queue"), True)],
)  # fmt: skip
def test_the_checks_that_connect_run_with_a_named_database_migrate_and_the_commands(
    manage: Any, tmp_path: Path, command: tuple[str, ...], is_seen: bool
) -> None:
    path = tmp_path / "db.sqlite3"
    sqlite3.connect(path).close()
    process = manage(
        *command, ALKSTORE_TEST_DATABASE=str(path), ALKSTORE_TEST_TIMEOUT="1", ALKSTORE_TEST_JOURNAL="delete"
    )
    process.wait()
    assert ("alkstore.W002" in process.output, "alkstore.W004" in process.output) == (is_seen, is_seen)


def looked_at(*databases: str) -> set[str]:
    messages = run_checks(databases=databases)
    return {word for message in messages if message.id == "alkstore.W004" for word in databases if word in message.msg}


def test_the_checks_that_connect_look_at_the_library_s_database_or_at_one_that_is_named_alone(
    project: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other.sqlite3"
    other.touch()
    monkeypatch.setitem(connections.settings["other"], "NAME", other)
    for alias in ("default", "other"):
        monkeypatch.setitem(connections.settings[alias], "OPTIONS", {"transaction_mode": "IMMEDIATE", "timeout": 1})
    assert looked_at("default", "other") == {"default"}
    assert looked_at("other") == {"other"}
    with override_settings(ALKSTORE={"DATABASE": "other"}):
        assert looked_at("default", "other") == {"other"}
    with override_settings(DATABASE_ROUTERS=[_OwnRouter()]):
        assert looked_at("other") == set()


class _OwnRouter:
    """Keeps the library's tables on the default database."""

    def allow_migrate(self, alias: str, app_label: str, **hints: Any) -> bool | None:
        return alias == "default" if app_label == "django_alkstore" else None


def test_f012_w003_atomic_requests_that_take_the_writer_lock(project: dict[str, Any]) -> None:
    project["ATOMIC_REQUESTS"] = True
    (message,) = found()
    assert message.id == "alkstore.W003"
    assert "ATOMIC_REQUESTS" in message.msg
    project["OPTIONS"]["transaction_mode"] = "DEFERRED"
    assert ids() == ["alkstore.W001"]


def test_f004_w004_goes_by_the_busy_timeout_that_a_connection_really_has(project: dict[str, Any]) -> None:
    project["OPTIONS"]["timeout"] = 1
    (message,) = found()
    assert message.id == "alkstore.W004"
    assert "1 s" in message.msg
    project["OPTIONS"]["timeout"] = 20
    project["OPTIONS"]["init_command"] += "PRAGMA busy_timeout=300;"
    (message,) = found()
    assert message.id == "alkstore.W004"
    assert "0.3 s" in message.msg


def test_several_faults_are_all_reported(project: dict[str, Any]) -> None:
    project["OPTIONS"] = {"timeout": 1}
    assert sorted(ids()) == ["alkstore.W001", "alkstore.W002", "alkstore.W004"]


def test_every_message_says_what_to_do(project: dict[str, Any]) -> None:
    project["OPTIONS"] = {"timeout": 1}
    project["ATOMIC_REQUESTS"] = True
    with override_settings(ALKSTORE={"NOPE": 1}):
        assert all(message.hint for message in found())


def test_a_database_that_cannot_be_opened_is_a_message_and_no_crash(project: dict[str, Any], tmp_path: Path) -> None:
    project["NAME"] = tmp_path / "no" / "such" / "folder" / "db.sqlite3"
    assert all(identity.startswith("alkstore.") for identity in ids())


def test_w005_a_database_that_cannot_be_read(project: dict[str, Any], tmp_path: Path) -> None:
    project["NAME"] = tmp_path  # a folder
    (message,) = found()
    assert message.id == "alkstore.W005"
    assert "unable to open" in message.msg


MOUNTS = """\
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
28 27 0:40 / /srv rw,relatime - nfs4 server:/srv rw,vers=4.2
29 28 254:1 / /srv/local rw,relatime - xfs /dev/vdb rw
30 27 254:0 /data/db.sqlite3 /app/db.sqlite3 rw,relatime shared:2 master:1 - ext4 /dev/vda rw
31 27 0:41 / /mnt/my\\040files rw,relatime - fuse.sshfs me@host:/ rw
32 27 0:42 / /mnt/fuse rw,relatime - fuse.gvfsd-fuse gvfsd rw
33 27 0:43 / /over rw,relatime - cifs //server/share rw
34 33 254:1 / /over rw,relatime - xfs /dev/vdb rw
35 27 0:44 /share/db.sqlite3 /app/remote.sqlite3 rw,relatime - 9p host rw
"""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/app/other.sqlite3", None),
        ("/app/db.sqlite3", "is itself a mount point"),
        ("/app/db.sqlite3-wal", None),
        ("/app/remote.sqlite3", "is on a file system of the type 9p"),
        ("/srv/db.sqlite3", "is on a file system of the type nfs4"),
        ("/srv/local/db.sqlite3", None),
        ("/srvx/db.sqlite3", None),
        ("/mnt/my files/db.sqlite3", "is on a file system of the type fuse.sshfs"),
        ("/mnt/fuse/db.sqlite3", None),
        ("/over/db.sqlite3", None),
    ],
)
def test_a_place_that_is_unfit_for_several_processes_is_known_by_the_mount_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, why: str | None
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    monkeypatch.setattr(file_access, "_MOUNTS", table)
    assert unfit_place(Path(path)) == why


def test_w006_a_database_file_that_is_a_mount_point(
    project: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"30 27 254:0 /db.sqlite3 {project['NAME']} rw - ext4 /dev/vda rw\n")
    monkeypatch.setattr(file_access, "_MOUNTS", table)
    (message,) = found()
    assert message.id == "alkstore.W006"
    assert f"The file {project['NAME']} of the database 'default' is itself a mount point." in message.msg
    assert "mount that folder" in str(message.hint)
    assert run_checks(tags=["alkstore"], databases=[]) == [], "only if a database is named"
    monkeypatch.setattr(file_access, "_MOUNTS", tmp_path / "nothing")
    assert ids() == []


def test_f136_e001_names_both_versions_before_any_query(
    project: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: DatabaseWrapper) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr(DatabaseWrapper, "connect", refuse)
    monkeypatch.setattr(DatabaseWrapper, "get_new_connection", refuse)
    monkeypatch.setattr(Database, "sqlite_version_info", (3, 34, 1))
    monkeypatch.setattr(Database, "sqlite_version", "3.34.1")
    (message,) = found()
    assert message.id == "alkstore.E001"
    assert message.is_serious()
    assert "3.34" in message.msg
    assert "3.35" in message.msg


@pytest.mark.parametrize("version", [(3, 35, 0), (3, 35, 5), (3, 53, 0), (4, 0, 0)])
def test_f136_exactly_the_minimum_passes(
    project: dict[str, Any], monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(Database, "sqlite_version_info", version)
    monkeypatch.setattr(Database, "sqlite_version", ".".join(map(str, version)))
    assert ids() == []


# The setting


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"NOPE": 1}, "NOPE"),
        ({"database": "default"}, "database"),
        ({3: 4}, "3"),
        ({"DATABASE": "nowhere"}, "DATABASE"),
        ({"DATABASE": 3}, "DATABASE"),
        ({"DATABASE": ""}, "DATABASE"),
        ({"DATABASE": ["default"]}, "DATABASE"),
        ({"JSON_ENCODER": "no.such.Encoder"}, "JSON_ENCODER"),
        ({"JSON_ENCODER": "json.JSONDecoder"}, "JSON_ENCODER"),
        ({"JSON_ENCODER": "nodots"}, "JSON_ENCODER"),
        ({"JSON_ENCODER": ""}, "JSON_ENCODER"),
        ({"JSON_ENCODER": json.JSONEncoder()}, "JSON_ENCODER"),
        ({"MAX_PAYLOAD_BYTES": 0}, "MAX_PAYLOAD_BYTES"),
        ({"MAX_PAYLOAD_BYTES": -1}, "MAX_PAYLOAD_BYTES"),
        ({"MAX_PAYLOAD_BYTES": "1 MiB"}, "MAX_PAYLOAD_BYTES"),
        ({"MAX_PAYLOAD_BYTES": True}, "MAX_PAYLOAD_BYTES"),
        ({"MAX_PAYLOAD_BYTES": None}, "MAX_PAYLOAD_BYTES"),
        ({"MAX_BACKOFF": -1}, "MAX_BACKOFF"),
        ({"MAX_BACKOFF": float("nan")}, "MAX_BACKOFF"),
        ({"MAX_BACKOFF": None}, "MAX_BACKOFF"),
        ({"KEEP_COMPLETED": -1}, "KEEP_COMPLETED"),
        ({"KEEP_COMPLETED": "1 day"}, "KEEP_COMPLETED"),
        ({"KEEP_COMPLETED": float("inf")}, "KEEP_COMPLETED"),
        ({"KEEP_DEAD": False}, "KEEP_DEAD"),
        ({"QUEUES": ["mail"]}, "QUEUES"),
        ({"QUEUES": {"no name": {}}}, "QUEUES"),
        ({"QUEUES": {"__alkstore_outbox:mail": {}}}, "QUEUES"),
        ({"QUEUES": {"outbox:no name": {}}}, "outbox:no name"),
        ({"QUEUES": {"outbox:": {}}}, "outbox:"),
        ({"QUEUES": {"outbox:mail": {"max_attempts": 0}}}, "max_attempts"),
        ({"BACKOFF_JITTER": -0.1}, "BACKOFF_JITTER"),
        ({"BACKOFF_JITTER": 10}, "BACKOFF_JITTER"),
        ({"BACKOFF_JITTER": None}, "BACKOFF_JITTER"),
        ({"QUEUES": {"mail": 3}}, "mail"),
        ({"QUEUES": {"mail": {"nope": 1}}}, "nope"),
        ({"QUEUES": {"mail": {"max_attempts": 0}}}, "max_attempts"),
        ({"QUEUES": {"mail": {"visibility_timeout": 0}}}, "visibility_timeout"),
        ({"QUEUES": {"mail": {"backoff_base": -1}}}, "backoff_base"),
        ({"QUEUES": {"mail": {"expires_in": 0}}}, "expires_in"),
        ([("DATABASE", "default")], "ALKSTORE"),
        ("default", "ALKSTORE"),
        (None, "ALKSTORE"),
    ],
)
def test_e002_names_an_unknown_key_or_a_wrong_value(project: dict[str, Any], setting: Any, named: str) -> None:
    with override_settings(ALKSTORE=setting):
        (message,) = [message for message in found() if message.id == "alkstore.E002"]
        assert message.is_serious()
        assert named in message.msg
        assert "README" in (message.hint or "")
    assert ids() == []  # read when it is used


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            {"MAX_BACKOF": 1},
            "ALKSTORE has an unknown key 'MAX_BACKOF'. Did you mean 'MAX_BACKOFF'? It takes DATABASE, ",
        ),
        ({"keep_dead": 1}, "unknown key 'keep_dead'. Did you mean 'KEEP_DEAD'?"),
        (
            {"QUEUES": {"mail": {"max_attempt": 1}}},
            "'max_attempt'. Did you mean 'max_attempts'? It takes backoff_base, ",
        ),
        ({"ZZZ": 1}, "ALKSTORE has an unknown key 'ZZZ'. It takes DATABASE, "),
        ({3: 1}, "ALKSTORE has an unknown key 3. It takes DATABASE, "),
        ({"DATABASE": "nowhere"}, "must be an alias in DATABASES ('default', 'other') or None, not 'nowhere'"),
        ({"KEEP_DEAD": "1 day"}, "ALKSTORE['KEEP_DEAD'] must be a number of seconds or a timedelta, not '1 day'"),
    ],
)
def test_e002_says_what_is_wrong_what_is_right_and_what_may_have_been_meant(
    project: dict[str, Any], setting: Any, said: str
) -> None:
    with override_settings(ALKSTORE=setting):
        (message,) = found()
        assert said in message.msg


def test_e002_reports_each_fault(project: dict[str, Any]) -> None:
    with override_settings(ALKSTORE={"NOPE": 1, "MAX_BACKOFF": -1, "KEEP_DEAD": 5}):
        assert ids().count("alkstore.E002") == 2


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"DATABASE": "default"},
        {"JSON_ENCODER": "django.core.serializers.json.DjangoJSONEncoder"},
        {"MAX_PAYLOAD_BYTES": 10, "MAX_BACKOFF": 60, "KEEP_COMPLETED": 0, "KEEP_DEAD": 86_400.5},
        {"KEEP_COMPLETED": None, "KEEP_DEAD": None},
        {"BACKOFF_JITTER": 0},
        {"BACKOFF_JITTER": 1},
        {"QUEUES": {"outbox:mail": {"max_attempts": 12, "backoff_base": 30}, "outbox:a:b": {}}},
        {"QUEUES": {"mail": {"visibility_timeout": 1, "max_attempts": 1, "backoff_base": 0, "expires_in": None}}},
    ],
)
def test_a_setting_that_is_right_gives_no_message(project: dict[str, Any], setting: Any) -> None:
    with override_settings(ALKSTORE=setting):
        assert ids() == []


# In a process of their own


def test_e003_a_module_that_cannot_be_imported(manage: Any, tmp_path: Path) -> None:
    environment = variant(EXTRA_APPS=["tests.ledger.broken", "tests.ledger.importer"])
    process = manage("check", ALKSTORE_TEST_DATABASE=str(tmp_path / "db.sqlite3"), **environment)
    assert process.wait() == 1
    for module, error in (("broken", "broken at import"), ("importer", "broken after its imports")):
        (line,) = [line for line in process.lines if "alkstore.E003" in line and f"tests.ledger.{module}." in line]
        assert error in line


def test_e004_a_database_other_than_sqlite(manage: Any) -> None:
    databases = {"default": {"ENGINE": "tests.ledger.elsewhere"}}
    process = manage("check", **variant(DATABASES=databases))
    assert process.wait() == 1
    (line,) = [line for line in process.lines if "alkstore." in line]
    assert "alkstore.E004" in line
    assert "elsewhere" in line


def test_the_checks_are_about_the_database_that_the_setting_names(manage: Any) -> None:
    databases = {
        "default": {"ENGINE": "tests.ledger.elsewhere"},
        "work": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:", "OPTIONS": RECOMMENDED},
    }
    process = manage("check", **variant(DATABASES=databases, ALKSTORE={"DATABASE": "work"}))
    assert process.wait() == 0, process.output
    assert "alkstore." not in process.output


def test_a_wrong_setting_is_named_by_the_commands_too(manage: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "db.sqlite3")
    process = manage("run_queue", ALKSTORE_TEST_DATABASE=path, **variant(ALKSTORE={"NOPE": 1}))
    assert process.wait() != 0
    assert "NOPE" in process.output
    assert "worker started" not in process.output


def test_an_app_that_is_made_ready_again_is_still_checked_once(project: dict[str, Any]) -> None:
    apps.get_app_config("django_alkstore").ready()
    with override_settings(ALKSTORE={"NOPE": 1}):
        assert ids() == ["alkstore.E002"]


def test_w005_a_transaction_mode_that_there_is_not(project: dict[str, Any]) -> None:
    project["OPTIONS"]["transaction_mode"] = "NOPE"
    (message,) = [message for message in found() if message.id == "alkstore.W005"]
    assert "transaction_mode" in message.msg
