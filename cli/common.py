"""What every command shares: its options and its output."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from imaged.config import Config
from imaged.errors import NotFoundError, PvisorError


class OutputError(PvisorError):
    """The command did what it does, and what it had to say could not be written."""

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"the command has done its work, but its output could not be written: {error.strerror}",
            hint="see where stdout goes; do not run the command again for its effect",
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """The options every command takes."""

    server: str | None
    json_output: bool
    verbose: bool
    store: Path | None = None
    require_signature: tuple[Path, ...] = ()

    @property
    def config(self) -> Config:
        """The host's configuration with these flags applied. NotFoundError when --store names none."""
        config = Config.resolve(server=self.server, require_signature=self.require_signature)
        if self.store is None:
            return config
        _require_store(self.store, config.store)
        return replace(config, store_directory=self.store)

    def emit(self, document: Any, text: str | Callable[[], str]) -> None:
        """The result on stdout: the document with --json, the text otherwise. OutputError."""
        shown = json.dumps(document) if self.json_output else printable(text() if callable(text) else text)
        if not shown:
            return
        with writing():
            print(shown, flush=True)


def _require_store(directory: Path, own: Path) -> None:
    """NotFoundError when the directory that --store names is no chunk store: commands would make one there."""
    from imaged.chunkstore.pack import PACKS_DIRECTORY

    if (directory / PACKS_DIRECTORY).is_dir():
        return
    hint = "a server's store is the directory given to serve --store"
    for likely in (directory / "store", own):
        if (likely / PACKS_DIRECTORY).is_dir():
            hint = f"there is one at {likely}; {hint}"
            break
    raise NotFoundError(f"no chunk store at {directory}", hint=hint)


@contextmanager
def writing() -> Iterator[None]:
    """For a block that only writes to stdout. OutputError; BrokenPipeError when nobody reads it any more."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error) from error


def output_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json and -v, passed on as `settings`; absent ones, and the server, are what the group was given."""

    @click.option("--json", "json_output", is_flag=True, help="One JSON document on stdout (but for run and exec).")
    @click.option("-v", "--verbose", is_flag=True, help="Show tracebacks and warnings on the way.")
    @functools.wraps(function)
    def command(
        *arguments: Any,
        json_output: bool,
        verbose: bool,
        **options: Any,
    ) -> Any:
        given = click.get_current_context().find_object(Settings) or Settings(None, False, False)
        settings = Settings(given.server, json_output or given.json_output, verbose or given.verbose)
        return function(*arguments, settings=settings, **options)

    return command


def command_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`output_options`, and --server URL, for commands that may ask one."""

    @click.option("--server", metavar="URL", help="Chunk server; PVISOR_SERVER when not given.")
    @output_options
    @functools.wraps(function)
    def command(*arguments: Any, settings: Settings, server: str | None, **options: Any) -> Any:
        return function(*arguments, settings=replace(settings, server=server or settings.server), **options)

    return command


def signature_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--require-signature, as part of `settings`: written below `command_options`."""

    @click.option(
        "--require-signature",
        type=click.Path(path_type=Path),
        multiple=True,
        metavar="PUBKEY",
        help="Only an image that this key has signed (PEM); repeated: one of them. PVISOR_REQUIRE_SIGNATURE when not "
        "given.",
    )
    @functools.wraps(function)
    def command(*arguments: Any, settings: Settings, require_signature: tuple[Path, ...], **options: Any) -> Any:
        return function(*arguments, settings=replace(settings, require_signature=require_signature), **options)

    return command


def store_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`output_options`, and --store DIR, for commands on a store that need not be this host's own."""

    @click.option(
        "--store",
        "directory",
        metavar="DIR",
        help="Another store than PVISOR_HOME's, such as a server's; s3://BUCKET/PREFIX is one in a bucket.",
    )
    @output_options
    @functools.wraps(function)
    def command(*arguments: Any, settings: Settings, directory: str | None, **options: Any) -> Any:
        store = store_directory(directory, settings.config) if directory is not None else None
        return function(*arguments, settings=replace(settings, store=store), **options)

    return command


def store_directory(text: str, config: Config) -> Path:
    """What --store names: a directory, or the mirror of a bucket here. InvalidNameError, StoreError."""
    if not text.startswith("s3:"):
        return Path(text).absolute()
    from imaged.s3.mirror import mirror_directory

    return mirror_directory(config, text)


def log_to_stderr(level: str = "ERROR") -> None:
    """Log messages on stderr; the first call decides which, and the hot path of `run` does without.

    What goes wrong for good ends as an error; what was merely noticed on the way is for -v, and for servers' logs.
    """
    import logging

    from imaged.loglines import LineFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter("pvisor: %(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=level)


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}


def printable(text: str) -> str:
    """What may go to a terminal: names, messages and records come from servers and guests, and a control character of
    theirs would command it. Tabs and line ends stay."""
    return text.translate(_CONTROLS)


def _cell(text: str) -> str:
    """In a table a line end would make a row."""
    return printable(text).replace("\n", "\\x0a").replace("\t", "\\x09")


def warn(message: str) -> None:
    """A line on stderr about something that did not stop the command."""
    print(f"pvisor: warning: {printable(message)}", file=sys.stderr)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, two spaces apart."""
    rows = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    )


def human_bytes(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def age(seconds: float) -> str:
    """How long ago, in its largest unit: '5 minutes'."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "now" if seconds < 2 else f"{int(seconds)} seconds"
