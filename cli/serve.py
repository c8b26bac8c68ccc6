"""`pvisor serve`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from cli.arguments import cache_size
from cli.common import Settings, output_options, store_directory, warn
from imaged import submodule
from imaged.config import Config
from imaged.errors import InvalidNameError

_OWN_HOSTS = ("127.0.0.1", "::1", "localhost")


@click.command(short_help="Serve a chunk store over HTTP.")
@click.option(
    "--listen", default="127.0.0.1:7878", show_default=True, metavar="HOST:PORT", help="Port 0 picks a free one."
)
@click.option(
    "--store",
    metavar="DIR|s3://BUCKET/PREFIX",
    help="Default: the store in PVISOR_HOME. S3 is found by AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID and so on.",
)
@click.option(
    "--workers", type=click.IntRange(1, 256), default=1, show_default=True, metavar="N", help="Processes that answer."
)
@click.option(
    "--drain",
    "drain_s",
    type=click.FloatRange(0, 3600),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="After SIGTERM, /readyz says no for this long before connections are refused.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Of what is logged on stderr; with -v that is a line for each request.",
)
@click.option("--token-file", metavar="F", help="Requests take a token of this file (pvisor token new).")
@click.option("--tls-cert", metavar="F", help="Serve over TLS with this certificate, in PEM, and its chain.")
@click.option("--tls-key", metavar="F", help="The key of --tls-cert.")
@click.option(
    "--rate-limit",
    type=click.FloatRange(0),
    default=0.0,
    metavar="N",
    help="Requests a second that each process takes of a client (a token, else an address); 0 is any number.",
)
@click.option(
    "--cache-max",
    "cache_max_bytes",
    callback=cache_size,
    metavar="SIZE",
    help="Keep at most so much of what other servers can give again, such as 500G.",
)
@click.option(
    "--upstream",
    "upstreams",
    metavar="URL[,URL]",
    help="What is not here is asked of these servers, in this order, kept and passed on.",
)
@output_options
def serve(
    settings: Settings,
    listen: str,
    store: str | None,
    workers: int,
    drain_s: float,
    log_format: str,
    token_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    rate_limit: float,
    cache_max_bytes: int | None,
    upstreams: str | None,
) -> None:
    """Serve images and chunks over HTTP, and convert images on request, until SIGTERM or Ctrl-C.

    \b
    Examples:
      pvisor serve --listen 0.0.0.0:7878 --store /srv/pvisor --workers 4
      pvisor serve --listen 0.0.0.0:7878 --store s3://images/pvisor --cache-max 500G
      pvisor serve --listen 0.0.0.0:7878 --upstream http://origin:7878 --cache-max 500G
      pvisor serve --listen 0.0.0.0:7878 --token-file /etc/pvisor/tokens --tls-cert cert.pem --tls-key key.pem
    """
    from imaged.serving.serveconfig import ServeOptions
    from imaged.serving.server import serve as serve_store

    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise InvalidNameError(f"--listen {listen!r} is not HOST:PORT", hint="for example 127.0.0.1:7878 or [::]:7878")
    if (tls_cert is None) != (tls_key is None):
        raise InvalidNameError("--tls-cert and --tls-key go together", hint="give both files, or neither")
    served = str(store_directory(store, settings.config) if store is not None else settings.config.store)
    options = ServeOptions(
        store=served,
        host=host.strip("[]"),
        port=int(port),
        workers=workers,
        drain_s=drain_s,
        log_format="json" if log_format == "json" else "text",
        log_requests=settings.verbose,
        token_file=_file(token_file),
        tls_cert=_file(tls_cert),
        tls_key=_file(tls_key),
        rate_limit=rate_limit,
        cache_max_bytes=cache_max_bytes,
        upstreams=Config.resolve(server=upstreams).servers if upstreams else (),
        # What stages and VMs of this host stand on is in its own store.
        gc_command=tuple(submodule.command("cli.gcjob")) if served == str(settings.config.store) else (),
    )

    def announce(url: str) -> None:
        settings.emit({"url": url}, f"serving {store or options.store} on {url}")
        sys.stdout.flush()
        if token_file is None and host.strip("[]") not in _OWN_HOSTS:
            warn("no --token-file: whoever reaches this address may read, change and remove everything")

    serve_store(options, announce=announce)


def _file(path: str | None) -> str | None:
    """Absolute, for processes that may start elsewhere."""
    return None if path is None else str(Path(path).absolute())
