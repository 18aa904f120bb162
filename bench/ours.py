"""django-alkstore as a user calls it: the public functions, and `manage.py run_queue` with its default logging."""

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from bench import floor
from bench.program import WARM_UP, Program, main

QUEUE = "BENCH_QUEUE"
"""The environment's name of the queue, and so of the handler."""


class Ours(Program):
    """The library."""

    def open(self) -> None:
        self.queue = os.environ.get(QUEUE, "noop")
        os.environ["BENCH_FOLDER"] = str(self.folder)
        os.environ["DJANGO_SETTINGS_MODULE"] = "bench.project.settings"
        if sys.argv[1] == "work":
            return
        import django

        django.setup()
        from django.db import connection, transaction
        from django_alkstore import services

        self.services = services
        self.connection = connection
        self.transaction = transaction

    def prepare(self) -> None:
        from django.core.management import call_command

        call_command("migrate", run_syncdb=True, verbosity=0)

    def enqueue(self, payload: object, *, priority: int = 0) -> object:
        if priority:
            return self.services.enqueue(self.queue, payload, priority=priority)
        return self.services.enqueue(self.queue, payload)

    def enqueue_many(self, payloads: Sequence[object]) -> object:
        return self.services.enqueue_many(self.queue, payloads)

    def claim_and_ack(self) -> bool:
        claimed = self.services.claim_batch(self.queue, "bench")
        for job in claimed:
            job.ack()
        return bool(claimed)

    def claim_and_ack_batch(self, size: int) -> int:
        """The acks in one transaction: there is no public function for many."""
        claimed = self.services.claim_batch(self.queue, "bench", limit=size)
        with self.transaction.atomic():
            for job in claimed:
                job.ack()
        return len(claimed)

    def left(self) -> int:
        from django_alkstore.models import Job

        return Job.objects.live().count()

    def worker(self) -> Sequence[str]:
        return [sys.executable, "-m", "django", "run_queue", self.queue, "--concurrency", "4"]

    def role_schedule(self) -> None:
        """Become the scheduler."""
        command = [sys.executable, "-m", "django", "run_schedules"]
        os.execvp(command[0], command)  # noqa: S606

    def role_stock_behind(self, count: int) -> None:
        connection = floor.connect(self.folder / floor.DATABASE)
        floor.fill(connection, count, priority="-5", queue=f"'{self.queue}'")
        connection.close()

    def role_write_rows(self, a_second: int, seconds: int) -> int:
        """An app that writes rows of its own, one for each commit, at a steady pace: how many."""
        from bench.project.models import Done

        print("writing", flush=True)
        started = time.monotonic()
        for number in range(a_second * seconds):
            time.sleep(max(0.0, started + number / a_second - time.monotonic()))
            Done.objects.create(job=number)
        return a_second * seconds

    def role_miss_boundaries(self, schedules: int, boundaries: int) -> None:
        """Schedules of one minute that are all due, and have been for as many boundaries."""
        from django.utils import timezone
        from django_alkstore.models import Schedule

        with self.transaction.atomic():
            for number in range(schedules):
                self.services.schedule(f"schedule-{number}", "@every 1m", "noop", {"number": number})
            Schedule.objects.update(next_fire_at=timezone.now() - timedelta(minutes=boundaries - 1, seconds=1))

    def role_write_while_behind(self) -> dict[str, float]:
        """An app that writes a row every 5 ms until no schedule is due: its longest wait, and what was fired."""
        from django.utils import timezone
        from django_alkstore.models import Job, Schedule

        from bench.project.models import Done

        Done.objects.create(job=0)
        print("writing", flush=True)
        while not Job.objects.exists():
            time.sleep(0.005)
        longest, began, looked = 0.0, time.perf_counter(), 0.0
        while True:
            started = time.perf_counter()
            Done.objects.create(job=0)
            ended = time.perf_counter()
            longest = max(longest, ended - started)
            if ended > looked + 0.5:
                looked = ended
                if not Schedule.objects.filter(next_fire_at__lte=timezone.now()).exists():
                    break
            time.sleep(0.005)
        return {"longest_ms": longest * 1e3, "seconds": ended - began, "jobs": Job.objects.count()}

    def role_outbox(self, count: int) -> dict[str, float]:
        """A request's transaction, by turns with and without its outbox job; microseconds, and the percent."""
        from bench.project.models import Order, OrderLine

        def transaction(number: int, *, job: bool) -> float:
            started = time.perf_counter()
            with self.transaction.atomic():
                order = Order.objects.create(reference=f"D-{number}", email="ada@example.com", total_cents=1250)
                OrderLine.objects.create(order=order, article="tea", quantity=2, cents=625)
                if job:
                    self.services.outbox_enqueue_tx("mail", {"order": order.pk})
            return time.perf_counter() - started

        for number in range(WARM_UP):
            transaction(-number - 1, job=number % 2 == 0)
        seconds = {False: 0.0, True: 0.0}
        for number in range(count):
            job = number % 4 in (1, 2)  # without, with, with, without: neither is always first
            seconds[job] += transaction(number, job=job)
        plain, full = (seconds[job] / (count / 2) * 1e6 for job in (False, True))
        return {"without": plain, "with": full, "percent": (full / plain - 1) * 100}


if __name__ == "__main__":
    main(Ours)
