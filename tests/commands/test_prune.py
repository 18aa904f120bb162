"""`alkstore_prune` with its options, and the service behind it."""

from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from django_alkstore.ages import parse_age
from django_alkstore.clock import ManualClock
from django_alkstore.exceptions import InvalidName, InvalidOption, ReservedName
from django_alkstore.models import Job
from django_alkstore.services import cancel, claim_batch, delete_finished, enqueue, enqueue_many, outbox
from django_alkstore.services.maintenance import PRUNE_BATCH

pytestmark = pytest.mark.django_db


def run(*arguments: str) -> str:
    out = StringIO()
    call_command("alkstore_prune", *arguments, stdout=out)
    return out.getvalue()


def left() -> list[tuple[str, str]]:
    return sorted(Job.objects.values_list("queue", "state"))


def one_of_each(*queues: str) -> None:
    """In each queue one job of each state."""
    for queue in queues:
        enqueue_many(queue, [None] * 3)
        handles = claim_batch(queue, "w", 3)
        handles[0].ack()
        handles[1].fail("no")
        enqueue(queue, None)
        cancel(enqueue(queue, None, delay=60).id)


LIVE = ["pending", "processing"]


def test_a_state_of_a_queue_is_deleted(clock: ManualClock) -> None:
    one_of_each("gone", "mail")
    before = left()
    shown = run("--queue", "gone", "--state", "dead")
    assert left() == [row for row in before if row != ("gone", "dead")]
    assert "dead       removed        1" in shown


def test_a_queue_without_a_state_loses_what_is_finished_and_nothing_live(clock: ManualClock) -> None:
    one_of_each("gone", "mail")
    run("--queue", "gone")
    assert [state for queue, state in left() if queue == "gone"] == LIVE
    assert len([queue for queue, _ in left() if queue == "mail"]) == 5


def test_only_what_finished_that_long_ago_is_deleted(clock: ManualClock) -> None:
    one_of_each("old")
    clock.advance(3_600)
    one_of_each("new")
    run("--older-than", "61m")
    assert len(left()) == 10
    run("--older-than", "1h")
    assert [state for queue, state in left() if queue == "old"] == LIVE
    assert len([queue for queue, _ in left() if queue == "new"]) == 5


def test_an_outbox_is_named_with_its_prefix(clock: ManualClock) -> None:
    enqueue("hooks", None)
    outbox("hooks").enqueue(None)
    Job.objects.update(state="dead", finished_at=clock.now())
    run("--queue", "outbox:hooks", "--state", "dead")
    assert left() == [("hooks", "dead")]


def test_an_outbox_without_its_prefix_is_refused_and_its_full_name_is_said(clock: ManualClock) -> None:
    outbox("hooks").enqueue(None)
    Job.objects.update(state="dead", finished_at=clock.now())
    with pytest.raises(CommandError, match="no job is in a queue 'hooks'; for the outbox, write --queue outbox:hooks"):
        run("--queue", "hooks")
    assert left() == [("__alkstore_outbox:hooks", "dead")]
    enqueue("hooks", None)
    Job.objects.filter(queue="hooks").update(state="dead", finished_at=clock.now())
    run("--queue", "hooks")
    assert left() == [("__alkstore_outbox:hooks", "dead")]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--queue", "a b"),
        ("--state", "pending"),
        ("--older-than", "soon"),
        ("--older-than", "-1"),
        ("--older-than", "5"),
        ("--queue", ""),
    ],
)
def test_a_wrong_option_is_refused_and_nothing_is_deleted(clock: ManualClock, arguments: tuple[str, ...]) -> None:
    one_of_each("mail")
    before = left()
    with pytest.raises(CommandError):
        run(*arguments)
    assert left() == before


def test_the_service_takes_the_names_that_the_command_takes(clock: ManualClock) -> None:
    enqueue("hooks", None)
    outbox("hooks").enqueue(None)
    Job.objects.update(state="dead", finished_at=clock.now())
    assert delete_finished(queue="outbox:hooks")["dead"] == 1
    assert left() == [("hooks", "dead")]
    with pytest.raises(InvalidName, match="outbox name is empty"):
        delete_finished(queue="outbox:")
    with pytest.raises(ReservedName):
        delete_finished(queue="__alkstore_outbox:hooks")


def test_many_are_deleted_in_batches(clock: ManualClock) -> None:
    enqueue_many("mail", [None] * (2 * PRUNE_BATCH + 1))
    Job.objects.update(state="dead", finished_at=clock.now())
    statements = []

    def keep(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        if sql.startswith("DELETE"):
            statements.append(sql)
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(keep):
        assert delete_finished(queue="mail", state="dead") == {"dead": 2 * PRUNE_BATCH + 1}
    assert len(statements) == 3
    assert not Job.objects.exists()


def test_what_is_requeued_while_a_batch_is_being_deleted_stays(clock: ManualClock) -> None:
    from django_alkstore.services.maintenance import delete_batch

    job_id = enqueue("mail", None).id
    assert delete_batch("default", [job_id]) == 0
    assert left() == [("mail", "pending")]


@pytest.mark.parametrize("options", [{"state": "pending"}, {"older_than": -1}, {"older_than": float("nan")}])
def test_the_service_refuses_a_wrong_option(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        delete_finished(**options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90s", 90), ("15m", 900), ("15 min", 900), ("12h", 43_200), (" 30d ", 2_592_000)],
)
def test_a_duration_is_read(text: str, expected: float) -> None:
    assert parse_age(text) == expected


@pytest.mark.parametrize("text", ["", "90", "d", "1.5h", "-1", "1w", "٣", "1e3", "9" * 30])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_age(text)
