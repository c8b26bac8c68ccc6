"""What this host can test is said in the header; what it can not is skipped with the reason, never in silence.

Tests run in several processes at once (`make test`), the tests of a file in one of them. Every test has directories,
ports, mounts and daemons of its own; what measures time closely, or changes the whole host, is marked `alone`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuse import linux
from tests.support.turns import Turns

PROGRAMS = {
    "root": ("mount", "umount"),
    "fuse": ("fusermount3",),
    "network": ("docker-registry", "skopeo"),
    "browser": ("chromium", "chromedriver"),
    "qemu": ("qemu-system-x86_64", "busybox", "getfattr"),
    "s3": ("swift-proxy-server", "swift-account-server", "swift-container-server", "swift-object-server", "memcached"),
}


def missing(marker: str) -> str:
    """Why tests with this marker can not run here, or an empty string."""
    absent = [program for program in PROGRAMS[marker] if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    if marker in ("root", "fuse") and os.geteuid() != 0:
        return "not root"
    if marker == "fuse" and not Path("/dev/fuse").exists():
        return "no /dev/fuse"
    return ""


def pytest_configure() -> None:
    """A worker has a mount namespace of its own: processes of the others keep none of its mounts in use."""
    if "PYTEST_XDIST_WORKER" in os.environ and os.geteuid() == 0:
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("", "/", "", linux.MS_REC | linux.MS_PRIVATE)


def pytest_report_header() -> str:
    return "features: " + "; ".join(f"{marker}: {missing(marker) or 'yes'}" for marker in PROGRAMS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {marker: missing(marker) for marker in PROGRAMS}
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees this host's pVisor settings or registry credentials, nor its state."""
    for name in [name for name in os.environ if name.startswith(("PVISOR_", "AWS_"))]:
        monkeypatch.delenv(name)
    empty = tmp_path_factory.getbasetemp() / "nowhere"
    empty.mkdir(exist_ok=True)
    (empty / "auth.json").write_text("{}")
    monkeypatch.setenv("PVISOR_HOME", str(empty / "home"))
    monkeypatch.setenv("PVISOR_RUN", str(empty / "run"))
    monkeypatch.setenv("DOCKER_CONFIG", str(empty / "docker"))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(empty / "auth.json"))
    yield


@pytest.fixture(scope="session")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Turns:
    base = tmp_path_factory.getbasetemp()
    return Turns(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)  # a worker's own is below the run's


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest, turns: Turns) -> Iterator[None]:
    """No other process runs a test while one that is marked `alone` runs."""
    wanted = turns.alone() if request.node.get_closest_marker("alone") else turns.among_others()
    with wanted:
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_stays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a failed test left mounted or running below this session's directory does not outlive the session."""
    base = f"{tmp_path_factory.getbasetemp()}/"
    yield
    for process in Path("/proc").glob("[0-9]*"):
        try:
            argv = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue
        ours = "fuse.daemon" in argv or argv[0].endswith("qemu-system-x86_64")
        if ours and any(base in argument for argument in argv):
            os.kill(int(process.name), signal.SIGKILL)
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in reversed(points):
        if point.startswith(base):
            subprocess.run(["umount", "--lazy", point], check=False)
