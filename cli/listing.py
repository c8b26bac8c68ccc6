"""Names of this host or of a server: what `ls` and `rm` of images and of snapshots have in common."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cli.common import Settings, store_options, table, warn
from imaged.errors import ChunkError, FormatError

if TYPE_CHECKING:
    from imaged.fetching.upstream import HttpUpstream

Row = TypeVar("Row")
Described = Mapping[str, Any]


def here_or_remote(things: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`store_options`, --remote and --server URL, as `settings` and `at`: the server, or None for this host.
    click.UsageError with --store."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @click.option("--remote", is_flag=True, help=f"The server's {things} instead.")
        @click.option("--server", metavar="URL", help=f"The {things} of this server: implies --remote.")
        @store_options
        @functools.wraps(function)
        def command(*arguments: Any, settings: Settings, remote: bool, server: str | None, **options: Any) -> Any:
            at = _server(settings, server) if remote or server is not None else None
            return function(*arguments, settings=settings, at=at, **options)

        return command

    return decorate


def _server(settings: Settings, server: str | None) -> str:
    from imaged.transfer.acquire import require_server

    if settings.store is not None:
        raise click.UsageError("--store is for what this host has: it goes with neither --remote nor --server")
    return require_server(replace(settings, server=server or settings.server).config)


def asking(at: str) -> AbstractContextManager[HttpUpstream]:
    """The server, for one command."""
    from imaged.transfer.acquire import command_upstream

    return command_upstream(at)


def readable(
    rows: Iterable[tuple[str, Row]], describe: Callable[[str, Row], dict[str, Any]], again: str
) -> Iterator[dict[str, Any]]:
    """Each described; one that can not be read is left out, and a warning says how to have it `again`."""
    for name, row in rows:
        try:
            yield describe(name, row)
        except (ChunkError, FormatError) as error:
            warn(f"{name} is left out: {error.message}; {again.format(name=name)}")


def show(
    settings: Settings, found: list[dict[str, Any]], header: Sequence[str], row: Callable[[Described, float], list[str]]
) -> None:
    """As JSON, or as a table: `row` gets one that was found, and the time."""
    settings.emit(found, lambda: table(header, [row(one, time.time()) for one in found]))
