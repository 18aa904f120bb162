"""Named events, one for each thing that happens, and the words that each is logged in.

All log wording of the library is in this file, and all of it goes to the logger `django_alkstore`. A project
may connect receivers of its own; one that raises is logged by Django and stops nothing. Receivers get
keyword arguments as listed beside each event.
"""

import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.dispatch import Signal

from django_alkstore.names import describe_queue

logger = logging.getLogger("django_alkstore")

nothing_registered = Signal()
jobs_unhandled = Signal()  # due: the number of due jobs by queue
worker_started = Signal()  # database, queues, concurrency, pid, worker_id
crash_detection_off = Signal()  # reason
worker_stopping = Signal()  # reason, running
worker_stopped = Signal()  # completed, failed
worker_gave_back = Signal()  # job_ids, reason
worker_exhausted = Signal()  # job_ids
job_started = Signal()  # job
job_completed = Signal()  # job, seconds
job_settled = Signal()  # job, seconds: the handler settled it itself
job_retried = Signal()  # job, seconds, error, traceback, asked_for, retry_in
job_died = Signal()  # job, seconds, error, traceback, asked_for: by Retry or Discard
job_raised_late = Signal()  # job, error, traceback: after the handler had settled the job itself
job_snoozed = Signal()  # job, delay
job_locked_out = Signal()  # job, error, delay: the database was locked, and the attempt does not count
lease_lost = Signal()  # job, what, traceback
job_lapsed = Signal()  # job_id, queue, dead
job_abandoned = Signal()  # job_id, queue, worker_id, dead: its worker died
job_expired = Signal()  # job_id, queue
job_unreadable = Signal()  # job_id, queue, reason
leader_elected = Signal()  # database, pid, owner
leader_stood_down = Signal()  # reason
leadership_left = Signal()  # error, lapses_in: it could not be freed, and nobody tries again
leader_absent = Signal()  # reason: it does not lead, and was told not to wait
scheduler_cut_off = Signal()  # a second signal came before it had stopped
standing_by = Signal()  # owner, expires_at
standby_ended = Signal()  # it was told to stop
schedule_fired = Signal()  # fire
schedule_broken = Signal()  # name, reason
jobs_pruned = Signal()  # removed
database_trouble = Signal()  # doing, error, pause
database_recovered = Signal()  # doing
database_replaced = Signal()  # error
module_broken = Signal()  # module, error, traceback


_LOG_TEXT = 500
"""Characters of an error in one line; the job keeps more."""


_words: dict[Signal, tuple[int, Callable[..., str]]] = {}


only_listener: Callable[[int, str], None] | None = None
"""Takes level and message, where nobody else would see a record: making one costs more than a short job."""


class _Thread(threading.local):
    post: Callable[[Callable[[], None]], object] | None = None


_thread = _Thread()


@contextmanager
def passed_to(post: Callable[[Callable[[], None]], object]) -> Iterator[None]:
    """Inside, this thread sends no event itself: it passes on a function that sends it."""
    before, _thread.post = _thread.post, post
    try:
        yield
    finally:
        _thread.post = before


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, the events of this thread are kept; they are sent at its end. For blocks that hold a lock."""
    kept: list[Callable[[], None]] = []
    post = _thread.post
    try:
        with passed_to(kept.append):
            yield
    finally:
        for send in kept:
            if post is None:
                send()
            else:
                post(send)


def emit(event: Signal, **data: Any) -> None:
    """Log `event` and send it. An error of a log handler or of a receiver goes no further."""
    if _thread.post is not None:
        _thread.post(partial(_send, event, data))
    else:
        _send(event, data)


def _send(event: Signal, data: dict[str, Any]) -> None:
    level, say = _words[event]
    if not logger.isEnabledFor(level):
        pass
    elif only_listener is not None:
        only_listener(level, say(**data))
    else:
        # Not `logger.log`: looking for the caller, which is always this function, costs a third of a line.
        record = logger.makeRecord(logger.name, level, __file__, 0, say(**data), (), None, "emit")
        try:
            logger.handle(record)
        except Exception:  # noqa: BLE001  a handler of the project's must not undo what it was only to be told of
            traceback.print_exc()
    if event.receivers:
        event.send_robust(sender=None, **data)


def flush(timeout: float = 2.0) -> None:
    """Let what was logged be written: the process may end without another chance."""
    current: logging.Logger | None = logger
    while current is not None:
        for handler in current.handlers:
            handler.flush()
        current = current.parent if current.propagate else None


def _short(text: str) -> str:
    line = text.split("\n", 1)[0]
    return line if len(line) <= _LOG_TEXT else line[:_LOG_TEXT] + "…"


def _job(job: Any) -> str:
    return f"job {job.id} in {describe_queue(job.queue)}"


def _attempt(job: Any) -> str:
    return f"attempt {job.attempt} of {job.max_attempts}"


def _behind(traceback: str) -> str:
    return f"\n{traceback.rstrip()}" if traceback else ""


def _log(event: Signal, level: int, say: Callable[..., str]) -> None:
    """Write each `event` at `level` in the words that `say` makes of its data."""
    _words[event] = (level, say)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(describe_queue(name) for name in names) or "no queue"


_LISTED = 10
"""Names or ids in one line; the rest is a number."""


def unhandled(due: Mapping[str, int]) -> str:
    """One sentence about jobs that wait for a handler which nobody has registered. For the log and for people."""
    listed = [f"{count} due in {describe_queue(queue)}" for queue, count in list(due.items())[:_LISTED]]
    if len(due) > _LISTED:
        listed.append(f"{sum(list(due.values())[_LISTED:])} due in {len(due) - _LISTED} more")
    it = "it" if len(due) == 1 else "them"
    return f"{', '.join(listed)}, and no handler is registered for {it} in an alkstore.py of the installed apps"


def _jobs(job_ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, job_ids[:_LISTED]))
    rest = f" and {len(job_ids) - _LISTED} more" if len(job_ids) > _LISTED else ""
    return f"{'job' if len(job_ids) == 1 else 'jobs'} {shown}{rest}"


_log(
    nothing_registered,
    logging.WARNING,
    lambda: "no handler is registered in an alkstore.py of the installed apps: schedules are fired, and no job is run",
)
_log(jobs_unhandled, logging.WARNING, unhandled)
_log(
    worker_started,
    logging.INFO,
    lambda database, queues, concurrency, pid, worker_id: (
        f"worker started: {_listed(queues)}; concurrency {concurrency}, database {database}, pid {pid}"
    ),
)
_log(
    worker_stopping,
    logging.INFO,
    lambda reason, running: f"worker stopping ({reason}): claims no more, {running} running",
)
_log(
    worker_stopped,
    logging.INFO,
    lambda completed, failed: f"worker stopped: {completed} completed, {failed} failed attempts",
)
_log(
    worker_gave_back,
    logging.INFO,
    lambda job_ids, reason: f"gave back {_jobs(job_ids)} ({reason})",
)
_log(
    worker_exhausted,
    logging.ERROR,
    lambda job_ids: (
        f"every thread is held by a handler past its time limit ({_jobs(job_ids)}); "
        "exiting with status 4, for the supervisor to start it afresh"
    ),
)
_log(job_started, logging.DEBUG, lambda job: f"started {_job(job)} ({_attempt(job)})")
_log(job_completed, logging.INFO, lambda job, seconds: f"completed {_job(job)} in {seconds:.3f} s")
_log(
    job_settled,
    logging.INFO,
    lambda job, seconds: f"{_job(job)} was settled by its handler in {seconds:.3f} s",
)
_log(
    job_retried,
    logging.WARNING,
    lambda job, seconds, error, traceback, asked_for, retry_in: (
        f"failed {_job(job)} after {seconds:.3f} s ({_attempt(job)}), again in {retry_in:g} s: "
        f"{_short(error)}{'' if asked_for else _behind(traceback)}"
    ),
)
_log(
    job_died,
    logging.ERROR,
    lambda job, seconds, error, traceback, asked_for: (
        f"dead: {_job(job)} after {seconds:.3f} s ({_attempt(job)}): "
        f"{_short(error)}{'' if asked_for else _behind(traceback)}"
    ),
)
_log(
    job_raised_late,
    logging.WARNING,
    lambda job, error, traceback: (
        f"{_job(job)} was settled by its handler, and then failed: {_short(error)}{_behind(traceback)}"
    ),
)
_log(job_snoozed, logging.INFO, lambda job, delay: f"snoozed {_job(job)} for {delay:g} s")
_log(
    job_locked_out,
    logging.WARNING,
    lambda job, error, delay: (
        f"locked out {_job(job)} ({_attempt(job)}, which does not count), again in {delay:.1f} s: {_short(error)}. "
        'OPTIONS["transaction_mode"] = "IMMEDIATE" and a longer OPTIONS["timeout"] of the database prevent this'
    ),
)
_log(
    crash_detection_off,
    logging.WARNING,
    lambda reason: f"crash detection is off, so the jobs of a killed worker wait for their leases: {reason}",
)
_log(
    lease_lost,
    logging.WARNING,
    lambda job, what, traceback: (
        f"lost the lease on {_job(job)} ({_attempt(job)}): its {what} changed nothing{_behind(traceback)}"
    ),
)
_log(
    job_lapsed,
    logging.WARNING,
    lambda job_id, queue, dead: (
        f"the lease on job {job_id} in {describe_queue(queue)} ran out; "
        + ("dead, its attempts are spent" if dead else "claimable again")
    ),
)
_log(
    job_abandoned,
    logging.WARNING,
    lambda job_id, queue, worker_id, dead: (
        f"worker {worker_id} died while it held job {job_id} in {describe_queue(queue)}; "
        + ("dead, its attempts are spent" if dead else "claimable again")
    ),
)
_log(
    job_expired,
    logging.WARNING,
    lambda job_id, queue: f"job {job_id} in {describe_queue(queue)} expired before a worker took it; dead",
)
_log(
    job_unreadable,
    logging.ERROR,
    lambda job_id, queue, reason: f"dead: job {job_id} in {describe_queue(queue)}: {_short(reason)}",
)
_log(
    leader_elected,
    logging.INFO,
    lambda database, pid, owner: f"scheduler leads: database {database}, pid {pid}",
)
_log(leader_stood_down, logging.INFO, lambda reason: f"scheduler stood down: {reason}")
_log(
    leadership_left,
    logging.WARNING,
    lambda error, lapses_in: (
        f"database trouble while freeing the leadership, which lapses within {lapses_in:g} s: {_short(str(error))}"
    ),
)
_log(leader_absent, logging.ERROR, lambda reason: f"the scheduler ends with status 3: {reason}")
_log(
    scheduler_cut_off,
    logging.WARNING,
    lambda: "scheduler cut off at a second signal; its leadership, if it could not be freed, lapses within 10 s",
)
_log(
    standing_by,
    logging.INFO,
    lambda owner, expires_at: f"scheduler stands by: {owner} leads",
)
_log(standby_ended, logging.INFO, lambda: "scheduler stopped: it stood by")
_log(
    schedule_fired,
    logging.INFO,
    lambda fire: (
        f"fired {fire.name} for {fire.fire_at.isoformat(timespec='seconds')}: "
        f"job {fire.job_id} in {describe_queue(fire.queue)}"
    ),
)
_log(
    schedule_broken,
    logging.ERROR,
    lambda name, reason: (
        f"schedule {name} is paused, since it cannot be read: {_short(reason)}; "
        "declare it again with schedule(), then resume it with resume_schedule()"
    ),
)
_log(
    jobs_pruned,
    logging.INFO,
    lambda removed: "pruned " + ", ".join(f"{count} {state}" for state, count in removed.items()),
)
_log(
    database_trouble,
    logging.WARNING,
    lambda doing, error, pause: (
        f"database trouble while {doing}{f', again in {pause:.1f} s' if pause else ''}: {_short(str(error))}"
    ),
)
_log(
    database_replaced,
    logging.ERROR,
    lambda error: f"{_short(str(error))}; exiting with status 5, for the supervisor to start it afresh",
)
_log(database_recovered, logging.INFO, lambda doing: f"database is back: {doing}")
_log(
    module_broken,
    logging.ERROR,
    lambda module, error, traceback: (
        f"cannot import {module}, so its handlers are not registered: {_short(error)}{_behind(traceback)}"
    ),
)
