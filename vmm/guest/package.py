"""Debian's cloud kernel without installing it: its package, downloaded by apt and unpacked into a directory."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from imaged.progress import NoProgress, Progress
from vmm.errors import VmSetupError

META_PACKAGE = "linux-image-cloud-amd64"
_HINT = f"install {META_PACKAGE}, or set PVISOR_KERNEL to a kernel or a directory with boot/ and lib/modules/"
_ASK_S, _DOWNLOAD_S, _UNPACK_S, _WAIT_S = 60, 600, 120, 900
_POLL_S = 0.1


def unpack(target: Path, progress: Progress | None = None) -> None:
    """Makes `target` with the package's boot/ and lib/modules/, whole or not at all; one that is there stays.

    Processes may call this at once: one downloads, the others wait for it. VmSetupError.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.with_name(f"{target.name}.lock")):
            if target.is_dir():
                return
            with tempfile.TemporaryDirectory(prefix=".kernel-", dir=target.parent) as work:
                unpacked = _unpacked(Path(work), progress or NoProgress())
                _sync(unpacked)
                unpacked.rename(target)
    except OSError as error:
        hint = "make room there, or set PVISOR_HOME"
        raise VmSetupError(f"kernel package into {target}: {error.strerror or error}", hint=hint) from error


def find() -> str:
    """The package that `unpack` would download, by the lists of this host. VmSetupError."""
    depends = _run([_program("apt-cache", "apt"), "depends", META_PACKAGE], Path("/"), _ASK_S)
    found = re.search(r"Depends: (linux-image-\S+-cloud-amd64)$", depends, re.MULTILINE)
    if found is None:
        hint = f"run `apt-get update`; {_HINT}"
        raise VmSetupError(f"the package lists of this host do not have {META_PACKAGE}", hint=hint)
    for name, debian in (("apt-get", "apt"), ("dpkg-deb", "dpkg")):
        _program(name, debian)
    return found.group(1)


def _unpacked(work: Path, progress: Progress) -> Path:
    package = find()
    progress.start(f"downloading the kernel of guests, {package}", None)
    _run([_program("apt-get", "apt"), "download", package], work, _DOWNLOAD_S)
    files = list(work.glob("*.deb"))
    if len(files) != 1:
        raise VmSetupError(f"`apt-get download {package}` made {len(files)} files, not one", hint=_HINT)
    progress.start(f"unpacking {package}", None)
    unpacked = work / "unpacked"
    _run([_program("dpkg-deb", "dpkg"), "--extract", str(files[0]), str(unpacked)], work, _UNPACK_S)
    return unpacked


def _program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise VmSetupError(f"no kernel for guests, and no {name} (Debian's {package}) to get one with", hint=_HINT)
    return found


def _run(argv: Sequence[str], work: Path, timeout_s: float) -> str:
    """What the program prints. VmSetupError with the last line of what it complains about."""
    shown = " ".join([Path(argv[0]).name, *argv[1:]])
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise VmSetupError(f"kernel for guests: `{shown}` did not end in {timeout_s:.0f} s", hint=_HINT) from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = lines[-1].strip() if lines else f"exit status {done.returncode}"
        raise VmSetupError(f"kernel for guests: `{shown}`: {said}", hint=_HINT)
    return done.stdout


def _sync(directory: Path) -> None:
    """What was unpacked is durable before it gets its name."""
    from fuse import linux

    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        linux.sync_file_system(fd)
    finally:
        os.close(fd)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Alone with the right to make the kernel directory; a killed holder leaves nothing locked."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    message = f"another process has been getting the kernel of guests for {_WAIT_S} s ({path})"
                    raise VmSetupError(message, hint=_HINT) from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)
