"""Ten versions of an image at a chunk server: the bytes stored, beside the compressed layers and beside casync.

A version is the Debian root rebuilt, as one layer: of its files one in fifty is edited in place (some bytes in the
middle), one in a hundred grows, and each version brings a directory of its own. Registries keep every layer whole;
casync cuts the same trees into chunks by content (its defaults: 16 to 256 KiB, zstd).
"""

from __future__ import annotations

import argparse
import io
import random
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.common import Cost, measure, show, write
from bench.image import layers, pvisor, pvisor_env
from scripts.debian import TAG, debian_layout

VERSIONS = 10
EDITED, GROWN, NEW_FILES = 50, 100, 20


def version(base: Path, number: int, target: Path) -> None:
    """The tar of one version; the first is the root as it is."""
    source = random.Random(number)
    with tarfile.open(base) as old, tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as new:
        for entry in old:
            data = old.extractfile(entry) if entry.isreg() else None
            body = data.read() if data is not None else b""
            if number and body:
                body = _edited(body, source)
                entry.size = len(body)
                entry.pax_headers = {key: value for key, value in entry.pax_headers.items() if key != "size"}
            new.addfile(entry, io.BytesIO(body) if data is not None else None)
        for name, body in _own_files(number, source):
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            new.addfile(entry, io.BytesIO(body))


def _edited(body: bytes, source: random.Random) -> bytes:
    if source.randrange(EDITED) == 0:
        at = source.randrange(len(body))
        patch = source.randbytes(64)
        body = body[:at] + patch + body[at + len(patch) :]
    if source.randrange(GROWN) == 0:
        at = source.randrange(len(body))
        body = body[:at] + source.randbytes(100) + body[at:]
    return body


def _own_files(number: int, source: random.Random) -> Iterator[tuple[str, bytes]]:
    words = [f"{source.randrange(10000):04d} " for _ in range(500)]
    for file in range(NEW_FILES):
        yield f"srv/v{number}/file{file}", "".join(source.choices(words, k=4000)).encode()


def tree_bytes(path: Path) -> int:
    """The lengths of all files below path."""
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=VERSIONS, help="versions")
    count = parser.parse_args().n
    costs: dict[str, list[Cost]] = {"layers (gzip -6)": [], "casync": [], "pvisor": []}
    stored: dict[str, list[int]] = {name: [] for name in costs}
    with tempfile.TemporaryDirectory(prefix="pvisor-bench-") as directory:
        scratch = Path(directory)
        base, tar = scratch / "base.tar", scratch / "version.tar"
        with base.open("wb") as output:
            subprocess.run(["zcat", str(layers(debian_layout())[0])], stdout=output, check=True)
        layer_bytes = 0
        for number in range(count):
            version(base, number, tar)
            root, layout = scratch / "root", scratch / "layout"
            shutil.rmtree(root, ignore_errors=True)
            shutil.rmtree(layout, ignore_errors=True)
            root.mkdir()
            subprocess.run(["tar", "-xpf", str(tar), "-C", str(root)], check=True)
            costs["layers (gzip -6)"].append(measure(["gzip", "-6", "--keep", "--force", str(tar)]))
            layer_bytes += (scratch / "version.tar.gz").stat().st_size
            stored["layers (gzip -6)"].append(layer_bytes)
            index = scratch / f"{number}.caidx"
            argv = ["casync", "make", f"--store={scratch / 'casync'}", str(index), str(root)]
            costs["casync"].append(measure(argv))
            stored["casync"].append(
                tree_bytes(scratch / "casync") + sum(x.stat().st_size for x in scratch.glob("*.caidx"))
            )
            _make_layout(layout, tar)
            argv = [pvisor(), "convert", f"oci:{layout}:{TAG}", "--name", f"app:v{number}"]
            costs["pvisor"].append(measure(argv, env=pvisor_env(scratch)))
            stored["pvisor"].append(tree_bytes(scratch / "home/store/packs"))
    show(
        f"{count} versions of a Debian root",
        ["", "first MB", f"all {count} MB", "each further MB", "of the layers", "CPU s a version"],
        [
            [
                name,
                f"{sizes[0] / 1e6:.1f}",
                f"{sizes[-1] / 1e6:.1f}",
                f"{(sizes[-1] - sizes[0]) / max(1, count - 1) / 1e6:.2f}",
                f"{sizes[-1] / layer_bytes:.2f}x",
                f"{sum(cost.cpu_s for cost in costs[name]) / count:.1f}",
            ]
            for name, sizes in stored.items()
        ],
    )
    document = {
        name: {"stored_bytes": sizes, "cpu_s": [cost.cpu_s for cost in costs[name]]} for name, sizes in stored.items()
    }
    write("serve_dedup", {"versions": count, "contenders": document})


def _make_layout(layout: Path, tar: Path) -> None:
    image = f"{layout}:{TAG}"
    for argv in (
        ["umoci", "init", "--layout", str(layout)],
        ["umoci", "new", "--image", image],
        ["umoci", "raw", "add-layer", "--image", image, str(tar)],
    ):
        subprocess.run(argv, check=True, capture_output=True)


if __name__ == "__main__":
    main()
