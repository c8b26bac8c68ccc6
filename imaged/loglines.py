"""Log records as text of which each line that begins at the margin is a record of ours.

Messages carry what clients, guests and servers sent: with a line end of theirs it would write lines of its own, and
with an escape it would command the terminal that shows them.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TypeAlias

_Raised: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
_MARGIN = "  "


class LineFormatter(logging.Formatter):
    """A message is one line; those of a traceback are set in."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return one_line(super().formatMessage(record))

    def formatException(self, ei: _Raised) -> str:  # noqa: N802
        return _set_in(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _set_in(super().formatStack(stack_info))


def one_line(text: str) -> str:
    """With what is not printable as `\\x1b` or `\\u2028`."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(ord(c)) for c in text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _set_in(text: str) -> str:
    return "\n".join(_MARGIN + one_line(line) for line in text.split("\n"))
