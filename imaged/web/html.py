"""HTML that can not be broken out of: everything that is not `Html` already is text, and is escaped.

Names, labels and messages come from images and registries. Besides markup they may have bytes that are no text, control
characters, and characters that turn the direction of what follows: these are shown, not obeyed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias

Child: TypeAlias = "Html | str | int | Iterable[Child] | None"
_MARKUP: dict[str, str | int | None] = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"}
_UNSHOWN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})


class Html(str):
    """Markup that was made here. Not to be made from text of elsewhere."""

    __slots__ = ()


def escape(text: str) -> Html:
    """Text as markup that shows it."""
    shown = _UNSHOWN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return Html(shown.translate(str.maketrans(_MARKUP)))


def join(*children: Child) -> Html:
    """What is given, one after the other; None is nothing."""
    return Html("".join(_parts(children)))


def _parts(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            yield child
        elif isinstance(child, str | int):
            yield escape(str(child))
        else:
            yield from _parts(child)


def tag(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Html:
    """An element. Attributes: `class_` is class, `aria_label` aria-label; None and False are left out, True has no
    value. Links go only to where a path or a fragment says."""
    shown = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        if attribute in ("href", "action") and not str(value).startswith(("/", "#", "?", "data:image/svg+xml,")):
            raise ValueError(f"a link to {value!r}")
        shown.append(f" {attribute}" if value is True else f' {attribute}="{escape(str(value))}"')
    start = f"<{name}{''.join(shown)}>"
    return Html(start if name in _VOID else f"{start}{join(*children)}</{name}>")
