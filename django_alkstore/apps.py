"""The app's configuration. Loading it starts no thread and asks the database nothing."""

from collections.abc import Callable
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, register


class AlkstoreConfig(AppConfig):
    name = "django_alkstore"
    label = "django_alkstore"
    verbose_name = "Background work"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # The commands ask for the first tag alone: a module that cannot be imported must not stop a worker.
        register(_check("check_setting"), "alkstore")
        register(_check("check_database"), "alkstore")
        register(_check("check_modules"), "alkstore_modules")


def _check(name: str) -> Callable[..., list[CheckMessage]]:
    """The system check of this name."""

    def run(**kwargs: Any) -> list[CheckMessage]:
        from django_alkstore import checks  # noqa: PLC0415  a server starts without running any

        found: list[CheckMessage] = getattr(checks, name)(**kwargs)
        return found

    return run
