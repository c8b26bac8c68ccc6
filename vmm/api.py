"""Virtual machines for programs: what `pvisor vm` does, with output in hand."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imaged import calls
from imaged.calls import Stream
from imaged.config import Config
from imaged.progress import Progress
from vmm.errors import VmArgumentError, VmTimeoutError
from vmm.vms import Vms
from vmm.workload import Workload, WorkloadOptions, check, resolve

if TYPE_CHECKING:
    from vmm.parking import Parked
    from vmm.survey import VmStatus

DEFAULT_MEMORY_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a process ended: as a shell says it (128 + N after signal N), and what it wrote when that was captured."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""


@dataclass(frozen=True, slots=True)
class Vm:
    """A VM of this host by its name. The object holds nothing: the VM outlives it, and threads may share it."""

    name: str
    config: Config

    def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        input: bytes | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        capture_output: bool = False,
        timeout_s: float | None = None,
    ) -> Result:
        """Run a process in the VM and wait for its end. Several at a time are several calls, in threads.

        It has the image's environment under `env`, and the image's working directory and user unless given. It reads
        `input`, `stdin` or nothing, and writes to this program's stdout and stderr, to what is given, or into the
        result. Raises VmStateError when the VM does not run, VmCommandError when the program does not exist (127) or
        can not be executed (126), VmTimeoutError, VmInterruptedError when the VM was parked or ended meanwhile.
        """
        config = Vms(self.config).get(self.name).image_config
        words = calls.words(argv, VmArgumentError)
        if not words:
            raise VmArgumentError("argv is empty", hint="give a program and its arguments")
        options = WorkloadOptions(env=calls.variables(env, VmArgumentError), workdir=workdir, user=user)
        streams = _Streams(input=input, stdin=stdin, stdout=stdout, stderr=stderr, capture_output=capture_output)
        timeout_s = calls.seconds(timeout_s, VmArgumentError)
        return _execute(self, resolve(config, words, options, entrypoint=False), streams, timeout_s)

    def park(self, snapshot: str | None = None, *, progress: Progress | None = None) -> Parked:
        """Write the VM into the store and end it: it holds no process and no memory until it is resumed.

        The snapshot gets this name, or one of the VM's own: `Parked.name`. Raises VmStateError, VmExistsError; after
        any error it runs on.
        """
        from vmm.parking import park

        return park(Vms(self.config), self.name, snapshot=snapshot, progress=progress)

    def resume(self) -> Vm:
        """Let the parked VM go on. Raises VmStateError, SnapshotMismatchError, NodeError; then it is parked still."""
        return resume(self.name, config=self.config)

    def fork(self, count: int = 1) -> list[Vm]:
        """New VMs that go on from what this one is now, all or none; a running one goes on itself."""
        return fork(self.name, count, config=self.config)

    def remove(self, *, keep_snapshot: bool = False) -> None:
        """End the VM and remove it.

        With a parked one goes the snapshot that it is, unless that was given a name or is to stay. Of any other its
        last park stays.
        """
        from vmm.removal import remove

        remove(Vms(self.config), self.name, keep_snapshot=keep_snapshot)

    def status(self) -> VmStatus:
        """What it does now. Raises VmNotFoundError."""
        from vmm.survey import status

        return status(Vms(self.config), self.name)

    @property
    def console(self) -> Path:
        """The socket of its serial line, which takes one connection at a time."""
        return Vms(self.config).run(self.name) / "serial.sock"


def start(
    image: str,
    *,
    name: str | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    cpus: int = 1,
    disk_bytes: int | None = None,
    network: str = "none",
    server: str | None = None,
    config: Config | None = None,
) -> Vm:
    """Boot a VM from an image: it runs when this returns, until it is parked or removed.

    `image` is a name or an id; one that is not on this host is pulled lazily from `server` first. What the guest
    writes is in its RAM, or with `disk_bytes` on a disk of that size. `network` is "none", or "user" for outgoing
    connections through this host. Raises VmExistsError, VmSetupError, QemuError, NodeError, and VmError when the guest
    does not come up.
    """
    from vmm.boot import Shape, boot

    resolved = config or Config.resolve(server=server)
    shape = Shape(memory_bytes=memory_bytes, cpus=cpus, disk_bytes=disk_bytes or 0, network=network)
    record = boot(Vms(resolved), image, _opener(resolved, image, server), shape, name=name)
    return Vm(record.name, resolved)


def run(
    image: str,
    argv: Sequence[str] = (),
    *,
    name: str | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    cpus: int = 1,
    disk_bytes: int | None = None,
    network: str = "none",
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    user: str | None = None,
    input: bytes | None = None,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    capture_output: bool = False,
    timeout_s: float | None = None,
    server: str | None = None,
    config: Config | None = None,
) -> Result:
    """Boot a VM as `start` does, run a process in it as `Vm.exec` does, and remove the VM.

    `argv` takes the place of the image's Cmd, after its Entrypoint. `timeout_s` is of the process, from its start.
    """
    from vmm.boot import Shape, temporary

    resolved = config or Config.resolve(server=server)
    shape = Shape(memory_bytes=memory_bytes, cpus=cpus, disk_bytes=disk_bytes or 0, network=network)
    words = calls.words(argv, VmArgumentError)
    options = WorkloadOptions(env=calls.variables(env, VmArgumentError), workdir=workdir, user=user)
    check(words, options)
    timeout_s = calls.seconds(timeout_s, VmArgumentError)
    streams = _Streams(input=input, stdin=stdin, stdout=stdout, stderr=stderr, capture_output=capture_output)
    with temporary(Vms(resolved), image, _opener(resolved, image, server), shape, name=name) as record:
        workload = resolve(record.image_config, words, options, entrypoint=True)
        return _execute(Vm(record.name, resolved), workload, streams, timeout_s)


def resume(
    name: str,
    *,
    new_name: str | None = None,
    network: str | None = None,
    server: str | None = None,
    config: Config | None = None,
) -> Vm:
    """Let a parked VM go on, or a new one from a snapshot; see `vmm.restore.resume`.

    A snapshot that is not on this host is pulled lazily from `server` first. One that was pulled has a network only
    with `network="user"`.
    """
    from vmm import restore

    resolved = config or Config.resolve(server=server)
    record = restore.resume(Vms(resolved), name, name=new_name, network=network, server=resolved.server)
    return Vm(record.name, resolved)


def fork(
    name: str,
    count: int = 1,
    *,
    network: str | None = None,
    server: str | None = None,
    config: Config | None = None,
) -> list[Vm]:
    """New VMs from a running VM, which goes on, from a parked one or from a snapshot; see `vmm.restore.fork`.

    A snapshot that is not on this host is pulled lazily from `server` first. `network` as of `resume`.
    """
    from vmm import restore

    resolved = config or Config.resolve(server=server)
    made = restore.fork(Vms(resolved), name, count, network=network, server=resolved.server)
    return [Vm(record.name, resolved) for record in made]


def listing(*, config: Config | None = None) -> list[VmStatus]:
    """Every VM of this host, by name, and what it does now."""
    from vmm.survey import survey

    return survey(Vms(config or Config.resolve()))


def get(name: str, *, config: Config | None = None) -> Vm:
    """The VM of this name. Raises VmNotFoundError."""
    resolved = config or Config.resolve()
    Vms(resolved).get(name)
    return Vm(name, resolved)


class _Streams:
    """Where a process's bytes come from and go to."""

    def __init__(
        self, *, input: bytes | None, stdin: Stream, stdout: Stream, stderr: Stream, capture_output: bool
    ) -> None:
        refusal = VmArgumentError
        calls.check_streams(
            input=input, stdin=stdin, stdout=stdout, stderr=stderr, capture_output=capture_output, refusal=refusal
        )
        self.stdin: int | bytes | None = bytes(input) if input is not None else calls.descriptor(stdin, refusal)
        self.kept = (io.BytesIO(), io.BytesIO()) if capture_output else None
        self.stdout: Callable[[bytes], object] = calls.writer(calls.descriptor(stdout, refusal, 1))
        self.stderr: Callable[[bytes], object] = calls.writer(calls.descriptor(stderr, refusal, 2))
        if self.kept is not None:
            self.stdout, self.stderr = self.kept[0].write, self.kept[1].write

    @property
    def data(self) -> tuple[bytes, bytes]:
        return (self.kept[0].getvalue(), self.kept[1].getvalue()) if self.kept is not None else (b"", b"")


def _execute(vm: Vm, workload: Workload, streams: _Streams, timeout_s: float | None) -> Result:
    from vmm.execution import execute

    try:
        code = execute(
            Vms(vm.config),
            vm.name,
            workload,
            stdin=streams.stdin,
            stdout=streams.stdout,
            stderr=streams.stderr,
            timeout_s=timeout_s,
        )
    except VmTimeoutError as error:
        error.stdout, error.stderr = streams.data
        raise
    stdout, stderr = streams.data
    return Result(exit_code=code, stdout=stdout, stderr=stderr)


def _opener(config: Config, image: str, server: str | None) -> Callable[[], Any]:
    from fuse.node import open_image

    image = calls.image_name(image, VmArgumentError)
    return lambda: open_image(config, image, server=server or config.server, start=True)
