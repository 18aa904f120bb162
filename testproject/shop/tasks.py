"""The shop's tasks, by Django's own API. An order keeps the ids of their results, which its page shows."""

import asyncio

from django_alkstore.tasks import task
from testproject.shop.models import Order

ANSWER_TIME = 0.05
"""Seconds that the credit agency takes to answer. Meanwhile the worker's event loop runs the checks of other orders."""


class PrinterBusy(Exception):
    """The printer does not take an invoice, this time."""


@task(takes_context=True, max_attempts=5, backoff=0.2)
def print_invoice(context, order_id):  # type: ignore[no-untyped-def]
    """Each seventh order meets a busy printer the first time, so that there is a retry to see."""
    order = Order.objects.get(pk=order_id)
    if order.pk % 7 == 0 and context.attempt == 1:
        raise PrinterBusy(f"the printer is busy with another invoice, and did not take that of {order}")
    return {"invoice": f"I-{order.pk:06}", "total": order.total}


@task
async def check_credit(reference):  # type: ignore[no-untyped-def]
    """A coroutine: a thousand of these may wait at once."""
    await asyncio.sleep(ANSWER_TIME)
    return {"reference": reference, "limit": 500}
