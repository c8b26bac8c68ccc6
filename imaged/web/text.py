"""Sizes, counts and times as people read them."""

from __future__ import annotations

import time

from imaged.web.html import Html, tag

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    shown = float(count)
    for unit in _UNITS:
        if shown < 1024 or unit == _UNITS[-1]:
            return f"{count} B" if unit == "B" else f"{shown:.1f} {unit}"
        shown /= 1024
    raise AssertionError


def plural(count: int, noun: str) -> str:
    """'1 chunk', '1,204 chunks'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def span(seconds: float) -> str:
    """A length of time in its largest unit: '5 minutes'."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return plural(int(seconds // length), unit)
    return plural(max(0, int(seconds)), "second")


def ago(at: float | None, now: float | None = None) -> Html | str:
    """A moment as how long ago it was; the moment itself in the title. A dash for none, and for what no clock says."""
    if at is None or not 0 < at < 253402300800:
        return "–"
    seconds = (time.time() if now is None else now) - at
    moment = time.gmtime(at)
    shown = "just now" if seconds < 2 else f"{span(seconds)} ago"
    stamp, title = time.strftime("%Y-%m-%dT%H:%M:%SZ", moment), time.strftime("%Y-%m-%d %H:%M:%S UTC", moment)
    return tag("time", shown, datetime=stamp, title=title)


def short(chunk: object) -> str:
    """The start of an id, enough to find it by."""
    return str(chunk)[:12]
