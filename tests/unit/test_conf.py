"""The `ALKSTORE` setting: read when used, and everything wrong with it said by name."""

import json
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.serializers.json import DjangoJSONEncoder
from django.test import override_settings

from django_alkstore import conf
from django_alkstore.names import outbox_queue
from django_alkstore.services.options import defaults_for

HUGE = 10**5000


def test_the_defaults_are_the_contracts() -> None:
    settings = conf.Settings()
    assert (settings.max_payload_bytes, settings.max_backoff, settings.backoff_jitter) == (1024 * 1024, 3600.0, 0.1)
    assert (settings.keep_completed, settings.keep_dead) == (86_400.0, None)
    assert settings.liveness is True
    assert settings.require_handler is False
    assert conf.JobDefaults(300.0, 3, 5.0, None, 0) == conf.PLAIN_DEFAULTS
    assert conf.JobDefaults(60.0, 5, 5.0, None, 0) == conf.OUTBOX_DEFAULTS


@pytest.mark.parametrize("raw", [{}, {"DATABASE": None}, {"QUEUES": {}}, {"JSON_ENCODER": None}])
def test_what_says_nothing_is_the_defaults(raw: dict[str, Any]) -> None:
    with override_settings(ALKSTORE=raw):
        assert conf.settings() == conf.Settings()


def test_an_override_takes_effect_at_once_and_ends_at_once() -> None:
    for value in (1, 2):
        with override_settings(ALKSTORE={"MAX_BACKOFF": value}):
            assert conf.settings().max_backoff == value
    assert conf.settings().max_backoff == 3600


WRONG: list[tuple[str, Any]] = [
    ("BOGUS", 1),
    ("database", "default"),
    *[("DATABASE", value) for value in ("nowhere", "", 5, [], {}, True)],
    *[
        ("JSON_ENCODER", value)
        for value in (
            "",
            "json",
            ".",
            ".x",
            "..x.y",
            "json.NoSuch",
            "no.such.Thing",
            "json.dumps",
            json.dumps,
            object,
            5,
            DjangoJSONEncoder(),
        )
    ],
    *[("LIVENESS", value) for value in (None, 0, 1, "on", "", [])],
    *[("MAX_PAYLOAD_BYTES", value) for value in (0, -1, 1.5, True, None, "1", HUGE)],
    *[("MAX_BACKOFF", value) for value in (-1, None, True, "1", float("nan"), float("inf"), HUGE)],
    *[
        ("BACKOFF_JITTER", value)
        for value in (-0.1, 1.01, 10, None, True, "0.1", float("nan"), float("inf"), HUGE, timedelta(seconds=1))
    ],
    *[(key, value) for key in ("KEEP_COMPLETED", "KEEP_DEAD") for value in (-1, True, "1", float("nan"), HUGE, [])],
    *[
        ("QUEUES", value)
        for value in (None, [], "mail", {"no good": {}}, {5: {}}, {None: {}}, {"__alkstore_outbox:x": {}})
    ],
    *[("QUEUES", {"mail": value}) for value in (None, [], 5, {"bogus": 1}, {5: 1}, {"delay": 1}, {"unique_key": "x"})],
    *[
        ("QUEUES", {name: {}})
        for name in ("outbox:", "outbox:no good", "outbox:__alkstore_x", "outbox: mail", "outbox:" + 129 * "x")
    ],
    *[("QUEUES", {"outbox:mail": value}) for value in (None, [], {"bogus": 1}, {"max_attempts": 0})],
    *[("QUEUES", {"mail": {"visibility_timeout": value}}) for value in (0, -1, None, True, "1", float("inf"), HUGE)],
    *[("QUEUES", {"mail": {"max_attempts": value}}) for value in (0, -1, None, True, 1.0, HUGE)],
    *[("QUEUES", {"mail": {"backoff_base": value}}) for value in (-1, None, True, "1", HUGE)],
    *[("QUEUES", {"mail": {"expires_in": value}}) for value in (0, -1, True, "1", HUGE)],
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=[f"{key}-{number}" for number, (key, _) in enumerate(WRONG)])
def test_a_wrong_value_is_a_problem_that_names_its_key_and_raises_nothing(key: str, value: Any) -> None:
    [problem] = conf.problems({key: value})
    assert key in problem
    problem.encode()


@pytest.mark.parametrize("raw", [None, [], "x", 5, [("DATABASE", None)]])
def test_a_setting_that_is_no_dict_is_a_problem(raw: Any) -> None:
    [problem] = conf.problems(raw)
    assert "ALKSTORE" in problem
    with override_settings(ALKSTORE=raw), pytest.raises(ImproperlyConfigured, match="ALKSTORE"):
        conf.settings()


def test_every_problem_is_told_at_once() -> None:
    raw = {"BOGUS": 1, "MAX_BACKOFF": -1, "KEEP_DEAD": "x", "QUEUES": {"mail": {"max_attempts": 0}}}
    problems = list(conf.problems(raw))
    assert len(problems) == 4
    with override_settings(ALKSTORE=raw), pytest.raises(ImproperlyConfigured) as raised:
        conf.settings()
    assert all(key in str(raised.value) for key in raw)


def test_an_encoder_is_given_as_a_class_or_by_its_path() -> None:
    for given in (DjangoJSONEncoder, "django.core.serializers.json.DjangoJSONEncoder"):
        with override_settings(ALKSTORE={"JSON_ENCODER": given}):
            assert conf.settings().json_encoder is DjangoJSONEncoder


@pytest.mark.parametrize("value", [0, 0.0, 0.5, 1])
def test_jitter_is_a_share(value: float) -> None:
    with override_settings(ALKSTORE={"BACKOFF_JITTER": value}):
        assert conf.settings().backoff_jitter == value


def test_a_key_of_queues_that_names_an_outbox_is_the_outbox_s_and_no_queue_s() -> None:
    queues = {"outbox:mail": {"max_attempts": 12}, "mail": {"backoff_base": 1}}
    with override_settings(ALKSTORE={"QUEUES": queues}):
        settings = conf.settings()
    # What the key leaves out is the outbox's own default, not the queue's.
    assert defaults_for(outbox_queue("mail"), settings) == conf.JobDefaults(60.0, 12, 5.0, None)
    assert defaults_for("mail", settings) == conf.JobDefaults(300.0, 3, 1.0, None)
    assert defaults_for("outbox:mail", settings) == conf.JobDefaults()
    assert defaults_for(outbox_queue("other"), settings) == conf.OUTBOX_DEFAULTS


def test_an_outbox_whose_own_name_begins_with_outbox_has_a_key() -> None:
    with override_settings(ALKSTORE={"QUEUES": {"outbox:outbox:x": {"max_attempts": 7}}}):
        settings = conf.settings()
    assert defaults_for(outbox_queue("outbox:x"), settings).max_attempts == 7
    assert defaults_for(outbox_queue("x"), settings).max_attempts == 5


def test_the_fault_of_an_entry_of_queues_names_the_entry_and_what_is_wrong() -> None:
    [problem] = conf.problems({"QUEUES": {"outbox:no good": {}}})
    assert problem.startswith("ALKSTORE['QUEUES']['outbox:no good']: outbox name 'no good' has ' ' at position 2")
    [problem] = conf.problems({"QUEUES": {"outbox:mail": {"max_attempts": 0}}})
    assert problem.startswith("ALKSTORE['QUEUES']['outbox:mail']['max_attempts'] must be")
