"""`pvisor node`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from cli.arguments import cache_size
from cli.common import Settings, command_options, human_bytes, output_options, table


@click.group(short_help="Start, stop and ask the host's node daemon.")
def node() -> None:
    """The host's node daemon: one FUSE mount that serves every image. Other commands start it on demand.

    \b
    Examples:
      pvisor node status
      pvisor node stop
    """


def fills(documents: dict[str, dict[str, Any]]) -> str:
    """A table of what is being completed in the background, and why if it is not."""
    rows = [
        [
            fill["name"],
            fill["state"],
            f"{fill['present_chunks']} of {fill['chunks']}" if fill["chunks"] else "-",
            human_bytes(fill["fetched_bytes"]),
            fill["error"],
        ]
        for fill in documents.values()
    ]
    return table(["FILL", "STATE", "CHUNKS HERE", "BYTES FETCHED", "REASON"], rows)


def counters(documents: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A row for each image or snapshot."""
    columns = ("reads", "hits", "requests", "fetched_chunks")
    return [
        [image["name"], *(str(image[column]) for column in columns), human_bytes(image["fetched_bytes"])]
        for image in documents.values()
    ]


def cache(document: dict[str, Any]) -> str:
    """A line about the bound of the cache."""
    used, bound = human_bytes(document["used_bytes"]), human_bytes(document["max_bytes"])
    text = f"cache: {used} of {bound}, {document['evicted_chunks']} chunks evicted"
    return f"{text}; {document['held_back']}" if document["held_back"] else text


@node.command(short_help="Start the daemon.")
@click.option(
    "--cache-max",
    "cache_max_bytes",
    callback=cache_size,
    metavar="SIZE",
    help="Keep at most so much of what servers can give again, such as 20G; PVISOR_CACHE_MAX when not given.",
)
@command_options
def start(settings: Settings, cache_max_bytes: int | None) -> None:
    """Start the daemon; does nothing when it runs, but for a bound that is given.

    With a bound, chunks that were not used for longest go as new ones come (docs/tiers.md). What no server can give
    again stays, whatever the bound.

    \b
    Examples:
      pvisor node start
      pvisor node start --cache-max 20G
    """
    from fuse.node import ensure

    config = settings.config
    if cache_max_bytes is None:
        status = ensure(config).status()
    else:
        daemon = ensure(replace(config, cache_max_bytes=cache_max_bytes))
        daemon.limit_cache(cache_max_bytes)
        status = daemon.status()
    settings.emit(status, f"node daemon runs, pid {status['pid']}")


@node.command(short_help="Stop the daemon and unmount every image.")
@output_options
def stop(settings: Settings) -> None:
    """Stop the daemon and unmount every image. Refuses when one is in use.

    \b
    Example:
      pvisor node stop
    """
    from fuse.node import stop as stop_node

    stopped = stop_node(settings.config)
    settings.emit({"stopped": stopped}, "node daemon stopped" if stopped else "node daemon was not running")


@node.command(short_help="Show what the daemon serves and fetched.")
@output_options
def status(settings: Settings) -> int:
    """Show what the daemon serves and what it fetched. Exit code 1 when it does not run.

    READS are the kernel's reads of the image's data; what its page cache has, it does not read again. HITS are chunks
    that were in memory or in the local store. REQUESTS are HTTP requests, CHUNKS and BYTES FETCHED what came over the
    wire for them. All count from the start of the daemon.

    \b
    Examples:
      pvisor node status
      pvisor node status --json
    """
    from fuse.node import connect

    running = connect(settings.config)
    if running is None:
        settings.emit({"running": False, "images": {}}, "node daemon is not running")
        return 1
    document = {"running": True, **running.status()}

    def text() -> str:
        rows = counters(document["images"])
        header = ["IMAGE", "READS", "HITS", "REQUESTS", "CHUNKS FETCHED", "BYTES FETCHED"]
        parts = [f"node daemon runs, pid {document['pid']}\n" + table(header, rows)]
        if document["snapshots"]:
            parts.append(table(["SNAPSHOT", *header[1:]], counters(document["snapshots"])))
        if document["fills"]:
            parts.append(fills(document["fills"]))
        if document["cache"]["max_bytes"] is not None:
            parts.append(cache(document["cache"]))
        if document["vms"]:
            parts.append(f"VMs that run: {', '.join(document['vms'])}")
        return "\n\n".join(parts)

    settings.emit(document, text)
    return 0
