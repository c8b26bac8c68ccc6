"""Errors of the fuse package; all are `imaged.errors.PvisorError`.

NodeError           the host's node daemon: does not start, does not answer, refuses
MountError          a mount or unmount that the kernel refused (carries errno)
"""

from __future__ import annotations

import os

from imaged.errors import PvisorError


class NodeError(PvisorError):
    """The node daemon does not start, does not answer, or answered an error."""


class MountError(PvisorError):
    """The kernel refused a mount, unmount or namespace call."""

    def __init__(self, what: str, errno: int, *, hint: str = "") -> None:
        super().__init__(f"{what}: {os.strerror(errno)}", hint=hint)
        self.errno = errno
