"""Durations as people read them and write them."""

import re
from datetime import datetime

_UNITS = {"d": 86_400, "h": 3_600, "min": 60, "s": 1}
_WRITTEN = re.compile(r"(\d{1,9})\s*(s|m|min|h|d)", re.ASCII)


def age(seconds: float) -> str:
    """Seconds in the largest unit that they fill and the one below it: `8 s`, `3 min 20 s`, `5 h`, `2 d 1 h`."""
    left, words = max(int(seconds), 0), []
    for unit, size in _UNITS.items():
        count, left = divmod(left, size)
        words.append(f"{count} {unit}" if count else "")
    first = next((place for place, word in enumerate(words) if word), None)
    return "0 s" if first is None else " ".join(filter(None, words[first : first + 2]))


def distance(moment: datetime, now: datetime) -> str:
    """`3 min 20 s ago` or `in 3 min 20 s`."""
    seconds = (now - moment).total_seconds()
    return f"{age(seconds)} ago" if seconds >= 0 else f"in {age(-seconds)}"


def parse_age(text: str) -> float:
    """The seconds of `90s`, `15m`, `12h` or `30d`. Raises `ValueError` for anything else."""
    found = _WRITTEN.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a duration: write a number and one of s, m, h and d, for example 30d")
    return float(int(found[1]) * _UNITS["min" if found[2] == "m" else found[2]])
