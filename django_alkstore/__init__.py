"""Queues, locks, schedules and outboxes in the project's own SQLite file."""

__version__ = "0.1.0"
