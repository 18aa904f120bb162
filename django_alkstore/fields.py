"""Columns that read the same on every database and under every project's settings."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import FieldError, ValidationError
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import lookups
from django.db.models.expressions import Combinable, ExpressionList, register_combinable_fields
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
        # Whose column it has, whole microseconds: so `F("run_at") - timedelta(...)` is one number less another. For any
        # other type of number Django would make text of it, which no comparison would ever find due.
        return "DurationField"

    def get_db_prep_save(self, value: Any, connection: BaseDatabaseWrapper) -> Any:
        if hasattr(value, "as_sql"):
            return _as_instant(value)
        return super().get_db_prep_save(value, connection)

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


_ADDED, _SUBTRACTED = Combinable.ADD, Combinable.SUB
register_combinable_fields(InstantField, _ADDED, models.DurationField, InstantField)
register_combinable_fields(models.DurationField, _ADDED, InstantField, InstantField)
register_combinable_fields(InstantField, _SUBTRACTED, models.DurationField, InstantField)
register_combinable_fields(InstantField, _SUBTRACTED, InstantField, models.DurationField)


class _FromDateTime(models.Func):
    """What Django's date and time functions give, as microseconds since the epoch."""

    output_field = InstantField()
    arity = 1

    def as_sqlite(self, compiler: "SQLCompiler", connection: BaseDatabaseWrapper, **context: Any) -> Any:
        # They give text, in UTC: "2026-03-01 12:00:00.250001", with no point where there is no fraction.
        template = (
            "(SELECT CAST(round((julianday(substr(moment, 1, 19)) - 2440587.5) * 86400) AS INTEGER) * 1000000"
            " + CAST(substr(substr(moment, 21) || '000000', 1, 6) AS INTEGER)"
            " FROM (SELECT %(expressions)s AS moment))"
        )
        return self.as_sql(compiler, connection, template=template, **context)


def _as_instant(expression: Any) -> Any:
    """The resolved expression as what the column holds. `FieldError` where it is none: it would be stored as it is."""
    field = getattr(expression, "output_field", None)
    if field is None or isinstance(field, InstantField):
        return expression
    if isinstance(field, models.DateTimeField) and settings.USE_TZ:
        return _FromDateTime(expression)
    raise FieldError(
        f"a moment cannot be set to, or compared with, {expression!r} of type {type(field).__name__}: it takes an "
        "aware datetime, another moment, one with a timedelta added or subtracted, or (with USE_TZ) a date function"
    )


def _is_prepared(expression: Any) -> bool:
    """Is it a plain value of a list, which Django 5.2 prepares before it makes an expression of it?"""
    return isinstance(expression, models.Value) and isinstance(expression.value, int)


class _OfInstants(lookups.Lookup):
    """Compares instants with instants."""

    def get_prep_lookup(self) -> Any:
        prepared = super().get_prep_lookup()
        if isinstance(prepared, ExpressionList):
            return ExpressionList(
                *(each if _is_prepared(each) else _as_instant(each) for each in prepared.source_expressions)
            )
        return _as_instant(prepared) if hasattr(prepared, "as_sql") else prepared


for _lookup in (
    lookups.Exact,
    lookups.GreaterThan,
    lookups.GreaterThanOrEqual,
    lookups.LessThan,
    lookups.LessThanOrEqual,
    lookups.In,
    lookups.Range,
):
    InstantField.register_lookup(type(f"Instant{_lookup.__name__}", (_OfInstants, _lookup), {}))


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
