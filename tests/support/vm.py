"""A host that runs VMs from a Debian root, and leaves none of them behind however a test ends."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.debian import TAG, debian_layout
from tests.support import guest
from tests.support.command import Host, host
from vmm import recovery

IMAGE = "debian:12"
MEMORY = "256M"


_SEED = "seed"
"""A file of a seeded host: the snapshot that its VMs are made from, which has no name."""


@contextlib.contextmanager
def vm_host(root: Path, *, image: bool = True, seeded: bool = False, server: str = "", **extra: str) -> Iterator[Host]:
    """With the image `debian:12` in its store, if wanted; its VMs are killed at the end.

    On a `seeded` one `start` resumes a guest that was parked just after its boot, where no option is given: five times
    as quick. A collection may take that away.
    """
    with host(root, server, **kernel_environment(), **extra) as made:
        try:
            if image:
                template = _seeded() if seeded else _converted()
                root.mkdir(parents=True, exist_ok=True)
                # Shared by all modules: what was made of the image once. Index files are sparse.
                subprocess.run(["cp", "-a", "--sparse=always", f"{template}/.", str(root)], check=True)
            yield made
        finally:
            end_vms(made)


@functools.cache
def _converted() -> Path:
    """A host on which nothing runs, with the image; until this program ends."""
    root = Path(tempfile.mkdtemp(prefix="pvisor-vm-template-"))
    atexit.register(_remove, root, os.getpid())
    with host(root / "host") as made:
        made.run("convert", f"oci:{debian_layout()}:{TAG}", "--name", IMAGE)
    return root / "host"


def _remove(root: Path, maker: int) -> None:
    """At the exit of the process that made it, not of a child that a test forked."""
    if os.getpid() == maker:
        shutil.rmtree(root, ignore_errors=True)


@functools.cache
def _seeded() -> Path:
    """As `_converted`, with the snapshot of a guest that has just booted."""
    root = _converted().with_name("seeded")
    with vm_host(root) as made:
        start(made, "first")
        made.run("vm", "park", "first", "--as", _SEED)
        made.run("vm", "rm", "first")
        snapshot = made.json("snapshot", "inspect", _SEED)["id"]
        made.run("snapshot", "rm", _SEED)
    shutil.rmtree(root / "run", ignore_errors=True)
    (root / _SEED).write_text(snapshot)
    return root


def kernel_environment() -> dict[str, str]:
    """The kernel that all tests share, so that no home downloads one."""
    image = guest.kernel().image
    root = image.parent.parent
    return {} if root == Path("/") else {"PVISOR_KERNEL": str(root)}


def end_vms(made: Host) -> None:
    """Kill every QEMU of this host."""
    for run in (made.root / "run" / "vms").glob("*"):
        recovery.end(run)


def start(made: Host, name: str, *options: str, image: str = IMAGE) -> str:
    """A running VM."""
    seed = made.root / _SEED
    if seed.exists() and not options and image == IMAGE:
        made.run("vm", "resume", seed.read_text(), "--name", name)
        return name
    made.run("vm", "run", "--name", name, "--memory", MEMORY, *options, image)
    return name


def sh(made: Host, name: str, script: str, *options: str, code: int = 0, stdin: bytes = b"") -> bytes:
    """What a shell script in the VM writes to its stdout."""
    return made.run("vm", "exec", *options, name, "--", "sh", "-c", script, code=code, stdin=stdin).stdout


def shown(made: Host, name: str) -> dict[str, Any] | None:
    """What `vm ls` says of a VM; None when it lists none of this name."""
    found = [one for one in made.json("vm", "ls") if one["name"] == name]
    return found[0] if found else None


def state(made: Host, name: str) -> str:
    found = shown(made, name)
    return found["state"] if found is not None else "gone"


def qemus(made: Host) -> list[int]:
    """The QEMU processes of this host."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            argv = (process / "cmdline").read_bytes().split(b"\0")
            if argv[0].endswith(b"qemu-system-x86_64") and any(str(made.root).encode() in word for word in argv):
                found.append(int(process.name))
    return found


def wait_until(done: Callable[[], object], wait_s: float = 60.0) -> None:
    deadline = time.monotonic() + wait_s
    while not done():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
