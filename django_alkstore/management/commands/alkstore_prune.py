"""Delete finished jobs whose time is over."""

from typing import Any

from django_alkstore.ages import age
from django_alkstore.management.base import AlkstoreCommand
from django_alkstore.services import prune, queue_stats
from django_alkstore.services.maintenance import retention


class Command(AlkstoreCommand):
    help = "Deletes finished jobs that are older than the settings keep them, in short transactions."

    def work(self, alias: str, options: dict[str, Any]) -> str | None:
        removed = prune(using=alias)
        stats = queue_stats(using=alias)
        for state, keep in retention().items():
            kept = sum(getattr(queue, state) for queue in stats)
            rule = "kept for ever" if keep is None else f"kept for {age(keep)}"
            self.stdout.write(f"{state:<10} removed {removed[state]:>8}   left {kept:>8}   ({rule})")
        return None
