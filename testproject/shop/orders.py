"""Placing an order: the rows and the work that they cause, in one transaction."""

import secrets
from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError, transaction

from django_alkstore.services import outbox_enqueue_tx
from testproject.shop import payments
from testproject.shop.catalogue import CATALOGUE
from testproject.shop.models import Order, OrderLine
from testproject.shop.tasks import check_credit, print_invoice


class AlreadyPlaced(Exception):
    """There is an order with this reference: the same form was sent twice."""


def new_reference() -> str:
    return f"S-{secrets.randbelow(10**8):08}"


def place(reference: str, email: str, quantities: Mapping[str, int]) -> Order:
    """Store the order, enqueue its mail and its webhook, and take the payment: all of it, or nothing.

    Raises `AlreadyPlaced` or `payments.Declined`; then there is no order, and nobody hears of it.
    """
    with transaction.atomic():
        order = _store(reference, email, quantities)
        # The key lets the page and the admin's search find an order's jobs.
        outbox_enqueue_tx("mail", {"order": order.pk}, unique_key=reference)
        # The mail is written when it is sent. The webhook carries the order as it is now.
        outbox_enqueue_tx("webhook", _as_json(order, quantities), unique_key=reference)
        order.invoice_result = print_invoice.enqueue(order.pk).id
        order.credit_result = check_credit.enqueue(reference).id
        order.save(update_fields=["invoice_result", "credit_result"])
        # Last, so that a declined payment has something to undo. A real bank is asked over the network, which
        # belongs before the transaction, since SQLite has one writer and this one would make all others wait.
        payments.charge(order.reference, order.total_cents)
    return order


def _store(reference: str, email: str, quantities: Mapping[str, int]) -> Order:
    total = sum(CATALOGUE[article].cents * quantity for article, quantity in quantities.items())
    try:
        order = Order.objects.create(reference=reference, email=email, total_cents=total)
    except IntegrityError as error:
        raise AlreadyPlaced(f"the order {reference} has been placed already") from error
    OrderLine.objects.bulk_create(
        OrderLine(order=order, article=article, quantity=quantity, cents=CATALOGUE[article].cents)
        for article, quantity in quantities.items()
    )
    return order


def _as_json(order: Order, quantities: Mapping[str, int]) -> dict[str, Any]:
    return {"order": order.reference, "total_cents": order.total_cents, "lines": dict(quantities)}
