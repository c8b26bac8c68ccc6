"""Errors of the vmm package; all are `imaged.errors.PvisorError`.

VmError                     a virtual machine, or something about one
+-- VmSetupError            pVisor failed before the workload started (125): a program, kernel or device is missing
|   +-- VmNotFoundError     no VM has this name
|   +-- VmExistsError       a VM has this name already
|   +-- VmBusyError         another command works on this VM
|   +-- VmFullError         there is no room on the disk
|   +-- VmStateError        the VM is not in the state that this needs (it is parked, it ended, it is paused)
|   +-- SnapshotMismatchError   the snapshot was made by another QEMU, machine or processor (carries both values)
+-- QemuError               QEMU refused, failed or ended (carries how it ended and the last line of its log)
|   +-- QemuTimeoutError    QEMU lives and did not answer in time
+-- AgentError              the agent in the guest refused, failed or is not there
|   +-- AgentTimeoutError   the agent did not answer in time
|   +-- AgentBusyError      all of the guest's agent ports are in use
|   +-- AgentKilledError    the agent was killed in the guest, and another one began
+-- VmCommandError          the workload's program can not be executed (126) or does not exist (127)
+-- VmTimeoutError          the workload took longer than it was given, and was ended (124)
+-- VmInterruptedError      the VM was parked, or it or its agent ended, while the workload ran in it
+-- VmArgumentError         what was asked for makes no sense (a ValueError, too; wrong usage for a command)
"""

from __future__ import annotations

import errno

from imaged.errors import PvisorError

TIMED_OUT, SETUP_FAILED, NOT_EXECUTABLE, NOT_FOUND = 124, 125, 126, 127


class VmError(PvisorError):
    """A virtual machine that could not do what was asked."""


class VmSetupError(VmError):
    """pVisor failed before the workload started."""


class VmNotFoundError(VmSetupError):
    """No VM has this name; `when` is added to that."""

    def __init__(self, name: str, when: str = "") -> None:
        super().__init__(f"no VM {name!r}{when}", hint="`pvisor vm ls` lists them")


class VmExistsError(VmSetupError):
    """A VM has this name already."""


class VmBusyError(VmSetupError):
    """Another command works on this VM."""


class VmFullError(VmSetupError):
    """There is no room on the disk of PVISOR_HOME or PVISOR_RUN."""


class VmStateError(VmSetupError):
    """The VM is not in the state that this needs."""


class SnapshotMismatchError(VmSetupError):
    """This host can not continue the snapshot: `what` was `recorded` in it and is `found` here."""

    def __init__(self, what: str, *, recorded: str, found: str, hint: str = "") -> None:
        super().__init__(f"{what}: the snapshot was made with {recorded}, here is {found}", hint=hint)
        self.what, self.recorded, self.found = what, recorded, found


class QemuError(VmError):
    """QEMU refused, failed, or ended.

    `ended` tells how it ended ("exit status 1", "signal 9 (SIGKILL)", "ended"), or is None while it lives or when that
    is not known; `log_line` is the last line of its log, or empty.
    """

    def __init__(self, message: str, *, ended: str | None = None, log_line: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.ended, self.log_line = ended, log_line


class QemuTimeoutError(QemuError):
    """QEMU lives and did not answer in time: whether it did what was asked is not known."""


class AgentError(VmError):
    """The agent in the guest refused, failed, or is not there."""


class AgentTimeoutError(AgentError):
    """The agent did not answer in time."""


class AgentBusyError(AgentError):
    """All agent ports of the guest are in use by other commands."""


class AgentKilledError(AgentError):
    """The agent was killed in the guest, and another one began: what it was doing is not known."""


class VmCommandError(VmError):
    """The program could not be executed; `exit_code` is 126 or 127, as a shell gives them."""

    def __init__(self, message: str, *, exit_code: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class VmTimeoutError(VmError):
    """The workload took longer than it was given, and was ended; what it had written is in `stdout` and `stderr`."""

    exit_code = TIMED_OUT

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.stdout = self.stderr = b""


class VmInterruptedError(VmError):
    """The VM was parked, or it or its agent ended, while the workload ran in it: its exit code is not known."""

    exit_code = SETUP_FAILED


class VmArgumentError(VmError, ValueError):
    """What a program or a command line asked for makes no sense."""

    exit_code = 2


def space_hint(error: OSError) -> str:
    """What to do about a file that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space on the file system of PVISOR_HOME: `pvisor snapshot rm`, `pvisor store gc`, `pvisor vm rm`"
    return "set PVISOR_HOME to a directory you can write"
