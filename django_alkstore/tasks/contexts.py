"""The context of a running task."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from django_alkstore.services import JobHandle
from django_alkstore.tasks.apis import Api


@cache
def context_of(api: Api) -> Any:
    """The API's `TaskContext` with the job's handle."""
    base = api.context

    @dataclass(frozen=True, slots=True, kw_only=True)
    class AlkstoreContext(base):  # type: ignore[misc, valid-type]
        job: JobHandle

    return AlkstoreContext
