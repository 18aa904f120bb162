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
QUEUE_DEFAULT = "default of the queue"
"""Shown for an option of a schedule that its queue decides."""
MAX_JSON = 20_000
"""Characters of a payload on a page."""
MAX_ERROR = 500
"""Characters of a job's last error that are read. Its failed attempts have the whole of it."""
MAX_LINE = 120
"""Characters of an error in a list."""

SHORT = 10
"""Seconds; a shorter duration is shown with its fraction."""

_NO_BREAK = "\N{NO-BREAK SPACE}"
# Characters that would turn the text behind them around: the same JSON, escaped.
_TURNING = {code: f"\\u{code:04x}" for code in (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}

_pretty = JSONEncoder(indent=2, ensure_ascii=False).iterencode


def badge(kind: str, label: str) -> SafeString:
    return format_html('<span class="alkstore-badge alkstore-{}">{}</span>', kind, label)


def status(kind: str, label: str, situation: str = "", *, alarming: bool = False) -> SafeString:
    """A badge with a word or two behind it."""
    if not situation:
        return badge(kind, label)
    mood = "alkstore-alarm" if alarming else "alkstore-quiet"
    return format_html('{} <span class="{}">{}</span>', badge(kind, label), mood, situation)


def two_lines(first: str, second: str | None, title: str | None = None) -> SafeString:
    """A text, and below it a quiet one that is cut where the column ends. The whole of that is in its title.

    `title`: the title of the first text. Default: the text itself.
    """
    head = format_html('<bdi class="alkstore-first" title="{}">{}</bdi>', title or first, first)
    line = plain_first_line(second)
    if line == NOTHING:
        return head
    return format_html('{}<span class="alkstore-second" title="{}"><bdi>{}</bdi></span>', head, line, line)


def duration(seconds: float | None) -> str:
    """A duration, with its fraction if it is short."""
    if seconds is None:
        return NOTHING
    if 0 < seconds < 1:
        return f"{max(round(seconds * 1_000), 1)}{_NO_BREAK}ms"
    return f"{max(seconds, 0):.3g}{_NO_BREAK}s" if seconds < SHORT else age(seconds)


def plain(value: int) -> str:
    """A number that names something: without separators, so that it can be searched for."""
    return str(value)


def plain_or_default(value: int | None) -> str:
    return QUEUE_DEFAULT if value is None else plain(value)


def duration_or_default(value: float | None) -> str:
    return QUEUE_DEFAULT if value is None else duration(value)


def count(number: int, one: str, several: str | None = None) -> str:
    """`1 job`, `3 jobs`, `1,234 jobs`."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


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
    """A duration that no line break divides."""
    return ages.age(seconds).replace(" ", _NO_BREAK)


def moment(value: datetime | None) -> SafeString | str:
    """A moment with its distance from now."""
    if value is None:
        return NOTHING
    return format_html(
        '<time datetime="{}">{}</time> <span class="alkstore-quiet">({})</span>',
        value.isoformat(),
        when(value),
        ages.distance(value, clock.now()).replace(" ", _NO_BREAK),
    )


def short_moment(value: datetime | None) -> SafeString | str:
    """Only a moment's distance from now. The moment itself is in the title."""
    if value is None:
        return NOTHING
    distance = ages.distance(value, clock.now()).replace(" ", _NO_BREAK)
    return format_html('<time datetime="{}" title="{}">{}</time>', value.isoformat(), when(value), distance)


def names(values: Any) -> SafeString | str:
    """A list of names that another program may have written, one in a line."""
    if not isinstance(values, list):
        return text(str(values)[:MAX_JSON])
    return format_html_join("", "<div>{}</div>", ((text(str(value)),) for value in values)) or NOTHING


def column(
    field: str, label: str, shown: Callable[[Any], SafeString | str], *, sorts: bool = False
) -> Callable[[Any, Model], SafeString | str]:
    """A method for a `ModelAdmin`: the field as `shown` shows it.

    Its name there must not be a field's, since the admin would then show the field by itself. `sorts`: the list can be
    sorted by it.
    """

    @admin.display(description=label, ordering=field if sorts else None)
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
