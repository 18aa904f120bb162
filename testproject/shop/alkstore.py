"""What runs for the shop's outboxes and queues. Found by its name: workers, checks and the admin import it."""

import json
from http import HTTPStatus
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from django.conf import settings
from django.core.mail import EmailMessage
from django.db.models import Count, Sum

from django_alkstore.exceptions import Discard
from django_alkstore.registry import delivery, handler
from django_alkstore.services import JobHandle
from testproject.shop.models import Order, SalesReport
from testproject.signing import KEY_HEADER, SIGNATURE_HEADER, sign

WEBHOOK_TIMEOUT = 10.0
"""Seconds. A receiver that hangs must not hold a worker's thread."""

WORTH_ANOTHER_TRY = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
"""Of the answers that blame the sender, those that another attempt can change."""


class ReceiverTrouble(Exception):
    """The webhook's receiver did not take it, this time."""


@delivery("mail", time_limit=60)
def send_confirmation(job: JobHandle) -> None:
    order = Order.objects.prefetch_related("lines").get(pk=job.payload["order"])
    lines = "\n".join(f"  {line}" for line in order.lines.all())
    # A message that is sent twice has the same Message-ID twice, by which mail programs can tell a repeat.
    message_id = f"<{job.idempotency_key}@shop.example.com>"
    EmailMessage(
        subject=f"Your order {order.reference}",
        body=f"Thank you. You ordered:\n\n{lines}\n\nTotal: {order.total}\n",
        to=[order.email],
        headers={"X-Shop-Order": order.reference, "Message-ID": message_id},
    ).send()


@delivery("webhook", time_limit=60)
def post_webhook(job: JobHandle) -> None:
    """Delivery is at least once: the idempotency key, the same each time, lets the receiver ignore repeats."""
    key = job.idempotency_key
    body = json.dumps(job.payload).encode()
    headers = {
        "Content-Type": "application/json",
        KEY_HEADER: key,
        SIGNATURE_HEADER: sign(settings.SHOP_WEBHOOK_SECRET, key, body),
    }
    request = Request(settings.SHOP_WEBHOOK_URL, body, headers, method="POST")  # noqa: S310  the URL is a setting
    try:
        with urlopen(request, timeout=WEBHOOK_TIMEOUT) as response:  # noqa: S310
            response.read()
    except HTTPError as error:
        with error:
            raise _refusal(error.code) from error


def _refusal(status: int) -> Exception:
    said = f"the receiver answered {status}"
    hopeless = 400 <= status < 500 and status not in WORTH_ANOTHER_TRY
    return Discard(said) if hopeless else ReceiverTrouble(said)


@handler("reports", atomic=True)
def build_report(job: JobHandle) -> None:
    """The report and the ack are one transaction (`atomic=True`): each job makes exactly one report."""
    sums = Order.objects.aggregate(orders=Count("pk"), cents=Sum("total_cents"))
    SalesReport.objects.create(
        job_id=job.id, boundary=job.fire_at, orders=sums["orders"], total_cents=sums["cents"] or 0
    )
