"""Files that people name: tokens, certificates, keys. A server opens some of them again and again, and waits for none.

To open a FIFO waits for somebody who writes to it, and a device may never end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """The file, to be read; returns at once. OSError, also for what is there and no regular file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise _irregular(path) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _irregular(path)
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _irregular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))
