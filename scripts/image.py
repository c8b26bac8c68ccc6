"""Builds the container image from the Dockerfile and tries it: `make image-test` (some minutes, mostly downloads).

The base is our own Debian root under the name that the Dockerfile asks for, so no registry is needed; apt and pip are
configured as on this host, by files that are there while the image is built and are not part of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from scripts.debian import TAG, debian_layout
from tests.support.registry import free_port

ROOT = Path(__file__).resolve().parent.parent
BASE = "docker.io/library/debian:12-slim"
IMAGE = "localhost/pvisor:test"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def podman(storage: Path) -> list[str]:
    """With a storage of its own, as it runs on hosts with cgroup v1 too."""
    where = [f"--root={storage / 'root'}", f"--runroot={storage / 'run'}", "--storage-driver=overlay"]
    return ["podman", "--cgroup-manager=cgroupfs", "--runtime=runc", *where]


def host_files(scratch: Path) -> list[str]:
    """Volumes that have apt and pip in the build find what they find here."""
    shown = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings: dict[str, str] = {"cert": "/host-ca.crt"}
    mounted: list[Path] = []
    for line in shown.stdout.splitlines():
        key, _, value = line.partition("=")
        value = value.strip("'\"")
        name = key.rpartition(".")[2]
        if name in ("index-url", "extra-index-url", "trusted-host", "find-links"):
            settings.setdefault(name, value)
            places = [Path(word.removeprefix("file://")) for word in value.split() if word.startswith(("file:", "/"))]
            mounted += [place.parent if place.name == "simple" else place for place in places]
    config = scratch / "pip.conf"
    config.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    volumes = {config: "/etc/pip.conf", Path("/etc/apt/apt.conf.d"): "/etc/apt/apt.conf.d"}
    volumes |= {_CERTIFICATES: "/host-ca.crt"} | {place: str(place) for place in mounted if place.exists()}
    return [f"--volume={source}:{target}:ro" for source, target in volumes.items()]


def build(storage: Path) -> None:
    """The image IMAGE in `storage`."""
    target = f"containers-storage:[overlay@{storage / 'root'}+{storage / 'run'}]{BASE}"
    subprocess.run(["skopeo", "copy", "--quiet", f"oci:{debian_layout()}:{TAG}", target], check=True)
    options = ["--isolation=chroot", "--network=host", "--pull=never", "--quiet", f"--tag={IMAGE}"]
    subprocess.run([*podman(storage), "build", *options, *host_files(storage), str(ROOT)], check=True)


def try_it(storage: Path) -> None:
    """`pvisor doctor` runs in it; `pvisor serve` answers, and ends when it is told to."""
    run = [*podman(storage), "run", "--rm", "--network=host", "--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"]
    done = subprocess.run([*run, IMAGE, "doctor", "--json"], capture_output=True, text=True, check=False)
    print("doctor:", json.dumps(json.loads(done.stdout))[:2000])
    address = f"127.0.0.1:{free_port()}"
    with subprocess.Popen([*run, IMAGE, "serve", "--listen", address, "--workers=2"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        print("serve:", server.stdout.readline().decode().strip())
        with urllib.request.urlopen(f"http://{address}/readyz", timeout=20) as answer:
            print("readyz:", answer.read().decode().strip())
        server.terminate()
        print("ended with status", server.wait(60))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="pvisor-image-") as directory:
        storage = Path(directory)
        try:
            began_s = time.monotonic()
            build(storage)
            print(f"built in {time.monotonic() - began_s:.0f} s")
            try_it(storage)
        finally:
            subprocess.run([*podman(storage), "rmi", "--all", "--force"], check=False, capture_output=True)
            subprocess.run(["umount", str(storage / "root/overlay")], check=False, capture_output=True)


if __name__ == "__main__":
    main()
