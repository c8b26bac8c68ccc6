"""Sizes as people write them: `500M`, `20G`, `1.5g`, with or without a `b` or `iB` behind."""

from __future__ import annotations

import re

from imaged.errors import InvalidNameError

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(?:([kmgtp])(?:i?b)?|b?)", re.IGNORECASE)
_MOST_BYTES = 1 << 62
LEAST_CACHE_BYTES = 16 << 20
"""Below this a cache holds little more than what is just on its way."""


def parse_bytes(text: str, what: str) -> int:
    """A number and a unit, powers of 1024 as podman counts them. InvalidNameError names `what` has the size."""
    found = _SIZE.fullmatch(text.strip())
    count = float(found[1]) * _UNITS[(found[2] or "").lower()] if found is not None else -1.0
    if not 0 <= count < _MOST_BYTES:
        raise InvalidNameError(f"{what} {text!r} is not a size", hint="a number and a unit, such as 500M or 20G")
    return int(count)


def cache_bytes(text: str, what: str) -> int:
    """A bound of a cache. InvalidNameError, also for one that no cache can keep."""
    count = parse_bytes(text, what)
    if count < LEAST_CACHE_BYTES:
        raise InvalidNameError(
            f"{what} {text!r} is {count} bytes: a cache takes at least {LEAST_CACHE_BYTES >> 20}M",
            hint="such as 500M or 20G",
        )
    return count
