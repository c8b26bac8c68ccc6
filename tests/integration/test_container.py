"""The container image: built from the Dockerfile, and tried.

The base is our own Debian root under the name that the Dockerfile asks for, so no registry is needed; apt and pip are
configured as on this host, by files that are there while the image is built and are not part of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.debian import TAG, debian_layout

pytestmark = [pytest.mark.root, pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(2400)]
ROOT = Path(__file__).resolve().parents[2]
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


@pytest.fixture(scope="module")
def storage() -> Iterator[Path]:
    """Where podman keeps IMAGE: it wants a path of at most 50 characters."""
    with tempfile.TemporaryDirectory(prefix="pvisor-image-") as directory:
        place = Path(directory)
        try:
            build(place)
            yield place
        finally:
            subprocess.run([*podman(place), "rmi", "--all", "--force"], check=False, capture_output=True)
            subprocess.run(["umount", str(place / "root/overlay")], check=False, capture_output=True)


def run(storage: Path, *argv: str) -> list[str]:
    limits = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"]
    return [*podman(storage), "run", "--rm", "--network=host", *limits, IMAGE, *argv]


def test_all_that_a_container_can_bring_is_in_the_image(storage: Path) -> None:
    """Without what its host gives to a worker's: the device and privileges."""
    done = subprocess.run(run(storage, "doctor", "--json"), capture_output=True, text=True, check=False)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    programs = ("qemu-system-x86_64", "firmware", "busybox", "perl", "mkfs.ext4", "qemu-img")
    for name in ("root", "fusermount3", "PVISOR_HOME", *(f"VMs: {program}" for program in programs)):
        assert checks[name]["ok"], checks[name]


def test_the_image_serves_and_ends_when_it_is_told_to(storage: Path) -> None:
    command = run(storage, "serve", "--listen", "127.0.0.1:0", "--workers=2", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            with urllib.request.urlopen(f"{url}/readyz", timeout=60) as answer:
                assert answer.status == 200
        finally:
            server.terminate()
        assert server.wait(60) == 0
