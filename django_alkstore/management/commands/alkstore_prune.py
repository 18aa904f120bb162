"""Delete finished jobs: those that the settings keep no longer, or those that the options name."""

from argparse import ArgumentTypeError
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_alkstore.ages import age, parse_age
from django_alkstore.exceptions import InvalidName
from django_alkstore.management.base import EXIT_USAGE, ReportCommand
from django_alkstore.models import Job
from django_alkstore.names import OUTBOX_MARK, outbox_queue, queue_named
from django_alkstore.services import delete_finished, prune, queue_stats
from django_alkstore.services.maintenance import FINISHED_STATES, retention


class Command(ReportCommand):
    help = (
        "Deletes finished jobs in short transactions. Without an option: those that are older than the settings keep "
        "them. With --queue, --state or --older-than: every finished job that matches all of these options."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--queue", type=_queue, metavar="NAME", help="Of this queue; outbox:NAME for an outbox.")
        parser.add_argument("--state", choices=FINISHED_STATES, help="In this state. Default: all three.")
        parser.add_argument(
            "--older-than", type=_age, metavar="AGE", help="Finished at least this long ago: 90s, 15m, 12h, 30d."
        )

    def work(self, alias: str, options: dict[str, Any]) -> str | None:
        chosen = {name: options[name] for name in ("queue", "state", "older_than") if options[name] is not None}
        if chosen:
            _refuse_name_of_outbox(options["queue"], alias)
            for state, count in delete_finished(**chosen, using=alias).items():
                self.stdout.write(f"{state:<10} removed {count:>8}")
            return None
        removed = prune(using=alias)
        stats = queue_stats(using=alias)
        for state, keep in retention().items():
            kept = sum(getattr(queue, state) for queue in stats)
            rule = "no limit in the settings" if keep is None else f"the settings keep them for {age(keep)}"
            self.stdout.write(f"{state:<10} removed {removed[state]:>8}   left {kept:>8}   ({rule})")
        return None


def _queue(name: str) -> str:
    """An argument's type: a name that the service takes."""
    try:
        queue_named(name)
    except InvalidName as error:
        raise ArgumentTypeError(str(error)) from None
    return name


def _refuse_name_of_outbox(name: str | None, alias: str) -> None:
    """`CommandError` if no job is in a queue of this name, and some are in an outbox of this name."""
    if name is None or name.startswith(OUTBOX_MARK):
        return
    jobs = Job.objects.using(alias)
    if not jobs.filter(queue=name).exists() and jobs.filter(queue=outbox_queue(name)).exists():
        raise CommandError(
            f"no job is in a queue {name!r}; for the outbox, write --queue {OUTBOX_MARK}{name}", returncode=EXIT_USAGE
        )


def _age(text: str) -> float:
    try:
        return parse_age(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
