"""A host that runs VMs from a Debian root, and leaves none of them behind however a test ends."""

from __future__ import annotations

import contextlib
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


@contextlib.contextmanager
def vm_host(root: Path, *, image: bool = True, server: str = "", **extra: str) -> Iterator[Host]:
    """With the image `debian:12` in its store, if wanted; its VMs are killed at the end."""
    with host(root, server, **kernel_environment(), **extra) as made:
        try:
            if image:
                made.run("convert", f"oci:{debian_layout()}:{TAG}", "--name", IMAGE)
            yield made
        finally:
            end_vms(made)


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
