"""`pvisor job`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import click

from cli.common import Settings, age, command_options, human_bytes, table
from imaged.fetching.remote import Job
from imaged.transfer.acquire import command_upstream, require_server


@click.group(short_help="List, inspect and cancel the server's jobs.")
def job() -> None:
    """Conversions and collections that a server does for its clients.

    \b
    Examples:
      pvisor job ls --server http://store:7878
      pvisor job inspect 65b2f0c1e9a4d0021f3a
      pvisor job cancel 65b2f0c1e9a4d0021f3a
    """


@job.command("ls")
@click.option("--unfinished", is_flag=True, help="Only those that wait or run.")
@command_options
def list_jobs(settings: Settings, unfinished: bool) -> None:
    """List the jobs that the server remembers, the newest first.

    \b
    Examples:
      pvisor job ls
      pvisor job ls --unfinished --json
    """
    with command_upstream(require_server(settings.config)) as upstream:
        found = [(document, Job.parse(document)) for document in upstream.jobs()]
    shown = [(document, one) for document, one in found if not (unfinished and one.finished)]

    def text() -> str:
        now = time.time()
        rows = [
            [one.id, one.state, age(now - one.created_at), one.source or one.kind, one.name or "-", _outcome(one)]
            for _, one in shown
        ]
        return table(["ID", "STATE", "AGE", "SOURCE", "NAME", "PROGRESS"], rows)

    settings.emit([document for document, _ in shown], text)


def _outcome(one: Job) -> str:
    """How far it is, or what came of it, in a line."""
    if one.error:
        return one.error if len(one.error) <= 80 else one.error[:79] + "…"
    if one.image is not None:
        warnings = one.image.get("warning_count")
        return f"{warnings} warnings" if warnings else ""
    if one.report is not None:
        return f"{human_bytes(_count(one.report, 'freed_bytes'))} freed"
    step, total = one.progress.get("step"), _count(one.progress, "total_bytes")
    if not step:
        return ""
    done = _count(one.progress, "done_bytes")
    return f"{step}, {human_bytes(done)} of {human_bytes(total)}" if total else str(step)


def _count(document: Mapping[str, Any], key: str) -> int:
    value = document.get(key)
    return value if isinstance(value, int) else 0


@job.command(short_help="Show everything that the server knows of a job.")
@click.argument("id")
@command_options
def inspect(settings: Settings, id: str) -> None:
    """Show everything that the server knows of a job, the warnings of a conversion among it; prints JSON.

    \b
    Example:
      pvisor job inspect 65b2f0c1e9a4d0021f3a
    """
    with command_upstream(require_server(settings.config)) as upstream:
        document = upstream.job_document(id)
    settings.emit(document, lambda: json.dumps(document, indent=2))


@job.command(short_help="End jobs that wait or run.")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@command_options
def cancel(settings: Settings, ids: tuple[str, ...]) -> None:
    """End jobs that wait or run. What they have stored already goes with the next collection.

    A conversion that several clients asked for ends for all of them.

    \b
    Example:
      pvisor job cancel 65b2f0c1e9a4d0021f3a
    """
    with command_upstream(require_server(settings.config)) as upstream:
        cancelled = [Job.parse(upstream.cancel_job(one)).id for one in ids]
    settings.emit({"cancelled": cancelled}, "\n".join(cancelled))
