"""What an OCI image configuration says of processes, read with care: for stages and for guests.

`refusal` is the error of whoever asks, made from a message and perhaps a hint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from imaged.errors import PvisorError

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEFAULT_TERM = "xterm"


def environment(
    image: Sequence[str],
    given: Sequence[str],
    *,
    tty: bool,
    environ: Mapping[str, str],
    refusal: type[PvisorError],
) -> dict[str, str]:
    """The image's Env under `given`, whose items are `K=V`, or `K` for the value in `environ` if it has one.

    There is a PATH, and with a terminal a TERM, unless they say which.
    """
    values = {"PATH": DEFAULT_PATH, "TERM": DEFAULT_TERM} if tty else {"PATH": DEFAULT_PATH}
    for item in image:
        name, _, value = item.partition("=")
        if name:
            values[name] = value
    for item in given:
        name, has_value, value = item.partition("=")
        if not name:
            raise refusal(f"environment {item!r} has no name", hint="give -e NAME=VALUE or -e NAME")
        if has_value:
            values[name] = value
        elif name in environ:
            values[name] = environ[name]
    return values


def strings(config: Mapping[str, Any], key: str, refusal: type[PvisorError]) -> list[str]:
    value = config.get(key)
    if value is None:
        return []
    if isinstance(value, str):  # images of very old builders
        return [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise refusal(f"image configuration: {key} is not a list of strings")
    return list(value)


def string(config: Mapping[str, Any], key: str, refusal: type[PvisorError]) -> str:
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise refusal(f"image configuration: {key} is not a string")
    return value or ""


def refuse_nul(texts: Iterable[str], refusal: type[PvisorError]) -> None:
    """What the kernel could not be given."""
    for text in texts:
        if "\0" in text:
            raise refusal(f"{text[:80]!r} has a NUL byte, which no argument, variable or path can have")
