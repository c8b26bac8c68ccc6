"""Errors of the stage package; all are `imaged.errors.PvisorError`.

StageError              a stage or its process
+-- StageSetupError     pVisor failed before the workload started (125)
|   +-- StageBusyError      a process runs in the stage, or another command has it
|   +-- StageNotFoundError  no stage has this name
|   +-- StageMismatchError  the stage was made from another image or workspace
+-- CommandError        the workload's program can not be executed (126) or does not exist (127)
+-- ArgumentError       what was asked for makes no sense (a ValueError, too; wrong usage for a command)
+-- ApplyConflictError  the host directory is not what the stage's changes were made from; nothing was applied
+-- StageTimeoutError   the workload took longer than it was given, and was ended
+-- StageEndedError     the stage was ended while the workload ran in it
"""

from __future__ import annotations

from imaged.errors import PvisorError

SETUP_FAILED, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127


class StageError(PvisorError):
    """A stage, or a process in it, that could not do what was asked."""


class StageSetupError(StageError):
    """pVisor failed before the workload started."""


class StageBusyError(StageSetupError):
    """A process runs in the stage, or another command holds it."""


class StageNotFoundError(StageSetupError):
    """No stage has this name."""


class StageMismatchError(StageSetupError):
    """The stage was made from another image or for another workspace."""


class ArgumentError(StageError, ValueError):
    """What a program or a command line asked for makes no sense."""

    exit_code = 2


class CommandError(StageError):
    """The program could not be executed; `exit_code` is 126 or 127, as a shell gives them."""

    def __init__(self, message: str, *, exit_code: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class StageTimeoutError(StageError):
    """The workload took longer than it was given, and was ended; what it had written is in `stdout` and `stderr`."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.stdout = self.stderr = b""


class StageEndedError(StageError):
    """Someone ended the stage while the workload ran in it; `exit_code` is 128 + the signal, most often 137."""

    def __init__(self, message: str, *, exit_code: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class ApplyConflictError(StageError):
    """The host directory is not what the stage's changes were made from: nothing was applied.

    `conflicts` are paths and reasons, all there are.
    """

    def __init__(self, message: str, *, conflicts: tuple[tuple[bytes, str], ...], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.conflicts = conflicts
