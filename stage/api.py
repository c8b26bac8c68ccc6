"""`stage.run` for programs: what `pvisor run` does, with its output in hand."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fuse.node import open_image
from imaged import calls
from imaged.calls import Stream
from imaged.config import Config
from stage.boundary.streams import Collect, Streams
from stage.boundary.supervise import usable
from stage.errors import ArgumentError, StageTimeoutError
from stage.kept.stages import Stages
from stage.options import Network, RunOptions
from stage.session import run_image


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a process ended: as a shell says it (128 + N after signal N), and what it wrote when that was captured."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""


def run(
    image: str,
    argv: Sequence[str] = (),
    *,
    stage: str | None = None,
    workspace: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    user: str | None = None,
    net: Network = "none",
    input: bytes | None = None,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    capture_output: bool = False,
    timeout_s: float | None = None,
    memory_bytes: int | None = None,
    cpus: float | None = None,
    pids: int | None = None,
    server: str | None = None,
    config: Config | None = None,
) -> Result:
    """Run a process in an image and wait for its end; its bytes arrive as they are read.

    `image` is a name or an id; one that is not on this host is pulled lazily from `server` first. `argv` takes the
    place of the image's Cmd; `env`, `workdir` and `user` go before what the image says. Writes are dropped at the end,
    or kept in the stage of this name. `workspace` is a directory of this host, shown at /workspace, where the process
    then starts; writes to it stay in the stage as well.

    The process reads /dev/null, `stdin` or the bytes of `input`, and writes to this program's own stdout and stderr, to
    the files or descriptors given, or with `capture_output` into the result. Signals of this program are its own: an
    exception that a handler raises ends the process, as `timeout_s` does.

    Threads may call this at once. The result has the workload's exit code. Raises CommandError when its program does
    not exist or can not be executed, StageTimeoutError, and StageSetupError, MountError or another PvisorError when
    nothing was started; of these, ArgumentError is a ValueError as well.
    """
    image = calls.image_name(image, ArgumentError)
    calls.check_streams(
        input=input,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        capture_output=capture_output,
        refusal=ArgumentError,
    )
    timeout_s = calls.seconds(timeout_s, ArgumentError)
    argv = calls.words(argv, ArgumentError)
    options = RunOptions(
        workspace=_directory(workspace),
        env=calls.variables(env, ArgumentError),
        workdir=workdir,
        user=user,
        net=net,
        memory_bytes=memory_bytes,
        cpus=cpus,
        pids=pids,
    )
    streams = Streams(
        stdin=calls.descriptor(stdin, ArgumentError),
        stdout=calls.descriptor(stdout, ArgumentError, usable(1)),
        stderr=calls.descriptor(stderr, ArgumentError, usable(2)),
    )
    config = config or Config.resolve(server=server)
    opened = open_image(config, image, server=server or config.server, start=True)
    try:
        if input is not None:
            streams.feed(input)
        outputs = streams.collect() if capture_output else ()
        try:
            code = run_image(config, opened, argv, options, stage=stage, streams=streams, timeout_s=timeout_s)
        except StageTimeoutError as error:
            error.stdout, error.stderr = _data(outputs)
            raise
        kept, errors = _data(outputs)
        return Result(exit_code=code, stdout=kept, stderr=errors)
    finally:
        streams.close()


def drop(stage: str, *, force: bool = False, config: Config | None = None) -> None:
    """Throw a kept stage away, with all its writes; with `force`, what runs in it ends first.

    Raises StageNotFoundError, StageBusyError.
    """
    stages = Stages((config or Config.resolve()).stages)
    if force:
        stages.end(stage)
    stages.drop(stage)


def _directory(given: str | os.PathLike[str] | None) -> Path | None:
    """An empty one would be the current directory: what an unset variable of the caller's does not mean."""
    if given is None:
        return None
    try:
        path = Path(given)
    except TypeError as error:
        raise ArgumentError(f"workspace {given!r} is no path", hint="give a str or a pathlib.Path") from error
    if not os.fspath(given) or "\0" in str(path):
        raise ArgumentError(f"workspace {given!r} is no directory", hint="give . for the current one")
    return path


def _data(outputs: Sequence[Collect]) -> tuple[bytes, bytes]:
    if not outputs:
        return b"", b""
    return outputs[0].data, outputs[1].data
