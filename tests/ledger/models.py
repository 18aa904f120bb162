"""Business rows for the tests: what handlers write and what is counted at the end."""

from django.db import models


class Entry(models.Model):
    """One effect. `job_id` is unique where an effect must happen exactly once."""

    text = models.CharField(max_length=200)
    job_id = models.BigIntegerField(null=True, unique=True)

    def __str__(self) -> str:
        return self.text
