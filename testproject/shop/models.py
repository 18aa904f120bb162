"""Orders, and the reports made of them. Money is in cents."""

from django.db import models

from testproject.shop.catalogue import CATALOGUE


class Order(models.Model):
    """A paid order: one whose payment is declined is never there."""

    reference = models.CharField(max_length=20, unique=True)
    email = models.EmailField()
    total_cents = models.PositiveIntegerField()
    placed_at = models.DateTimeField(auto_now_add=True)
    invoice_result = models.CharField(max_length=20, help_text="The id of the result of the task print_invoice.")
    credit_result = models.CharField(max_length=20, help_text="The id of the result of the task check_credit.")

    def __str__(self) -> str:
        return self.reference

    @property
    def total(self) -> str:
        return f"{self.total_cents / 100:.2f}"


class OrderLine(models.Model):
    """One article of an order."""

    order = models.ForeignKey(Order, models.CASCADE, related_name="lines")
    article = models.CharField(max_length=20)
    quantity = models.PositiveIntegerField()
    cents = models.PositiveIntegerField(help_text="For one, when it was ordered.")

    def __str__(self) -> str:
        product = CATALOGUE.get(self.article)
        return f"{self.quantity} x {product.name if product else self.article}"


class SalesReport(models.Model):
    """All orders at one moment."""

    job_id = models.BigIntegerField(unique=True, help_text="The job that made it: one job makes one report.")
    boundary = models.DateTimeField(null=True, help_text="When it was due; none where somebody fired it by hand.")
    made_at = models.DateTimeField(auto_now_add=True)
    orders = models.PositiveIntegerField()
    total_cents = models.PositiveBigIntegerField()

    def __str__(self) -> str:
        return f"{self.orders} orders, {self.total}"

    @property
    def total(self) -> str:
        return f"{self.total_cents / 100:.2f}"
