"""What words of a command line mean, where commands agree on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


def cache_size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """The bound of a cache in bytes, or with a unit of 1024: 500M, 20G."""
    if text is None:
        return None
    from imaged.errors import InvalidNameError
    from imaged.sizes import cache_bytes

    try:
        return cache_bytes(text, "size")
    except InvalidNameError as error:
        raise click.BadParameter(f"{error.message}: {error.hint}", context, parameter) from error


def own_command(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """The command without the `--` that may stand before it."""
    del context, parameter
    return words[1:] if words[:1] == ("--",) else words


def process_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """-e, -w, -u, -i and -t, as `env`, `workdir`, `user`, `interactive` and `tty`: of every command that starts a
    process, in a stage or in a guest."""
    for option in reversed(_PROCESS_OPTIONS):
        function = option(function)
    return function


@contextmanager
def failing_with(exit_code: int) -> Iterator[None]:
    """An error of the block that has no exit code of its own gets this one."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "exit_code"):
            error.exit_code = exit_code  # type: ignore[attr-defined]
        raise


_PROCESS_OPTIONS = (
    click.option(
        "-e",
        "--env",
        multiple=True,
        metavar="K=V",
        help="Set a variable, or pass the caller's with -e K; nothing else of the caller's environment is passed.",
    ),
    click.option("-w", "--workdir", metavar="DIR", help="Directory to start in."),
    click.option("-u", "--user", metavar="USER", help="User name or id, with :GROUP if wanted."),
    click.option("-i", "--interactive", is_flag=True, help="Keep standard input open."),
    click.option("-t", "--tty", is_flag=True, help="Give the process a terminal."),
)
