"""Contract, section 2: one name rule for queues, locks, schedules and outboxes, and the reserved prefix."""

from collections.abc import Callable

import pytest
from django.utils.safestring import mark_safe

from django_alkstore import exceptions, services
from django_alkstore.models import Job, Lock, Schedule

pytestmark = pytest.mark.django_db(transaction=True)

# Every public function that takes a name, as a call with that name and nothing else wrong.
TAKERS: dict[str, Callable[[str], object]] = {
    "enqueue": lambda name: services.enqueue(name, None),
    "enqueue_many": lambda name: services.enqueue_many(name, [1]),
    "enqueue_many of nothing": lambda name: services.enqueue_many(name, []),
    "get_or_enqueue": lambda name: services.get_or_enqueue(name, "key", None),
    "claim_batch": lambda name: services.claim_batch(name, "worker"),
    "next_claim_at": services.next_claim_at,
    "sweep": services.sweep,
    "lock": services.lock,
    "schedule": lambda name: services.schedule(name, "@every 1h", "mail"),
    "schedule's queue": lambda name: services.schedule("report", "@every 1h", name),
    "outbox": services.outbox,
}
taker = pytest.mark.parametrize("call", TAKERS.values(), ids=TAKERS.keys())


def nothing_is_stored() -> bool:
    return not (Job.objects.exists() or Lock.objects.exists() or Schedule.objects.exists())


@pytest.mark.parametrize(
    "name",
    ["a", "Z", "7", "_", "a" * 128, "a.b_c-d:e/f@g+h", "_5F", "0-", "__alkstor", "_alkstore_x", "a__alkstore_x"],
)
@taker
def test_every_function_takes_a_name_within_the_rule(call: Callable[[str], object], name: str) -> None:
    call(name)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "empty"),
        ("a" * 129, "129"),
        ("a" * 10_000, "10000"),
        ("a b", "' '"),
        ("a\n", r"\n"),
        ("\na", r"\n"),
        ("a\x00b", r"\x00"),
        ("a$", "$"),
        ("a%b", "%"),
        ("a?b#c", "?"),
        ("a&b", "&"),
        ('a"b', '"'),
        ("caf\u00e9", "xe9"),
        ("\u0661", "0661"),
        ("\u6f22", "6f22"),
        ("\U0001f600", "1f600"),
        ("\udc80", "udc80"),
        (".a", "."),
        ("-a", "-"),
        (":a", ":"),
        ("/a", "/"),
        ("@a", "@"),
        ("+a", "+"),
    ],
    ids=ascii,
)
@taker
def test_f103_f107_a_name_outside_the_rule_is_refused_with_the_character_or_length_that_was_wrong(
    call: Callable[[str], object], name: str, told: str
) -> None:
    with pytest.raises(exceptions.InvalidName) as raised:
        call(name)
    assert not isinstance(raised.value, exceptions.ReservedName)
    assert isinstance(raised.value, ValueError)
    assert told in str(raised.value)
    str(raised.value).encode()  # printable everywhere, whatever the name held
    assert nothing_is_stored()


@pytest.mark.parametrize("name", [None, 1, b"mail", True, ["mail"], ("mail",), object(), 1.5])
@taker
def test_a_name_that_is_no_str_is_refused(call: Callable[[object], object], name: object) -> None:
    if name is None and call is TAKERS["sweep"]:
        assert call(name) == 0  # sweep(None) means all queues
        return
    with pytest.raises(exceptions.InvalidName):
        call(name)
    assert nothing_is_stored()


@pytest.mark.parametrize(
    "name", ["__alkstore_", "__alkstore_x", "__alkstore_scheduler", "__alkstore_outbox:mail", "__alkstore_outbox:"]
)
@taker
def test_every_function_refuses_the_reserved_prefix(call: Callable[[str], object], name: str) -> None:
    with pytest.raises(exceptions.ReservedName) as raised:
        call(name)
    assert isinstance(raised.value, exceptions.InvalidName)
    assert nothing_is_stored()


@pytest.mark.parametrize("name", ["__alkstore_outbox:mail", "no good", ""])
def test_functions_that_join_a_transaction_refuse_the_same_names(name: str) -> None:
    for call in (services.enqueue_tx, services.outbox_enqueue_tx):
        with pytest.raises(exceptions.InvalidName):
            call(name, None)
    assert nothing_is_stored()


def test_an_outbox_queue_is_reached_through_its_outbox_alone() -> None:
    job = services.outbox("mail").enqueue({"to": "a"})
    assert job.queue == "__alkstore_outbox:mail"
    with pytest.raises(exceptions.ReservedName):
        services.claim_batch(job.queue, "thief")
    # Whoever has its id may look, cancel and requeue.
    assert services.get_job(job.id) == job
    assert services.cancel(job.id)
    assert services.requeue(job.id)


def test_an_outbox_name_of_full_length_fits() -> None:
    job = services.outbox("o" * 128).enqueue(None)
    assert services.get_job(job.id).queue == "__alkstore_outbox:" + "o" * 128


def test_a_str_subclass_is_the_name_that_it_spells() -> None:
    job = services.enqueue(mark_safe("mail"), None)
    assert services.get_job(job.id).queue == "mail"
    assert [handle.id for handle in services.claim_batch("mail", "w")] == [job.id]
