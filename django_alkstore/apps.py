"""The app's configuration. Loading it starts no thread and asks the database nothing."""

from collections.abc import Callable
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Tags, register


def _check(name: str) -> Callable[..., list[CheckMessage]]:
    """The system check of this name."""

    def run(**kwargs: Any) -> list[CheckMessage]:
        from django_alkstore import checks  # noqa: PLC0415  a server starts without running any

        found: list[CheckMessage] = getattr(checks, name)(**kwargs)
        return found

    return run


# Made once: `ready` may be called again, and what is registered twice must be the same.
# The commands ask for the tag "alkstore" only. A worker looks at the modules itself, and other commands need none.
_CHECKS = (
    (_check("check_setting"), ["alkstore"]),
    (_check("check_database"), ["alkstore"]),
    (_check("check_connection"), ["alkstore", Tags.database]),
    (_check("check_modules"), ["alkstore_modules"]),
    (_check("check_tasks"), ["alkstore"]),
)


class AlkstoreConfig(AppConfig):
    name = "django_alkstore"
    label = "django_alkstore"
    verbose_name = "Background work"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        for check, tags in _CHECKS:
            register(check, *tags)
