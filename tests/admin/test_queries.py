"""What the lists ask of the database: few statements, none that writes, none that walks the table."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from django_alkstore import services
from django_alkstore.clock import ManualClock
from django_alkstore.models import Job
from tests.admin.conftest import URL
from tests.admin.test_lists import PAGES

pytestmark = pytest.mark.django_db

READING = {"SELECT", "SAVEPOINT", "RELEASE"}

WALKING = {"", "?all=", "?o=1", "?o=-1", "?o=99"}
"""The lists of everything, along the primary key and with a limit."""


def test_as_many_queries_for_200_rows_as_for_100(admin: Client) -> None:
    def fill(start: int) -> None:
        for n in range(start, start + 100):
            services.enqueue(f"queue-{n % 7}", {}, unique_key=f"key-{n}")
            services.schedule(f"schedule-{n}", "@every 1h", "reports")
            services.lock(f"lock-{n}").acquire()

    urls = [f"{URL}{model}/?all=" for model in ("job", "schedule", "lock")] + [f"{URL}job/?all=&q=queue"]
    counts: list[list[int]] = []
    for start in (0, 100):
        fill(start)
        counts.append([])
        for url in urls:
            with CaptureQueriesContext(connection) as captured:
                response = admin.get(url)
            assert len(response.context["cl"].result_list) == start + 100
            counts[-1].append(len(captured))
    assert counts[0] == counts[1]
    assert max(counts[0]) <= 10, counts


@contextmanager
def statements() -> Iterator[list[tuple[str, Any]]]:
    """Each statement with its parameters."""
    seen: list[tuple[str, Any]] = []

    def keep(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        seen.append((sql, parameters))
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(keep):
        yield seen


@pytest.mark.parametrize("url", PAGES)
def test_listing_only_reads(admin: Client, every_state: Callable[[], dict[str, Job]], url: str) -> None:
    every_state()
    with statements() as seen:
        admin.get(url)
    assert [sql for sql, _ in seen if sql.split()[0] not in READING] == []


def test_looking_at_a_job_only_reads(admin: Client, every_state: Callable[[], dict[str, Job]]) -> None:
    for job in every_state().values():
        with statements() as seen:
            assert admin.get(f"{URL}job/{job.pk}/change/").status_code == 200
        assert {sql.split()[0] for sql, _ in seen} <= READING


@pytest.fixture
def big(db: None, clock: ManualClock) -> None:
    """Enough of each state that the planner's choice matters."""
    for state in ("completed", "dead", "cancelled"):
        services.enqueue_many("mail", [{}] * 300)
        Job.objects.filter(state="pending").update(state=state, finished_at=clock.now())
    services.enqueue_many("mail", [{}] * 300)
    services.claim_batch("mail", "w", 100)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


def plan(sql: str, parameters: Any) -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN QUERY PLAN {sql}", parameters)
        return [row[3] for row in cursor.fetchall()]


JOB_LISTS = [url for url in PAGES if url.startswith(f"{URL}job/")]


@pytest.mark.parametrize("extra", ["", "p=2"])
@pytest.mark.parametrize("url", JOB_LISTS)
def test_no_list_walks_the_table(admin: Client, big: None, url: str, extra: str) -> None:
    query = url.removeprefix(f"{URL}job/")
    with statements() as seen:
        admin.get(f"{url}{'&' if '?' in url else '?'}{extra}")
    asked = [(sql, parameters) for sql, parameters in seen if "django_alkstore_job" in sql]
    assert asked
    for sql, parameters in asked:
        for step in plan(sql, parameters):
            if not step.startswith("SCAN django_alkstore_job"):
                continue
            partial = "USING COVERING INDEX" in step or "USING INDEX" in step
            limited = query in WALKING and "LIMIT" in sql and "WHERE" not in sql
            assert partial or limited, (step, sql)
