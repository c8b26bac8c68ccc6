"""Processes in a running VM, and why one could not be run or followed to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from signal import SIGKILL

from vmm import console
from vmm.agent import Agent, GuestProcess
from vmm.control import Control
from vmm.errors import (
    AgentBusyError,
    AgentError,
    AgentKilledError,
    AgentTimeoutError,
    VmError,
    VmInterruptedError,
    VmNotFoundError,
    VmSetupError,
    VmTimeoutError,
)
from vmm.held import console_log
from vmm.record import State, VmRecord
from vmm.vms import Vms
from vmm.workload import Workload

_CONNECT_S = 30.0
_ANSWER_S = 30.0
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
    directory that can not be made, VmTimeoutError, VmInterruptedError when the VM was parked, or it or its agent
    ended meanwhile.
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

    run, log = vms.run(name), console_log(vms.path(name))
    said_bytes = console.size(log)
    try:
        patience_s = _CONNECT_S if record.state == State.RUNNING else _WORKED_ON_S
        with Agent.connect(run, timeout_s=patience_s, waiting=lambda: _require_going(vms, record)) as agent:
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
    except AgentKilledError as error:
        hint = f"`pvisor vm ps {name}` lists it if it goes on"
        raise VmInterruptedError(
            f"the agent in VM {name!r} was killed while the command ran: how that ended is not known", hint=hint
        ) from error
    except AgentError as error:
        from vmm.process import has_ended

        if not has_ended(run):
            raise
        raise _gone(vms, name, started) from error
    if ended.timed_out:
        raise VmTimeoutError(f"the command took longer than {timeout_s:g} s, and was ended")
    if ended.signal == SIGKILL:
        _tell_of_memory(record, console.killed_for_memory(log, said_bytes))
    return ended.exit_code


def _tell_of_memory(record: VmRecord, killed: str) -> None:
    if not killed:
        return
    import logging  # not on the way of other commands

    text = "VM %s: its kernel ended %s for lack of memory: it has %d MiB, which also hold what it writes without --disk"
    # As an error, for nothing else tells of it.
    logging.getLogger(__name__).error(text, record.name, killed, record.memory_bytes >> 20)


def processes(vms: Vms, name: str) -> tuple[GuestProcess, ...]:
    """What commands run in a VM, and what they have started; that there are more of them is logged. VmStateError when
    it does not run; AgentError."""
    with _speaking(vms, name) as agent:
        found, left = agent.processes(timeout_s=_ANSWER_S)
    if left:
        import logging

        text = "VM %s: not all of its processes are listed: %s"
        logging.getLogger(__name__).error(text, name, "; ".join(left))
    return found


def kill(vms: Vms, name: str, pids: Sequence[int], signal: int) -> None:
    """Send a signal to some of `processes`. VmSetupError for the first that is none of them; the others get it."""
    failure: VmSetupError | None = None
    with _speaking(vms, name) as agent:
        for pid in pids:
            try:
                agent.kill(pid, signal, timeout_s=_ANSWER_S)
            except VmSetupError as error:
                failure = failure or error
    if failure is not None:
        raise failure


@contextmanager
def _speaking(vms: Vms, name: str) -> Iterator[Agent]:
    """With the agent of a VM that runs, whatever runs in it."""
    record = vms.get(name)
    if record.state != State.RUNNING:
        record = _require_running(vms, name)
    run = vms.run(name)
    try:
        with Agent.connect(
            run, timeout_s=_CONNECT_S, control=True, waiting=lambda: _require_going(vms, record)
        ) as agent:
            yield agent
    except AgentError as error:
        from vmm.process import has_ended

        if isinstance(error, AgentTimeoutError | AgentBusyError | AgentKilledError) or not has_ended(run):
            raise
        raise _gone(vms, name, started=False) from error


def _require_running(vms: Vms, name: str) -> VmRecord:
    """One that another command works on, but that will run again, counts."""
    from vmm.survey import refusal, status

    found = status(vms, name)
    if found.state in (State.RUNNING, State.FORKING, State.PARKING):
        return found.record
    raise refusal(vms, found.record, State.RUNNING)


def _require_going(vms: Vms, record: VmRecord) -> None:
    """VmStateError when the guest can not answer, however long one waits: QEMU's process is stopped."""
    from vmm import process

    pid = process.pid_of(vms.run(record.name))
    if pid is not None and process.is_stopped(pid):
        from vmm.survey import refusal

        raise refusal(vms, record, State.RUNNING)


def _gone(vms: Vms, name: str, started: bool) -> VmError:
    from vmm.survey import CUT_OFF, ENDED, refusal, status

    try:
        found = status(vms, name)
    except VmNotFoundError as error:
        return VmInterruptedError(f"VM {name!r} was removed while the command ran in it") if started else error
    if not started:
        return refusal(vms, found.record, State.RUNNING)
    hint = f"`pvisor vm resume {name}` lets it go on" if found.state in (State.PARKED, State.PARKING) else ""
    if found.state == ENDED:
        hint = refusal(vms, found.record, State.RUNNING).hint
    elif found.state == CUT_OFF:
        hint = f"`pvisor vm park {name}` saves it while it lives"
    became = {State.PARKED: "was parked", State.PARKING: "is being parked", ENDED: f"has ended ({found.detail})"}
    what = became.get(found.state, f"is {found.state}")
    return VmInterruptedError(f"VM {name!r} {what} while the command ran in it: how that ended is not known", hint=hint)
