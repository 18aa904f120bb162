"""The business rows of a torture run, which are its ledger, and the history that the database itself keeps."""

from django.db import models


class Order(models.Model):
    """A business row, written in one transaction with the job that it causes."""

    reference = models.CharField(max_length=100, unique=True)
    queue = models.CharField(max_length=200)
    unique_key = models.CharField(max_length=100, null=True)
    job_id = models.BigIntegerField(null=True)

    def __str__(self) -> str:
        return self.reference


class Effect(models.Model):
    """What one run of a handler did. Nothing is unique here: doubles are to be seen, not to be refused."""

    job_id = models.BigIntegerField()
    fence = models.BigIntegerField()
    reference = models.CharField(max_length=100)

    def __str__(self) -> str:
        return f"effect of job {self.job_id}, claim {self.fence}"


class Note(models.Model):
    """A row of an app that knows nothing of jobs."""

    writer = models.CharField(max_length=50)
    number = models.IntegerField()

    def __str__(self) -> str:
        return f"{self.writer} {self.number}"


class Counter(models.Model):
    """One row: how many notes there are, counted up in each note's transaction."""

    value = models.IntegerField(default=0)

    def __str__(self) -> str:
        return str(self.value)


class History(models.Model):
    """One change of one job's row. Triggers write it, in the transaction of the change (`history.py`)."""

    id = models.BigAutoField(primary_key=True)
    at = models.BigIntegerField()
    """Microseconds since the epoch, to the millisecond."""
    change = models.CharField(max_length=1)
    """I(nsert), U(pdate) or D(elete): what follows is the row after it; for a delete, before it."""
    job_id = models.BigIntegerField()
    state = models.CharField(max_length=10)
    attempts = models.IntegerField()
    max_attempts = models.IntegerField()
    fence = models.BigIntegerField()
    worker_id = models.TextField(null=True)
    lease_expires_at = models.BigIntegerField(null=True)
    run_at = models.BigIntegerField()
    errors = models.IntegerField()
    """How many the row has."""
    last_error = models.TextField(null=True)
    leader = models.TextField(null=True)
    """Who held the leadership at that moment."""
    # Of an insert alone, since they never change.
    queue = models.TextField(null=True)
    payload = models.TextField(null=True)
    unique_key = models.TextField(null=True)
    schedule = models.TextField(null=True)
    fire_at = models.BigIntegerField(null=True)
    created_at = models.BigIntegerField(null=True)

    def __str__(self) -> str:
        return f"{self.pk}: job {self.job_id} {self.change} {self.state}, claim {self.fence}"
