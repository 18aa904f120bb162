"""What a worker of this project can run: the jobs of registered handlers, and of tasks."""

from importlib.util import find_spec

import django
from django.conf import settings

from django_alkstore.names import validate_name
from django_alkstore.registrations import Registration, registrations


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


def _may_have_tasks() -> bool:
    """True if the setting names a backend of this library, and Django or a package has the API."""
    named = [str(params.get("BACKEND", "")) for params in (getattr(settings, "TASKS", None) or {}).values()]
    has_api = django.VERSION >= (6, 0) or find_spec("django_tasks") is not None
    return has_api and any(not name.startswith(("django.tasks.", "django_tasks.")) for name in named)
