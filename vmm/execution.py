"""Processes in a running VM, and why one could not be run or followed to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vmm.agent import Agent, Control
from vmm.errors import (
    AgentBusyError,
    AgentError,
    AgentTimeoutError,
    QemuTimeoutError,
    VmError,
    VmInterruptedError,
    VmNotFoundError,
    VmStateError,
    VmTimeoutError,
)
from vmm.record import State, VmRecord
from vmm.vms import Vms
from vmm.workload import Workload

_CONNECT_S = 30.0
_ENDING_S = 3.0
_WORKED_ON_S = 600.0
"""A VM that is just parked or forked stands still for as long as that takes."""


def execute(
    vms: Vms,
    name: str,
    workload: Workload,
    *,
    stdin: int | bytes | None,
    stdout: Callable[[bytes], object],
    stderr: Callable[[bytes], object],
    timeout_s: float | None = None,
    terminal: tuple[int, int] | None = None,
    control: Control | None = None,
    on_start: Callable[[], None] | None = None,
) -> int:
    """Run a process in a VM and return its exit code, 128 + N after signal N; see `vmm.agent.Agent.execute`.

    VmStateError when the VM does not run, VmCommandError (126, 127), VmSetupError for a user that is not there or a
    directory that can not be made, VmTimeoutError, VmInterruptedError when the VM was parked or ended meanwhile.
    """
    record = vms.get(name)
    if record.state != State.RUNNING:
        record = _require_running(vms, name)
    started = False

    def begun() -> None:
        nonlocal started
        started = True
        if on_start is not None:
            on_start()

    run = vms.run(name)
    try:
        with Agent.connect(run, timeout_s=_CONNECT_S if record.state == State.RUNNING else _WORKED_ON_S) as agent:
            ended = agent.execute(
                workload.argv,
                env=workload.env,
                cwd=workload.cwd,
                user=workload.user,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                timeout_s=timeout_s,
                terminal=terminal,
                control=control,
                on_start=begun,
            )
    except (AgentTimeoutError, AgentBusyError):
        raise
    except AgentError as error:
        if not _has_ended(run):
            raise
        raise _gone(vms, name, started) from error
    if ended.timed_out:
        raise VmTimeoutError(f"the command took longer than {timeout_s:g} s, and was ended")
    return ended.exit_code


def _require_running(vms: Vms, name: str) -> VmRecord:
    """One that another command works on, but that will run again, counts."""
    from vmm.survey import status

    found = status(vms, name)
    if found.state in (State.RUNNING, State.FORKING, State.PARKING):
        return found.record
    hint = f"`pvisor vm resume {name}` first" if found.state == State.PARKED else "`pvisor vm ls` tells more"
    raise VmStateError(f"VM {name!r} is {found.state}, not running", hint=hint)


def _has_ended(run: Path) -> bool:
    """Whether there is no QEMU, or it is ending: its sockets go before it does."""
    from vmm.process import Process

    try:
        found = Process.attach(run)
    except VmStateError:
        return True
    try:
        found.wait(_ENDING_S)
    except QemuTimeoutError:
        return False
    finally:
        found.close()
    return True


def _gone(vms: Vms, name: str, started: bool) -> VmError:
    from vmm.survey import CUT_OFF, ENDED, status

    try:
        found = status(vms, name)
    except VmNotFoundError as error:
        return VmInterruptedError(f"VM {name!r} was removed while the command ran in it") if started else error
    detail = f" ({found.detail})" if found.detail else ""
    hint = ""
    if found.state in (State.PARKED, State.PARKING):
        hint = f"`pvisor vm resume {name}`" + (" lets it go on" if started else " first")
    elif found.state in (ENDED, CUT_OFF):
        hint = f"`pvisor vm rm {name}` removes what is left of it"
    if started:
        return VmInterruptedError(
            f"VM {name!r} is {found.state}{detail} since, and the command's end is not known", hint=hint
        )
    return VmStateError(f"VM {name!r} is {found.state}{detail}, not running", hint=hint)
