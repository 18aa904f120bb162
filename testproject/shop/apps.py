"""The shop's app. Nothing happens here: handlers are found in alkstore.py, schedules are declared by a command."""

from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "testproject.shop"
    default_auto_field = "django.db.models.BigAutoField"
