"""A project's own `DEFAULT_AUTO_FIELD`."""

from django.db import models


class HouseKey(models.BigAutoField):
    """What a project with house rules may use for its keys."""
