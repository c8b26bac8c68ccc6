"""`pvisor convert` and `pvisor pull`."""

from __future__ import annotations

import click

from cli.common import Settings, command_options, progress, warn
from imaged import acquire
from imaged.acquire import Acquired
from imaged.names import SourceName


def show(settings: Settings, acquired: Acquired) -> None:
    """The result of a conversion or pull, and what had to be left out of it."""
    for warning in acquired.warnings:
        warn(warning)
    document = {"name": acquired.name, "id": str(acquired.id), **acquired.details}
    settings.emit(document, f"{acquired.name}  {acquired.id}")


def pull_image(settings: Settings, text: str, *, lazy: bool, platform: str | None = None) -> Acquired:
    """Pull, with a progress line on a terminal."""
    with progress(settings) as line:
        return acquire.pull_image(settings.config, text, lazy=lazy, platform=platform, progress=line)


@click.command(short_help="Turn an OCI image into a block image.")
@click.argument("source")
@click.option(
    "--name", metavar="NAME", help="Default: the archive's own, or the name of the repository, file or directory."
)
@click.option("--platform", metavar="OS/ARCH", help="Default: this host's.")
@command_options
def convert(settings: Settings, source: str, name: str | None, platform: str | None) -> None:
    """Turn an OCI image into a block image, in the local store or, with --server, in the server's.

    The server converts images of registries itself. Other sources are files of this host: they are converted here,
    which leaves them in the local store too, and sent.

    \b
    SOURCE is docker://HOST/REPO:TAG, oci:DIR[:TAG], oci-archive:FILE[:TAG],
    docker-archive:FILE[:TAG], or dir:DIR for a plain root directory.

    \b
    Examples:
      pvisor convert docker://registry.example/library/debian:12 --name debian:12
      pvisor convert oci:./image:v1
    """
    parsed = SourceName.parse(source)
    try:
        with progress(settings) as line:
            acquired = acquire.convert_image(settings.config, parsed, name=name, platform=platform, progress=line)
    except KeyboardInterrupt:
        if settings.config.server is not None and parsed.transport == "docker":
            warn(
                f"the conversion goes on at {settings.config.server}; `pvisor image ls --remote` shows when it is done"
            )
        raise
    show(settings, acquired)


@click.command(short_help="Fetch an image, whole or lazily.")
@click.option("--lazy", is_flag=True, help="Fetch the metadata only; file data arrives when it is read.")
@click.option("--platform", metavar="OS/ARCH", help="Of a source that has several. Default: this host's.")
@click.argument("image", metavar="SOURCE|NAME")
@command_options
def pull(settings: Settings, image: str, lazy: bool, platform: str | None) -> None:
    """Fetch an image from the server, or from an OCI source where no server is set.

    With --lazy the image is ready as soon as its metadata is here.

    \b
    Examples:
      pvisor pull --lazy debian:12 --server http://store:7878
      pvisor pull docker://registry.example/team/app:v1
    """
    show(settings, pull_image(settings, image, lazy=lazy, platform=platform))
