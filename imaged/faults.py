"""One place that turns errors of the kernel and of LMDB into errors of the store."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from imaged.errors import StoreError, StoreFullError, StoreReadOnlyError

REBUILD_HINT = "stop the processes that use it, then run `pvisor store fsck --rebuild`"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_LEAST_BYTES = 1 << 20
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_DAMAGED = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError)


@contextmanager
def store_faults(what: str, path: Path) -> Iterator[None]:
    """Run a block that works on the store at `path`; `what` is the verb phrase of the message ("append to a pack")."""
    try:
        yield
    except OSError as error:
        raise _of_errno(what, path, error.errno or 0) from error
    except lmdb.Error as error:
        raise _of_lmdb(what, path, error) from error


def _of_errno(what: str, path: Path, number: int) -> StoreError:
    if number in _FULL:
        return StoreFullError(
            f"store {path}: can not {what}: {os.strerror(number)}",
            hint="free space there (`pvisor image rm` and `pvisor store gc`), or set PVISOR_HOME to a larger disk",
        )
    if number in _READ_ONLY:
        return StoreReadOnlyError(
            f"store {path}: can not {what}: {os.strerror(number)}",
            hint="make the directory writable for this user, or set PVISOR_HOME to one that is",
        )
    return StoreError(f"store {path}: can not {what}: {os.strerror(number)}")


def _of_lmdb(what: str, path: Path, error: lmdb.Error) -> StoreError:
    if isinstance(error, lmdb.MapFullError):
        return StoreFullError(
            f"store {path}: can not {what}: the index is at its fixed limit of 64 GiB",
            hint="drop images and run `pvisor store gc`, or use a second store",
        )
    if isinstance(error, lmdb.DiskError):
        return _of_errno(what, path, errno.ENOSPC)
    if isinstance(error, lmdb.ReadonlyError):
        return _of_errno(what, path, errno.EACCES)
    if isinstance(error, _DAMAGED):
        return StoreError(f"store {path}: can not {what}: the index is damaged ({error})", hint=REBUILD_HINT)
    if error.code == errno.EIO and _is_full(path):  # what LMDB makes of a write that the disk took a part of
        return _of_errno(what, path, errno.ENOSPC)
    if error.code > 0:
        return _of_errno(what, path, error.code)
    return StoreError(f"store {path}: can not {what}: {error}")


def _is_full(path: Path) -> bool:
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _LEAST_BYTES
