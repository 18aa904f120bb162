"""How values look on a page. Everything goes through `format_html`, which escapes it."""

from collections.abc import Callable, Iterable
from datetime import datetime
from json import JSONEncoder
from typing import Any

from django.contrib import admin
from django.db.models import Model, TextField
from django.db.models.functions import Cast
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from django_alkstore import clock
from django_alkstore.names import outbox_of
from django_alkstore.payloads import UnreadablePayload, read_payload

NOTHING = "-"
MAX_JSON = 20_000
"""Characters of a payload on a page."""
MAX_LINE = 120
"""Characters of an error in a list."""

_pretty = JSONEncoder(indent=2, ensure_ascii=False).iterencode


def badge(kind: str, label: str) -> SafeString:
    return format_html('<span class="alkstore-badge alkstore-{}">{}</span>', kind, label)


def text(value: str | None) -> SafeString | str:
    """Somebody's text, whose direction stays its own."""
    return format_html("<bdi>{}</bdi>", value) if value else NOTHING


def plain_first_line(value: str | None) -> str:
    lines = (value or "").strip().splitlines()
    if not lines:
        return NOTHING
    cut = len(lines) > 1 or len(lines[0]) > MAX_LINE
    return lines[0][:MAX_LINE] + (" …" if cut else "")


def first_line(value: str | None) -> SafeString | str:
    return text(plain_first_line(value))


def block(value: str) -> SafeString:
    """Text with its line breaks, in a box that scrolls."""
    return format_html('<pre class="alkstore-block" dir="auto">{}</pre>', value)


def optional_block(value: str | None) -> SafeString | str:
    return block(value) if value else NOTHING


def queue_name(queue: str) -> str:
    """As people name it. An outbox's queue is told from a queue of that name."""
    outbox = outbox_of(queue)
    return queue if outbox is None else f"outbox {outbox}"


def when(moment: datetime) -> str:
    """A moment in the project's time zone and date format, to the second, under either `USE_TZ`."""
    local = moment.astimezone(timezone.get_current_timezone())
    return f"{date_format(local, 'DATE_FORMAT')}, {local:%H:%M:%S}"


def age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def distance(moment: datetime, now: datetime) -> str:
    """`3 min ago` or `in 3 min`."""
    seconds = (now - moment).total_seconds()
    return f"{age(seconds)} ago" if seconds >= 0 else f"in {age(-seconds)}"


def moment(value: datetime | None, prefix: str = "") -> SafeString | str:
    if value is None:
        return NOTHING
    return format_html(
        '{} <time datetime="{}">{}</time> <span class="alkstore-quiet">({})</span>',
        prefix,
        value.isoformat(),
        when(value),
        distance(value, clock.now()),
    )


def column(name: str, label: str, shown: Callable[[Any], SafeString | str]) -> Callable[[Model], SafeString | str]:
    """A column of the list, or a line of the detail page: the field `name` as `shown` shows it."""

    @admin.display(description=label)
    def display(row: Model) -> SafeString | str:
        return shown(getattr(row, name))

    # The admin makes a CSS class of it.
    display.__name__ = name
    return display


def stored_text(row: Model, field: str) -> str:
    """A JSON column as stored, whether it can be read or not."""
    rows = type(row)._default_manager.using(row._state.db).filter(pk=row.pk)
    return rows.values_list(Cast(field, TextField()), flat=True).first() or ""


def json_block(stored: str) -> SafeString:
    """Stored JSON laid out for reading, cut where it is long. What is not JSON is shown as it is."""
    value = read_payload(stored)
    if isinstance(value, UnreadablePayload):
        return format_html("<p>Not JSON: {}</p>{}", value.reason, _cut([stored], stored))
    try:
        return _cut(_pretty(value), stored)
    except RecursionError:
        return _cut([stored], stored)


def _cut(pieces: Iterable[str], stored: str) -> SafeString:
    """As much of `pieces` as a page takes: the rest is never made."""
    taken, length = [], 0
    for piece in pieces:
        taken.append(piece[: MAX_JSON + 1])
        length += len(piece)
        if length > MAX_JSON:
            break
    shown = block("".join(taken)[:MAX_JSON])
    if length <= MAX_JSON:
        return shown
    return format_html(
        '{}<p class="alkstore-quiet">Cut here: the whole is {} characters of JSON.</p>', shown, f"{len(stored):,}"
    )


def failures(history: Any) -> SafeString | str:
    """Each failed attempt, the latest first. Something else may have written the column: nothing is taken as given."""
    if isinstance(history, UnreadablePayload):
        return block(history.text[:MAX_JSON])
    if not isinstance(history, list):
        return block(str(history)[:MAX_JSON])
    return format_html_join("", "{}", ((_failure(entry),) for entry in reversed(history))) or NOTHING


def _failure(entry: Any) -> SafeString:
    if not isinstance(entry, dict):
        return block(str(entry)[:MAX_JSON])
    return format_html(
        '<section class="alkstore-failure"><h3>Attempt {} <span class="alkstore-quiet">{}</span></h3>{}{}</section>',
        entry.get("attempt", "?"),
        _when_written(entry.get("at")),
        block(str(entry.get("error", ""))),
        block(str(entry["traceback"])) if entry.get("traceback") else "",
    )


def _when_written(at: Any) -> str:
    try:
        return when(datetime.fromisoformat(at))
    except (TypeError, ValueError, OverflowError):
        return str(at)
