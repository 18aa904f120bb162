"""The app's configuration. Loading it starts no thread and asks the database nothing."""

from django.apps import AppConfig


class AlkstoreConfig(AppConfig):
    name = "django_alkstore"
    label = "django_alkstore"
    verbose_name = "Background work"
    default_auto_field = "django.db.models.BigAutoField"
