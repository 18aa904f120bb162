"""The shop's views: the order and its jobs are there together, or not at all."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.core.mail import EmailMessage
from django.test import Client

from django_alkstore.models import Job, State
from django_alkstore.services import outbox
from django_alkstore.testing import run_pending
from testproject.shop import payments
from testproject.shop.models import Order, OrderLine


def order(client: Client, reference: str = "T-1", **changes: Any) -> Any:
    body = {"reference": reference, "email": "a@example.com", "lines": {"tea": 2, "cup": 1}, **changes}
    return client.post("/api/orders/", json.dumps(body), content_type="application/json")


def nothing_is_stored() -> bool:
    return not (Order.objects.exists() or OrderLine.objects.exists() or Job.objects.exists())


def test_an_order_is_stored_with_its_lines_its_mail_and_its_webhook(client: Client) -> None:
    answer = order(client)
    assert answer.status_code == 201
    assert answer.json() == {"order": "T-1", "total_cents": 2 * 950 + 725}
    stored = Order.objects.get()
    assert sorted(stored.lines.values_list("article", "quantity", "cents")) == [("cup", 1, 725), ("tea", 2, 950)]
    mail, webhook = Job.objects.filter(task="").order_by("pk")
    assert (mail.queue, mail.payload) == (outbox("mail").queue, {"order": stored.pk})
    assert webhook.queue == outbox("webhook").queue
    assert webhook.payload == {"order": "T-1", "total_cents": 2_625, "lines": {"tea": 2, "cup": 1}}
    assert {mail.unique_key, webhook.unique_key} == {"T-1"}


def test_the_retry_curve_is_the_one_of_the_settings(client: Client, settings: Any) -> None:
    settings.ALKSTORE = {"QUEUES": {name: {"backoff_base": 0.25} for name in ("outbox:mail", "outbox:webhook")}}
    order(client)
    assert set(Job.objects.filter(task="").values_list("backoff_base", "max_attempts")) == {(0.25, 5)}


def test_a_declined_payment_takes_back_the_order_and_both_jobs(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs were there when the bank was asked: they are undone, and not merely never made."""
    seen: list[int] = []
    real = payments.charge

    def charge(reference: str, cents: int) -> None:
        seen.append(Job.objects.count())
        real(reference, cents)

    monkeypatch.setattr(payments, "charge", charge)
    answer = order(client, "T-17")
    assert answer.status_code == 402
    assert "declined" in answer.json()["error"]
    assert seen == [4]
    assert nothing_is_stored()


def test_one_payment_in_ten_is_declined(client: Client) -> None:
    answers = [order(client, f"T-{number:03}").status_code for number in range(100)]
    assert (answers.count(201), answers.count(402)) == (90, 10)
    assert Order.objects.count() == 90
    assert Job.objects.count() == 360


def test_an_order_that_fails_in_another_way_leaves_nothing_either(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def charge(reference: str, cents: int) -> None:
        raise ConnectionError("the bank does not answer")

    monkeypatch.setattr(payments, "charge", charge)
    with pytest.raises(ConnectionError):
        order(client)
    assert nothing_is_stored()


def test_a_reference_is_placed_once(client: Client) -> None:
    assert [order(client).status_code for _ in range(2)] == [201, 409]
    assert Order.objects.count() == 1
    assert Job.objects.count() == 4


@pytest.mark.parametrize(
    "change",
    [
        {"reference": "17"},
        {"reference": None},
        {"email": "nobody"},
        {"email": "a@example.com\nBcc: b@example.com"},
        {"lines": {}},
        {"lines": {"tea": 0}},
        {"lines": {"tea": -1}},
        {"lines": {"tea": 100}},
        {"lines": {"tea": 1.5}},
        {"lines": {"tea": True}},
        {"lines": {"tea": [1]}},
        {"lines": {"coffee": 1}},
        {"lines": ["tea"]},
        {"lines": None},
    ],
    ids=str,
)
def test_an_order_that_makes_no_sense_is_refused(client: Client, change: dict[str, Any]) -> None:
    assert order(client, **change).status_code == 400
    assert nothing_is_stored()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000], ids=lambda body: repr(body[:5]))
def test_a_body_that_is_no_order_is_refused(client: Client, body: bytes) -> None:
    assert client.post("/api/orders/", body, content_type="application/json").status_code == 400


def test_the_api_takes_orders_only(client: Client) -> None:
    assert client.get("/api/orders/").status_code == 405


def send_form(client: Client, **changes: str) -> Any:
    """As a browser does: the page is fetched, and its form is sent with its own reference."""
    reference = client.get("/").context["form"]["reference"].value()
    fields = {"reference": reference, "email": "a@example.com", "quantity_tea": "1", **changes}
    return client.post("/", fields, follow=True)


def test_the_page_places_an_order_and_shows_it(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testproject.shop.views.new_reference", lambda: "S-12345678")
    page = send_form(client).content.decode()
    assert "Your order S-12345678 over 9.50 is placed" in page
    assert page.count("<td>Pending</td>") == 2


def test_the_page_says_that_a_payment_was_declined(client: Client) -> None:
    page = send_form(client, reference="S-7").content.decode()
    assert "No order was placed: the bank declined 9.50 for the order S-7" in page
    assert nothing_is_stored()


def test_the_page_says_what_is_missing(client: Client) -> None:
    page = send_form(client, quantity_tea="").content.decode()
    assert "Order at least one article" in page
    assert nothing_is_stored()


def test_each_page_has_a_reference_of_its_own(client: Client) -> None:
    references = {client.get("/").context["form"]["reference"].value() for _ in range(20)}
    assert len(references) == 20


def test_the_mail_tells_the_order(client: Client, mailoutbox: list[EmailMessage]) -> None:
    order(client)
    (job,) = run_pending("mail")
    (mail,) = mailoutbox
    assert mail.to == ["a@example.com"]
    assert mail.subject == "Your order T-1"
    assert "2 x Green tea, 100 g" in str(mail.body)
    assert "Total: 26.25" in str(mail.body)
    message_id = f"<{job.idempotency_key}@shop.example.com>"
    assert mail.extra_headers == {"X-Shop-Order": "T-1", "Message-ID": message_id}
    assert mail.message()["Message-ID"] == message_id
    assert Job.objects.get(pk=job.id).state == State.COMPLETED


def test_a_mail_that_cannot_be_sent_is_tried_again(
    client: Client, mailoutbox: list[EmailMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    order(client)
    send: Callable[..., int] = EmailMessage.send

    def broken(*args: Any, **kwargs: Any) -> int:
        monkeypatch.setattr(EmailMessage, "send", send)
        raise ConnectionError("no mail server")

    monkeypatch.setattr(EmailMessage, "send", broken)
    first, second = run_pending("mail")
    assert (first.id, first.attempt, second.attempt) == (second.id, 1, 2)
    assert len(mailoutbox) == 1
    assert Job.objects.get(pk=first.id).last_error == "ConnectionError: no mail server"


def test_the_page_of_an_order_shows_what_became_of_its_tasks(client: Client) -> None:
    for number in range(1, 9):
        assert order(client, f"P-{number}0").status_code == 201
    run_pending("default")
    placed = next(each for each in Order.objects.all() if each.pk % 7)
    page = client.get(f"/orders/{placed.reference}/").content.decode()
    assert page.count("Successful") == 2
    assert f"I-{placed.pk:06}" in page
    assert client.get("/orders/nobody/").status_code == 404
    retried = next(each for each in Order.objects.all() if each.pk % 7 == 0)
    page = client.get(f"/orders/{retried.reference}/").content.decode()
    assert "Ready" in page
    assert "testproject.shop.tasks.PrinterBusy" in page
