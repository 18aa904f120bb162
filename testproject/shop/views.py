"""The order page, and the same for programs."""

from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_http_methods, require_POST

from django_alkstore.models import Job
from django_alkstore.services import outbox
from django_alkstore.tasks.apis import primary
from testproject.shop.forms import OrderForm
from testproject.shop.models import Order, SalesReport
from testproject.shop.orders import AlreadyPlaced, new_reference, place
from testproject.shop.payments import Declined
from testproject.shop.tasks import check_credit, print_invoice

SHOWN = 15


@require_http_methods(["GET", "HEAD", "POST"])
def index(request: HttpRequest) -> HttpResponse:
    form = OrderForm(request.POST) if request.method == "POST" else _empty_form()
    if form.is_bound and form.is_valid():
        _place_and_tell(request, form)
        return redirect("shop")
    context = {"form": form, "orders": _latest_orders(), "report": SalesReport.objects.last()}
    return render(request, "shop/index.html", context)


def _empty_form() -> OrderForm:
    # The reference goes out with the form: sent twice, it is still one order.
    return OrderForm(initial={"reference": new_reference()})


def _place_and_tell(request: HttpRequest, form: OrderForm) -> None:
    try:
        order = place(form.cleaned_data["reference"], form.cleaned_data["email"], form.quantities)
    except (Declined, AlreadyPlaced) as error:
        messages.error(request, f"No order was placed: {error}.")
    else:
        messages.success(request, f"Thank you. Your order {order} over {order.total} is placed.")


def _latest_orders() -> list[dict[str, Any]]:
    """The latest orders with the state of each one's jobs."""
    orders = list(Order.objects.order_by("-pk")[:SHOWN])
    jobs = Job.objects.filter(unique_key__in=[order.reference for order in orders])
    states = {(job.queue, job.unique_key): job.get_state_display() for job in jobs.defer("payload", "errors")}
    return [
        {
            "order": order,
            "mail": states.get((outbox("mail").queue, order.reference), "-"),
            "webhook": states.get((outbox("webhook").queue, order.reference), "-"),
        }
        for order in orders
    ]


def order(request: HttpRequest, reference: str) -> HttpResponse:
    """What became of the order's tasks."""
    placed = get_object_or_404(Order, reference=reference)
    results = [
        ("Invoice", _result(print_invoice, placed.invoice_result)),
        ("Credit check", _result(check_credit, placed.credit_result)),
    ]
    return render(request, "shop/order.html", {"order": placed, "results": results})


def _result(task: Any, result_id: str) -> Any:
    """The task's result; None if its job was deleted, as completed jobs are after a day."""
    try:
        return task.get_result(result_id)
    except primary().result_does_not_exist:
        return None


@csrf_exempt  # no cookie tells who calls, so there is no session to misuse
@require_POST
def api_orders(request: HttpRequest) -> JsonResponse:
    """201 and the order, 402 where the payment is declined, 409 for a reference that is taken, 400 for the rest."""
    try:
        form = OrderForm.from_json(request.body)
    except ValidationError as error:
        return JsonResponse({"error": error.message}, status=400)
    if not form.is_valid():
        return JsonResponse({"errors": form.errors}, status=400)
    try:
        order = place(form.cleaned_data["reference"], form.cleaned_data["email"], form.quantities)
    except Declined as error:
        return JsonResponse({"error": str(error)}, status=402)
    except AlreadyPlaced as error:
        return JsonResponse({"error": str(error)}, status=409)
    return JsonResponse({"order": order.reference, "total_cents": order.total_cents}, status=201)
