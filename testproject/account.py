"""What really happened: counted from the database, the mail folder and the receiver's log, and then judged."""

import email
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from email import policy
from http import HTTPStatus
from pathlib import Path
from typing import Any

from django.db import transaction
from django.db.models import Sum

from django_alkstore.models import Job, State
from django_alkstore.services import outbox
from testproject.receiver import Event
from testproject.shop.management.commands.declare_schedules import SALES_REPORT
from testproject.shop.models import Order, SalesReport
from testproject.shop.tasks import check_credit, print_invoice


@dataclass(frozen=True, slots=True)
class Stored:
    """What the database says."""

    orders: frozenset[str]
    """References."""
    turnover: int
    """Of these orders, in cents."""
    jobs: Counter[tuple[str, str]]
    """By outbox and reference: the jobs that there are, in any state."""
    unfinished: list[str]
    """Jobs of the outboxes that are not completed."""
    retries: Counter[str]
    """By outbox: failed attempts, as the jobs keep them."""
    invoices: Counter[str]
    """By the order's reference: results of the task `print_invoice` that are successful."""
    checks: Counter[str]
    """By the order's reference: results of the coroutine `check_credit` that are successful."""
    task_retries: int
    """Failed attempts of these tasks."""
    fires: int
    """Boundaries of the schedule that became jobs."""
    fires_done: int
    reports: int
    """For a boundary."""
    last_report: tuple[int, int] | None
    """Its orders and its turnover."""


@dataclass(frozen=True, slots=True)
class Received:
    """What the receiver noted."""

    accepted: Counter[str] = field(default_factory=Counter)
    """By reference: deliveries that it took as new."""
    events: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    """Deliveries that the sender was not told had gone well."""


@dataclass(frozen=True, slots=True)
class Account:
    """All three, beside what the shop answered to those who ordered."""

    answers: Mapping[str, int]
    """By reference; 0 where no answer came."""
    stored: Stored
    mails: Counter[str]
    """By reference: messages in the folder."""
    received: Received

    def answered(self, status: int) -> frozenset[str]:
        return frozenset(reference for reference, answer in self.answers.items() if answer == status)

    @property
    def declined(self) -> frozenset[str]:
        return self.answered(HTTPStatus.PAYMENT_REQUIRED)

    def faults(self) -> list[str]:
        """All that is not as it should be, one sentence each; none: nothing lost, nothing sent for a declined order."""
        return [*self._order_faults(), *self._delivery_faults(), *self._report_faults()]

    def _order_faults(self) -> Iterator[str]:
        placed = self.answered(HTTPStatus.CREATED)
        odd = {r: s for r, s in self.answers.items() if r not in placed | self.declined}
        if odd:
            yield f"{len(odd)} orders got another answer than 201 or 402: {_some(f'{r} {s}' for r, s in odd.items())}"
        yield from _differences("order", "answered as placed", placed, "in the database", self.stored.orders)

    def _delivery_faults(self) -> Iterator[str]:
        stored = self.stored
        if stored.unfinished:
            yield f"{len(stored.unfinished)} jobs are not completed: {_some(stored.unfinished)}"
        for name in ("mail", "webhook"):
            enqueued = Counter({reference: n for (queue, reference), n in stored.jobs.items() if queue == name})
            yield from _not_once(f"{name} job", stored.orders, enqueued)
        yield from _not_once("mail", stored.orders, self.mails)
        yield from _not_once("webhook taken by the receiver", stored.orders, self.received.accepted)
        yield from _not_once("invoice", stored.orders, stored.invoices)
        yield from _not_once("credit check", stored.orders, stored.checks)
        if self.received.events[Event.FORGED]:
            yield f"{self.received.events[Event.FORGED]} webhooks had a wrong signature"

    def _report_faults(self) -> Iterator[str]:
        stored = self.stored
        if not stored.fires:
            yield "the schedule never fired"
        if stored.reports != stored.fires_done:
            yield f"{stored.fires_done} report jobs are completed, but there are {stored.reports} reports"
        if stored.last_report != (len(stored.orders), stored.turnover):
            yield f"the last report says {stored.last_report}, not {(len(stored.orders), stored.turnover)}"


def _some(items: Iterable[str], shown: int = 5) -> str:
    listed = sorted(items)
    return ", ".join(listed[:shown]) + (", …" if len(listed) > shown else "")


def _differences(what: str, here: str, ours: frozenset[str], there: str, theirs: frozenset[str]) -> Iterator[str]:
    for side, other, only in ((here, there, ours - theirs), (there, here, theirs - ours)):
        if only:
            yield f"{len(only)} {what}s {side} but not {other}: {_some(only)}"


def _not_once(what: str, orders: frozenset[str], found: Counter[str]) -> Iterator[str]:
    """What is not exactly one for each order. A declined order is none: whatever is there for it is too much."""
    missing = orders - found.keys()
    if missing:
        yield f"no {what} for {len(missing)} orders: {_some(missing)}"
    repeated = {reference for reference in found.keys() & orders if found[reference] > 1}
    if repeated:
        yield f"more than one {what} for {len(repeated)} orders: {_some(repeated)}"
    extra = found.keys() - orders
    if extra:
        yield f"a {what} for {len(extra)} orders that do not exist: {_some(extra)}"


def count(answers: Mapping[str, int], mail_folder: Path, receiver_log: Path) -> Account:
    return Account(answers, read_database(), read_mails(mail_folder), read_receiver_log(receiver_log))


def read_database() -> Stored:
    outboxes = {outbox(name).queue: name for name in ("mail", "webhook")}
    # One transaction: the scheduler goes on while we count, and all numbers must be of one moment.
    with transaction.atomic():
        jobs = list(Job.objects.filter(queue__in=outboxes).defer("payload"))
        fires = Job.objects.filter(schedule=SALES_REPORT, fire_at__isnull=False)
        report = SalesReport.objects.last()
        retries: Counter[str] = Counter()
        for job in jobs:
            retries[outboxes[job.queue]] += len(job.errors)
        return Stored(
            orders=frozenset(Order.objects.values_list("reference", flat=True)),
            turnover=Order.objects.aggregate(cents=Sum("total_cents"))["cents"] or 0,
            jobs=Counter((outboxes[job.queue], job.unique_key or "") for job in jobs),
            unfinished=[
                f"{outboxes[job.queue]} {job.unique_key} {job.state}" for job in jobs if job.state != State.COMPLETED
            ],
            retries=retries,
            invoices=Counter(_references(print_invoice)),
            checks=Counter(_references(check_credit)),
            task_retries=sum(len(job.errors) for job in Job.objects.exclude(task="")),
            fires=fires.count(),
            fires_done=fires.filter(state=State.COMPLETED).count(),
            reports=SalesReport.objects.filter(boundary__isnull=False).count(),
            last_report=(report.orders, report.total_cents) if report else None,
        )


def _references(task: Any) -> Iterator[str]:
    """The references of the orders for which this task has succeeded."""
    for job in Job.objects.filter(task=task.module_path, state=State.COMPLETED):
        result = task.get_result(str(job.pk))
        argument = result.args[0]
        yield argument if isinstance(argument, str) else Order.objects.get(pk=argument).reference


def read_mails(folder: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for path in folder.glob("*.eml"):
        message = email.message_from_bytes(path.read_bytes(), policy=policy.default)
        found[str(message["X-Shop-Order"])] += 1
    return found


def read_receiver_log(path: Path) -> Received:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return Received(
        accepted=Counter(entry["order"] for entry in entries if entry["event"] == Event.ACCEPTED),
        events=Counter(entry["event"] for entry in entries),
        failures=sum(entry["answer"] != HTTPStatus.OK for entry in entries),
    )
