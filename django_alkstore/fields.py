"""Columns that read the same on every database and under every project's settings."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.core.exceptions import FieldError, ValidationError
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import lookups
from django.db.models.expressions import (
    Combinable,
    CombinedExpression,
    DurationExpression,
    ExpressionList,
    register_combinable_fields,
)
from django.utils.dateparse import parse_datetime

from django_alkstore.clock import from_us, readable, to_us
from django_alkstore.internals import type_of
from django_alkstore.payloads import dumps, from_dump, read_payload, to_dump

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
        if value is None or isinstance(value, int):
            return value
        moment = self.to_python(value)
        return None if moment is None else to_us(moment)

    def value_to_string(self, obj: models.Model) -> str:
        value = self.value_from_object(obj)
        return "" if value is None else value.isoformat()


register_combinable_fields(InstantField, Combinable.SUB, InstantField, models.DurationField)


class _FromNow(models.Func):
    """The database's own `Now()` as microseconds since the epoch."""

    output_field = InstantField()
    arity = 1

    def as_sqlite(self, compiler: "SQLCompiler", connection: BaseDatabaseWrapper, **context: Any) -> Any:
        # It is text there, in UTC and to the millisecond, which a Julian day's fraction has room for.
        template = "CAST(round((julianday(%(expressions)s) - 2440587.5) * 86400000) AS INTEGER) * 1000"
        return self.as_sql(compiler, connection, template=template, **context)


def _as_instant(expression: Any) -> Any:
    """The resolved expression as one of what the column holds, or `FieldError`: SQLite would store it as it is."""
    from django.db.models.functions import Coalesce, Greatest, Least, Now  # noqa: PLC0415  few ever come here

    match expression:
        case models.Value(value=None | datetime()):
            return models.Value(expression.value, output_field=InstantField())
        case Now():
            return _FromNow(expression)
        case DurationExpression(connector=Combinable.ADD | Combinable.SUB) if _adds_duration(expression):
            left, right = (
                side if _is_duration(side) else _as_instant(side) for side in expression.get_source_expressions()
            )
            return CombinedExpression(left, expression.connector, right, output_field=InstantField())
        case models.When():
            return _with_sources(expression, [expression.condition, _as_instant(expression.result)])
        case models.Case() | Coalesce() | Greatest() | Least() | models.ExpressionWrapper():
            made = _with_sources(expression, [_as_instant(source) for source in expression.get_source_expressions()])
            made.output_field = InstantField()
            return made
    field = type_of(expression)
    is_instant = isinstance(field, InstantField) and not isinstance(expression, DurationExpression)
    if is_instant or isinstance(expression, models.F):  # of a query around this one: it has a type once that is made
        return expression
    raise FieldError(
        f"a moment cannot be set to, or compared with, {expression!r} of type {type(field).__name__}: it takes an "
        "aware datetime, another moment, Now(), and each with a timedelta added or subtracted; what else is a whole "
        "number of microseconds since the epoch is told by output_field=InstantField()"
    )


def _is_duration(side: Any) -> bool:
    try:
        return isinstance(type_of(side), models.DurationField)
    except FieldError:  # a moment and a duration: the sum has no type for Django
        return False


def _adds_duration(expression: DurationExpression) -> bool:
    left, right = map(_is_duration, expression.get_source_expressions())
    return right or (left and expression.connector == Combinable.ADD)


def _with_sources(expression: Any, sources: list[Any]) -> Any:
    made = expression.copy()
    made.set_source_expressions(sources)
    return made


def _is_prepared(expression: Any) -> bool:
    """True for a plain value of a list. Django 5.2 prepares such a value before it makes an expression of it."""
    return isinstance(expression, models.Value) and isinstance(expression.value, int)


class _OfInstants(lookups.Lookup):
    """Compares instants with instants."""

    def get_prep_lookup(self) -> Any:
        prepared = super().get_prep_lookup()
        return _all_instants(prepared) if hasattr(prepared, "as_sql") else prepared

    def process_rhs(self, compiler: "SQLCompiler", connection: BaseDatabaseWrapper) -> Any:
        if hasattr(self.rhs, "as_sql"):
            self.rhs = _all_instants(self.rhs)  # by now a reference to a query around this one has a type
        return super().process_rhs(compiler, connection)


def _all_instants(expression: Any) -> Any:
    if not isinstance(expression, ExpressionList):
        return _as_instant(expression)
    return ExpressionList(
        *(each if _is_prepared(each) else _as_instant(each) for each in expression.source_expressions)
    )


@InstantField.register_lookup
class _Exact(_OfInstants, lookups.Exact):
    pass


@InstantField.register_lookup
class _GreaterThan(_OfInstants, lookups.GreaterThan):
    pass


@InstantField.register_lookup
class _GreaterThanOrEqual(_OfInstants, lookups.GreaterThanOrEqual):
    pass


@InstantField.register_lookup
class _LessThan(_OfInstants, lookups.LessThan):
    pass


@InstantField.register_lookup
class _LessThanOrEqual(_OfInstants, lookups.LessThanOrEqual):
    pass


@InstantField.register_lookup
class _In(_OfInstants, lookups.In):
    pass


@InstantField.register_lookup
class _Range(_OfInstants, lookups.Range):
    pass


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

    def clean(self, value: Any, model_instance: models.Model | None) -> Any:
        # Not by way of `to_python`: the value is decoded already, also if it is a text.
        self.validate(value, model_instance)
        return value

    def validate(self, value: Any, model_instance: models.Model | None) -> None:
        """Nothing to refuse here: every value is one of JSON, null and the empty ones too. The services check."""

    def value_to_string(self, obj: models.Model) -> str:
        return to_dump(self.value_from_object(obj))

    def to_python(self, value: Any) -> Any:
        """The value that a serializer has written; None, numbers and booleans are written as they are."""
        return from_dump(value) if isinstance(value, str) else value
