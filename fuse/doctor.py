"""What a host needs to serve and run lazy images, checked one by one."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from imaged.config import Config
from imaged.errors import PvisorError


@dataclass(frozen=True, slots=True)
class Check:
    """One thing a host needs: whether it is there, what was found, what to do when it is not. Without one that is
    `optional` most of pVisor works."""

    name: str
    ok: bool
    detail: str
    hint: str = ""
    optional: bool = False


def examine(config: Config) -> list[Check]:
    """All checks, each of them made even when an earlier one fails."""
    checks = [
        Check("root", os.geteuid() == 0, f"user id {os.geteuid()}", "run as root: mounts and namespaces need it"),
        _device("/dev/fuse", "load the fuse module"),
        _program("fusermount3", "install fuse3"),
        _file_system("erofs", "load the erofs module (Linux 5.16 or later)"),
        _file_system("overlay", "load the overlay module"),
        _kernel(),
        _directory("PVISOR_HOME", config.home),
        _directory("PVISOR_RUN", config.run),
    ]
    checks += [_server(url) for url in config.servers]
    return checks


def _device(path: str, hint: str) -> Check:
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        return Check(path, False, error.strerror or str(error), hint)
    return Check(path, True, "opens")


def _program(name: str, hint: str) -> Check:
    found = shutil.which(name)
    return Check(name, found is not None, found or "not on PATH", hint)


def _file_system(name: str, hint: str) -> Check:
    known = {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()}
    release = os.uname().release
    module = any(Path(f"/lib/modules/{release}").glob(f"kernel/fs/{name}*/{name}*.ko*"))
    if name in known:
        return Check(f"{name} file system", True, "in the kernel")
    return Check(f"{name} file system", module, "a module that can be loaded" if module else "unknown", hint)


def _kernel() -> Check:
    release = os.uname().release
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    how = "mounts EROFS from files" if numbers >= (6, 12) else "mounts EROFS through loop devices"
    return Check("kernel", numbers >= (5, 16), f"{release} {how}", "Linux 5.16 is the first that can")


def _directory(name: str, path: Path) -> Check:
    above = next(parent for parent in (path, *path.parents) if parent.exists())
    writable = above.is_dir() and os.access(above, os.W_OK)
    usage = shutil.disk_usage(above)
    detail = f"{path}, {usage.free / (1 << 30):.1f} GiB free" if writable else f"{above} can not be written"
    return Check(name, writable, detail, f"make {above} writable or set {name}")


def _server(url: str) -> Check:
    from imaged.fetching.retry import RetryPolicy
    from imaged.fetching.upstream import HttpUpstream

    upstream = HttpUpstream(url, retry=RetryPolicy(total_s=2.0), timeout_s=5.0)
    try:
        count = len(upstream.images())
    except PvisorError as error:
        return Check("server", False, error.message, error.hint)
    finally:
        upstream.close()
    return Check("server", True, f"{url} has {count} {'image' if count == 1 else 'images'}")
