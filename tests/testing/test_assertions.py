"""`assert_enqueued` and `assert_nothing_enqueued`: what they count, and what they say."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from django_alkstore.exceptions import InvalidName, InvalidOption, InvalidPayload
from django_alkstore.registry import delivery, handler
from django_alkstore.services import JobHandle, enqueue, enqueue_many, outbox
from django_alkstore.testing import assert_enqueued, assert_nothing_enqueued, isolated_registry, run_pending
from django_alkstore.testing.assertions import ANY, _Wanted

pytestmark = pytest.mark.django_db


def failure(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as raised:
        call(*args, **kwargs)
    return re.sub(r"job \d+", "job N", str(raised.value))


def test_a_job_that_was_enqueued_is_found_and_returned() -> None:
    first, second, _ = enqueue("mail", {"to": "ada"}), enqueue("mail", {"to": "bob"}), enqueue("other", None)
    assert [job.pk for job in assert_enqueued("mail")] == [first.pk, second.pk]
    assert [job.pk for job in assert_enqueued("mail", payload={"to": "bob"})] == [second.pk]
    assert len(assert_enqueued("mail", count=2)) == 2
    assert len(assert_enqueued("mail", payload={"to": "bob"}, count=1)) == 1
    assert assert_enqueued("mail", payload={"to": "eve"}, count=0) == []


def test_the_failure_shows_what_was_enqueued() -> None:
    enqueue("mail", {"to": "ada"})
    outbox("letters").enqueue([1, 2])
    assert failure(assert_enqueued, "mail", payload={"to": "bob"}, count=1) == (
        "expected 1 of queue mail with payload {'to': 'bob'}, found 0. Enqueued:\n"
        "  job N in queue mail, pending: {'to': 'ada'}\n"
        "  job N in outbox letters, pending: [1, 2]"
    )


def test_the_failure_says_that_nothing_was_enqueued() -> None:
    assert failure(assert_enqueued, "mail") == "expected at least one of queue mail, found 0. Nothing was enqueued."


def test_a_long_list_and_a_long_payload_are_cut() -> None:
    enqueue_many("mail", ["x" * 1_000] * 30)
    said = failure(assert_enqueued, "mail", count=1)
    assert "found 30" in said
    assert said.endswith("  and 10 more")
    assert max(map(len, said.splitlines())) < 300


def test_the_count_must_be_exact() -> None:
    enqueue_many("mail", [1, 2])
    for count in (0, 1, 3):
        assert f"expected {count} of queue mail, found 2" in failure(assert_enqueued, "mail", count=count)


def test_a_payload_is_compared_as_it_is_stored() -> None:
    enqueue("mail", {"a": (1, 2)})
    assert_enqueued("mail", payload={"a": (1, 2)})
    assert_enqueued("mail", payload={"a": [1, 2]})
    with pytest.raises(InvalidPayload):
        assert_enqueued("mail", payload={"a": {1, 2}})


def test_none_is_a_payload_and_true_is_not_one() -> None:
    enqueue("mail", [1, {"n": 0}])
    for payload in (None, [True, {"n": 0}], [1, {"n": False}], [1], [1, {}]):
        failure(assert_enqueued, "mail", payload=payload)
    enqueue("mail", None)
    assert len(assert_enqueued("mail", payload=None)) == 1


def test_outboxes_are_named_as_in_the_settings_or_given() -> None:
    enqueue("letters", "queue")
    outbox("letters").enqueue("outbox")
    for target in ("outbox:letters", outbox("letters")):
        assert [job.payload for job in assert_enqueued(target, count=1)] == ["outbox"]
    assert [job.payload for job in assert_enqueued("letters", count=1)] == ["queue"]


def test_jobs_that_have_run_count() -> None:
    with isolated_registry():
        handler("mail")(lambda job: None)
        enqueue("mail", None)
        run_pending()
    assert assert_enqueued("mail", count=1)[0].state == "completed"


def test_a_registered_handler_stands_for_its_queue() -> None:
    with isolated_registry():

        @handler("mail")
        def mail(job: JobHandle) -> None:
            pass

        @delivery("letters")
        def letters(job: JobHandle) -> None:
            pass

        mail.enqueue(1)
        letters.enqueue(2)
        assert [job.payload for job in assert_enqueued(mail, count=1)] == [1]
        assert [job.payload for job in assert_enqueued(letters, count=1)] == [2]
        assert "expected no job, queue mail." in failure(assert_nothing_enqueued, mail)


def test_anything_with_a_queue_is_a_target_and_nothing_else_is() -> None:
    enqueue("mail", 1)
    assert_enqueued(SimpleNamespace(queue="mail"), payload=1)
    for target in (None, 1, object(), print):
        with pytest.raises(InvalidOption, match="a queue, an outbox, a registered handler or a task"):
            assert_enqueued(target)
    with pytest.raises(InvalidName):
        assert_enqueued("no name")
    with pytest.raises(InvalidOption, match="a task"):
        assert_enqueued("mail", args=[1])


def test_nothing_enqueued() -> None:
    assert_nothing_enqueued()
    enqueue("mail", 1)
    assert_nothing_enqueued("other", outbox("mail"))
    assert failure(assert_nothing_enqueued) == "expected no job. Enqueued:\n  job N in queue mail, pending: 1"
    assert "expected no job, queue other, queue mail." in failure(assert_nothing_enqueued, "other", "mail")


@pytest.mark.django_db(databases=["default", "other"])
def test_each_database_by_its_alias() -> None:
    enqueue("mail", 1, using="other")
    assert_nothing_enqueued()
    assert_enqueued("mail", using="other")
    failure(assert_nothing_enqueued, using="other")


def test_a_task_is_found_by_its_path_in_any_queue() -> None:
    """What is asked of a task: its dotted path, and the arguments in the stored payload."""
    task = SimpleNamespace(module_path="shop.tasks.send", queue_name="default")

    def fits(job: SimpleNamespace, **arguments: Any) -> bool:
        given = {"payload": ANY, "args": ANY, "kwargs": ANY, **arguments}
        return _Wanted.of(task, **given).fits(job)  # type: ignore[arg-type]

    stored = {"args": [1, [2]], "kwargs": {"to": "ada"}}
    job = SimpleNamespace(queue="urgent", task="shop.tasks.send", payload=stored)
    assert fits(job)
    assert fits(job, args=(1, (2,)))
    assert fits(job, args=[1, [2]], kwargs={"to": "ada"})
    assert fits(job, payload=stored)
    assert not fits(job, args=[])
    assert not fits(job, kwargs={})
    assert not fits(SimpleNamespace(queue="default", task="shop.tasks.other", payload=stored))
    assert not fits(SimpleNamespace(queue="default", task="", payload=None))
