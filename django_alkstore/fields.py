"""Columns that read the same on every database and under every project's settings."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ValidationError
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.dateparse import parse_datetime

from django_alkstore.clock import from_us, readable, to_us
from django_alkstore.payloads import UnreadablePayload, dumps, read_payload

if TYPE_CHECKING:
    from django.db.models.sql.compiler import SQLCompiler  # nothing else imports it before the first query

    # What is set and read is typed as for a DateTimeField, `null` included; the column is another.
    _Instant = models.DateTimeField
    _JSON = models.Field[Any, Any]
else:
    _Instant = _JSON = models.Field


class InstantField(_Instant):  # type: ignore[type-arg]  # the plugin fills them in
    """A moment: microseconds since the epoch in the database, an aware datetime in UTC in Python.

    `DateTimeField` stores local time under `USE_TZ=False`, where a lease would jump an hour twice a year.
    """

    description = "A moment, as microseconds since the epoch"

    def get_internal_type(self) -> str:
        return "BigIntegerField"

    def from_db_value(self, value: Any, expression: Any, connection: BaseDatabaseWrapper) -> datetime | None:
        return None if value is None else readable(value)

    def to_python(self, value: Any) -> datetime | None:
        if isinstance(value, str):
            parsed = parse_datetime(value)
            if parsed is None:
                raise ValidationError(f"{value!r} is not an ISO 8601 date and time.")
            value = parsed
        if isinstance(value, int):
            return from_us(value)
        if value is not None and not isinstance(value, datetime):
            raise ValidationError(f"{value!r} is not a moment.")
        if value is not None and value.utcoffset() is None:
            raise ValidationError(f"{value!r} has no time zone.")
        return value

    def get_prep_value(self, value: Any) -> Any:
        value = super().get_prep_value(value)
        if isinstance(value, (datetime, str)):
            moment = self.to_python(value)
            return None if moment is None else to_us(moment)
        return value

    def value_to_string(self, obj: models.Model) -> str:
        value = self.value_from_object(obj)
        return "" if value is None else value.isoformat()


class JSONTextField(_JSON):
    """JSON as text, decoded on reading.

    Not Django's `JSONField`: its check lets SQLite's own parser decide what JSON is, and that parser stops at
    a nesting depth that Python's passes, and knows neither our size limit nor our error messages.
    """

    description = "A JSON value, as text"

    def get_internal_type(self) -> str:
        return "TextField"

    def select_format(self, compiler: "SQLCompiler", sql: str, params: Any) -> Any:
        # As bytes: a text that is not UTF-8, which something else wrote, would fail the whole statement.
        if compiler.connection.vendor == "sqlite":
            sql = f"CAST({sql} AS BLOB)"
        return super().select_format(compiler, sql, params)

    def from_db_value(self, value: Any, expression: Any, connection: BaseDatabaseWrapper) -> Any:
        return None if value is None else read_payload(value)

    def get_db_prep_value(self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False) -> Any:
        if hasattr(value, "as_sql"):
            return value
        return dumps(value)

    def value_to_string(self, obj: models.Model) -> Any:
        # The serializers encode JSON themselves.
        value = self.value_from_object(obj)
        return value.text if isinstance(value, UnreadablePayload) else value
