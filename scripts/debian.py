"""A real Debian root as an OCI layout, built with mmdebstrap and umoci; the demo, tests and benchmarks share it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import random
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".demo"
TAG = "bookworm"


def debian_layout(name: str = "minbase", packages: Sequence[str] = (), script: str = "") -> Path:
    """The layout's directory, its image tagged `bookworm`; built when it is not in `.demo/` yet (about 30 s).

    `script` is run by a shell in the finished root.
    """
    layout = CACHE / name
    with _making(layout) as scratch:
        if scratch is None:
            return layout
        tar, fresh = scratch / "root.tar", scratch / "layout"
        image = f"{fresh}:{TAG}"
        more = [f"--include={','.join(packages)}"] if packages else []
        if script:
            more.append(f'--customize-hook=chroot "$1" sh -ec "{script}"')
        for argv in (
            ["mmdebstrap", "--variant=minbase", *more, TAG, str(tar)],
            ["umoci", "init", "--layout", str(fresh)],
            ["umoci", "new", "--image", image],
            ["umoci", "raw", "add-layer", "--image", image, str(tar)],
            ["umoci", "config", "--image", image, "--config.cmd", "/bin/bash"],
        ):
            subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
        fresh.rename(layout)
    return layout


def debian_variant(name: str, number: int) -> Path:
    """minbase and a layer on top with 1 MiB of noise in /srv/data; the same for the same number."""
    layout = CACHE / name
    base = debian_layout()
    with _making(layout) as scratch:
        if scratch is None:
            return layout
        tar, fresh = scratch / "layer.tar", scratch / "layout"
        shutil.copytree(base, fresh)
        entry = tarfile.TarInfo("srv/data")
        entry.size = 1 << 20
        with tarfile.open(tar, "w") as stream:
            stream.addfile(entry, io.BytesIO(random.Random(number).randbytes(entry.size)))
        argv = ["umoci", "raw", "add-layer", "--image", f"{fresh}:{TAG}", str(tar)]
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
        fresh.rename(layout)
    return layout


@contextlib.contextmanager
def _making(layout: Path) -> Iterator[Path | None]:
    """A scratch directory to make it in; None when it is there. Processes that want it at once wait for the first."""
    CACHE.mkdir(exist_ok=True)
    lock = os.open(layout.with_name(f"{layout.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not layout.exists():
            fcntl.flock(lock, fcntl.LOCK_EX)
        if layout.exists():
            yield None
            return
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            yield Path(scratch)
    finally:
        os.close(lock)
