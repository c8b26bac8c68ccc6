"""A writable view of a read-only directory: overlayfs, with its options and what its refusals mean."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fuse import linux
from fuse.errors import MountError
from stage.errors import StageSetupError

# Composed inode numbers (xino) would be above 2^62, which 32-bit programs refuse and JavaScript rounds.
_OPTIONS = "metacopy=off,xino=off,"
# What lies below is data: its trusted.overlay.* attributes must not redirect lookups (many kernels follow by default).
# Renaming a directory of the image is EXDEV then, as in any container engine, and the upper directory stays plain.
OVER_IMAGE = "redirect_dir=nofollow,index=off"
# A host directory is worked in: directories are renamed, and files with several names stay one file when they change.
# Attributes that it has itself, which only the host's root can set, lead nowhere in the lowest layer.
OVER_WORKSPACE = "redirect_dir=on,index=on"
# Twice as long each time: two seconds in all.
_PAUSES_S = tuple(0.001 * 2**count for count in range(11))
_OWN_ATTRIBUTES = "trusted.overlay."
# Nothing is synced to disk; only right for writes that are dropped at exit.
_VOLATILE = ",volatile"


def mount_overlay(
    lower: Path,
    upper: Path,
    work: Path,
    target: Path,
    *,
    options: str = OVER_IMAGE,
    flags: int = linux.MS_NODEV,
    volatile: bool = False,
) -> None:
    """Mounts `upper` over `lower` on `target`, which may be a directory that the mount then hides.

    An `upper` that is not there yet is made, so that the root of the overlay looks as the lower's: mode and owner.
    Paths go to the kernel as descriptors, so that any byte may be in them. Device nodes never open (MS_NODEV).
    """
    _make_upper(lower, upper)
    with _directory(lower) as lower_fd, _directory(upper) as upper_fd, _directory(work) as work_fd:
        layers = f"lowerdir={_link(lower_fd)},upperdir={_link(upper_fd)},workdir={_link(work_fd)},"
        try:
            _mount_when_free(target, flags, layers + _OPTIONS + options + _VOLATILE * volatile)
        except MountError as error:
            raise _explain(error, lower, upper) from error


def _mount_when_free(target: Path, flags: int, options: str) -> None:
    """The kernel ends the mounts of a process a moment after the process, and until then refuses `index=on` as busy."""
    for pause_s in _PAUSES_S:
        try:
            linux.mount("overlay", target, "overlay", flags, options)
            return
        except MountError as error:
            if error.errno != errno.EBUSY:
                raise
        time.sleep(pause_s)
    linux.mount("overlay", target, "overlay", flags, options)


def file_system(path: Path) -> str:
    """The type of the file system that `path` is on, as /proc/self/mountinfo names it; "" when it is not there."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    found = ""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == number:
                found = rest.split()[0]
    return found


def _make_upper(lower: Path, upper: Path) -> None:
    """Under another name until it is complete: what exists belongs to the workload, who may have changed it."""
    if upper.exists():
        return
    new = upper.with_name(f".{upper.name}.new")
    try:
        like = lower.stat()
        new.mkdir(0o700, exist_ok=True)
        os.chown(new, like.st_uid, like.st_gid)
        new.chmod(stat.S_IMODE(like.st_mode))
        _copy_attributes(lower, new)
        os.utime(new, ns=(like.st_atime_ns, like.st_mtime_ns))
        new.rename(upper)
    except OSError as error:
        hint = "make space on the file system of PVISOR_HOME" if error.errno == errno.ENOSPC else ""
        raise StageSetupError(f"directory {error.filename or upper}: {error.strerror}", hint=hint) from error


def _copy_attributes(source: Path, target: Path) -> None:
    """Access lists and the like. As in a copy by overlayfs, those that the other file system has no place for stay."""
    for name in os.listxattr(source):
        if name.startswith(_OWN_ATTRIBUTES):
            continue
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StageSetupError(f"directory {path}: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _link(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def _explain(error: MountError, lower: Path, upper: Path) -> StageSetupError:
    what = f"overlay of {lower} with writes in {upper}: {os.strerror(error.errno)}"
    kind = file_system(upper)
    if error.errno == errno.EINVAL:
        return StageSetupError(
            f"{what}; {upper} is on {kind or 'an unknown file system'}, which the kernel refuses for writes",
            hint="set PVISOR_HOME to a directory on ext4, xfs, btrfs or tmpfs (not on overlay, FUSE or NFS)",
        )
    hints = {
        errno.ENODEV: "load the overlay module: modprobe overlay",
        errno.EPERM: "run as root with CAP_SYS_ADMIN in the host's user namespace",
        errno.ELOOP: "one of the two directories must not be inside the other",
        errno.ESTALE: f"put the directory back that the stage was made for, or save what you need from {upper}",
        errno.EBUSY: "another process uses the stage: look at pvisor stage ls",
        errno.ENOSPC: "make space on the file system of PVISOR_HOME",
        errno.EROFS: "set PVISOR_HOME to a directory that can be written",
    }
    return StageSetupError(what, hint=hints.get(error.errno, ""))
