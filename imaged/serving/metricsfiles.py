"""The files in which the serving processes of one supervisor count together (prometheus_client's multiprocess mode).

That maps them sparse. On a full file system the first touch of a page would end the process by SIGBUS, so each process
has room for all that it will ever count before it begins.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from imaged.errors import PvisorError

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
"""In the environment of a serving process before it imports prometheus_client."""
_KINDS = ("counter", "gauge_livesum", "histogram")
"""What the names of files begin with: the kinds of metrics that imaged/serving/metrics.py has."""
_FILE_BYTES = 1 << 20
"""Some four times what every route with every status takes."""


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """For as long as there are such processes. PvisorError."""
    try:
        path = Path(tempfile.mkdtemp(prefix="pvisor-metrics-"))
    except OSError as error:
        hint = "TMPDIR names another directory for temporary files"
        raise PvisorError(
            f"no directory for metrics in {tempfile.gettempdir()}: {error.strerror}", hint=hint
        ) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def reserve(path: Path) -> None:
    """Room for what this process counts. OSError, and then nothing of it is there."""
    made = [path / f"{kind}_{os.getpid()}.db" for kind in _KINDS]
    try:
        for file in made:
            fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, _FILE_BYTES)
            finally:
                os.close(fd)
    except OSError:
        for file in made:
            file.unlink(missing_ok=True)
        raise
