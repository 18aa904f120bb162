"""How long ago, and in how long, as people read it."""

from datetime import datetime

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def age(seconds: float) -> str:
    """Seconds in the largest unit that they fill and the one below it: `8 s`, `3 min 20 s`, `5 h`, `2 d 1 h`."""
    left, words = max(int(seconds), 0), []
    for size, unit in _UNITS:
        count, left = divmod(left, size)
        words.append(f"{count} {unit}" if count else "")
    first = next((place for place, word in enumerate(words) if word), None)
    return "0 s" if first is None else " ".join(filter(None, words[first : first + 2]))


def distance(moment: datetime, now: datetime) -> str:
    """`3 min 20 s ago` or `in 3 min 20 s`."""
    seconds = (now - moment).total_seconds()
    return f"{age(seconds)} ago" if seconds >= 0 else f"in {age(-seconds)}"
