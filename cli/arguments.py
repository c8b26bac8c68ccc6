"""What words of a command line mean, where commands agree on it."""

from __future__ import annotations

import click

# What follows the name is the command's own, options included.
OPTIONS_FIRST = {"allow_interspersed_args": False}


def memory_size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Bytes, or a number with a unit of 1024: 512M, 1.5G."""
    if text is None:
        return None
    number, unit = text.upper().removesuffix("B").removesuffix("I"), 1
    if number[-1:] in ("K", "M", "G", "T"):
        number, unit = number[:-1], 1 << 10 * ("KMGT".index(number[-1]) + 1)
    try:
        count = int(float(number) * unit)
    except (ValueError, OverflowError):
        count = 0
    if count < 1 << 20:
        raise click.BadParameter(f"{text!r} is no size of 1M or more", context, parameter)
    return count


def own_command(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """The command without the `--` that may stand before it."""
    del context, parameter
    return words[1:] if words[:1] == ("--",) else words
