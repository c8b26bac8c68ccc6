"""Getting the kernel package, from an apt that a test made: once for many, whole or not at all, clear when it fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vmm.errors import VmSetupError
from vmm.guest import package

PROGRAMS = {
    "apt-cache": 'echo "linux-image-cloud-amd64"; echo "  Depends: linux-image-6.1.0-9-cloud-amd64"',
    "apt-get": 'echo "$2" >> "$CALLS"; sleep 0.2; echo x > "$2_6.1_amd64.deb"',
    "dpkg-deb": 'mkdir -p "$3/boot" "$3/lib/modules"; cp "$2" "$3/boot/vmlinuz"',
}


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in PROGRAMS.items():
        fake(tmp_path, name, text)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def fake(directory: Path, name: str, text: str) -> None:
    path = directory / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.endswith(".lock"))


def test_many_at_once_download_once(tmp_path: Path, calls: Path) -> None:
    target = tmp_path / "home/guest/kernel"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: package.unpack(target), range(8)))
    assert (target / "boot/vmlinuz").read_text() == "x\n"
    assert calls.read_text() == "linux-image-6.1.0-9-cloud-amd64\n"
    assert left(target.parent) == ["kernel"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("apt-cache", "echo linux-image-cloud-amd64", "package lists of this host do not have"),
        ("apt-cache", "echo 'E: No packages found' >&2; exit 100", "apt-cache depends .*No packages found"),
        ("apt-get", "echo 'E: Failed to fetch: Temporary failure' >&2; exit 100", "download .*: E: Failed to fetch"),
        ("apt-get", "true", "made 0 files"),
        ("dpkg-deb", 'mkdir "$3"; echo "No space left on device" >&2; exit 2', "dpkg-deb .*No space left"),
    ],
)
def test_what_fails_leaves_nothing(tmp_path: Path, calls: Path, name: str, text: str, said: str) -> None:
    fake(tmp_path, name, text)
    target = tmp_path / "home/guest/kernel"
    with pytest.raises(VmSetupError, match=said) as raised:
        package.unpack(target)
    assert "PVISOR_KERNEL" in raised.value.hint
    assert left(target.parent) == []
    for name, text in PROGRAMS.items():
        fake(tmp_path, name, text)
    package.unpack(target)
    assert (target / "boot/vmlinuz").exists()


def test_a_host_without_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VmSetupError, match=r"no apt-cache \(Debian's apt\)"):
        package.unpack(tmp_path / "home/kernel")


def test_no_place_for_it(tmp_path: Path, calls: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(VmSetupError, match=r"Not a directory|File exists"):
        package.unpack(tmp_path / "home/guest/kernel")
