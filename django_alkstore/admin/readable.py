"""Rows whose texts are shown whatever something else has written into them."""

from __future__ import annotations  # Django's classes take no type arguments when they run

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from django.db.models import BinaryField, CharField, F, Model, QuerySet, TextField
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast
from django.db.models.query import ModelIterable

from django_alkstore.internals import make_rows_with

M = TypeVar("M", bound=Model)

_PREFIX = "stored_"
"""What the bytes of a text are called beside it, until they are decoded."""


def readable(rows: QuerySet[M], names: Iterable[str] | None = None) -> QuerySet[M]:
    """`rows` with these columns (default: each that holds text) read as bytes, and put in place as text.

    SQLite takes any bytes for text, and its driver fails a whole statement at the first that are not UTF-8.
    """
    if names is None:
        names = [field.name for field in rows.model._meta.concrete_fields if isinstance(field, (CharField, TextField))]
    found: QuerySet[M] = rows.defer(*names).annotate(**in_place_of(**{name: F(name) for name in names}))
    make_rows_with(found, _DecodedRows)
    return found


def in_place_of(**values: Combinable) -> dict[str, Cast]:
    """Annotations that `readable` rows show in place of the columns of these names."""
    return {f"{_PREFIX}{name}": Cast(value, BinaryField()) for name, value in values.items()}


def decoded(stored: bytes | None) -> str | None:
    return None if stored is None else stored.decode(errors="replace")


class _DecodedRows(ModelIterable):  # type: ignore[type-arg]  # it has no parameter at run time
    def __iter__(self) -> Iterator[Any]:
        stored = [name for name in self.queryset.query.annotations if name.startswith(_PREFIX)]
        for row in super().__iter__():
            values = vars(row)
            for name in stored:
                values[name.removeprefix(_PREFIX)] = decoded(values.pop(name))
            yield row
