"""Named events, one for each thing that happens, and the words that each is logged in.

All log wording of the library is in this file, and all of it goes to the logger `django_alkstore`. A project may
connect receivers of its own. If one raises, Django logs the error, and everything else continues. Receivers get the
keyword arguments that are listed beside each event.
"""

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from django.dispatch import Signal

from django_alkstore import clock, failures
from django_alkstore.names import describe_queue

logger = logging.getLogger("django_alkstore")

nothing_registered = Signal()
jobs_unhandled = Signal()  # due: the number of due jobs by queue
worker_started = Signal()  # database, queues, concurrency, pid, worker_id
crash_detection_off = Signal()  # reason
worker_stopping = Signal()  # reason, running
worker_stopped = Signal()  # completed, failed
worker_gives_back = Signal()  # job_ids, reason
worker_broke = Signal()  # error: the worker met an unexpected error, and ends
cut_off_failed = Signal()  # job, error: its transaction stays open for now
job_mishandled = Signal()  # job, error: of the worker itself; the attempt fails
worker_exhausted = Signal()  # job_ids
worker_stuck = Signal()  # job, handler, blocks_loop: its coroutine does not end, or blocks the event loop
job_started = Signal()  # job
job_completed = Signal()  # job, seconds
job_settled = Signal()  # job, seconds: the handler gave it back itself
job_retried = Signal()  # job, seconds, error, traceback, asked_for, exception (None if none was raised), retry_in
job_died = Signal()  # job, seconds, error, traceback, asked_for (by Retry or Discard), exception
job_raised_late = Signal()  # job, error, traceback, exception: after the handler had settled the job itself
job_snoozed = Signal()  # job, delay
job_locked_out = Signal()  # job, error, delay: the database was locked, and the attempt does not count
lease_lost = Signal()  # job, what, traceback, exception
job_lapsed = Signal()  # job_id, queue, dead
job_abandoned = Signal()  # job_id, queue, worker_id, dead: its worker died
job_expired = Signal()  # job_id, queue
job_unreadable = Signal()  # job_id, queue, attempt, reason
leader_elected = Signal()  # database, pid, owner
leader_stood_down = Signal()  # reason
leadership_left = Signal()  # error, lapses_in: it could not be freed, and nobody tries again
leader_absent = Signal()  # reason: it does not lead, and was told not to wait
scheduler_cut_off = Signal()  # a second signal came before it had stopped
standing_by = Signal()  # owner, expires_at
standby_ended = Signal()  # it was told to stop
schedule_fired = Signal()  # fire
schedule_broken = Signal()  # name, reason
schedule_brought_in_line = Signal()  # name, change: "added", "changed", "disabled" or "conflict"
schedule_ended = Signal()  # name: it is declared, and no boundary follows
boundaries_passed = Signal()  # name, coalesced, too_late, overlapped: boundaries that did not fire
jobs_pruned = Signal()  # removed
database_trouble = Signal()  # doing, error, pause; reason: the files that cannot be written, or None
database_recovered = Signal()  # doing
database_replaced = Signal()  # error
file_events_missing = Signal()  # reason, interval: the database is polled instead, every `interval` seconds
task_unknown = Signal()  # job, task, reason, delay: the job was given back, and is due again after the delay
queue_unknown = Signal()  # queue, nearest (None if no name is similar): an enqueue to a queue without a handler
module_broken = Signal()  # module, error, traceback, exception

# Of what a program does by calling a service. They have no log line: `tell` sends them.
jobs_enqueued = Signal()  # using, queue, job_ids
job_cancelled = Signal()  # using, job_id
job_requeued = Signal()  # using, job_id
job_run_now = Signal()  # using, job_id
job_rescheduled = Signal()  # using, job_id, run_at
schedule_declared = Signal()  # using, name
schedule_removed = Signal()  # using, name
schedule_paused = Signal()  # using, name
schedule_resumed = Signal()  # using, name
schedule_fired_now = Signal()  # using, name, job_id
lock_acquired = Signal()  # using, name, owner, token
lock_renewed = Signal()  # using, name, owner, token
lock_released = Signal()  # using, name, owner, token
lock_taken_away = Signal()  # using, name


_LOG_TEXT = 500
"""Characters of an error in one line; the job keeps more."""


class _Failure(NamedTuple):
    """The line about a failure. Its template is constant, so that an error tracker can group equal failures."""

    template: str
    arguments: tuple[object, ...]
    attributes: Mapping[str, object] = {}
    """Of the log record."""
    traceback: str = ""
    exception: BaseException | None = None


_words: dict[Signal, tuple[int, Callable[..., str | _Failure]]] = {}


class FastHandler(logging.Handler):
    """A log handler that also takes a line without a log record: making a record costs more than a short job."""

    def add(self, level: int, message: str) -> None:
        raise NotImplementedError


fast_handler: FastHandler | None = None
"""Set by the commands when they add their own log handler."""


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


def emit(event: Signal, **data: Any) -> None:
    """Log `event` and send it. An error of a log handler or of a receiver is shown and goes no further."""
    if _thread.post is not None:
        _thread.post(partial(_send_later, event, data))
    else:
        _send(event, data)


def tell(event: Signal, **data: Any) -> None:
    """As `emit`, without a log line: for what a program does by calling a service."""
    if _thread.post is not None:
        _thread.post(partial(_send_later, event, data, _send_to_receivers))
    else:
        _send_to_receivers(event, data)


def _send_later(
    event: Signal, data: dict[str, Any], send: Callable[[Signal, dict[str, Any]], None] | None = None
) -> None:
    try:
        (send or _send)(event, data)
    finally:
        data.clear()  # the thread that called this may keep it until the next event


def _send(event: Signal, data: dict[str, Any]) -> None:
    if logger.disabled:
        _enable_logger()
    level, say = _words[event]
    if logger.isEnabledFor(level):
        _log_line(level, say(**data))
    _send_to_receivers(event, data)


def _send_to_receivers(event: Signal, data: dict[str, Any]) -> None:
    if event.receivers:
        try:
            event.send_robust(sender=None, **data)
        except BaseException:  # noqa: BLE001  SystemExit too; and Django logs errors by log handlers that may raise
            _show_exception()


def _enable_logger() -> None:
    """Undo what a configuration of logging does by default to the loggers that it does not name."""
    logger.disabled = False
    if logger.isEnabledFor(logging.WARNING):
        _log_line(
            logging.WARNING,
            f"the logger {logger.name} was disabled, as logging.config.dictConfig and fileConfig do unless "
            "disable_existing_loggers is False; it is enabled again. To silence it, set its level",
        )


def _log_line(level: int, line: str | _Failure) -> None:
    # Warnings and errors are always records: error trackers look at every record, whatever handlers there are.
    if isinstance(line, str) and level < logging.WARNING and fast_handler and _is_only_handler(fast_handler):
        fast_handler.add(level, line)
        return
    try:
        logger.handle(_record(level, line))
    except BaseException:  # noqa: BLE001  it is the project's handler, and may even raise SystemExit
        _show_exception()


def _record(level: int, line: str | _Failure) -> logging.LogRecord:
    # Not `logger.log`: it searches for its caller, which is always this function, and that takes a third of the time.
    if isinstance(line, str):
        return logger.makeRecord(logger.name, level, __file__, 0, line, (), None, "emit")
    error = line.exception
    record = logger.makeRecord(
        logger.name,
        level,
        __file__,
        0,
        line.template,
        line.arguments,
        None if error is None else (type(error), error, failures.traceback_of(error)),
        "emit",
        line.attributes,
    )
    # A formatter takes this as it is. It need not ask the exception for its text, which may raise or be very long.
    record.exc_text = line.traceback.rstrip() or None
    return record


def _is_only_handler(handler: FastHandler) -> bool:
    """True if no other log handler and no filter would be given the logger's records."""
    handlers = logger.handlers
    if len(handlers) != 1 or handlers[0] is not handler or logger.filters:
        return False
    return not (logger.propagate and logging.root.handlers)


@contextmanager
def shown_if_it_fails() -> Iterator[None]:
    """Show an error of the block on standard error, and let it go no further."""
    try:
        yield
    except BaseException:  # noqa: BLE001  it is an error of foreign code
        _show_exception()


def _show_exception() -> None:
    # Standard error may be closed (`ValueError`), missing (`AttributeError`) or full: nothing is left to tell it to.
    with suppress(OSError, ValueError, AttributeError):
        traceback.print_exc()


FLUSH_TIMEOUT = 2.0
_TIME_TO_COMPLAIN = 0.1
"""Seconds of a flush that are kept for naming what has not finished."""


class _Flush(threading.Thread):
    """Flushes one log handler or stream."""

    def __init__(self, target: Any) -> None:
        super().__init__(name="alkstore-flush", daemon=True)
        self.target = target
        self.succeeded = False
        self.problem = "it has not finished"

    def run(self) -> None:
        try:
            self.target.flush()
        except Exception as error:  # noqa: BLE001  the target is foreign code
            self.problem = str(error) or type(error).__name__
        else:
            self.succeeded = True


def flush(timeout: float = FLUSH_TIMEOUT) -> list[object]:
    """Flush every log handler of the process, standard output and standard error. It raises nothing.

    Return those that failed or have not finished within `timeout` seconds. They are named on standard error.
    Each is flushed in a daemon thread, so one that blocks delays neither the others nor the end of the process.
    """
    started = clock.waiting_from()
    flushes = [_Flush(target) for target in (*_log_handlers(), sys.stdout, sys.stderr) if target is not None]
    _run_threads(flushes, timeout - _TIME_TO_COMPLAIN)
    failed = [flush for flush in flushes if not flush.succeeded]
    if failed:
        complaint = threading.Thread(target=_complain, args=(failed,), name="alkstore-flush", daemon=True)
        _run_threads([complaint], timeout - clock.waited_since(started))
    return [flush.target for flush in failed]


def _log_handlers() -> Iterable[logging.Handler]:
    """The handlers of all loggers, each once."""
    loggers = [logging.root, *list(logging.root.manager.loggerDict.values())]
    handlers = [handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers]
    return {id(handler): handler for handler in handlers}.values()


def _run_threads(threads: Sequence[threading.Thread], timeout: float) -> None:
    """Start the threads and wait until they have ended, at most `timeout` seconds for all of them."""
    started = clock.waiting_from()
    for thread in threads:
        with suppress(RuntimeError):  # the process may start no more threads; the caller sees that nothing was done
            thread.start()
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, timeout - clock.waited_since(started)))


def _complain(failed: Sequence[_Flush]) -> None:
    lines = [f"django_alkstore: cannot flush {flush.target!r}: {flush.problem}\n" for flush in failed]
    # If standard error is among them, nothing is left to tell it to.
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write("".join(lines))
        sys.stderr.flush()


def _short(text: str) -> str:
    line = text.split("\n", 1)[0]
    return line if len(line) <= _LOG_TEXT else line[:_LOG_TEXT] + "…"


def _about(job_id: object, queue: str, attempt: object) -> dict[str, object]:
    return {"job_id": job_id, "queue": queue, "task": None, "attempt": attempt}


def _about_job(job: Any) -> dict[str, object]:
    return _about(job.id, job.queue, job.attempt)


def _job(job: Any) -> str:
    return f"job {job.id} in {describe_queue(job.queue)}"


def _attempt(job: Any) -> str:
    return f"attempt {job.attempt} of {job.max_attempts}"


def _traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _log(event: Signal, level: int, say: Callable[..., str | _Failure]) -> None:
    """Write each `event` at `level` in the words that `say` makes of its data."""
    _words[event] = (level, say)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(describe_queue(name) for name in names) or "no queue"


_LISTED = 10
"""Names or ids in one line; the rest is a number."""


def unhandled(due: Mapping[str, int]) -> str:
    """One sentence about jobs that wait for a handler which nobody has registered. For the log and for people."""
    it = "it" if len(due) == 1 else "them"
    return f"{_due(due)}, and no handler is registered for {it} in an alkstore.py of the installed apps"


def unknown_to_workers(due: Mapping[str, int]) -> str:
    """One sentence about jobs whose handler is registered, and on whose queue no running worker works. For people."""
    it, has = ("it", "it has a handler") if len(due) == 1 else ("them", "they have handlers")
    return f"{_due(due)}: {has}, but no running worker knows {it}; restart the workers, or start one for {it}"


def _due(due: Mapping[str, int]) -> str:
    listed = [f"{count} due in {describe_queue(queue)}" for queue, count in list(due.items())[:_LISTED]]
    if len(due) > _LISTED:
        listed.append(f"{sum(list(due.values())[_LISTED:])} due in {len(due) - _LISTED} more")
    return ", ".join(listed)


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


def ended_schedule(name: str, **_: object) -> str:
    return f"schedule {name} has no next boundary: its moments are past"


_log(schedule_ended, logging.INFO, ended_schedule)


_IN_LINE = {
    "added": "schedule {} was added: the code declares it",
    "changed": "schedule {} was changed: the code declares it otherwise",
    "disabled": "schedule {} fires nothing any more: the code no longer declares it",
    "conflict": "schedule {} is declared by the code and by a call of schedule(); that of the call stands",
}


def brought_in_line(name: str, change: str, **_: object) -> str:
    return _IN_LINE[change].format(name)


_log(schedule_brought_in_line, logging.INFO, brought_in_line)


def passed_boundaries(name: str, coalesced: int, too_late: int, overlapped: int, **_: object) -> str:
    counts = {"covered by a later one": coalesced, "too late": too_late, "beside an earlier job": overlapped}
    listed = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    return f"schedule {name} has passed boundaries without firing: {listed}"


_log(boundaries_passed, logging.WARNING, passed_boundaries)


def unknown_task(job: Any, task: str, reason: str, delay: float, **_: object) -> str:
    return f"{job!r}: no task to run, again in {delay:g} s: {reason}"


_log(task_unknown, logging.WARNING, unknown_task)


def unknown_queue(queue: str, nearest: str | None, **_: object) -> str:
    meant = f" Did you mean {nearest}?" if nearest else ""
    return f"a job was enqueued into {describe_queue(queue)}, for which no handler is registered.{meant}"


_log(queue_unknown, logging.WARNING, unknown_queue)
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
    worker_gives_back,
    logging.INFO,
    lambda job_ids, reason: f"gives back {_jobs(job_ids)} ({reason})",
)
_log(
    worker_broke,
    logging.ERROR,
    lambda error: _Failure("the worker met an unexpected error and ends", (), {}, _traceback_of(error), error),
)
_log(cut_off_failed, logging.ERROR, lambda job, error: f"the transaction of {_job(job)} cannot be rolled back: {error}")
_log(
    job_mishandled,
    logging.ERROR,
    lambda job, error: _Failure(
        "the worker itself failed at %s", (_job(job),), _about_job(job), _traceback_of(error), error
    ),
)
_log(
    worker_stuck,
    logging.ERROR,
    lambda job, handler, blocks_loop: (
        f"{handler} ({_job(job)}) "
        + ("blocks the event loop" if blocks_loop else "has not ended after it was cancelled at its time limit")
        + "; exiting with status 4, for the supervisor to start it afresh"
    ),
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
    lambda job, seconds: f"{_job(job)} was given back by its handler after {seconds:.3f} s",
)
_log(
    job_retried,
    logging.WARNING,
    lambda job, seconds, error, traceback, asked_for, exception, retry_in: _Failure(
        "failed %s after %.3f s (%s), again in %g s: %s",
        (_job(job), seconds, _attempt(job), retry_in, _short(error)),
        _about_job(job) | {"asked_for": asked_for},
        traceback,
        exception,
    ),
)
_log(
    job_died,
    logging.ERROR,
    lambda job, seconds, error, traceback, asked_for, exception: _Failure(
        "dead: %s after %.3f s (%s): %s",
        (_job(job), seconds, _attempt(job), _short(error)),
        _about_job(job) | {"asked_for": asked_for},
        traceback,
        exception,
    ),
)
_log(
    job_raised_late,
    logging.WARNING,
    lambda job, error, traceback, exception=None: _Failure(
        "%s was settled by its handler, and then failed: %s",
        (_job(job), _short(error)),
        _about_job(job),
        traceback,
        exception,
    ),
)
_log(job_snoozed, logging.INFO, lambda job, delay: f"snoozed {_job(job)} for {delay:g} s")
_log(
    job_locked_out,
    logging.WARNING,
    lambda job, error, delay: _Failure(
        "locked out %s (%s, which does not count), again in %.1f s: %s. "
        'OPTIONS["transaction_mode"] = "IMMEDIATE" and a longer OPTIONS["timeout"] of the database prevent this',
        (_job(job), _attempt(job), delay, _short(error)),
        _about_job(job),
    ),
)
_log(
    crash_detection_off,
    logging.WARNING,
    lambda reason: f"crash detection is off, so the jobs of a killed process wait for their leases: {reason}",
)
_log(
    lease_lost,
    logging.WARNING,
    lambda job, what, traceback, exception=None: _Failure(
        "lost the lease on %s (%s): its %s changed nothing",
        (_job(job), _attempt(job), what),
        _about_job(job),
        traceback,
        exception,
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
    lambda job_id, queue, attempt, reason: _Failure(
        "dead: job %s in %s: %s",
        (job_id, describe_queue(queue), _short(reason)),
        _about(job_id, queue, attempt),
    ),
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
    lambda doing, error, pause, reason=None: (
        f"database trouble while {doing}{f', again in {pause:.1f} s' if pause else ''}: {_short(str(error))}"
        f"{f'; {reason}' if reason else ''}"
    ),
)
_log(
    database_replaced,
    logging.ERROR,
    lambda error: f"{_short(str(error))}; exiting with status 5, for the supervisor to start it afresh",
)
_log(database_recovered, logging.INFO, lambda doing: f"database is back: {doing}")
_log(
    file_events_missing,
    logging.WARNING,
    lambda reason, interval: (
        f"the kernel's file events cannot be used ({_short(reason)}): "
        f"looking for changes of the database every {interval * 1_000:g} ms instead"
    ),
)
_log(
    module_broken,
    logging.ERROR,
    lambda module, error, traceback, exception=None: _Failure(
        "cannot import %s, so its handlers are not registered: %s",
        (module, _short(error)),
        traceback=traceback,
        exception=exception,
    ),
)
