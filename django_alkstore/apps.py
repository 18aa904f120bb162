"""The app's configuration. Loading it starts no thread and asks the database nothing."""

from django.apps import AppConfig
from django.core.checks import register


class AlkstoreConfig(AppConfig):
    name = "django_alkstore"
    label = "django_alkstore"
    verbose_name = "Background work"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_alkstore import checks  # noqa: PLC0415  it imports the models, which are loaded by now

        # The commands ask for the first tag alone: a module that cannot be imported must not stop a worker.
        register(checks.check_setting, "alkstore")
        register(checks.check_database, "alkstore")
        register(checks.check_modules, "alkstore_modules")
