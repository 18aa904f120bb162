"""Finding the task of a stored dotted path. A worker imports nothing but modules that the project has installed."""

from importlib import import_module
from typing import Any

from django.apps import apps
from django.conf import settings

from django_alkstore.tasks.apis import api_of_task, in_use


class StoresTasks:
    """Marks the backends of this library."""

    alias: str
    database: str | None
    modules: frozenset[str]
    queues: set[str]
    task_options: dict[str, Any]

    def check_options(self) -> None:
        raise NotImplementedError


class UnknownTask(Exception):
    """A stored path leads to no task that this process may run. The message says why."""


def backends() -> list[StoresTasks]:
    """The backends of this library in the setting `TASKS`, of each API that is in use."""
    made = [api.backends[alias] for api in in_use() for alias in getattr(settings, "TASKS", None) or ()]
    return [backend for backend in made if isinstance(backend, StoresTasks)]


def may_import(module: str) -> bool:
    """True if the module belongs to an installed app, or is listed in `OPTIONS["modules"]` of a backend."""
    if any(module == app.name or module.startswith(f"{app.name}.") for app in apps.get_app_configs()):
        return True
    return any(module in backend.modules for backend in backends())


def find_task(path: str) -> Any:
    """The task at this dotted path. Raises `UnknownTask`. The module is imported only if that is allowed."""
    module, _, name = path.rpartition(".")
    if not path:
        raise UnknownTask("the job names no task")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        raise UnknownTask(f"{path!r} is not the path of a function in a module")
    if not may_import(module):
        raise UnknownTask(f"the module {module} belongs to no installed app, and OPTIONS['modules'] does not list it")
    try:
        found = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:
        raise UnknownTask(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    if api_of_task(found) is None:
        raise UnknownTask(f"{path} is not a task")
    if not isinstance(found.get_backend(), StoresTasks):
        raise UnknownTask(f"{path} is a task of another backend, {found.backend!r}")
    return found
