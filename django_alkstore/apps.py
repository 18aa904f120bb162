"""The app's configuration. Loading it starts no thread and asks the database nothing."""

from django.apps import AppConfig
from django.core.checks import Tags, register


class AlkstoreConfig(AppConfig):
    name = "django_alkstore"
    label = "django_alkstore"
    verbose_name = "Background work"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_alkstore import checks  # noqa: PLC0415  it imports the models, which are loaded by now

        register(checks.check_setting, Tags.compatibility)
        register(checks.check_modules, Tags.compatibility)
        register(checks.check_database, Tags.compatibility)
