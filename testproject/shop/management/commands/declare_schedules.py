"""Declare the shop's schedules: a step of a deploy, after `migrate`.

Declaring again changes nothing but what is declared differently, and keeps each schedule's place on its grid.
"""

from typing import Any

from django.core.management.base import BaseCommand

from django_alkstore.services import schedule

SALES_REPORT = "sales-report"


class Command(BaseCommand):
    help = "Declares the shop's schedules."

    def handle(self, *args: Any, **options: Any) -> None:
        declared = schedule(SALES_REPORT, "@every 10s", "reports")
        if options["verbosity"]:
            self.stdout.write(f"{declared.name}: {declared.spec}, first at {declared.next_fire_at:%H:%M:%S} UTC")
