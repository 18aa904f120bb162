"""The webhook, over real HTTP, to the receiver: signed, sent again until it is confirmed, and taken once."""

import json
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any

import pytest

from django_alkstore.models import Job, State
from django_alkstore.testing import run_pending
from testproject.receiver import SILENCE, Ledger, Receiver
from testproject.shop.models import Order
from testproject.shop.orders import place
from testproject.signing import KEY_HEADER, SIGNATURE_HEADER, is_signed, sign

SECRET = "a secret of the tests"
FIRST = {"refuses": ("refused", 503), "fails": ("accepted", 500), "is silent": ("accepted", SILENCE)}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "receiver.jsonl"


@pytest.fixture
def fate(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """What befalls each key's first delivery; until a test says otherwise, nothing does."""

    def befall(event: str, status: int) -> None:
        monkeypatch.setattr(Ledger, "_first", lambda self, key: (event, status))

    befall("accepted", 200)
    return befall


@pytest.fixture
def receiver(log: Path, fate: object, settings: Any) -> Iterator[Receiver]:
    ledger = Ledger(log, seed=1)
    with Receiver(0, SECRET, ledger) as server:
        settings.SHOP_WEBHOOK_URL = server.url
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
    ledger.close()


def entries(log: Path) -> list[tuple[str, str | None, str, int]]:
    noted = map(json.loads, log.read_text().splitlines())
    return [(entry["key"], entry["order"], entry["event"], entry["answer"]) for entry in noted]


def placed() -> Job:
    """An order; its webhook's job."""
    place("T-1", "a@example.com", {"tea": 1})
    return Job.objects.get(payload__contains="T-1", task="")


def post(server: Receiver, key: str, body: bytes, signature: str) -> int:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.request("POST", "/", body, {KEY_HEADER: key, SIGNATURE_HEADER: signature})
        return connection.getresponse().status
    except RemoteDisconnected:
        return SILENCE
    finally:
        connection.close()


def test_a_webhook_is_signed_and_taken(receiver: Receiver, log: Path) -> None:
    job = placed()
    run_pending("webhook")
    assert entries(log) == [(job.idempotency_key, "T-1", "accepted", 200)]
    assert Job.objects.get(pk=job.pk).state == State.COMPLETED


@pytest.mark.parametrize("trouble", FIRST)
def test_a_webhook_that_is_not_confirmed_is_sent_again_and_taken_once(
    receiver: Receiver, log: Path, fate: Callable[[str, int], None], trouble: str
) -> None:
    fate(*FIRST[trouble])
    job = placed()
    attempts = [handle.attempt for handle in run_pending("webhook")]
    assert attempts == [1, 2]
    events = [event for _, _, event, _ in entries(log)]
    assert events.count("accepted") == 1
    assert len(events) == 2
    stored = Job.objects.get(pk=job.pk)
    assert stored.state == State.COMPLETED
    assert len(stored.errors) == 1


def test_a_receiver_that_is_not_there_costs_attempts_and_then_leaves_a_dead_job() -> None:
    job = placed()
    assert len(run_pending("webhook")) == 5
    stored = Job.objects.get(pk=job.pk)
    assert stored.state == State.DEAD
    assert "URLError" in (stored.last_error or "")
    assert Order.objects.count() == 1


def test_a_wrong_secret_ends_the_job_at_once(receiver: Receiver, log: Path, settings: Any) -> None:
    """Another attempt would be refused all the same."""
    settings.SHOP_WEBHOOK_SECRET = "another one"
    job = placed()
    assert len(run_pending("webhook")) == 1
    assert entries(log) == [(job.idempotency_key, None, "forged", 401)]
    stored = Job.objects.get(pk=job.pk)
    assert (stored.state, stored.last_error) == (State.DEAD, "Discard: the receiver answered 401")


def test_repeats_are_ignored_by_the_idempotency_key_alone(receiver: Receiver, log: Path) -> None:
    body = b'{"order": "T-1"}'
    assert [post(receiver, key, body, sign(SECRET, key, body)) for key in ("1", "1", "2")] == [200, 200, 200]
    assert [(key, event) for key, _, event, _ in entries(log)] == [
        ("1", "accepted"),
        ("1", "repeat"),
        ("2", "accepted"),
    ]


def test_repeats_at_the_same_moment_are_taken_once(receiver: Receiver, log: Path) -> None:
    body = b'{"order": "T-1"}'
    threads = [threading.Thread(target=post, args=(receiver, "1", body, sign(SECRET, "1", body))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(event for _, _, event, _ in entries(log)) == ["accepted"] + ["repeat"] * 7


def test_a_receiver_knows_repeats_after_a_restart(log: Path, fate: object) -> None:
    for event in ("accepted", "repeat"):
        ledger = Ledger(log, seed=1)
        assert ledger.deliver("1", b'{"order": "T-1"}') == 200
        ledger.close()
        assert entries(log)[-1] == ("1", "T-1", event, 200)


@pytest.mark.parametrize(
    ("key", "body", "signature"),
    [
        ("1", b"{}", ""),
        ("1", b"{}", "sha256="),
        ("1", b"{}", sign("another secret", "1", b"{}")),
        ("2", b"{}", sign(SECRET, "1", b"{}")),
        ("1", b"[]", sign(SECRET, "1", b"{}")),
        ("1", b"{}", sign(SECRET, "1", b"{}").upper()),
        ("1", b"{}", "\xe9\xff"),
    ],
    ids=["none", "empty", "wrong secret", "wrong key", "wrong body", "upper case", "not ASCII"],
)
def test_a_wrong_signature_is_refused(receiver: Receiver, log: Path, key: str, body: bytes, signature: str) -> None:
    assert not is_signed(SECRET, key, body, signature)
    assert post(receiver, key, body, signature) == 401
    assert [event for _, _, event, _ in entries(log)] == ["forged"]


def test_a_forged_delivery_does_not_make_the_real_one_a_repeat(receiver: Receiver, log: Path) -> None:
    body = b'{"order": "T-1"}'
    post(receiver, "1", body, "sha256=guess")
    post(receiver, "1", body, sign(SECRET, "1", body))
    assert [event for _, _, event, _ in entries(log)] == ["forged", "accepted"]


def test_a_share_of_first_deliveries_fails_always_the_same_ones(tmp_path: Path) -> None:
    def first_answers(name: str) -> list[int]:
        ledger = Ledger(tmp_path / name, seed=1)
        answers = [ledger.deliver(str(key), b"{}") for key in range(400)]
        ledger.close()
        return answers

    answers = first_answers("one")
    assert answers == first_answers("two")
    assert set(answers) == {200, 500, 503, SILENCE}
    assert 280 < answers.count(200) < 360
