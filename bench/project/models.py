"""What a request of the project writes: an order and its line."""

from django.db import models


class Order(models.Model):
    reference = models.CharField(max_length=20, unique=True)
    email = models.EmailField()
    total_cents = models.PositiveIntegerField()
    placed_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.reference


class OrderLine(models.Model):
    order = models.ForeignKey(Order, models.CASCADE)
    article = models.CharField(max_length=20)
    quantity = models.PositiveIntegerField()
    cents = models.PositiveIntegerField()

    def __str__(self) -> str:
        return self.article


class Done(models.Model):
    """One row for each job that an atomic handler has run."""

    job = models.BigIntegerField()

    def __str__(self) -> str:
        return f"job {self.job}"
