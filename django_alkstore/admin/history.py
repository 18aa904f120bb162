"""A job's failed attempts and what was done to it in the admin, the latest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from django_alkstore.admin import show
from django_alkstore.models import Job
from django_alkstore.payloads import UnreadablePayload

OBVIOUS = ("builtins.", "django_alkstore.")
"""Modules whose exceptions everybody knows by their name."""
MAX_LOGGED = 20
"""How many entries of the admin's log are shown with a job."""


@dataclass
class Failures:
    """Attempts in a row that failed in the same way."""

    error: str
    traceback: str
    exception: str
    """The dotted path of the exception's class, or nothing if its name alone says as much."""
    attempts: list[tuple[str, datetime | None, str]] = field(default_factory=list)
    """Of each attempt: its number, when it failed, and that moment as it is shown. The latest first."""

    @property
    def at(self) -> datetime | None:
        return self.attempts[0][1]


@dataclass(frozen=True)
class Remark:
    """Something that was done to the job."""

    text: str
    at: datetime | None


def history(job: Job, said: Sequence[str]) -> SafeString | str:
    """The job's history. A message that one of the sentences in `said` ends with is not repeated."""
    errors: Any = job.errors
    if isinstance(errors, UnreadablePayload):
        return show.block(errors.text[: show.MAX_JSON])
    if not isinstance(errors, list):
        return show.block(str(errors)[: show.MAX_JSON])
    entries = list(_in_order(errors, _logged(job), job.attempts))
    shown = (_show(entry, said, is_open=place == 0) for place, entry in enumerate(_folded(entries)))
    return format_html_join("", "{}", ((item,) for item in shown)) or show.NOTHING


def has_history(job: Job) -> bool:
    """True if an attempt has failed, or if somebody has done something to the job in the admin."""
    return job.errors != [] or bool(_logged(job))


def _logged(job: Job) -> list[Remark]:
    """What people have done to the job in the admin, the latest first. Read once for a page."""
    found: list[Remark] | None = vars(job).get("_alkstore_logged")
    if found is None:
        found = vars(job)["_alkstore_logged"] = _read_log(job)
    return found


def _read_log(job: Job) -> list[Remark]:
    entries = LogEntry.objects.filter(
        content_type=ContentType.objects.get_for_model(Job), object_id=str(job.pk), action_flag=CHANGE
    )
    return [
        Remark(f"{entry.get_change_message().rstrip('.')} by {entry.user.get_username()}", _aware(entry.action_time))
        for entry in entries.select_related("user").order_by("-action_time")[:MAX_LOGGED]
    ]


def _in_order(errors: list[Any], remarks: Sequence[Remark], attempts: int) -> Iterator[Failures | Remark]:
    """The failures and the remarks, the latest first.

    Where the numbers of the attempts begin again, the job was requeued: if nobody did that in the admin, say so too.
    """
    left = list(remarks)
    later: int | None = attempts + 1  # the number that the attempt after the latest failure has
    for entry in reversed(errors):
        failure = _failure(entry)
        number = _number(entry)
        passed = [remark for remark in left if _is_after(remark.at, failure.at)]
        yield from passed
        left = left[len(passed) :]
        began_again = number is not None and later is not None and number >= later
        if began_again and not any(remark.text.startswith("Requeued") for remark in passed):
            yield Remark("Requeued", None)
        yield failure
        later = number
    yield from left


def _folded(entries: Sequence[Failures | Remark]) -> list[Failures | Remark]:
    """The same, with failures in a row that are alike made one."""
    folded: list[Failures | Remark] = []
    for entry in entries:
        last = folded[-1] if folded else None
        if isinstance(entry, Failures) and isinstance(last, Failures) and _alike(entry, last):
            last.attempts += entry.attempts
        else:
            folded.append(entry)
    return folded


def _alike(one: Failures, other: Failures) -> bool:
    return (one.error, one.traceback) == (other.error, other.traceback)


def _failure(entry: Any) -> Failures:
    """One entry of the history. Another program may have written it: nothing is taken for granted."""
    if not isinstance(entry, dict):
        return Failures(str(entry)[: show.MAX_JSON], "", "", [("?", None, "")])
    at, shown = _moment(entry.get("at"))
    error, traceback = (str(entry.get(key) or "")[: show.MAX_JSON] for key in ("error", "traceback"))
    exception = str(entry.get("exception") or "")[: show.MAX_LINE]
    if exception.startswith(OBVIOUS):
        exception = ""
    return Failures(error, traceback, exception, [(str(entry.get("attempt", "?")), at, shown)])


def _number(entry: Any) -> int | None:
    number = entry.get("attempt") if isinstance(entry, dict) else None
    return number if isinstance(number, int) else None


def _moment(at: Any) -> tuple[datetime | None, str]:
    try:
        moment = datetime.fromisoformat(at)
        return _aware(moment), show.when(moment)
    except (TypeError, ValueError, OverflowError):
        return None, str(at or "")


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.astimezone(UTC)


def _is_after(one: datetime | None, other: datetime | None) -> bool:
    return one is not None and (other is None or one >= other)


def _show(entry: Failures | Remark, said: Sequence[str], *, is_open: bool) -> SafeString:
    if isinstance(entry, Remark):
        moment = "" if entry.at is None else f" on {show.when(entry.at)}"
        return format_html('<p class="alkstore-remark"><bdi>{}</bdi>{}.</p>', entry.text, moment)
    stack = _without_message(entry)
    line, whole = _message(entry.error, said)
    moments = format_html_join(", ", "{}", ((shown,) for _, _, shown in entry.attempts if shown))
    return format_html(
        '<details class="alkstore-failure"{}><summary>{} <bdi>{}</bdi> <span class="alkstore-quiet">{} {}</span>'
        "</summary>{}{}</details>",
        " open" if is_open else "",
        _heading(entry),
        line,
        moments,
        entry.exception,
        show.block(whole) if whole else "",
        show.block(stack) if stack else "",
    )


def _message(error: str, said: Sequence[str]) -> tuple[str, str]:
    """The message as a line for the heading, or as a text for the box if no line holds it; nothing if it was said."""
    message = error.strip()
    if show.plain_first_line(message) != message:
        return "", message
    if any(sentence.endswith(message) for sentence in said):
        return "", ""
    return message, ""


def _heading(entry: Failures) -> str:
    numbers = [number for number, _, _ in reversed(entry.attempts)]
    if len(numbers) == 1:
        return f"Attempt {numbers[0]}:"
    return f"Attempts {', '.join(numbers[:-1])} and {numbers[-1]} failed in the same way:"


def _without_message(entry: Failures) -> str:
    """The traceback without the message at its end, which is shown above it."""
    traceback = entry.traceback.rstrip()
    error = entry.error.strip()
    if not error or not traceback.endswith(error):
        return traceback
    start = traceback.rfind("\n", 0, len(traceback) - len(error))
    return traceback[: start + 1].rstrip()
