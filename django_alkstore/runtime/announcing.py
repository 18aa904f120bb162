"""Sends the events about what a transaction of the worker has changed. Foreign code runs here, so no lock is held."""

from django_alkstore import signals
from django_alkstore.runtime.jobs import Result, Run
from django_alkstore.runtime.writing import Written
from django_alkstore.services import JobHandle
from django_alkstore.services.events import Event, outcome_event, settled_event
from django_alkstore.services.outcomes import ACK, RELEASE, Outcome


def announce(written: Written) -> None:
    """Announce the results and the swept jobs."""
    for result, took_effect in written.results:
        if took_effect:
            announce_outcome(result.run.job, result.outcome, result.seconds)
        else:
            _announce_refused(result)
    for swept in written.swept:
        swept.announce()


def announce_given_back(written: Written, *, stopping: bool) -> None:
    """Announce the jobs that were given back because no thread has started them."""
    ids = [
        result.run.job.id
        for result, took_effect in written.results
        if took_effect and result.outcome is RELEASE and result.run.started_at is None
    ]
    if ids:
        reason = "stopping" if stopping else "no thread became free"
        signals.emit(signals.worker_gives_back, job_ids=ids, reason=reason)


def announce_outcome(job: JobHandle, outcome: Outcome, seconds: float) -> None:
    """Announce the outcome of an attempt, once it is on the job's row."""
    _emit(outcome_event(job, outcome, seconds))


def _emit(event: Event | None) -> None:
    if event is not None:
        signals.emit(event.signal, **event.data)


def announce_settled(job: JobHandle, seconds: float, late: Outcome | None = None) -> None:
    """Announce a job that its handler, or the handler's transaction, has settled.

    `late`: the outcome by which the handler ended after that, if it raised.
    """
    outcome = job._settled_by or ACK  # without one, an atomic handler has returned, and has deleted the job's row
    _emit(settled_event(job, outcome, seconds))
    if late is not None:
        signals.emit(
            signals.job_raised_late,
            job=job,
            error=late.error,
            traceback=late.traceback,
            exception=late.take_exception(),
        )


def _announce_refused(result: Result) -> None:
    job, outcome = result.run.job, result.outcome
    if job._settled or job._settling:  # a callback after its commit may have kept the handle from knowing
        announce_settled(job, result.seconds, outcome)
    elif not result.run.lost or outcome.traceback:  # a loss that is known was announced before
        what = outcome.kind.name.lower().replace("_", " ")
        announce_loss(result.run, what, outcome.traceback, outcome.take_exception())


def announce_loss(run: Run, what: str, traceback: str = "", exception: BaseException | None = None) -> None:
    """Tell the handler and the log that the lease is lost, so that `what` changed nothing."""
    run.job.lease_lost.set()
    signals.emit(signals.lease_lost, job=run.job, what=what, traceback=traceback, exception=exception)
