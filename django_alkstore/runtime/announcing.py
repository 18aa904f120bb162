"""Sends the events about what a transaction of the worker has changed. Foreign code runs here: no lock is held."""

from django_alkstore import signals
from django_alkstore.runtime.jobs import Result, Run
from django_alkstore.runtime.perform import announce_failure
from django_alkstore.runtime.writing import Written
from django_alkstore.services import JobHandle
from django_alkstore.services.outcomes import RELEASE, Kind


def announce(written: Written) -> None:
    """Announce the results and the swept jobs."""
    for result, took_effect in written.results:
        job, outcome = result.run.job, result.outcome
        if not took_effect:
            _announce_refused(result)
        elif outcome.kind is Kind.ACK:
            signals.emit(signals.job_completed, job=job, seconds=result.seconds)
        elif outcome.kind is not Kind.GIVE_BACK:
            announce_failure(job, outcome, result.seconds)
        elif outcome.error:
            signals.emit(signals.job_locked_out, job=job, error=outcome.error, delay=outcome.delay)
        elif outcome.delay is not None:
            signals.emit(signals.job_snoozed, job=job, delay=outcome.delay)
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


def announce_settled(job: JobHandle, seconds: float) -> None:
    """Announce a job that its handler, or the handler's transaction, has settled."""
    outcome = job.settled_by
    if outcome is not None and outcome.is_failure:
        announce_failure(job, outcome, seconds)
    elif outcome is not None and outcome.kind is Kind.GIVE_BACK:
        signals.emit(signals.job_settled, job=job, seconds=seconds)
    else:
        signals.emit(signals.job_completed, job=job, seconds=seconds)


def _announce_refused(result: Result) -> None:
    job, outcome = result.run.job, result.outcome
    if job.settled or job.settling:  # a callback after its commit may have kept the handle from knowing
        announce_settled(job, result.seconds)
        signals.emit(
            signals.job_raised_late,
            job=job,
            error=outcome.error,
            traceback=outcome.traceback,
            exception=outcome.take_exception(),
        )
    elif not result.run.lost or outcome.traceback:  # a loss that is known was announced before
        what = outcome.kind.name.lower().replace("_", " ")
        announce_loss(result.run, what, outcome.traceback, outcome.take_exception())


def announce_loss(run: Run, what: str, traceback: str = "", exception: BaseException | None = None) -> None:
    """Tell the handler and the log that the lease is lost, so that `what` changed nothing."""
    run.job.lease_lost.set()
    signals.emit(signals.lease_lost, job=run.job, what=what, traceback=traceback, exception=exception)
