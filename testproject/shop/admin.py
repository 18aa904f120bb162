"""The shop's rows, to look at."""

from typing import TYPE_CHECKING

from django.contrib import admin
from django.db.models import Model
from django.http import HttpRequest

from testproject.shop.models import Order, OrderLine, SalesReport

if TYPE_CHECKING:  # generic for the type checker alone
    Lines = admin.TabularInline[OrderLine, Order]
    Orders = admin.ModelAdmin[Order]
    Reports = admin.ModelAdmin[SalesReport]
else:
    Lines = admin.TabularInline
    Orders = Reports = admin.ModelAdmin


class ReadOnly:
    """Orders and reports are made by the shop alone."""

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


class OrderLines(ReadOnly, Lines):
    model = OrderLine
    fields = ["article", "quantity", "cents"]


@admin.register(Order)
class OrderAdmin(ReadOnly, Orders):
    list_display = ["reference", "email", "total", "placed_at"]
    search_fields = ["reference", "email"]
    ordering = ["-pk"]
    inlines = [OrderLines]


@admin.register(SalesReport)
class SalesReportAdmin(ReadOnly, Reports):
    list_display = ["boundary", "made_at", "orders", "total"]
    ordering = ["-pk"]
