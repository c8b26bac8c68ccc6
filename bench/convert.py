"""Conversion of a Debian image from a registry on loopback, beside `podman pull` and `skopeo copy` + `umoci unpack`.

Prints MB/s of uncompressed layer data, CPU seconds, peak memory and bytes stored. Every contender starts without any
state; samples are interleaved.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from bench.common import Cost, Podman, Samples, measure, show, write
from bench.image import pvisor, pvisor_env, served_debian

CONTENDERS = ("pvisor convert", "podman pull", "skopeo copy + umoci unpack")


def disk_bytes(path: Path) -> int:
    """Blocks in use below path."""
    done = subprocess.run(["du", "--block-size=1", "-s", str(path)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def sample(contender: str, image: str, scratch: Path) -> tuple[Cost, int]:
    """One run with fresh state: its cost and the bytes it leaves on disk."""
    state = scratch / "state"
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir()
    if contender == "pvisor convert":
        cost = measure([pvisor(), "convert", f"docker://{image}"], env=pvisor_env(state))
    elif contender == "podman pull":
        cost = measure(Podman(state).pull(image))
    else:
        layout = f"{state / 'layout'}:image"
        copied = measure(["skopeo", "copy", "--quiet", "--src-tls-verify=false", f"docker://{image}", f"oci:{layout}"])
        unpacked = measure(["umoci", "unpack", "--image", layout, str(state / "bundle")])
        cost = Cost(
            copied.wall_s + unpacked.wall_s,
            copied.cpu_s + unpacked.cpu_s,
            max(copied.peak_bytes, unpacked.peak_bytes),
        )
    stored = disk_bytes(state)
    if contender == "podman pull":
        Podman(state).forget()
        subprocess.run(["umount", str(state / "root" / "overlay")], check=False, capture_output=True)
    return cost, stored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=5)
    count = parser.parse_args().n
    wall = {contender: Samples() for contender in CONTENDERS}
    cpu = {contender: Samples() for contender in CONTENDERS}
    peak = dict.fromkeys(CONTENDERS, 0)
    stored = dict.fromkeys(CONTENDERS, 0)
    with served_debian() as image, tempfile.TemporaryDirectory(prefix="pvisor-bench-") as directory:
        for _ in range(count):
            for contender in CONTENDERS:
                cost, stored[contender] = sample(contender, image.reference, Path(directory))
                wall[contender].add(cost.wall_s)
                cpu[contender].add(cost.cpu_s)
                peak[contender] = max(peak[contender], cost.peak_bytes)
        layer_bytes = image.uncompressed_bytes
    podman_s = wall["podman pull"].p50
    show(
        f"conversion of {layer_bytes / 1e6:.0f} MB of layers, n = {count}",
        ["contender", "P50 s", "P95 s", "MB/s", "CPU s", "peak MB", "stored MB", "podman / this"],
        [
            [
                contender,
                f"{wall[contender].p50:.2f}",
                f"{wall[contender].p95:.2f}",
                f"{layer_bytes / 1e6 / wall[contender].p50:.0f}",
                f"{cpu[contender].p50:.2f}",
                f"{peak[contender] / 1e6:.0f}",
                f"{stored[contender] / 1e6:.1f}",
                f"{podman_s / wall[contender].p50:.2f}x",
            ]
            for contender in CONTENDERS
        ],
    )
    results = {
        contender: {
            "wall_s": wall[contender].to_json(),
            "cpu_s": cpu[contender].to_json(),
            "peak_bytes": peak[contender],
            "stored_bytes": stored[contender],
        }
        for contender in CONTENDERS
    }
    write("convert", {"layer_bytes": layer_bytes, "contenders": results})


if __name__ == "__main__":
    main()
