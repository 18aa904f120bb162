"""Contract, section 1: the names of the public API, and what they take."""

import inspect

import pytest
from django.apps import apps

from django_alkstore import exceptions, models, services

FIELDS = {
    "Job": "id queue payload state priority run_at attempts max_attempts visibility_timeout backoff_base expires_at "
    "worker_id lease_expires_at unique_key schedule fire_at errors last_error created_at finished_at",
    "Lock": "name owner token acquired_at expires_at",
    "Schedule": "name spec queue payload priority max_attempts visibility_timeout backoff_base expires_in enabled "
    "next_fire_at last_fire_at last_error created_at updated_at",
}
FUNCTIONS = [
    "enqueue",
    "enqueue_tx",
    "enqueue_many",
    "get_or_enqueue",
    "claim_batch",
    "get_job",
    "cancel",
    "requeue",
    "run_now",
    "reschedule",
    "prune",
    "sweep",
    "next_claim_at",
    "queue_stats",
    "lock",
    "schedule",
    "unschedule",
    "pause_schedule",
    "resume_schedule",
    "tick",
    "soonest",
    "run_schedules",
    "outbox",
    "outbox_enqueue_tx",
]
HANDLE = [
    "id",
    "idempotency_key",
    "queue",
    "payload",
    "attempt",
    "max_attempts",
    "priority",
    "enqueued_at",
    "run_at",
    "lease_expires_at",
    "last_error",
    "schedule",
    "fire_at",
    "ack",
    "retry",
    "fail",
    "heartbeat",
    "release",
    "ack_tx",
    "lease_lost",
]


@pytest.mark.parametrize("model", FIELDS)
def test_each_table_has_the_fields_of_the_contract(model: str) -> None:
    present = {field.name for field in getattr(models, model)._meta.concrete_fields}
    assert set(FIELDS[model].split()) <= present


def test_there_are_three_tables() -> None:
    assert {model.__name__ for model in apps.get_app_config("django_alkstore").get_models()} == set(FIELDS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_public_function_takes_a_keyword_only_using(name: str) -> None:
    assert name in services.__all__
    using = inspect.signature(getattr(services, name)).parameters["using"]
    assert using.kind is inspect.Parameter.KEYWORD_ONLY
    assert using.default is None


def test_everything_public_is_there_and_nothing_else_takes_no_using() -> None:
    for name in services.__all__:
        public = getattr(services, name)
        if inspect.isfunction(public):
            assert "using" in inspect.signature(public).parameters, name


@pytest.mark.parametrize("name", HANDLE)
def test_a_handle_has_the_attributes_of_the_contract(name: str) -> None:
    assert hasattr(services.JobHandle, name)


@pytest.mark.parametrize(
    ("error", "parents"),
    [
        ("InvalidName", [ValueError]),
        ("ReservedName", [ValueError, exceptions.InvalidName]),
        ("InvalidPayload", [TypeError]),
        ("InvalidOption", [ValueError]),
        ("InvalidSpec", [ValueError]),
        ("TransactionRequired", []),
        ("DuplicateJob", []),
        ("LeaseLost", []),
        ("LockHeld", []),
        ("LockLost", []),
        ("LeadershipLost", []),
        ("Retry", []),
        ("Discard", []),
        ("Snooze", []),
    ],
)
def test_every_error_is_an_alkstore_error(error: str, parents: list[type]) -> None:
    kind = getattr(exceptions, error)
    assert issubclass(kind, exceptions.AlkstoreError)
    assert all(issubclass(kind, parent) for parent in parents)
    assert error in exceptions.__all__
