"""JSON documents that came from somewhere else: what of them is believed, and the one way in which ours are written."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from imaged.errors import FormatError

NUMBER_LIMIT = 1 << 63
DEPTH_LIMIT = 64
"""Of objects and lists in one another: what reads or writes a document may itself be deep in calls."""


def canonical(document: Any) -> bytes:
    """Sorted keys, no spaces, ASCII: equal documents have equal bytes."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def parse_json(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object, no deeper than DEPTH_LIMIT. FormatError."""
    try:
        document = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(what, expected="a JSON object", found=str(error)[:200]) from error
    if not isinstance(document, dict):
        raise FormatError(what, expected="a JSON object", found=type(document).__name__)
    require_shallow(document, what)
    return document


def require_shallow(document: Any, what: str) -> None:
    """FormatError for a document that is deeper than DEPTH_LIMIT."""
    level = [document]
    for _ in range(DEPTH_LIMIT):
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list))]
        level = [value for values in inner for value in values]
        if not level:
            return
    raise FormatError(what, expected=f"at most {DEPTH_LIMIT} levels", found="more")


def taker(document: Any, what: str) -> Callable[[str, type], Any]:
    """Takes fields of a JSON object by name and type; numbers are from 0 to 2^63. FormatError that names the field."""
    if not isinstance(document, dict):
        raise FormatError(what, expected="a JSON object", found=type(document).__name__)

    def take(key: str, kind: type) -> Any:
        value = document.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise FormatError(f"{what}, field {key}", expected=kind.__name__, found=repr(value)[:80])
        if isinstance(value, int) and not 0 <= value < NUMBER_LIMIT:
            raise FormatError(f"{what}, field {key}", expected="0 or more, below 2^63", found=str(value)[:80])
        return value

    return take


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
