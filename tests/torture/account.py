"""The account at the end of a run: what the business rows, the history, the journals and the logs say together.

Each check adds a line for each thing that is not as the contract has it. `docs/lifecycle.md` says what may become of
a job; `Life` replays exactly that.
"""

import json
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from django.db import connection

from django_alkstore.clock import from_us
from django_alkstore.failures import EXPIRED, LEASE_EXPIRED, MAX_ERRORS, TIME_LIMIT, WORKER_DIED
from django_alkstore.models import Job, Schedule
from django_alkstore.names import LEADERSHIP_LOCK
from django_alkstore.services.locks import holder
from django_alkstore.services.ticks import MAX_CATCH_UP
from django_alkstore.specs import Every, parse_spec
from tests.torture import journal, logs
from tests.torture.alkstore import EXACT, INJECTED, OUTSIDE
from tests.torture.models import Counter, Effect, History, Note, Order
from tests.torture.settings import SCHEDULES

LIVE = {"pending", "processing"}
CLOCK_GRAIN = 2_000
"""Microseconds: the triggers' clock counts milliseconds."""
SAID = {"completed": "completed", "retried": "failed", "died": "died", "snoozed": "given back"}
"""How a claim ended, by the event that a worker said it with."""


@dataclass
class Life:
    """One job, as its history tells it."""

    first: History
    now: History
    """The row after its latest change."""
    deleted: bool = False
    endings: dict[int, str] = field(default_factory=dict)
    """How each claim ended, by its fence."""
    faults: list[str] = field(default_factory=list)

    @property
    def queue(self) -> str:
        return self.first.queue or ""

    @property
    def reference(self) -> str:
        """The order that it was enqueued for."""
        return json.loads(self.first.payload or "")["order"]

    @property
    def completed_by(self) -> int | None:
        """The claim that completed it."""
        return next((fence for fence, how in self.endings.items() if how == "completed"), None)

    def move(self, after: History) -> None:
        before, self.now = self.now, after
        if after.change == "D":
            self.deleted = True
            if before.state in LIVE:
                self.faults.append(f"deleted while {before.state} (history {after.pk})")
            return
        what = self._what_happened(before, after)
        if what is None:
            self.faults.append(
                f"history {after.pk}: {before.state} -> {after.state}, claim {before.fence} -> {after.fence}, "
                f"attempts {before.attempts} -> {after.attempts} of {after.max_attempts}, "
                f"errors {before.errors} -> {after.errors} ({after.last_error!r}), "
                f"lease {before.lease_expires_at} at {after.at}"
            )
        elif what not in ("claimed", "renewed"):
            self.endings[before.fence] = what

    @staticmethod
    def _what_happened(before: History, after: History) -> str | None:
        """The name of the change, or `None` where there is none such."""
        step = (before.state, after.state)
        same_claim = before.fence == after.fence
        spent = after.attempts - before.attempts
        error_kept = after.errors == min(before.errors + 1, MAX_ERRORS)
        no_error = after.errors == before.errors
        if step == ("pending", "processing"):
            in_order = after.fence == before.fence + 1 and spent == 1 and after.attempts <= after.max_attempts
            due = before.run_at <= after.at + CLOCK_GRAIN
            return "claimed" if in_order and due and no_error else None
        if step == ("pending", "dead"):
            return "expired" if same_claim and error_kept and after.last_error == EXPIRED else None
        if before.state != "processing" or not same_claim:
            return None
        if after.state == "processing":
            same_holder = before.worker_id == after.worker_id
            return "renewed" if same_holder and spent == 0 and no_error else None
        if after.state == "completed":
            return "completed" if spent == 0 and no_error else None
        if step == ("processing", "pending") and spent == -1 and no_error:
            return "given back"
        if spent or not error_kept:
            return None
        left = before.attempts < before.max_attempts
        if after.last_error == WORKER_DIED:
            return "left by the dead" if left == (after.state == "pending") else None
        if after.last_error == LEASE_EXPIRED:
            over = before.lease_expires_at is not None and before.lease_expires_at <= after.at + CLOCK_GRAIN
            return "lapsed" if over and left == (after.state == "pending") else None
        return "failed" if after.state == "pending" else "died"


class Account:
    """Takes the account of one run, in the process that ran it, once everything has come to rest."""

    def __init__(self, folder: Path, unexpected_ends: Iterable[str]) -> None:
        self.folder = folder
        self.faults: list[str] = list(unexpected_ends)
        """Every discrepancy, in a line."""
        self.table: list[tuple[str, str]] = []
        """What was counted, for people."""
        self.lives: dict[int, Life] = {}
        self.events: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def take(self) -> None:
        for event in journal.read(self.folder):
            self.events[event["event"]].append(event)
        self._replay()
        for check in (
            self._jobs,
            self._claims,
            self._orders,
            self._effects,
            self._schedules,
            self._notes,
            self._database,
            self._logs,
        ):
            check()

    def _fault(self, text: str) -> None:
        self.faults.append(text)

    def _count(self, what: str, text: str) -> None:
        self.table.append((what, text))

    def _replay(self) -> None:
        keyed: dict[tuple[str, str], int] = {}
        for row in History.objects.order_by("id").iterator():
            if row.change == "I":
                if row.job_id in self.lives:
                    self._fault(f"job {row.job_id}: its id came back (history {row.pk})")
                self.lives[row.job_id] = life = Life(row, row)
                if (row.state, row.attempts, row.fence, row.errors) != ("pending", 0, 0, 0):
                    life.faults.append(f"born {row.state}, attempts {row.attempts}")
            else:
                life = self.lives[row.job_id]
                life.move(row)
            if life.first.unique_key is None:
                continue
            key = (life.queue, life.first.unique_key)
            if row.state in LIVE and row.change != "D":
                if keyed.setdefault(key, row.job_id) != row.job_id:
                    self._fault(f"jobs {keyed[key]} and {row.job_id} are live with one key {key}")
            elif keyed.get(key) == row.job_id:
                del keyed[key]

    def _jobs(self) -> None:
        """Each history is one that the life cycle allows, has ended, and is what the row says."""
        rows = {row.pk: row for row in Job.objects.all()}
        states: Tally[str] = Tally()
        reasons: Tally[str] = Tally()
        for job_id, life in self.lives.items():
            states[life.now.state] += 1
            self.faults += [f"job {job_id} in {life.queue}: {fault}" for fault in life.faults]
            if life.now.state in LIVE:
                self._fault(f"job {job_id} in {life.queue} is still {life.now.state}")
            if life.now.state == "dead":
                reasons[self._reason(job_id, life)] += 1
            row = rows.pop(job_id, None)
            if (row is None) != life.deleted:
                self._fault(f"job {job_id} is {'gone' if row is None else 'there'}, and its history says otherwise")
            if row is not None and row.state in ("completed", "dead"):
                self._errors_of(row)
        if rows:
            self._fault(f"jobs without a history: {sorted(rows)}")
        self._count("jobs", _listed(states))
        self._count("dead because", _listed(reasons))
        self._count("pruned", str(sum(life.deleted for life in self.lives.values())))

    def _reason(self, job_id: int, life: Life) -> str:
        """Why it is dead, in few words. Each must be a reason that the run gave."""
        error = life.now.last_error or ""
        if life.deleted:
            self._fault(f"dead job {job_id} was deleted, and KEEP_DEAD keeps it")
        for reason in (INJECTED, LEASE_EXPIRED, WORKER_DIED, TIME_LIMIT, "database is locked"):
            if reason in error:
                return reason
        self._fault(f"job {job_id} in {life.queue} is dead for no reason of this run's: {error!r}")
        return error

    def _errors_of(self, row: Job) -> None:
        numbers = [entry["attempt"] for entry in row.errors]
        if numbers != sorted(set(numbers)) or (numbers and numbers[-1] > row.attempts):
            self._fault(f"job {row.pk}: attempts {row.attempts}, and errors of attempts {numbers}")
        failures = row.attempts - (row.state == "completed")
        if len(numbers) != min(failures, MAX_ERRORS):
            self._fault(f"job {row.pk}: {row.state} after {row.attempts} attempts, with {len(numbers)} errors")

    def _claims(self) -> None:
        """What workers said of each claim is what became of that very claim.

        A claim that was left by the dead must be one of which no process has said anything since.
        """
        for said, how in SAID.items():
            for event in self.events[said]:
                self._expect_ending(event, how)
        for event in self.events["settled"]:
            if self._ending(event) not in ("completed", "failed", "died", "given back"):
                self._fault(f"{_place(event)}: said to be settled, and was {self._ending(event)}")
        ways = {"ack": "completed", "release": "given back", "retry": "failed"}
        for event in self.events["settled itself"]:
            if event["done"]:
                how = ways[event["way"]]
                last = event["way"] == "retry" and self._ending(event) == "died"
                self._expect_ending(event, "died" if last else how)
            elif self._ending(event) != "lapsed":
                self._fault(f"{_place(event)}: its {event['way']} was refused, and its claim {self._ending(event)}")
        for event in self.events["lost"]:
            # A renewal may be refused while its handler is settling the job.
            if event["what"] != "renewal" and self._ending(event) != "lapsed":
                self._fault(f"{_place(event)}: {event['what']} lost its lease, and its claim {self._ending(event)}")
        endings = Tally(how for life in self.lives.values() for how in life.endings.values())
        self._count("claims", _listed(endings))
        lost = len({(event["job"], event["fence"]) for event in self.events["lost"]})
        self._count("late endings", f"{lost} refused")

    def _ending(self, event: dict[str, Any]) -> str | None:
        return self.lives[event["job"]].endings.get(event["fence"])

    def _expect_ending(self, event: dict[str, Any], how: str) -> None:
        ending = self._ending(event)
        if ending != how:
            self._fault(f"{_place(event)}: said {event['event']}, and its claim was {ending or 'never ended'}")

    def _orders(self) -> None:
        """Every committed order has its job, no other has one, and what was said to be committed is there."""
        orders = {order.reference: order for order in Order.objects.all()}
        jobs_of: dict[str, list[int]] = defaultdict(list)
        for job_id, life in self.lives.items():
            if life.first.schedule is None:
                jobs_of[life.reference].append(job_id)
        for reference, jobs in jobs_of.items():
            if reference not in orders:
                self._fault(f"order {reference} is not there, and has the jobs {jobs}")
        if not orders:
            self._fault("no order was ever committed: the run has shown nothing")
        shared = 0
        for reference, order in orders.items():
            life = self.lives.get(order.job_id or 0)
            if life is None or life.queue != order.queue or life.first.unique_key != order.unique_key:
                self._fault(f"order {reference} has no job: {order.job_id}")
            elif order.unique_key is not None and life.reference != reference:
                shared += 1
                if jobs_of[reference]:
                    self._fault(f"order {reference} shares job {order.job_id}, and has {jobs_of[reference]} besides")
            elif jobs_of[reference] != [order.job_id]:
                self._fault(f"order {reference} has job {order.job_id}, and its jobs are {jobs_of[reference]}")
        committed = {r for event in self.events["committed"] for r in event["orders"]}
        rolled_back = {r for event in self.events["rolled back"] for r in event["orders"]}
        self.faults += [f"order {r} was committed, and is not there" for r in sorted(committed - orders.keys())]
        self.faults += [f"order {r} was rolled back, and is there" for r in sorted(rolled_back & orders.keys())]
        self._count("orders", f"{len(orders)} committed, {shared} of them on another's job by its unique key")
        stray = sum(len(jobs) for reference, jobs in jobs_of.items() if reference not in orders)
        self._count("orders rolled back", f"{len(rolled_back)} by their producers' word; {stray} jobs without an order")

    def _effects(self) -> None:
        """Exactly once where the ack commits with the effect, else at least once; always of the same job."""
        by_job: dict[int, list[int]] = defaultdict(list)
        for effect in Effect.objects.all():
            by_job[effect.job_id].append(effect.fence)
            self._check_reference(effect.job_id, effect.reference)
        for event in self.events["delivered"]:
            by_job[event["job"]].append(event["fence"])
            self._check_reference(event["job"], event["reference"])
        exact: Tally[str] = Tally()
        other: Tally[str] = Tally()
        for job_id, life in self.lives.items():
            fences, by = by_job[job_id], life.completed_by
            tally = exact if life.queue in EXACT else other
            tally.update({"jobs": by is not None, "effects": len(fences)})
            if life.queue in EXACT:
                if fences != ([] if by is None else [by]):
                    self._fault(f"job {job_id} in {life.queue}: completed by claim {by}, effects of claims {fences}")
            elif by is not None and by not in fences:
                self._fault(f"job {job_id} in {life.queue}: completed by claim {by}, effects of claims {fences} only")
        self._count("exactly once", f"{exact['jobs']} jobs completed, {exact['effects']} effects")
        outside = sum(life.queue in OUTSIDE for life in self.lives.values())
        self._count(
            "at least once",
            f"{other['jobs']} jobs completed, {other['effects']} effects ({outside} jobs deliver outside the database)",
        )

    def _check_reference(self, job_id: int, reference: str) -> None:
        life = self.lives.get(job_id)
        if life is None:
            self._fault(f"an effect of {reference} by job {job_id}, which there never was")
        elif life.first.schedule is None and life.reference != reference:
            self._fault(f"an effect of {reference} by job {job_id}, which is for {life.reference}")

    def _schedules(self) -> None:
        """Each boundary has one job, none is missing, and only the leader fired."""
        fired: dict[str, dict[int, Life]] = defaultdict(dict)
        for job_id, life in self.lives.items():
            name, boundary = life.first.schedule, life.first.fire_at
            if name is None or boundary is None:
                continue
            if boundary in fired[name]:
                self._fault(f"schedule {name}: {from_us(boundary)} was fired twice, the second as job {job_id}")
            fired[name][boundary] = life
        for name, spec, _ in SCHEDULES:
            self._boundaries(name, cast("Every", parse_spec(spec)).interval, fired[name])
        for event in self.events["fired"]:
            leader = self.lives[event["job"]].first.leader
            if leader != event["owner"]:
                self._fault(f"{event['file']}: {event['owner']} fired job {event['job']} while {leader} led")
        held = holder(LEADERSHIP_LOCK)
        # It may keep its lease only if another held the writer lock for as long as it tried to free it.
        left = any(
            "while freeing the leadership" in log.read_text(errors="replace") for log in self.folder.glob("*.log")
        )
        if held is not None and not left:
            self._fault(f"every scheduler has stopped, and {held[0]} holds the leadership")
        self._count("leaders", f"{len(self.events['elected'])} terms")

    def _boundaries(self, name: str, interval: int, fired: dict[int, Life]) -> None:
        row = Schedule.objects.get(name=name)
        if not fired or not row.enabled:
            self._fault(f"schedule {name}: {len(fired)} fired, {row.last_error}")
            return
        boundaries = sorted(fired)
        born = row.created_at + timedelta(microseconds=interval)
        if from_us(boundaries[0]) != born:
            self._fault(f"schedule {name}: first fired for {from_us(boundaries[0])}, and was due at {born}")
        if row.last_fire_at != from_us(boundaries[-1]):
            self._fault(f"schedule {name}: last fired for {from_us(boundaries[-1])}, its row has {row.last_fire_at}")
        skipped = 0
        for number, (before, after) in enumerate(pairwise(boundaries), 1):
            # The most that one tick fires, all of which were due when it began.
            caught_up = [each for each in boundaries[:number][-MAX_CATCH_UP:] if fired[each].first.created_at >= before]
            gap = (after - before) // interval - 1
            if (after - before) % interval:
                self._fault(f"schedule {name}: {from_us(after)} is not on its grid")
            elif gap and len(caught_up) != MAX_CATCH_UP:
                self._fault(f"schedule {name}: {gap} boundaries missing after {from_us(before)}")
            skipped += gap
        text = f"{len(boundaries)} boundaries from {born:%H:%M:%S} on, {len(fired)} jobs"
        self._count(f"schedule {name}", text + (f", {skipped} skipped past {MAX_CATCH_UP}" if skipped else ""))

    def _notes(self) -> None:
        notes = {(note.writer, note.number) for note in Note.objects.all()}
        written = {(event["writer"], event["number"]) for event in self.events["note written"]}
        self.faults += [f"note {lost} was written, and is not there" for lost in sorted(written - notes)]
        value = Counter.objects.get().value
        if not value == len(notes) == Note.objects.count():
            self._fault(f"{Note.objects.count()} notes, counted as {value}")
        self._count("an app's own rows", f"{len(written)} said to be written, {len(notes)} there, counted as {value}")

    def _database(self) -> None:
        with connection.cursor() as cursor:
            for pragma in ("integrity_check", "foreign_key_check"):
                cursor.execute(f"PRAGMA {pragma}")
                found = [row[0] for row in cursor.fetchall()]
                if found not in ([], ["ok"]):
                    self._fault(f"PRAGMA {pragma}: {found}")
                self._count(pragma, "ok" if found in ([], ["ok"]) else f"{len(found)} faults")

    def _logs(self) -> None:
        counted, unexpected = logs.read(self.folder)
        self.faults += unexpected
        for kind, number in counted.items():
            self._count(f"log: {kind}", str(number))


def _place(event: dict[str, Any]) -> str:
    return f"{event['file']}, job {event['job']}, claim {event['fence']}"


def _listed(tally: Tally[str]) -> str:
    return ", ".join(f"{number} {what}" for what, number in sorted(tally.items())) or "none"
