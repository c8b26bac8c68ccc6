"""A real Debian root as an OCI layout, built with mmdebstrap and umoci; the demo, tests and benchmarks share it."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".demo"
TAG = "bookworm"


def debian_layout(name: str = "minbase", packages: Sequence[str] = ()) -> Path:
    """The layout's directory, its image tagged `bookworm`; built when it is not in `.demo/` yet (about 30 s)."""
    layout = CACHE / name
    if layout.exists():
        return layout
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        tar, fresh = Path(scratch) / "root.tar", Path(scratch) / "layout"
        image = f"{fresh}:{TAG}"
        include = [f"--include={','.join(packages)}"] if packages else []
        for argv in (
            ["mmdebstrap", "--variant=minbase", *include, TAG, str(tar)],
            ["umoci", "init", "--layout", str(fresh)],
            ["umoci", "new", "--image", image],
            ["umoci", "raw", "add-layer", "--image", image, str(tar)],
            ["umoci", "config", "--image", image, "--config.cmd", "/bin/bash"],
        ):
            subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
        fresh.rename(layout)
    return layout
