"""What a worker of this project can run: the jobs of registered handlers, and of tasks."""

from importlib.util import find_spec
from typing import Any

import django

from django_alkstore.exceptions import InvalidOption
from django_alkstore.names import validate_name
from django_alkstore.registrations import Registration, registrations, uses_tasks


def handled(using: str) -> list[Registration]:
    """A registration for each queue and outbox of a database that has a handler, and for each queue of tasks."""
    found = registrations()
    queues = {registration.queue for registration in found}
    return found + [each for each in _of_tasks(using) if each.queue not in queues]


def takes_every_task(using: str) -> bool:
    """True if the setting `TASKS` gives the tasks of every queue to this library, so that new queues may come."""
    if not _may_have_tasks():
        return False
    from django_alkstore.tasks.running import takes_every_queue  # noqa: PLC0415  it needs Django's API of tasks

    return takes_every_queue(using)


def queue_of_tasks(name: str) -> Registration:
    """The registration of a queue that may hold tasks."""
    from django_alkstore.tasks.running import registration_of  # noqa: PLC0415  it needs Django's API of tasks

    return registration_of(validate_name("queue", name))


def new_queues(using: str, known: set[str]) -> list[Registration]:
    """The queues of tasks that are not among the known ones."""
    return [registration for registration in _of_tasks(using) if registration.queue not in known]


def _of_tasks(using: str) -> list[Registration]:
    if not _may_have_tasks():
        return []
    from django_alkstore.tasks.running import task_registrations  # noqa: PLC0415  it needs Django's API of tasks

    return task_registrations(using)


def unknown_tasks(using: str) -> dict[str, str]:
    """The tasks of live jobs that this project cannot run, each with the reason."""
    if not _may_have_tasks():
        return {}
    from django_alkstore.tasks.running import unknown  # noqa: PLC0415  it needs Django's API of tasks

    return unknown(using)


def conflicting_queues() -> list[tuple[str, str]]:
    """The queues of tasks that have a handler: each with the alias of its backend, which is first."""
    queues = {registration.queue for registration in registrations()}
    return [(backend.alias, queue) for backend in _backends() for queue in sorted(backend.queues & queues)]


def wrong_task_options() -> list[tuple[str, str]]:
    """The backends of this library whose `OPTIONS` are wrong: the alias, and what is wrong."""
    found = []
    for backend in _backends():
        try:
            backend.check_options()
        except InvalidOption as error:
            found.append((backend.alias, str(error)))
    return found


def _backends() -> list[Any]:
    if not _may_have_tasks():
        return []
    from django_alkstore.tasks.finding import backends  # noqa: PLC0415  it needs Django's API of tasks

    return list({backend.alias: backend for backend in backends()}.values())


def _may_have_tasks() -> bool:
    """True if the setting names a backend of this library, and Django or a package has the API."""
    return uses_tasks() and (django.VERSION >= (6, 0) or find_spec("django_tasks") is not None)
