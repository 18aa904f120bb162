from django.db import migrations, models

import django_alkstore.fields


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Lock",
            fields=[
                ("token", models.BigAutoField(primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=177, unique=True)),
                ("owner", models.CharField(max_length=255)),
                ("acquired_at", django_alkstore.fields.InstantField()),
                ("expires_at", django_alkstore.fields.InstantField()),
                (
                    "liveness",
                    models.CharField(
                        blank=True,
                        help_text="The liveness file of the scheduler or worker that holds it.",
                        max_length=64,
                        null=True,
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Job",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("queue", models.CharField(max_length=146)),
                ("payload", django_alkstore.fields.JSONTextField()),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("pending", "Pending"),
                            ("processing", "Processing"),
                            ("completed", "Completed"),
                            ("dead", "Dead"),
                            ("cancelled", "Cancelled"),
                        ],
                        default="pending",
                        max_length=10,
                    ),
                ),
                ("priority", models.IntegerField(default=0, help_text="Higher goes first.")),
                ("run_at", django_alkstore.fields.InstantField(help_text="Due from this moment on.")),
                (
                    "attempts",
                    models.PositiveIntegerField(default=0, help_text="Claims that count against the maximum."),
                ),
                ("max_attempts", models.PositiveIntegerField()),
                ("visibility_timeout", models.FloatField(help_text="How long a claim is leased, in seconds.")),
                ("backoff_base", models.FloatField(help_text="The first wait after a failure, in seconds.")),
                (
                    "expires_at",
                    django_alkstore.fields.InstantField(help_text="Not delivered from this moment on.", null=True),
                ),
                (
                    "fence",
                    models.PositiveBigIntegerField(default=0, help_text="Grows with each claim; names the claim."),
                ),
                ("worker_id", models.CharField(help_text="Who holds the lease.", max_length=255, null=True)),
                ("lease_expires_at", django_alkstore.fields.InstantField(null=True)),
                (
                    "liveness",
                    models.CharField(
                        help_text="The liveness file under which the latest claim was made.", max_length=64, null=True
                    ),
                ),
                (
                    "unique_key",
                    models.CharField(help_text="At most one live job of the queue has it.", max_length=255, null=True),
                ),
                ("schedule", models.CharField(help_text="The schedule that fired it.", max_length=128, null=True)),
                (
                    "fire_at",
                    django_alkstore.fields.InstantField(help_text="The boundary that it was fired for.", null=True),
                ),
                ("errors", django_alkstore.fields.JSONTextField(default=list)),
                ("last_error", models.TextField(null=True)),
                ("created_at", django_alkstore.fields.InstantField()),
                ("finished_at", django_alkstore.fields.InstantField(null=True)),
                (
                    "started_at",
                    django_alkstore.fields.InstantField(help_text="The claim of the first attempt.", null=True),
                ),
                (
                    "last_attempted_at",
                    django_alkstore.fields.InstantField(
                        help_text="The claim of the latest attempt, given back or not; empty if none counts.",
                        null=True,
                    ),
                ),
                (
                    "task",
                    models.TextField(
                        default="", help_text="The dotted path of the task that it runs; empty for a handler's job."
                    ),
                ),
                (
                    "result",
                    django_alkstore.fields.JSONTextField(
                        help_text="What the task returned; empty if that was None.", null=True
                    ),
                ),
                (
                    "worker_ids",
                    django_alkstore.fields.JSONTextField(
                        default=list, help_text="Who made each counted attempt; the last 20 at most."
                    ),
                ),
                (
                    "lock_errors",
                    models.SmallIntegerField(
                        default=0,
                        help_text="Lock errors of the database in a row, whose attempts were given back.",
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(
                        condition=models.Q(("state", "pending")),
                        fields=["queue", "-priority", "run_at"],
                        name="alkstore_job_claim",
                    ),
                    models.Index(
                        condition=models.Q(("state", "processing")),
                        fields=["queue", "lease_expires_at"],
                        name="alkstore_job_lease",
                    ),
                    models.Index(
                        condition=models.Q(("expires_at__isnull", False), ("state", "pending")),
                        fields=["queue", "expires_at"],
                        name="alkstore_job_expiry",
                    ),
                    models.Index(
                        condition=models.Q(("last_error__isnull", False)),
                        fields=["state", "queue"],
                        name="alkstore_job_failed",
                    ),
                    models.Index(
                        condition=models.Q(("state__in", ("pending", "processing")), ("task__gt", "")),
                        fields=["queue", "task"],
                        name="alkstore_job_task",
                    ),
                    models.Index(
                        condition=models.Q(("unique_key__isnull", False)),
                        fields=["unique_key"],
                        name="alkstore_job_unique_key",
                    ),
                    models.Index(
                        condition=models.Q(("finished_at__isnull", False)),
                        fields=["state", "finished_at", "queue"],
                        name="alkstore_job_finished",
                    ),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(
                                ("finished_at__isnull", True),
                                ("state", "pending"),
                                ("lease_expires_at__isnull", True),
                                ("worker_id__isnull", True),
                            ),
                            models.Q(
                                ("finished_at__isnull", True),
                                ("state", "processing"),
                                ("lease_expires_at__isnull", False),
                                ("worker_id__isnull", False),
                            ),
                            models.Q(
                                ("state", "completed"),
                                ("finished_at__isnull", False),
                                ("lease_expires_at__isnull", True),
                                ("worker_id__isnull", True),
                            ),
                            models.Q(
                                ("state", "dead"),
                                ("finished_at__isnull", False),
                                ("lease_expires_at__isnull", True),
                                ("worker_id__isnull", True),
                            ),
                            models.Q(
                                ("state", "cancelled"),
                                ("finished_at__isnull", False),
                                ("lease_expires_at__isnull", True),
                                ("worker_id__isnull", True),
                            ),
                            _connector="OR",
                        ),
                        name="alkstore_job_state",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("max_attempts__gte", 1)), name="alkstore_job_max_attempts"
                    ),
                    models.UniqueConstraint(
                        condition=models.Q(("state__in", ("pending", "processing")), ("unique_key__isnull", False)),
                        fields=("queue", "unique_key"),
                        name="alkstore_job_live_unique_key",
                    ),
                    models.UniqueConstraint(
                        condition=models.Q(("fire_at__isnull", False), ("schedule__isnull", False)),
                        fields=("schedule", "fire_at"),
                        name="alkstore_job_schedule_boundary",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Schedule",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=128, unique=True)),
                ("spec", models.TextField()),
                (
                    "timezone",
                    models.CharField(
                        help_text="The zone of its wall clock; not for '@every'.", max_length=64, null=True
                    ),
                ),
                ("queue", models.CharField(max_length=128)),
                (
                    "task",
                    models.TextField(
                        default="", help_text="The dotted path of the task that it fires; empty for a handler."
                    ),
                ),
                ("payload", django_alkstore.fields.JSONTextField()),
                ("starting", django_alkstore.fields.InstantField(help_text="A boundary of the grid.", null=True)),
                (
                    "starts_at",
                    django_alkstore.fields.InstantField(help_text="No boundary before this moment.", null=True),
                ),
                ("ends_at", django_alkstore.fields.InstantField(help_text="No boundary after this moment.", null=True)),
                (
                    "catch_up",
                    models.CharField(help_text="What becomes of missed boundaries.", max_length=6, null=True),
                ),
                (
                    "grace",
                    models.FloatField(help_text="Seconds after which a boundary is too late to fire.", null=True),
                ),
                ("overlap", models.CharField(default="allow", max_length=5)),
                (
                    "jitter",
                    models.FloatField(default=0.0, help_text="Seconds by which a job is put off at most."),
                ),
                ("priority", models.IntegerField(default=0)),
                ("max_attempts", models.PositiveIntegerField(null=True)),
                ("visibility_timeout", models.FloatField(help_text="Seconds.", null=True)),
                ("backoff_base", models.FloatField(help_text="Seconds.", null=True)),
                ("expires_in", models.FloatField(help_text="Seconds from its tick; -1: never.", null=True)),
                ("enabled", models.BooleanField(default=True)),
                ("from_code", models.BooleanField(default=False, help_text="Declared by @scheduled.")),
                (
                    "undeclared_at",
                    django_alkstore.fields.InstantField(
                        help_text="When the code no longer declared it. It fires nothing since.", null=True
                    ),
                ),
                ("fired", models.PositiveBigIntegerField(default=0)),
                (
                    "coalesced",
                    models.PositiveBigIntegerField(default=0, help_text="Missed, and covered by a later boundary."),
                ),
                (
                    "too_late",
                    models.PositiveBigIntegerField(default=0, help_text="Missed, and not fired any more."),
                ),
                (
                    "overlapped",
                    models.PositiveBigIntegerField(default=0, help_text="Not fired beside the job of an earlier one."),
                ),
                ("next_fire_at", django_alkstore.fields.InstantField(null=True)),
                (
                    "last_fire_at",
                    django_alkstore.fields.InstantField(help_text="The last boundary that was fired.", null=True),
                ),
                ("last_error", models.TextField(help_text="Why the library paused it.", null=True)),
                ("created_at", django_alkstore.fields.InstantField()),
                ("updated_at", django_alkstore.fields.InstantField()),
            ],
            options={
                "indexes": [
                    models.Index(
                        condition=models.Q(("enabled", True)), fields=["next_fire_at"], name="alkstore_schedule_due"
                    )
                ],
            },
        ),
    ]
