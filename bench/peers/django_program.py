"""What the peers that are Django apps have in common."""

import os
import sys
from collections.abc import Sequence

from bench.program import Program


class DjangoProgram(Program):
    peer = ""
    command: Sequence[str] = ()

    def open(self) -> None:
        os.environ["BENCH_PEER"] = self.peer
        os.environ["BENCH_FOLDER"] = str(self.folder)
        os.environ["DJANGO_SETTINGS_MODULE"] = "bench.peers.settings"
        if sys.argv[1] == "work":
            return
        import django

        django.setup()

    def prepare(self) -> None:
        from django.core.management import call_command

        call_command("migrate", verbosity=0)

    def enqueue_many(self, payloads: Sequence[object]) -> object:
        """None of them has a call for many: one transaction is the best there is."""
        from django.db import transaction

        with transaction.atomic():
            for payload in payloads:
                self.enqueue(payload)
        return None

    def worker(self) -> Sequence[str]:
        return [sys.executable, "-m", "django", *self.command]
