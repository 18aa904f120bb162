"""Failures that people have met in systems like this one, where no other test was named after them.

Each is named after its entry in docs/known-failures.md, which names the tests of all the others too.
"""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.checks import run_checks
from django.db import connection, connections, transaction
from django.test import Client, override_settings
from django.urls import reverse

from django_alkstore import services
from django_alkstore.clock import ManualClock
from django_alkstore.models import Job
from django_alkstore.runtime.perform import tidy_connections
from tests.ledger.models import Entry
from tests.ledger.tools import database, row, variant, wait_for_state
from tests.processes import Process, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]
HANDLERS = variant(EXTRA_APPS=["tests.known"])


def assert_quiet(*processes: Process) -> None:
    """No error, and no complaint of a lock, reached a log line."""
    for process in processes:
        for word in ("ERROR", "locked", "Traceback"):
            assert word not in process.output, process.output


def test_f004_options_beside_instead_of_inside_are_seen_by_what_the_connection_really_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = connections.settings["default"]
    for key, value in {"NAME": tmp_path / "db.sqlite3", "OPTIONS": {}, "timeout": 20}.items():
        monkeypatch.setitem(settings, key, value)
    monkeypatch.setitem(settings, "transaction_mode", "IMMEDIATE")
    monkeypatch.setitem(settings, "init_command", "PRAGMA journal_mode=WAL")
    sqlite3.connect(tmp_path / "db.sqlite3").close()
    messages = run_checks(databases=["default"])
    found = {message.id: message for message in messages if str(message.id).startswith("alkstore.")}
    assert set(found) == {"alkstore.W001", "alkstore.W002"}  # Django's own 5 s are the documented minimum
    assert all("OPTIONS" in (message.hint or "") for message in found.values())
    monkeypatch.setitem(settings, "OPTIONS", {"timeout": 1})
    assert "alkstore.W004" in {message.id for message in run_checks(databases=["default"])}


APP = """
import sys
from django.db import transaction
from django_alkstore.services import enqueue, outbox_enqueue_tx
from tests.ledger.models import Entry
print("ready", flush=True)
sys.stdin.readline()
for number in range(60):
    with transaction.atomic():
        Entry.objects.create(text="order")
        outbox_enqueue_tx("mail", "sent")
    enqueue("record", "done")
print("written", flush=True)
"""

PRUNE = """
import sys, threading
from django_alkstore.services import prune
print("ready", flush=True)
sys.stdin.readline()
for _ in range(40):
    prune()
    threading.Event().wait(0.02)
print("pruned", flush=True)
"""


def test_f005_each_kind_of_process_and_an_app_write_one_file_without_a_lock_error(start: Start) -> None:
    services.schedule("often", "@every 1s", "noop")
    runners = [start("run_queue", "noop", "record"), start("run_outbox", "mail"), start("run_schedules")]
    app, prune = start("-c", APP), start("-c", PRUNE)
    for process in (app, prune):
        process.wait_for("ready")
    runners[2].wait_for("fired often")
    for process in (app, prune):
        process.tell("go")
    assert (app.wait(), prune.wait()) == (0, 0)
    mine = Job.objects.exclude(schedule="often")
    wait_until(lambda: mine.filter(state="completed").count() == 120, "all is done")
    for process in runners:
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert set(mine.values_list("state", "attempts")) == {("completed", 1)}
    for text in ("order", "sent", "done"):
        assert Entry.objects.filter(text=text).count() == 60
    assert_quiet(app, prune, *runners)


SLOW_READERS = """
import sys, threading
from django.db import connections, transaction
from tests.ledger.models import Entry
def view():
    for _ in range(4):
        with transaction.atomic():  # what ATOMIC_REQUESTS makes of a view that only reads
            Entry.objects.count()
            threading.Event().wait(0.02)
    connections.close_all()
print("ready", flush=True)
sys.stdin.readline()
threads = [threading.Thread(target=view) for _ in range(10)]
for thread in threads: thread.start()
print("reading", flush=True)
for thread in threads: thread.join()
print("read", flush=True)
"""


def test_f012_workers_drain_a_queue_beside_requests_that_take_the_writer_lock(start: Start) -> None:
    requests = start("-c", SLOW_READERS)
    requests.wait_for("ready")
    ids = services.enqueue_many("noop", [None] * 150)
    requests.tell("go")
    requests.wait_for("reading")
    workers = [start("run_queue", "noop"), start("run_queue", "noop")]
    wait_for_state("completed", *ids)
    assert set(Job.objects.values_list("attempts", flat=True)) == {1}
    assert requests.wait() == 0
    assert_quiet(requests, *workers)


def test_f013_the_job_list_is_looked_at_again_and_again_while_a_worker_works(start: Start) -> None:
    browser = Client()
    browser.force_login(User.objects.create_superuser("root"))
    ids = services.enqueue_many("noop", [None] * 500)
    worker = start("run_queue", "noop")
    looks = 0
    while Job.objects.exclude(state="completed").exists() or not looks:
        assert browser.get(reverse("admin:django_alkstore_job_changelist")).status_code == 200
        looks += 1
    assert sorted(Job.objects.filter(state="completed", attempts=1).values_list("id", flat=True)) == ids
    assert_quiet(worker)


@pytest.mark.parametrize("mode", ["", "DEFERRED", "IMMEDIATE", "EXCLUSIVE"])
def test_f015_a_drain_is_exact_in_every_transaction_mode(start: Start, mode: str) -> None:
    ids = services.enqueue_many("ledger", [f"job {number}" for number in range(80)])
    workers = [start("run_queue", "ledger", ALKSTORE_TEST_TRANSACTION_MODE=mode) for _ in range(2)]
    wait_for_state("completed", *ids)
    assert sorted(Entry.objects.values_list("job_id", flat=True)) == ids
    assert set(Job.objects.values_list("attempts", flat=True)) == {1}
    assert not any(" ERROR " in worker.output for worker in workers)


@contextmanager
def an_ack_before_each_statement(job_id: int) -> Iterator[Callable[[], bool]]:
    """The owner acks on another connection, as soon as the lock lets it; yields whether it could."""
    other = sqlite3.connect(database(), timeout=0, isolation_level=None)
    acked = False

    def interfere(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal acked
        if not acked and started:
            try:
                answer = other.execute(
                    "UPDATE django_alkstore_job SET state = 'completed', worker_id = NULL, lease_expires_at = NULL, "
                    "finished_at = 1 WHERE id = ? AND state = 'processing'",
                    (job_id,),
                )
                acked = answer.rowcount == 1
            except sqlite3.OperationalError:
                pass  # the sweep has the lock: nothing comes between its look and its update
        started.append(sql)
        return execute(sql, params, many, context)

    started: list[str] = []
    with closing(other), connection.execute_wrapper(interfere):
        yield lambda: acked


def test_f022_no_ack_comes_between_what_a_sweep_has_seen_and_what_it_does(clock: ManualClock) -> None:
    job = services.enqueue("mail", None, visibility_timeout=1)
    services.claim_batch("mail", "w")
    clock.advance(2)
    with an_ack_before_each_statement(job.pk) as acked:
        swept = services.sweep("mail")
    assert (swept, acked()) in ((1, False), (0, True))
    assert row(job.pk).state == ("completed" if acked() else "pending")
    assert len(row(job.pk).errors) == swept


UPKEEP = """
import sys
from django.core.management import call_command
from django_alkstore.services import maintenance
maintenance.UPKEEP_INTERVAL = 0.5
call_command(*sys.argv[1:])
"""


def test_f029_a_worker_whose_every_thread_is_busy_still_puts_right_what_has_lapsed(
    start: Start, tmp_path: Path
) -> None:
    blocked = services.enqueue("blocks", str(tmp_path / "open"), priority=9)
    worker = start("-c", UPKEEP, "run_queue", "blocks", "noop", "--concurrency", "1", **HANDLERS)
    wait_until(lambda: Entry.objects.filter(text="blocked").exists(), "the only thread is taken")
    orphan = services.enqueue("noop", None, max_attempts=1, visibility_timeout=1)
    assert services.claim_batch("noop", "ghost")
    wait_for_state("dead", orphan.pk)
    assert row(orphan.pk).last_error == "lease expired"
    assert row(blocked.pk).state == "processing"
    (tmp_path / "open").touch()
    wait_for_state("completed", blocked.pk)
    assert worker.popen.poll() is None


def own_process_ids() -> bool:
    """May this user start a process that is number 1 among its own?"""
    try:
        tried = subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, timeout=20, check=False)
    except FileNotFoundError:
        return False
    return tried.returncode == 0


def test_f039_as_process_1_it_gets_the_stop_signal_and_ends_with_status_0(start: Start) -> None:
    """Process 1 gets no signal that it does not handle, and no shell stands before it in the documented container."""
    if not own_process_ids():
        pytest.skip("needs a process id namespace")
    code = """
import os, sys
os.execvp("unshare", ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", "django", "run_alkstore"])
"""
    outer = start("-c", code)
    outer.wait_for("pid 1")  # as it sees itself
    (worker,) = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _is_first(entry) and _descends_from(int(entry.name), outer.pid)
    ]
    os.kill(worker, signal.SIGTERM)
    outer.wait_for("worker stopped")
    assert outer.wait() == 0
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert 'CMD ["python", "manage.py", "run_alkstore"' in readme


def _status(entry: Path) -> dict[str, str]:
    try:
        lines = (entry / "status").read_text().splitlines()
    except OSError:  # it has ended meanwhile
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _is_first(entry: Path) -> bool:
    ids = _status(entry).get("NSpid", "").split()
    return len(ids) > 1 and ids[-1] == "1"


def _descends_from(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(_status(Path(f"/proc/{pid}")).get("PPid", "0"))
    return False


def test_f041_a_handler_that_forks_leaves_both_processes_able_to_query(start: Start) -> None:
    job = services.enqueue("forks", None, max_attempts=1)
    start("run_queue", "forks", "record", **HANDLERS)
    wait_for_state("completed", job.pk)
    assert list(Entry.objects.order_by("id").values_list("text", flat=True)) == ["before", "child", "after"]
    following = services.enqueue("record", "next")
    wait_for_state("completed", following.pk)


def test_f041_a_fork_waits_until_the_worker_is_in_no_transaction(start: Start) -> None:
    job = services.enqueue("forks_meanwhile", None, max_attempts=1)
    worker = start("run_queue", "forks_meanwhile", "record", **HANDLERS)
    wait_for_state("completed", job.pk)
    # A child that was born with the loop's lock would wait for it as long as its busy timeout is, and then give up.
    assert Entry.objects.filter(text="child").count() == 1, worker.output


@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_f041_a_child_that_falls_through_an_atomic_handler_writes_nothing(start: Start, ending: str) -> None:
    job = services.enqueue("falls_through", ending, max_attempts=1)
    worker = start("run_queue", "falls_through", **HANDLERS)
    worker.wait_for(f"job {job.pk}")
    assert f"completed job {job.pk}" in worker.output  # by its parent
    assert row(job.pk).state == "completed"
    assert Entry.objects.count() == 1
    with closing(sqlite3.connect(database())) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_f034_whoever_hears_that_the_worker_stopped_hears_it_before_jobs_are_given_back(
    start: Start, tmp_path: Path
) -> None:
    """However long that one takes: nobody else runs what the process still does."""
    job = services.enqueue("blocks", str(tmp_path / "never"))
    worker = start("run_queue", "blocks", "--grace", "0", **HANDLERS)
    wait_until(lambda: Entry.objects.filter(text="blocked").exists(), "it runs")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 1
    assert "states at the stop: ['processing']" in worker.output
    assert row(job.pk).state == "pending"


def test_f052_a_worker_never_runs_a_job_before_its_commit_nor_after_a_rollback(start: Start) -> None:
    worker = start("run_queue", "finds", **HANDLERS)
    worker.wait_for("worker started")
    kept = []
    for number in range(60):
        with transaction.atomic():
            entry = Entry.objects.create(text="order")
            job = services.enqueue("finds", entry.pk, max_attempts=1)
            threading.Event().wait(0.01)
            if number % 2:
                transaction.set_rollback(True)
            else:
                kept.append(job.pk)
    wait_for_state("completed", *kept)
    assert Job.objects.count() == Entry.objects.count() == 30
    assert Entry.objects.filter(job_id__isnull=False).count() == 30
    assert_quiet(worker)


class ToWork:
    """Sends the library's models to another database."""

    def db_for_read(self, model: Any, **_: Any) -> str | None:
        return "other" if model._meta.app_label == "django_alkstore" else None

    db_for_write = db_for_read


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_f063_every_command_works_where_the_default_database_has_no_table_of_the_library(
    start: Start, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.sqlite3"
    with closing(sqlite3.connect(database())) as source, closing(sqlite3.connect(bare)) as copy:
        source.backup(copy)
        for (table,) in copy.execute("SELECT name FROM sqlite_master WHERE name GLOB 'django_alkstore_*'").fetchall():
            if "_idx" not in table and "sqlite_" not in table:
                copy.execute(f"DROP TABLE IF EXISTS {table}")
    elsewhere = variant(
        DATABASE_ROUTERS=["tests.known.test_known.ToWork"],
        OTHER_DATABASE=str(connections["other"].settings_dict["NAME"]),
    )
    environment = {**elsewhere, "ALKSTORE_TEST_DATABASE": str(bare)}
    with override_settings(DATABASE_ROUTERS=[ToWork()]):
        job = services.enqueue("noop", None)
        mail = services.outbox("mail").enqueue("x")
        services.schedule("often", "@every 1s", "noop")
        process = start("run_alkstore", **environment)
        wait_for_state("completed", job.pk, mail.pk)
        process.wait_for("fired often")
        for command in (("alkstore_status", "--json"), ("alkstore_prune",), ("check",)):
            assert start(*command, **environment).wait() == 0
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert "no such table" not in process.output
    assert "Traceback" not in process.output


def test_f107_a_name_of_every_allowed_character_is_taken_by_the_command_line(start: Start) -> None:
    name = "a/b:c@x+y-z._1"
    job = services.enqueue(name, None)
    start("run_queue", name, **HANDLERS).wait_for(f"worker started: queue {name}")
    wait_for_state("completed", job.pk)


def test_f111_the_file_levels_off_where_what_is_finished_is_pruned(clock: ManualClock) -> None:
    def pages() -> int:
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA page_count")
            return int(cursor.fetchone()[0])

    sizes = []
    for _ in range(8):
        services.enqueue_many("mail", ["x" * 200] * 1_000)
        Job.objects.update(state="completed", finished_at=clock.now())
        clock.advance(90_000)
        assert services.prune()["completed"] == 1_000
        sizes.append(pages())
    assert max(sizes[2:]) <= sizes[1] * 1.1


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize(("age", "kept"), [(0, False), (3_600, True), (None, True)])
def test_f115_the_age_of_a_connection_is_looked_at_between_two_jobs(
    monkeypatch: pytest.MonkeyPatch, age: int | None, kept: bool
) -> None:
    """Of each but that to the jobs' own file, at whose other end nobody lets go."""
    for each in (connections["default"], connections["other"]):
        monkeypatch.setitem(each.settings_dict, "CONN_MAX_AGE", age)
        each.close()
        Entry.objects.using(each.alias).count()  # what a handler does
    assert tidy_connections("default") is False
    assert connections["default"].connection is not None
    assert (connections["other"].connection is not None) is kept


def _resident(process: Process) -> int:
    """Bytes of memory that the process has."""
    return int(_status(Path(f"/proc/{process.pid}"))["VmRSS"].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("debug", [False, True], ids=["plain", "DEBUG"])
def test_f119_thousands_of_jobs_and_ticks_leave_the_memory_as_it_was(start: Start, debug: bool) -> None:
    services.schedule("often", "@every 1s", "noop")
    process = start("run_alkstore", "-v", "0", **variant(DEBUG=debug))

    def work(count: int) -> None:
        ids = [*services.enqueue_many("noop", [None] * count), services.outbox("mail").enqueue("x").pk]
        wait_until(lambda: not Job.objects.filter(pk__in=ids[-1:]).live().exists(), "the last is done")
        wait_until(lambda: not Job.objects.live().filter(schedule__isnull=True).exists(), "all are done")

    work(1_500)
    before = _resident(process)
    work(3_000)
    assert _resident(process) - before < 20 * 2**20
