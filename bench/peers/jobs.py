"""The task of those that take Django's own `@task`."""

from django.tasks import task

from bench import notes


@task()
def noop(payload: object = None) -> None:
    notes.begun(payload)
