"""`pvisor serve`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from cli.common import Settings, output_options
from imaged.errors import InvalidNameError


@click.command(short_help="Serve a chunk store over HTTP.")
@click.option(
    "--listen", default="127.0.0.1:7878", show_default=True, metavar="HOST:PORT", help="Port 0 picks a free one."
)
@click.option("--store", metavar="DIR", help="Default: the store in PVISOR_HOME.")
@output_options
def serve(settings: Settings, listen: str, store: str | None) -> None:
    """Serve images and chunks over HTTP, and convert images on request, until SIGTERM or Ctrl-C.

    \b
    Example:
      pvisor serve --listen 0.0.0.0:7878 --store /srv/pvisor
    """
    from imaged.server import serve as serve_store

    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise InvalidNameError(f"--listen {listen!r} is not HOST:PORT", hint="for example 127.0.0.1:7878 or [::]:7878")
    if store is not None and store.startswith("s3:"):
        raise InvalidNameError(f"--store {store}: this version serves directories only", hint="give --store DIR")
    served = Path(store) if store is not None else settings.config.store

    logging.getLogger().setLevel(min(logging.WARNING, logging.getLogger().level))

    def announce(url: str) -> None:
        settings.emit({"url": url}, f"serving {served} on {url}")
        sys.stdout.flush()

    serve_store(served, host=host.strip("[]"), port=int(port), announce=announce)
