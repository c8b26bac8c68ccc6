"""`stage.run` for programs: what `pvisor run` does, with its output in hand."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fuse.node import open_image
from imaged.config import Config
from imaged.names import ImageName
from stage.boundary.streams import Collect, Streams
from stage.boundary.supervise import usable
from stage.errors import ArgumentError, StageTimeoutError
from stage.kept.stages import Stages
from stage.options import Network, RunOptions, is_number
from stage.session import run_image

Stream = int | IO[Any] | None
# Waits of the kernel and of Python take about this much.
_LONGEST_S = 1e9


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
    if not isinstance(image, str):
        raise ArgumentError(f"image {image!r} is no text", hint="give a name or an id as a str")
    ImageName.parse(image)  # a bad name is wrong usage; the daemon could only say that it failed
    if capture_output and (stdout is not None or stderr is not None):
        raise ArgumentError("capture_output goes with neither stdout nor stderr")
    if input is not None and stdin is not None:
        raise ArgumentError("input goes without stdin")
    if input is not None and not isinstance(input, bytes | bytearray | memoryview):
        raise ArgumentError(f"input is {type(input).__name__}, not bytes", hint="encode text first")
    if timeout_s is not None and not (is_number(timeout_s) and 0 <= timeout_s <= _LONGEST_S):
        raise ArgumentError(f"timeout_s {timeout_s!r} is no time", hint=f"give seconds, 0 to {_LONGEST_S:.0f}, or None")
    argv = _words(argv)
    options = RunOptions(
        workspace=_directory(workspace),
        env=_variables(env if env is not None else {}),
        workdir=workdir,
        user=user,
        net=net,
        memory_bytes=memory_bytes,
        cpus=cpus,
        pids=pids,
    )
    streams = Streams(
        stdin=_descriptor(stdin), stdout=_descriptor(stdout, usable(1)), stderr=_descriptor(stderr, usable(2))
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


def _words(argv: Sequence[str]) -> tuple[str, ...]:
    if isinstance(argv, str | bytes):
        raise ArgumentError(f"argv {argv!r} is one word, not a list", hint="give a list, such as ['sh', '-c', 'a | b']")
    if not isinstance(argv, Iterable):
        raise ArgumentError(f"argv {argv!r} is no list", hint="give a list of str")
    argv = tuple(argv)
    for word in argv:
        if not isinstance(word, str):
            raise ArgumentError(f"argv has {word!r}, which is no text", hint="give str; os.fsdecode makes one of bytes")
    return argv


def _variables(env: Mapping[str, str]) -> tuple[str, ...]:
    if not isinstance(env, Mapping):
        raise ArgumentError(f"env is {type(env).__name__}, not a mapping", hint="give a dict of names and values")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ArgumentError(f"env has {name!r}: {value!r}, which is no text", hint="give names and values as str")
        if not name or "=" in name:
            raise ArgumentError(f"env has {name!r}, which no variable can be called")
    return tuple(f"{name}={value}" for name, value in env.items())


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


def _descriptor(given: Stream, default: int | None = None) -> int | None:
    if given is None:
        return default
    try:
        return given if isinstance(given, int) else given.fileno()
    except (AttributeError, OSError, ValueError) as error:  # text, an io.BytesIO, or a file that is closed
        raise ArgumentError(f"{given!r} has no descriptor", hint="give an open file, or capture_output=True") from error


def _data(outputs: Sequence[Collect]) -> tuple[bytes, bytes]:
    if not outputs:
        return b"", b""
    return outputs[0].data, outputs[1].data
