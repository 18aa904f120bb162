"""The admin: what there is, and the services as actions. It shows, and never writes through the ORM."""

from django_alkstore.admin.jobs import JobAdmin
from django_alkstore.admin.locks import LockAdmin
from django_alkstore.admin.schedules import ScheduleAdmin

__all__ = ["JobAdmin", "LockAdmin", "ScheduleAdmin"]
