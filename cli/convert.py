"""`pvisor convert` and `pvisor pull`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import click

from cli.common import Settings, command_options, signature_options, warn
from cli.progress import progress
from imaged.ids import ChunkId
from imaged.names import ImageName, SourceName
from imaged.signature import SigningKey
from imaged.transfer import acquire
from imaged.transfer.acquire import Acquired
from imaged.transfer.serverjob import JobGoesOn

_LEAST_FILL_MIB, _MOST_FILL_MIB = 0.001, 1_000_000


def show(settings: Settings, acquired: Acquired) -> None:
    """The result of a conversion or pull, and what had to be left out of it."""
    for warning in acquired.warnings:
        warn(warning)
    document = {"name": acquired.name, "id": str(acquired.id), **acquired.details}
    settings.emit(document, f"{acquired.name}  {acquired.id}")


def warn_of_job(interrupt: JobGoesOn) -> None:
    """After Ctrl-C: what it did not end."""
    job = f"{interrupt.job} --server {interrupt.server}"
    warn(f"the conversion goes on at the server: `pvisor job inspect {job}` tells of it, `pvisor job cancel` ends it")


def pull_image(settings: Settings, text: str, *, lazy: bool, platform: str | None = None) -> Acquired:
    """Pull, with a progress line on a terminal. Lazily through the node daemon, where there can be one: it goes on
    fetching what the image needs to start."""
    config = settings.config
    with progress(settings) as line:
        if not lazy or os.geteuid() != 0 or not Path("/dev/fuse").exists():
            return acquire.pull_image(config, text, lazy=lazy, platform=platform, progress=line)
        found = acquire.locate(config, text, platform=platform, progress=line)
        if isinstance(found, Acquired):
            return found
        from fuse.node import ensure, required_keys

        ImageName.parse(found.name)  # a bad name is wrong usage; the daemon could only say that it failed
        require = required_keys(config)
        pulled = ensure(config).pull(found.name, server=found.server, require=require)
        name, image = pulled.pop("name"), ChunkId.parse(pulled.pop("id"))
        return Acquired(name=name, id=image, warnings=found.warnings, details=pulled)


@click.command(short_help="Turn an OCI image into a block image.")
@click.argument("source")
@click.option(
    "--name", metavar="NAME", help="Default: the archive's own, or the name of the repository, file or directory."
)
@click.option("--platform", metavar="OS/ARCH", help="Default: this host's.")
@click.option(
    "--sign-key",
    type=click.Path(path_type=Path),
    metavar="KEY",
    help="Sign the result with this Ed25519 key (PEM), as `pvisor image sign` does.",
)
@command_options
def convert(settings: Settings, source: str, name: str | None, platform: str | None, sign_key: Path | None) -> None:
    """Turn an OCI image into a block image, in the local store or, with --server, in the server's.

    The server converts images of registries itself, and shows how far it is; Ctrl-C does not end that, `pvisor job
    cancel` does. Other sources are files of this host: they are converted here,
    which leaves them in the local store too, and sent.

    The key of --sign-key stays on this host. Of an image that the server converted it signs what the server says it
    made; of files of this host, what was made here.

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
            key = SigningKey.read(sign_key) if sign_key is not None else None
            acquired = acquire.convert_image(
                settings.config, parsed, name=name, platform=platform, progress=line, key=key
            )
    except JobGoesOn as interrupt:
        warn_of_job(interrupt)
        raise
    show(settings, acquired)


def fill_bytes(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Bytes a second, from a number of MiB."""
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not _LEAST_FILL_MIB <= rate <= _MOST_FILL_MIB:  # false of nan, too
        limits = f"a number of MiB a second from {_LEAST_FILL_MIB} to {_MOST_FILL_MIB}"
        raise click.BadParameter(f"{text!r} is not {limits}", context, parameter)
    return int(rate * (1 << 20))


def _pull(settings: Settings, image: str, *, lazy: bool, platform: str | None) -> Acquired:
    try:
        return pull_image(settings, image, lazy=lazy, platform=platform)
    except JobGoesOn as interrupt:
        warn_of_job(interrupt)
        raise


@click.command(short_help="Fetch an image, completely or lazily.")
@click.option("--lazy", is_flag=True, help="Fetch the metadata only; file data arrives when it is read.")
@click.option("--fill", is_flag=True, help="With --lazy: the node daemon goes on until the image is complete.")
@click.option(
    "--fill-rate",
    metavar="MIB",
    callback=fill_bytes,
    envvar="PVISOR_FILL_RATE",
    help="Bound of --fill in MiB a second; PVISOR_FILL_RATE when not given, else 8.",
)
@click.option("--platform", metavar="OS/ARCH", help="Of a source that has several. Default: this host's.")
@click.argument("image", metavar="SOURCE|NAME")
@command_options
@signature_options
def pull(settings: Settings, image: str, lazy: bool, fill: bool, fill_rate: int | None, platform: str | None) -> None:
    """Fetch an image from the server, or from an OCI source where no server is set.

    With --lazy the image is ready as soon as its metadata is here; what it needs to start, as far as that is known
    from earlier runs, goes on arriving in the background (as root, by the node daemon).

    With --fill everything else follows, behind all that processes read, until the image needs no server; `pvisor node
    status` shows how far it is. Whatever ends the daemon meanwhile, the next one goes on.

    \b
    Examples:
      pvisor pull --lazy debian:12 --server http://store:7878
      pvisor pull --lazy --fill --fill-rate 50 debian:12
      pvisor pull docker://registry.example/team/app:v1
      pvisor pull --lazy --require-signature team.pub registry.example/team/app:v1
    """
    given = click.get_current_context().get_parameter_source("fill_rate")
    if not fill and given is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--fill-rate goes with --fill")
    if not fill:
        show(settings, _pull(settings, image, lazy=lazy, platform=platform))
        return
    if not lazy:
        raise click.UsageError("--fill goes with --lazy: without it, pull returns when everything is here")
    from fuse.node import ensure

    daemon = ensure(settings.config)
    acquired = _pull(settings, image, lazy=True, platform=platform)
    daemon.fill(str(acquired.id), bytes_per_s=fill_rate)
    show(settings, replace(acquired, details={**acquired.details, "filling": True}))
