"""What is in the initramfs, that it is made once, and what is said when this host lacks a part."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from vmm.errors import VmSetupError
from vmm.guest import initramfs as module
from vmm.guest.initramfs import MODULES, initramfs
from vmm.guest.kernel import Kernel

pytestmark = pytest.mark.skipif(
    any(shutil.which(name) is None for name in ("busybox", "perl", "ldd")), reason="no busybox, perl or ldd"
)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    modules = tmp_path / "lib/modules/6.1-test"
    modules.mkdir(parents=True)
    for name in {name for group in MODULES.values() for name in group} - {"button"}:
        needs = "virtio" if name.startswith("virtio_") else ""
        (modules / f"{name}.ko").write_bytes(f"{name}\0depends={needs}\0".encode())
    (modules / "virtio.ko").write_bytes(b"virtio\0depends=\0")
    (modules / "modules.builtin").write_text("kernel/drivers/acpi/button.ko\n")
    return Kernel(image=tmp_path / "vmlinuz", modules=modules, release="6.1-test")


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    path = tmp_path / "agent.pl"
    path.write_text("print 'agent'")
    return path


def unpacked(path: Path, into: Path) -> Path:
    into.mkdir()
    subprocess.run(["busybox", "cpio", "-i", "-d"], input=path.read_bytes(), cwd=into, check=True, timeout=60)
    return into


def in_root(root: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the initramfs with that as its root."""
    environment = {**os.environ, "LC_ALL": "C"}
    command = ["chroot", str(root), *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


def test_content(tmp_path: Path, kernel: Kernel, agent: Path) -> None:
    root = unpacked(initramfs(tmp_path / "home", kernel, agent=(agent,)), tmp_path / "root")
    assert (root / "pvisor/agent.pl").read_text() == "print 'agent'"
    assert (root / "init").read_bytes() == module.INIT.read_bytes() and os.access(root / "init", os.X_OK)
    assert (root / "modules/base").read_text().split()[:2] == ["virtio.ko", "virtio_pci.ko"]
    assert (root / "modules/network").read_text() == "virtio_net.ko\n"
    assert (root / "modules/late").read_text() == "virtio_rng.ko\nevdev.ko\n"
    listed = [name for group in MODULES for name in (root / "modules" / group).read_text().split()]
    assert sorted(listed) == sorted(path.name for path in (root / "modules").glob("*.ko"))
    assert (root / "pvisor/dev/stdout").readlink() == Path("/proc/self/fd/1")
    for name in ("proc", "sys", "dev", "lower", "upper", "newroot"):
        assert (root / name).is_dir()


@pytest.mark.root
def test_its_perl_runs_with_nothing_else(tmp_path: Path, kernel: Kernel, agent: Path) -> None:
    agent.write_text("use strict; use warnings; use POSIX (); use List::Util 'sum'; print sum(POSIX::EINTR(), 3)")
    root = unpacked(initramfs(tmp_path / "home", kernel, agent=(agent,)), tmp_path / "root")
    done = in_root(root, "/usr/bin/perl", "/pvisor/agent.pl")
    assert (done.stdout, done.stderr) == ("7", "")
    assert not list(root.rglob("Socket.pm"))


@pytest.mark.root
def test_the_agent_compiles_in_it(tmp_path: Path, kernel: Kernel) -> None:
    root = unpacked(initramfs(tmp_path / "home", kernel), tmp_path / "root")
    done = in_root(root, "/usr/bin/perl", "-c", "/pvisor/agent.pl")
    assert done.stderr == "/pvisor/agent.pl syntax OK\n"


def test_made_once_and_anew_when_a_part_changes(tmp_path: Path, kernel: Kernel, agent: Path) -> None:
    home = tmp_path / "home"
    first = initramfs(home, kernel, agent=(agent,))
    born = first.stat().st_ino
    assert initramfs(home, kernel, agent=(agent,)) == first and first.stat().st_ino == born
    agent.write_text("print 'another'")
    second = initramfs(home, kernel, agent=(agent,))
    assert second != first
    assert sorted((home / "guest").glob("initramfs-*")) == sorted([first, second])


def test_it_is_not_built_again_until_a_part_changes(
    tmp_path: Path, kernel: Kernel, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[object] = []
    archive = module.cpio.archive
    monkeypatch.setattr(module.cpio, "archive", lambda entries: built.append(1) or archive(entries))
    home = tmp_path / "home"
    first = initramfs(home, kernel, agent=(agent,))
    assert (initramfs(home, kernel, agent=(agent,)), len(built)) == (first, 1)
    (kernel.modules / "ext4.ko").write_bytes(b"another ext4\0depends=\0")
    second = initramfs(home, kernel, agent=(agent,))
    assert (second != first, len(built)) == (True, 2)
    second.unlink()
    assert initramfs(home, kernel, agent=(agent,)) == second and second.exists()
    (noted,) = (home / "guest").glob("sources-*")
    for damage in (b"", b"{}", b"[]", b'{"made": 5, "sources": []}'):
        noted.write_bytes(damage)
        assert initramfs(home, kernel, agent=(agent,)) == second


def test_old_ones_go_when_a_new_one_is_made(tmp_path: Path, kernel: Kernel, agent: Path) -> None:
    home = tmp_path / "home"
    first = initramfs(home, kernel, agent=(agent,))
    os.utime(first, (0, 0))
    agent.write_text("print 'another'")
    second = initramfs(home, kernel, agent=(agent,))
    assert list((home / "guest").glob("initramfs-*")) == [second]


def test_one_in_use_counts_as_young(tmp_path: Path, kernel: Kernel, agent: Path) -> None:
    home = tmp_path / "home"
    first = initramfs(home, kernel, agent=(agent,))
    os.utime(first, (0, 0))
    initramfs(home, kernel, agent=(agent,))
    agent.write_text("print 'another'")
    initramfs(home, kernel, agent=(agent,))
    assert first.exists()


@pytest.mark.parametrize(("absent", "package"), [("busybox", "busybox-static"), ("perl", "perl-base")])
def test_a_program_that_is_not_there(
    tmp_path: Path, kernel: Kernel, agent: Path, monkeypatch: pytest.MonkeyPatch, absent: str, package: str
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in {"busybox", "perl", "ldd"} - {absent}:
        (programs / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(VmSetupError, match=f"{absent} is not installed") as raised:
        initramfs(tmp_path / "home", kernel, agent=(agent,))
    assert raised.value.hint == f"apt-get install {package}"


def test_an_agent_that_this_perl_does_not_run(tmp_path: Path, kernel: Kernel, agent: Path) -> None:
    agent.write_text("use No::Such::Module;")
    with pytest.raises(VmSetupError, match=r"does not run the guest's agent: Can't locate No/Such/Module.pm"):
        initramfs(tmp_path / "home", kernel, agent=(agent,))


def test_no_place_for_it(tmp_path: Path, kernel: Kernel, agent: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(VmSetupError, match="initramfs in "):
        initramfs(tmp_path / "home", kernel, agent=(agent,))
