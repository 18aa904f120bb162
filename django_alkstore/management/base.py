"""What the commands share: the arguments, and turning an outcome into an exit code."""

import argparse
import math
import time
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, NotSupportedError, connections

from django_alkstore import clock
from django_alkstore.dialects.transactions import is_contention, resolve_alias
from django_alkstore.models import Job
from django_alkstore.runtime.lines import show_log
from django_alkstore.runtime.loop import NotRegistered, refuse_in_memory
from django_alkstore.services.patience import Patience

EXIT_USAGE = 2


def positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return number


def duration(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return number


class AlkstoreCommand(BaseCommand):
    """A command on one database."""

    requires_system_checks = ["alkstore"]

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database", help="Database alias. Default: ALKSTORE['DATABASE'], else the routers' choice."
        )

    def handle(self, *args: Any, **options: Any) -> str | None:
        alias = options["database"] or resolve_alias(None)
        if alias not in connections:
            raise CommandError(f"there is no database {alias!r} in DATABASES", returncode=EXIT_USAGE)
        try:
            self.precheck(alias)
            self.see_tables(alias)
        except NotSupportedError as error:
            raise CommandError(str(error)) from error
        except DatabaseError as error:
            if not is_contention(alias, error):
                raise CommandError(
                    f"the tables on the database {alias!r} cannot be read ({error}); run migrate?"
                ) from error
            self.wait_for_tables(alias, error)
        return self.work(alias, options)

    def see_tables(self, alias: str) -> None:
        Job.objects.using(alias).exists()

    def wait_for_tables(self, alias: str, error: DatabaseError) -> None:
        """What to do where another process shuts everybody out: say so, and leave."""
        raise CommandError(f"the database {alias!r} is busy ({error}); try again") from error

    def precheck(self, alias: str) -> None:
        """Refuse a database that the command cannot work on, before it is asked anything."""

    def work(self, alias: str, options: dict[str, Any]) -> str | None:
        raise NotImplementedError


class RunCommand(AlkstoreCommand):
    """A command that runs until it is stopped, and says what it does through the log."""

    def precheck(self, alias: str) -> None:
        try:
            refuse_in_memory(alias)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error

    def wait_for_tables(self, alias: str, error: DatabaseError) -> None:
        """Go on: a busy database is no reason to end for what is meant to run for ever."""
        patience = Patience("starting", alias)
        while True:
            time.sleep(patience.after(error))
            try:
                self.see_tables(alias)
            except DatabaseError as again:
                error = again
            else:
                patience.reset()
                return

    def handle(self, *args: Any, **options: Any) -> str | None:
        show_log(options["verbosity"])
        return super().handle(*args, **options)

    def work(self, alias: str, options: dict[str, Any]) -> str | None:
        try:
            code = self.run(alias, options)
        except NotRegistered as error:
            raise CommandError(str(error), returncode=EXIT_USAGE) from error
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        if code:
            raise SystemExit(code)
        return None

    def run(self, alias: str, options: dict[str, Any]) -> int:
        """Run; the exit code."""
        raise NotImplementedError


class WorkerCommand(RunCommand):
    """A command that runs handlers."""

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--concurrency", type=positive_int, default=4, metavar="N", help="Handlers at once. Default: 4."
        )
        parser.add_argument(
            "--grace",
            type=duration,
            default=30.0,
            metavar="SECONDS",
            help="How long running handlers may take after SIGTERM. Default: 30.",
        )


def age(seconds: float | None) -> str:
    """Seconds as people read them: 8 s, 3 min, 5 h, 2 d."""
    if seconds is None:
        return "-"
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def since(moment: Any) -> str:
    """How long ago (`3 min ago`), or in how long (`in 3 min`)."""
    if moment is None:
        return "-"
    seconds = (clock.now() - moment).total_seconds()
    return f"{age(seconds)} ago" if seconds >= 0 else f"in {age(-seconds)}"
