"""The `pvisor` command as a fresh process, with a home and run directory of the test's own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.busybox import busybox_root
from tests.support.oci import write_layout

ROOT = Path(__file__).parents[2]
ARGV = [sys.executable, "-c", "from cli.main import main; main()"]


@dataclass(frozen=True, slots=True)
class Host:
    """One worker, or one store: PVISOR_HOME and PVISOR_RUN below `root`."""

    root: Path
    server: str = ""
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PVISOR_")}
        server = {"PVISOR_SERVER": self.server} if self.server else {}
        paths = {"PVISOR_HOME": str(self.root / "home"), "PVISOR_RUN": str(self.root / "run")}
        return {**kept, **paths, **server, **self.extra, "PYTHONPATH": str(ROOT)}

    def start(self, *argv: str, **options: Any) -> subprocess.Popen[bytes]:
        """The command, not waited for."""
        defaults = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*ARGV, *argv], env=self.env, **{**defaults, **options})

    def run(self, *argv: str, code: int = 0, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """The command to its end; AssertionError with its output when the exit code is another."""
        done = subprocess.run([*ARGV, *argv], env=self.env, input=stdin, capture_output=True, timeout=120)
        assert done.returncode == code, (argv, done.returncode, done.stdout[-2000:], done.stderr[-4000:])
        return done

    def json(self, *argv: str, code: int = 0) -> Any:
        """The one JSON document that the command prints with --json."""
        return json.loads(self.run(*argv, "--json", code=code).stdout)

    def error(self, *argv: str, code: int = 1) -> str:
        """What the command says when it fails as it should: short, and no traceback."""
        text = self.run(*argv, code=code).stderr.decode()
        assert "Traceback" not in text, text
        assert text.startswith("pvisor: error: ") or code == 2, text
        assert len(text.splitlines()) <= 6, text
        return text

    def assert_sound(self) -> None:
        """Every chunk and every image of the store is whole."""
        assert self.json("store", "fsck")["errors"] == []


@contextlib.contextmanager
def host(root: Path, server: str = "", **extra: str) -> Iterator[Host]:
    """A host whose node daemon, if one was started, is stopped at the end."""
    made = Host(root, server, dict(extra))
    try:
        yield made
    finally:
        made.run("node", "stop")


def directory_layer(root: Path) -> bytes:
    """A tar of a directory, its own metadata included."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(root, arcname=".")
    return buffer.getvalue()


def busybox_layout(scratch: Path, *more: bytes, tag: str = "v1", config: dict[str, Any] | None = None) -> Path:
    """An OCI layout `scratch/box` with a busybox image, and further layers on top."""
    base = scratch / "busybox-root"
    if not base.exists():
        busybox_root(base)
    defaults = {"Cmd": ["sh", "-c", "echo from Cmd"], "Env": ["PATH=/bin", "COLOR=green"], "WorkingDir": "/tmp"}
    return write_layout(scratch / "box", [directory_layer(base), *more], tag=tag, config=config or defaults)


def pvisor_mounts(root: Path) -> Sequence[str]:
    """Mount points at or below `root`."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if point.startswith(str(root))]
