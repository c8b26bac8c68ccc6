"""A running QEMU: start it, find it again, stop and continue it, save and load its device state.

    with Qemu.start(spec, run_dir) as qemu:    # a boot runs at once; a restore is stopped
        qemu.wait_loaded()                     # a restore
        qemu.cont()

QEMU outlives whoever started it. In its directory are the sockets qmp.sock, serial.sock and agent-N.sock, machine.json
(what a snapshot of it must say) and the files of `vmm.process`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fuse import protocol
from imaged.errors import FormatError
from imaged.snapshot import Machine
from vmm import facts
from vmm.agentproto import PORT_COUNT
from vmm.console import Console
from vmm.errors import QemuError, VmStateError
from vmm.machine import UPPER_FILE, UPPER_OPTIONS, Descriptors, MachineSpec, arguments
from vmm.process import Ending, Process
from vmm.qmp import Monitor
from vmm.stray import LIVE_NAME

_START_S = 60.0
_ANSWER_S = 20.0
_STOP_S = 60.0
_SAVE_S = 60.0
_LOAD_S = 60.0
_BACKLOG = 16
_FILES_BYTES = 128 << 20
"""Twice what device state may have, the largest file that a QEMU without a disk writes."""
_NOT_LOADED = "QEMU could not load the device state"
_LOADED, _LOAD_FAILED = "completed", ("failed", "cancelled")


class Qemu:
    """A QEMU that lives, as far as is known. One thread at a time.

    QEMU serves one monitor connection at a time, so let go of it with `close()` (or the `with` block) when other
    commands may want it. Every call ends with a QemuError that tells the cause when QEMU ends meanwhile.
    """

    __slots__ = ("_console", "_monitor", "_process", "run_dir")

    def __init__(self, run_dir: Path, process: Process, *, console: Console | None = None) -> None:
        self.run_dir = run_dir
        self._process = process
        self._console = console
        self._monitor: Monitor | None = None

    @classmethod
    def start(
        cls,
        spec: MachineSpec,
        run_dir: Path,
        *,
        inherit: Sequence[int] = (),
        recorded: Machine | None = None,
        timeout_s: float = _START_S,
    ) -> Self:
        """Start a VM; it gets the descriptors of `inherit` (leases). A QEMU that does not come up is killed.

        A boot runs when this returns. A restore is stopped and loads its device state: see `wait_loaded`. With
        `recorded`, what the snapshot says, a machine that would be another one is SnapshotMismatchError.
        VmSetupError, QemuError.
        """
        spec.check()
        program = facts.program()
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as stack:
            monitor, serial, *agents = (
                stack.enter_context(_listener(run_dir / name))
                for name in ("qmp.sock", "serial.sock", *(f"agent-{port}.sock" for port in range(PORT_COUNT)))
            )
            descriptors = Descriptors(
                monitor=monitor.fileno(), serial=serial.fileno(), agents=tuple(agent.fileno() for agent in agents)
            )
            passed = [descriptors.monitor, descriptors.serial, *descriptors.agents, *inherit]
            state = None
            if spec.state_path is not None:
                state = stack.enter_context(open(spec.state_path, "rb", buffering=0)).fileno()
                passed.append(state)
            console = None if state is not None else Console(run_dir / "serial.sock")
            # What a guest prints can not fill the host's disk; one with a disk of its own may write as much anyway.
            files_bytes = _FILES_BYTES if spec.upper_path is None else None
            argv = [*arguments(spec, program, descriptors), "-pidfile", str(run_dir / LIVE_NAME)]
            try:
                process = Process.spawn(argv, run_dir, inherit=passed, files_bytes=files_bytes)
                qemu = cls(run_dir, process, console=console)
            except BaseException:
                if console is not None:
                    console.close()
                raise
        try:
            qemu._begin(spec, state, recorded, deadline)
        except BaseException:
            qemu.kill()
            qemu.close()
            raise
        return qemu

    @classmethod
    def attach(cls, run_dir: Path) -> Self:
        """The QEMU that runs in this directory. VmStateError tells how it ended when it does not live."""
        return cls(run_dir, Process.attach(run_dir))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """A descriptor that is readable once QEMU has ended."""
        return self._process.fileno()

    def ending(self) -> Ending | None:
        """How QEMU ended, or None while it lives."""
        return self._process.ending()

    def status(self, *, timeout_s: float = _ANSWER_S) -> str:
        """QEMU's run state: "running", "paused", "inmigrate" and others."""
        return str(self._execute("query-status", timeout_s=timeout_s)["status"])

    def stop(self) -> None:
        """Stop the processors and finish what disks are doing."""
        self._execute("stop", timeout_s=_STOP_S)

    def flush_disk(self) -> None:
        """Write what QEMU still has in memory of the writable disk into its file. QemuError when that can not be done.

        `stop` does it as well, and drops the error. QEMU has no command for it, but opens a disk anew, with the options
        it has, only after it is flushed.
        """
        nodes = {node["node-name"]: node for node in self._execute("query-named-block-nodes", {"flat": True})}
        options = {**UPPER_OPTIONS, "file": UPPER_FILE}
        backing = nodes[options["node-name"]].get("backing_file")
        if backing is not None:
            names = (name for name, node in nodes.items() if (node["drv"], node["file"]) == ("raw", backing))
            options["backing"] = next(names)
        self._execute("blockdev-reopen", {"options": [options]}, timeout_s=_STOP_S)

    def cont(self) -> None:
        """Let the guest go on."""
        self._execute("cont")

    def save_state(self, path: Path) -> None:
        """Write the device state of a stopped VM, which can go on afterwards, into a new file. QemuError."""
        self._execute("xen-save-devices-state", {"filename": str(path), "live": False}, timeout_s=_SAVE_S)

    def wait_loaded(self, *, timeout_s: float = _LOAD_S) -> None:
        """Wait until the device state of a restore is loaded. QemuError when it can not be."""
        deadline = time.monotonic() + timeout_s
        with self._explaining(_NOT_LOADED):
            monitor = self._connection(timeout_s)
            status = monitor.execute("query-migrate", timeout_s=timeout_s).get("status", "")
            while status != _LOADED:
                if status in _LOAD_FAILED:
                    raise QemuError(f"{_NOT_LOADED}: {status}")
                status = monitor.event("MIGRATION", timeout_s=deadline - time.monotonic())["status"]

    def facts(self) -> Machine:
        """What a snapshot of this VM must say of its machine, as it was when QEMU started. VmStateError."""
        path = self.run_dir / "machine.json"
        try:
            return Machine.from_json(json.loads(path.read_bytes()))
        except FileNotFoundError as error:
            hint = "it can not be parked or forked: copy out what you need with `pvisor vm exec`, then `pvisor vm rm`"
            raise VmStateError(f"{path}, which says what the machine is, is gone", hint=hint) from error
        except (ValueError, FormatError) as error:
            raise VmStateError(f"{path}, which says what the machine is, is damaged: {error}") from error

    def console_tail(self) -> str:
        """What a guest that this object booted has printed on its serial line since the last call, if anything.

        The line is held until `close()`, so that nothing of the boot is lost.
        """
        return "" if self._console is None else self._console.take()

    def wait(self, timeout_s: float) -> Ending:
        """Wait until QEMU has ended. QemuTimeoutError."""
        return self._process.wait(timeout_s)

    def kill(self) -> Ending:
        """End QEMU at once; what the guest had not synced is lost."""
        return self._process.kill()

    def close(self) -> None:
        """Let go of QEMU, which goes on."""
        self._let_go_of_monitor()
        self._let_go_of_console()
        self._process.close()

    def _begin(self, spec: MachineSpec, state: int | None, recorded: Machine | None, deadline: float) -> None:
        monitor = self._connection(deadline - time.monotonic())
        kind = monitor.execute("qom-get", {"path": "/machine", "property": "type"}, timeout_s=_ANSWER_S)
        found = facts.here(spec, qemu=monitor.version, machine=str(kind).removesuffix("-machine"))
        if recorded is not None:
            facts.check(recorded, found)
        if state is not None:
            with self._explaining(_NOT_LOADED):
                monitor.execute("migrate-incoming", {"uri": f"fd:{state}"}, timeout_s=_LOAD_S)
        (self.run_dir / "machine.json").write_text(json.dumps(found.to_json()))

    def _execute(self, command: str, arguments: dict[str, Any] | None = None, *, timeout_s: float = _ANSWER_S) -> Any:
        return self._connection(timeout_s).execute(command, arguments, timeout_s=timeout_s)

    def _connection(self, timeout_s: float) -> Monitor:
        if self._monitor is None or self._monitor.closed:
            self._monitor = Monitor(self.run_dir / "qmp.sock", self._process, timeout_s=timeout_s)
        return self._monitor

    @contextlib.contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        """An end of QEMU in this block gets `what` said of it."""
        try:
            yield
        except QemuError as error:
            ending = self._process.ending()
            if ending is None:
                raise
            raise ending.error(what) from error

    def _let_go_of_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def _let_go_of_console(self) -> None:
        if self._console is not None:
            self._console.close()
            self._console = None


@contextlib.contextmanager
def _listener(path: Path) -> Iterator[socket.socket]:
    """A socket that listens at `path` from now on, whoever accepts."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with protocol.address(path) as address:
            listener.bind(address)
        path.chmod(0o600)
        listener.listen(_BACKLOG)
        yield listener
