"""How values look on a page. Everything goes through `format_html`, which escapes it."""

from collections.abc import Callable, Iterable
from datetime import datetime
from json import JSONEncoder
from typing import Any

from django.contrib import admin
from django.db.models import BinaryField, Model
from django.db.models.functions import Cast
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from django_alkstore import ages, clock
from django_alkstore.names import outbox_of
from django_alkstore.payloads import UnreadablePayload, read_payload

NOTHING = "-"
MAX_JSON = 20_000
"""Characters of a payload on a page."""
MAX_ERROR = 500
"""Characters of a job's last error that are read. Its failed attempts have the whole of it."""
MAX_LINE = 120
"""Characters of an error in a list."""

_NO_BREAK = "\N{NO-BREAK SPACE}"
# Characters that would turn the text behind them around: the same JSON, escaped.
_TURNING = {code: f"\\u{code:04x}" for code in (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}

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
    try:
        local = moment.astimezone(timezone.get_current_timezone())
    except OverflowError:  # the last day that there is, in UTC, and already the next one here
        local = moment
    return f"{date_format(local, 'DATE_FORMAT')}, {local:%H:%M:%S}"


def age(seconds: float) -> str:
    return ages.age(seconds).replace(" ", _NO_BREAK)


def moment(value: datetime | None, prefix: str = "") -> SafeString | str:
    if value is None:
        return NOTHING
    return format_html(
        '{} <time datetime="{}">{}</time> <span class="alkstore-quiet">({})</span>',
        prefix,
        value.isoformat(),
        when(value),
        ages.distance(value, clock.now()),
    )


def column(
    field: str, label: str, shown: Callable[[Any], SafeString | str]
) -> Callable[[Any, Model], SafeString | str]:
    """A method for a `ModelAdmin`: the field as `shown` shows it.

    Its name there must not be a field's, since the admin would then show the field by itself.
    """

    @admin.display(description=label)
    def display(_: Any, row: Model) -> SafeString | str:
        return shown(getattr(row, field))

    return display


def stored_bytes(row: Model, field: str) -> bytes:
    """A JSON column as stored, whether it can be read or not, and is UTF-8 or not."""
    rows = type(row)._default_manager.using(row._state.db).filter(pk=row.pk)
    return rows.values_list(Cast(field, BinaryField()), flat=True).first() or b""


def json_block(stored: bytes) -> SafeString:
    """Stored JSON laid out for reading, cut where it is long. What is not JSON is shown as it is."""
    value, text = read_payload(stored), stored.decode(errors="replace")
    if isinstance(value, UnreadablePayload):
        return format_html("<p>Not JSON: {}</p>{}", value.reason, _cut([text], text))
    try:
        return _cut(_pretty(value), text)
    except RecursionError:
        return _cut([text], text)


def _cut(pieces: Iterable[str], stored: str) -> SafeString:
    """As much of `pieces` as a page takes: the rest is never made."""
    taken, left = [], MAX_JSON
    for piece in pieces:
        taken.append(piece[:left])
        left -= len(piece)
        if left < 0:
            break
    # Each piece by itself: a key and a value in a script from right to left would change places.
    shown = format_html_join("", '<bdi dir="ltr">{}</bdi>', ((piece.translate(_TURNING),) for piece in taken))
    box = format_html('<pre class="alkstore-block" dir="ltr">{}</pre>', shown)
    if left >= 0:
        return box
    note = '{}<p class="alkstore-quiet">Cut after {} characters. As stored, the whole has {}.</p>'
    return format_html(note, box, f"{MAX_JSON:,}", f"{len(stored):,}")


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
