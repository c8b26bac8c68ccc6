"""Errors of the stage package; all are `imaged.errors.PvisorError`.

StageError              a stage or its process
+-- StageSetupError     pVisor failed before the workload started (125)
|   +-- StageBusyError      a process runs in the stage, or another command has it
|   +-- StageNotFoundError  no stage has this name
|   +-- StageMismatchError  the stage was made from another image or workspace
+-- CommandError        the workload's program can not be executed (126) or does not exist (127)
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


class CommandError(StageError):
    """The program could not be executed; `exit_code` is 126 or 127, as a shell gives them."""

    def __init__(self, message: str, *, exit_code: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code
