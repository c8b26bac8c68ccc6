"""A cold shell: nothing of the image on the host, to the first output byte of a fresh process.

`pvisor run` with the node daemon up and an empty store, beside `podman pull` + `podman run` of the same image from the
registry on loopback, and both warm. Fresh client state for each cold sample; samples are interleaved.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from bench.common import Podman, Samples, measure, show, time_first_byte, write
from bench.image import pvisor, pvisor_env, served_blocks, served_debian

SHELL = ("sh", "-c", '. /etc/os-release; echo "ready $PRETTY_NAME"')


def node_status(env: dict[str, str]) -> dict[str, int]:
    """requests, fetched_chunks, fetched_bytes of the only image."""
    done = subprocess.run([pvisor(), "node", "status", "--json"], env=env, capture_output=True, check=True)
    (image,) = json.loads(done.stdout)["images"].values()
    return {key: image[key] for key in ("requests", "fetched_chunks", "fetched_bytes", "reads")}


def pvisor_sample(name: str, server: str, scratch: Path, warm_runs: int) -> tuple[float, list[float], dict[str, int]]:
    """Seconds to ready cold, then warm, and what the cold start fetched."""
    state = scratch / "worker"
    shutil.rmtree(state, ignore_errors=True)
    env = pvisor_env(state) | {"PVISOR_SERVER": server}
    subprocess.run([pvisor(), "node", "start"], env=env, check=True, capture_output=True)
    try:
        argv = [pvisor(), "run", name, "--", *SHELL]
        cold = time_first_byte(argv, env=env).ready_s
        fetched = node_status(env)
        warm = [time_first_byte(argv, env=env).ready_s for _ in range(warm_runs)]
    finally:
        subprocess.run([pvisor(), "node", "stop"], env=env, check=True, capture_output=True)
    return cold, warm, fetched


def podman_sample(image: str, scratch: Path, warm_runs: int) -> tuple[float, list[float]]:
    """Seconds of pull and run to ready, then of a run alone."""
    podman = Podman(scratch / "podman")
    podman.forget()
    started = time.perf_counter()
    measure(podman.pull(image))
    pulled_s = time.perf_counter() - started
    argv = podman.run(image, *SHELL)
    cold = pulled_s + time_first_byte(argv).ready_s
    return cold, [time_first_byte(argv).ready_s for _ in range(warm_runs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=10)
    count = parser.parse_args().n
    rows = {key: Samples() for key in ("pvisor cold", "podman cold", "pvisor warm", "podman warm")}
    fetched: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory(prefix="pvisor-bench-") as directory, served_debian() as image:
        scratch = Path(directory)
        with served_blocks(image, scratch) as server:
            for _ in range(count):
                cold, warm, counts = pvisor_sample(image.name, server, scratch, 2)
                rows["pvisor cold"].add(cold)
                rows["pvisor warm"].values += warm
                fetched.append(counts)
                cold, warm = podman_sample(image.reference, scratch, 2)
                rows["podman cold"].add(cold)
                rows["podman warm"].values += warm
        Podman(scratch / "podman").forget()
        subprocess.run(["umount", str(scratch / "podman/root/overlay")], check=False, capture_output=True)
    show(
        "first output byte of a shell in Debian",
        ["", "n", "P50 ms", "P95 ms", "podman / pvisor"],
        [
            [
                key,
                str(len(samples.values)),
                f"{samples.p50 * 1e3:.0f}",
                f"{samples.p95 * 1e3:.0f}",
                f"{rows[key.replace('pvisor', 'podman')].p50 / rows[key.replace('podman', 'pvisor')].p50:.1f}x",
            ]
            for key, samples in rows.items()
        ],
    )
    worst = {key: max(counts[key] for counts in fetched) for key in fetched[0]}
    print(
        f"a cold start took at most {worst['requests']} requests, {worst['fetched_chunks']} chunks and "
        f"{worst['fetched_bytes'] / 1e6:.2f} MB on the wire"
    )
    write("cold_shell", {"samples": {key: value.to_json() for key, value in rows.items()}, "fetched": fetched})


if __name__ == "__main__":
    main()
