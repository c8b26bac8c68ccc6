"""The image that benchmarks use: a Debian root in a registry on loopback, and converted at a chunk server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.debian import TAG, debian_layout
from tests.support.ports import free_port
from tests.support.registry import run_registry

REPOSITORY = "debian"


@dataclass(frozen=True, slots=True)
class ServedImage:
    """An image in a registry: HOST:PORT/REPO:TAG, its name once converted, the bytes of its layers unpacked."""

    reference: str
    layout: Path
    uncompressed_bytes: int

    @property
    def name(self) -> str:
        return self.reference.partition("/")[2]


def pvisor() -> str:
    """The command as installed beside this interpreter."""
    beside = Path(sys.executable).parent / "pvisor"
    found = str(beside) if beside.exists() else shutil.which("pvisor")
    if found is None:
        raise RuntimeError("pvisor is not installed in this environment; `make` targets do that")
    return found


def pvisor_env(state: Path) -> dict[str, str]:
    """An environment whose PVISOR_HOME and PVISOR_RUN are below `state`, and that names no server."""
    dropped = ("PVISOR_", "PYTHONDONTWRITEBYTECODE")  # an installed command has its modules compiled
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    return kept | {"PVISOR_HOME": str(state / "home"), "PVISOR_RUN": str(state / "run")}


@contextmanager
def served_debian(name: str = "minbase", packages: Sequence[str] = ()) -> Iterator[ServedImage]:
    """The Debian image in a docker-registry of its own on loopback."""
    layout = debian_layout(name, packages)
    with run_registry() as registry:
        registry.push(f"oci:{layout}:{TAG}", f"{REPOSITORY}:{TAG}")
        yield ServedImage(f"{registry.address}/{REPOSITORY}:{TAG}", layout, layer_bytes(layout))


def layers(layout: Path) -> list[Path]:
    """The compressed layers of the layout's only image, lowest first."""
    manifest_digest = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
    manifest = json.loads(blob(layout, manifest_digest).read_text())
    return [blob(layout, layer["digest"]) for layer in manifest["layers"]]


def layer_bytes(layout: Path) -> int:
    """Bytes of the layout's layers when decompressed."""
    total = 0
    for layer in layers(layout):
        with subprocess.Popen(["zcat", str(layer)], stdout=subprocess.PIPE) as zcat:
            assert zcat.stdout is not None
            while block := zcat.stdout.read(1 << 20):
                total += len(block)
    return total


def blob(layout: Path, digest: str) -> Path:
    algorithm, _, digits = digest.partition(":")
    return layout / "blobs" / algorithm / digits


@contextmanager
def served_blocks(image: ServedImage, scratch: Path) -> Iterator[str]:
    """A chunk server on loopback that has converted the image; yields its URL."""
    url = f"http://127.0.0.1:{free_port()}"
    env = pvisor_env(scratch / "server")
    argv = [pvisor(), "serve", "--listen", url.removeprefix("http://")]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()  # announced: it accepts requests
            convert = [pvisor(), "convert", f"docker://{image.reference}", "--name", image.name, "--server", url]
            subprocess.run(convert, env=pvisor_env(scratch / "client"), check=True, capture_output=True)
            yield url
        finally:
            server.terminate()
            server.wait(timeout=20)
