"""A task of the package `django_tasks`, as other apps of a project may have them, also on Django 6."""

from django_tasks import task


@task
def multiply(x: int, y: int) -> int:
    return x * y


@task(takes_context=True)
async def describe(context, word):  # type: ignore[no-untyped-def]
    return [word, context.attempt, context.job.id]
