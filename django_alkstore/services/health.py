"""Is the work of one database being done, and can it be? What is wrong, one finding each.

Everything is read over a connection of its own, with a short wait. So it sees what others have committed, ends soon if
the database is slow, and leaves the caller's connection as it was. It changes nothing: the write by
which it tries whether one can write is rolled back. No statement reads finished jobs, but for an index's end.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Literal

from django.db import DatabaseError, NotSupportedError, connections
from django.db.models import Max, QuerySet

from django_alkstore import clock, names
from django_alkstore.ages import age
from django_alkstore.clock import SECOND
from django_alkstore.dialects import Operations, dialect_of, sqlite_health
from django_alkstore.dialects.sqlite import ENOUGH_TIMEOUT, is_missing
from django_alkstore.dialects.transactions import limit_wait, read, write_operations
from django_alkstore.exceptions import InvalidSpec
from django_alkstore.models import Job, Lock, Schedule, State
from django_alkstore.names import describe_queue
from django_alkstore.services import presence
from django_alkstore.services.leader import LEADERSHIP_TTL
from django_alkstore.services.maintenance import UPKEEP_INTERVAL
from django_alkstore.specs import parse_spec

LONGEST_WAIT = 2.0
"""Seconds to wait for the writer lock. Who holds it for longer keeps every worker waiting."""
CLOCK_SLACK = 10 * SECOND
"""Microseconds that a row may lie ahead of the clock."""
LEASE_SLACK = 86_400 * SECOND
"""The same for a job's lease, which a handler may ask to be longer than its timeout."""
RECENT = timedelta(hours=1)
COUNTED = 1_000
"""Dead jobs, after which no more are counted."""

_TRIED = f"{names.RESERVED_PREFIX}health"
"""The lock that is taken, and never committed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds. Durations are seconds."""

    grace: float = 30.0
    """That work may be due, or a schedule, before somebody must be there for it."""
    max_age: float = 3_600.0
    """That a due job may have waited, also if workers are there."""
    max_dead: int | None = None
    """Jobs that may have died in the last hour; `None`: any number, with a warning."""
    max_wal: int = 256 * 2**20
    """Bytes of the write-ahead log that a reader may hold up."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    level: Literal["error", "warning"]
    """A warning does not make unhealthy."""
    what: str
    """Its kind, in one word."""
    text: str
    """For people: one sentence."""
    about: str | None = None
    """The queue or schedule that it is about; None if it is about something else."""


@dataclass(slots=True)
class Health:
    """What an examination has found."""

    alias: str | None
    name: str | None = None
    """The database as the settings name it."""
    journal_mode: str | None = None
    """This and what follows are `None` if they are not known."""
    transaction_mode: str | None = None
    busy_timeout: float | None = None
    """Seconds."""
    wal_bytes: int | None = None
    free_bytes: int | None = None
    """What can still be written."""
    writable: bool | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)

    def error(self, what: str, text: str, about: str | None = None) -> None:
        self.findings.append(Finding("error", what, text, about))

    def warning(self, what: str, text: str, about: str | None = None) -> None:
        self.findings.append(Finding("warning", what, text, about))

    def trouble(self, doing: str, error: DatabaseError) -> None:
        """A finding for a database error; not a second one of the same kind."""
        what = sqlite_health.kind_of(error)
        if what not in {finding.what for finding in self.findings}:
            self.error(what, f"{_TROUBLE[what]} ({doing}: {error})")


_TROUBLE = {
    "locked": f"another has kept the database locked for more than {LONGEST_WAIT:g} s",
    "read_only": "the database is read-only for this user",
    "full": "the database has no room left",
    "corrupt": "the file is damaged, or no database",
    "unreachable": "the file, or the folder that it is in, cannot be used",
    "tables": "the tables are not there, or not as this version has them: manage.py migrate",
    "broken": "the database cannot be used",
}


def examine(alias: str, limits: Limits, *, queues: Sequence[str] = (), thorough: bool = False) -> Health:
    """Look at the database and at what is waiting in it: in all queues, or in these.

    `thorough`: read the whole file for damage, too.
    """
    connection = connections[alias]
    health = Health(alias, name=str(connection.settings_dict["NAME"]))
    try:
        dialect_of(connection)
    except NotSupportedError as error:
        health.error("not_supported", str(error))
        return health
    if connection.is_in_memory_db():  # type: ignore[attr-defined]
        health.error("in_memory", "the database is in memory, where no worker can see it")
    elif is_missing(connection):
        health.error("missing", "the file is not there; where it is to be made: manage.py migrate")
    else:
        with _connection_of_its_own(alias):
            _Examination(health, alias, limits, queues).run(thorough=thorough)
    return health


@contextmanager
def _connection_of_its_own(alias: str) -> Iterator[None]:
    """Let this thread use a fresh connection inside the block."""
    before = connections[alias]
    own = connections[alias] = connections.create_connection(alias)
    try:
        yield
    finally:
        connections[alias] = before
        with suppress(DatabaseError):
            own.close()


class _UndoneError(Exception):
    """Rolls back the write that was only tried."""


class _Examination:
    """Makes the looks one after the other. If one of them fails, the others are made all the same."""

    def __init__(self, health: Health, alias: str, limits: Limits, queues: Sequence[str]) -> None:
        self.health = health
        self.alias = alias
        self.limits = limits
        self.queues = queues
        self.connection = connections[alias]

    def run(self, *, thorough: bool) -> None:
        try:
            self._connect()
        except DatabaseError as error:
            self.health.trouble("connecting", error)
            return
        looks = [
            ("trying to write", self._try_to_write),
            ("looking for room", self._look_for_room),
            ("looking at the log", self._look_at_log),
            ("reading the jobs", self._look_at_queues),
            ("reading the schedules", self._look_at_schedules),
            ("reading the dead jobs", self._look_at_dead),
            ("reading the newest rows", self._look_at_clock),
        ]
        if thorough:
            looks.append(("checking the file", self._look_for_damage))
        for doing, look in looks:
            try:
                look()
            except DatabaseError as error:
                self.health.trouble(doing, error)
            except Exception as error:  # noqa: BLE001  a row that cannot be read must not hide the rest
                self.health.error("broken", f"{doing} failed: {type(error).__name__}: {error}")

    def _connect(self) -> None:
        self.connection.ensure_connection()
        # Before the wait is limited, which is done by the same setting.
        timeout = self.health.busy_timeout = sqlite_health.busy_timeout(self.connection)
        limit_wait(self.alias, LONGEST_WAIT)
        journal, mode = sqlite_health.settings(self.connection)
        self.health.journal_mode, self.health.transaction_mode = journal, mode
        if journal != "wal":
            text = f"the journal mode is {journal.upper()}, not WAL: readers and writers wait for each other"
            self.health.warning("journal_mode", text)
        if timeout < ENOUGH_TIMEOUT:
            text = f"the busy timeout is {timeout:g} s, below {ENOUGH_TIMEOUT:g} s"
            self.health.warning("busy_timeout", text)
        if mode != "IMMEDIATE":
            self.health.warning("transaction_mode", f"transactions begin in {mode} mode, not IMMEDIATE")

    def _try_to_write(self) -> None:
        def write(db: Operations) -> None:
            # Not an update of no row, which would not need the journal, nor a page that can be written.
            db.acquire_lock(_TRIED, "", clock.now_us(), clock.now_us(), 1)
            raise _UndoneError

        self.health.writable = False
        try:
            write_operations(self.alias, write)
        except _UndoneError:
            self.health.writable = True

    def _look_for_room(self) -> None:
        free = self.health.free_bytes = sqlite_health.room(self.connection)
        if free < sqlite_health.LEAST_ROOM:
            self.health.writable = False
            self.health.error("full", f"the database has no room left: {free} bytes, on its disk or by max_page_count")

    def _look_at_log(self) -> None:
        log = sqlite_health.log(self.connection, self.limits.max_wal)
        self.health.wal_bytes = log.size
        if log.waiting > self.limits.max_wal:
            mebibytes = log.waiting / 2**20
            self.health.error(
                "wal", f"a reader that does not end holds up {mebibytes:.0f} MiB of the write-ahead log, which grows"
            )

    @cached_property
    def _present(self) -> presence.Presence:
        """Which workers and which leader are there, read once."""
        return presence.look(self.alias)

    def _look_at_queues(self) -> None:
        now = clock.now_us()
        moments = read(self.alias, lambda db: db.next_claims(self.queues or db.live_queues()))
        ages = {queue: (now - since) / SECOND for queue, since in moments.items() if since is not None}
        present = self._present
        if present.crash_detection is not None:
            self.health.warning("crash_detection", present.crash_detection)
        for queue, waited in ages.items():
            self._look_for_workers(queue, waited, present)
            if waited > self.limits.max_age:
                text = f"the oldest due job has waited {age(waited)}, more than {age(self.limits.max_age)}"
                self.health.error("overdue", f"{describe_queue(queue)}: {text}", queue)
            if waited > self.limits.grace:
                self._look_at_leases(queue, now)
        # A queue that was named, is empty and has no worker may be misspelt, and would look healthy.
        for queue in dict.fromkeys(self.queues):
            if moments[queue] is None and queue not in present.served:
                text = f"{describe_queue(queue)}: no job waits in it, and no live worker is there for it"
                self.health.warning("no_worker", text, queue)

    def _look_for_workers(self, queue: str, waited: float, present: presence.Presence) -> None:
        """Look who works on a queue with live jobs. `waited`: seconds since its first one became due, or negative."""
        if queue in present.deserted:
            text = "it holds work, and all its workers have died"
        elif waited > self.limits.grace and queue not in present.served:
            text = f"work has been due for {age(waited)}, and no live worker is there for it"
        else:
            return
        self.health.error("no_worker", f"{describe_queue(queue)}: {text}", queue)

    def _look_at_leases(self, queue: str, now: int) -> None:
        # A worker with no free thread puts them right with its upkeep only.
        patience = self.limits.grace + UPKEEP_INTERVAL
        lapsed = read(self.alias, lambda db: db.lapsed(queue, now - round(patience * SECOND), COUNTED))
        if lapsed:
            jobs = f"job {lapsed[0].id}" + (f" and {len(lapsed) - 1} more" if len(lapsed) > 1 else "")
            text = f"the lease ran out on {jobs}, more than {age(patience)} ago, and nobody has put it right"
            self.health.error("lapsed", f"{describe_queue(queue)}: {text}", queue)

    def _look_at_schedules(self) -> None:
        now = clock.now_us()
        rows = Schedule.objects.using(self.alias).filter(enabled=True, undeclared_at=None, next_fire_at__isnull=False)
        columns = ("name", "spec", "timezone", "next_fire_at", "starting", "starts_at")
        due: list[float] = []
        for name, spec, timezone, moment, *begins in rows.order_by("name").values_list(*columns):
            boundary = clock.to_us(moment)
            waited = (now - boundary) / SECOND
            if waited > self.limits.grace:
                due.append(waited)
            with suppress(InvalidSpec):
                following = parse_spec(spec, timezone).after(boundary, now)
                is_begun = all(begin is None or clock.to_us(begin) <= now for begin in begins)
                if is_begun and following is not None and boundary - following > CLOCK_SLACK:
                    text = (
                        f"schedule {name} fires in {age(-waited)} only, though its spec is {spec}: the clock once ran"
                    )
                    self.health.error("clock", f"{text} ahead; declare the schedule again", name)
        if due and self._present.leader is None:
            which = f"{len(due)} schedules have" if len(due) > 1 else "1 schedule has"
            self.health.error("no_leader", f"{which} been due for up to {age(max(due))}, and no scheduler leads")

    def _look_at_dead(self) -> None:
        dead = Job.objects.using(self.alias).filter(state=State.DEAD, finished_at__gte=clock.now() - RECENT)
        count = dead.order_by()[: max(COUNTED, (self.limits.max_dead or 0) + 1)].count()
        if not count:
            return
        text = f"{count} {'jobs' if count > 1 else 'job'}{' or more' if count >= COUNTED else ''} died in the last hour"
        if self.limits.max_dead is None or count <= self.limits.max_dead:
            self.health.warning("dead", text)
        else:
            self.health.error("dead", f"{text}, more than {self.limits.max_dead}")

    def _look_at_clock(self) -> None:
        """Rows from the future: the clock has gone back since they were written, so their leases last too long."""
        now = clock.now_us()
        ahead = {what: moment - now for what, moment in self._newest(now) if moment > now + CLOCK_SLACK}
        if ahead:
            what, by = max(ahead.items(), key=lambda item: item[1])
            text = f"{what} lies {age(by / SECOND)} ahead: the clock has gone back, or was ahead"
            self.health.error("clock", text)

    def _newest(self, now: int) -> Iterator[tuple[str, int]]:
        """Moments that cannot be in the future, each with the name of what has it."""
        for created in Job.objects.using(self.alias).order_by("-pk").values_list("created_at", flat=True)[:1]:
            yield "the last job's enqueueing", clock.to_us(created)
        for lease in sqlite_health.last_leases(self.connection, now):
            yield f"a lease in {describe_queue(lease.queue)}", lease.written - LEASE_SLACK
        for what, rows, column, lasting in (
            ("a worker's sign of life", presence.signs(self.alias), "expires_at", presence.TTL),
            ("the scheduler's leadership", self._leadership(), "expires_at", LEADERSHIP_TTL),
            ("the taking of a lock", presence.locks(self.alias), "acquired_at", 0.0),
        ):
            latest = rows.aggregate(latest=Max(column))["latest"]
            if latest is not None:
                yield what, clock.to_us(latest) - round(lasting * SECOND)

    def _leadership(self) -> QuerySet[Lock]:
        return Lock.objects.using(self.alias).filter(name=names.LEADERSHIP_LOCK)

    def _look_for_damage(self) -> None:
        found = sqlite_health.damage(self.connection)
        if found is not None:
            self.health.error("corrupt", f"the file is damaged: {found}")
