"""A root directory with this Python and its standard library, as the lower of a stage that runs programs of a test."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.support.busybox import busybox_root

_LEFT_OUT = ("test", "tests", "__pycache__", "site-packages", "dist-packages", "idlelib", "ensurepip", "config-*")
PYTHON = Path(sys.executable).resolve()


def python_root(path: Path) -> Path:
    """Makes `path`; the interpreter is where it is on the host."""
    busybox_root(path)
    library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(library, path / library.relative_to("/"), symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    for file in {PYTHON, *_libraries(PYTHON, *(library / "lib-dynload").glob("*.so"))}:
        target = path / file.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
    return path


def _libraries(*programs: Path) -> set[Path]:
    """The shared libraries these load, and their loader, under the names they are asked by."""
    told = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False, timeout=30).stdout
    return {Path(name) for name in re.findall(r"(/\S+) \(0x", told)}
