"""The first root file system of a guest: busybox, modules, perl for the agent, and our two programs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from imaged.ids import ChunkId
from imaged.publish import published
from vmm import agentproto
from vmm.errors import VmSetupError
from vmm.guest import cpio
from vmm.guest.kernel import Kernel
from vmm.guest.modules import ModuleTree, content
from vmm.guest.program import PARTS, joined
from vmm.guest.sources import Sources

INIT = Path(__file__).with_name("init")
# `init` loads the first before all else, the next two when the VM has such a device, the last when the agent runs.
MODULES = {
    "base": ("virtio_pci", "virtio_blk", "virtio_console", "erofs", "overlay"),
    "network": ("virtio_net",),
    "disk": ("ext4",),
    "late": ("virtio_rng", "button", "evdev"),
}
_DIRECTORIES = ("dev", "etc", "lower", "newroot", "proc", "root", "run", "sys", "tmp", "upper")
_INITTAB = (
    b"""\
::respawn:/usr/bin/perl /pvisor/agent.pl --machine --root /newroot --ports %d
ttyS0::respawn:-/init console
::respawn:/init late
::shutdown:/init power_off
::ctrlaltdel:/init power_off
"""
    % agentproto.PORT_COUNT
)
# Each table is mounted by one process: starting one takes a guest longer than what it does.
_OWN_MOUNTS = b"""\
proc /proc proc defaults 0 0
sysfs /sys sysfs defaults 0 0
devtmpfs /dev devtmpfs mode=755 0 0
"""
_WORKLOAD_MOUNTS = b"""\
proc /newroot/proc proc nosuid,nodev,noexec 0 0
sysfs /newroot/sys sysfs nosuid,nodev,noexec 0 0
devtmpfs /newroot/dev devtmpfs nosuid 0 0
devpts /newroot/dev/pts devpts nosuid,noexec,newinstance,ptmxmode=666,mode=620,gid=5 0 0
shm /newroot/dev/shm tmpfs nosuid,nodev,mode=1777 0 0
run /newroot/run tmpfs nosuid,nodev,mode=755 0 0
"""
# What devtmpfs lacks of a usual /dev.
_DEVICE_LINKS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
# What a program has loaded when it is compiled: Perl's files, and the shared objects of those that have one.
_PERL_LOADED = r'print map { "$_\n" } values %INC, @DynaLoader::dl_shared_objects'
_PERL_HINT = "install Debian's perl-base"
_LDD_S = 30
_OLD_S = 3600.0


def initramfs(home: Path, kernel: Kernel, *, agent: Sequence[Path] = PARTS) -> Path:
    """The file for this kernel, named by its digest in `home`/guest; made when it is not there.

    It is not even built to find its name, a sixth of a second, while all files that went into it are as they were:
    `sources-KEY.json` beside it says how. Processes may call this at once. VmSetupError names what the host lacks.
    """
    programs = program("busybox", "busybox-static"), program("perl", "perl-base")
    key = ChunkId.of(repr((kernel, agent, programs)).encode())
    directory = home / "guest"
    noted = directory / f"sources-{key}.json"
    try:
        path = Sources.unchanged(noted)
        if path is None:
            sources = Sources()
            data = cpio.archive(_entries(kernel, agent, sources))
            path = directory / f"initramfs-{ChunkId.of(data)}"
            directory.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                with published(path) as stream:
                    stream.write(data)
                _remove_old(path)
            sources.save(noted, path)
        os.utime(path)  # still in use: see _remove_old
    except OSError as error:
        hint = "make room there, or set PVISOR_HOME to a directory you can write"
        raise VmSetupError(f"initramfs in {directory}: {error.strerror or error}", hint=hint) from error
    return path


def program(name: str, package: str) -> Path:
    """A program on this host's PATH. VmSetupError names the Debian package that has it."""
    found = shutil.which(name)
    if found is None:
        raise VmSetupError(f"{name} is not installed, and a guest needs it", hint=f"apt-get install {package}")
    return Path(found)


def libraries(programs: Sequence[Path]) -> list[Path]:
    """The shared libraries that these load, the loader among them; nothing for static ones. VmSetupError."""
    argv = [program("ldd", "libc-bin"), *programs]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_LDD_S)
    except subprocess.TimeoutExpired as error:
        raise VmSetupError(f"ldd did not end in {_LDD_S} s", hint="see what this host is busy with") from error
    absent = re.search(r"(\S+) => not found", done.stdout)
    if absent is not None:
        raise VmSetupError(f"{absent.group(1)}, which a guest's program needs, is not on this host", hint=_PERL_HINT)
    return [Path(path) for path in dict.fromkeys(re.findall(r"(/\S+) \(0x", done.stdout))]


def _entries(kernel: Kernel, agent: Sequence[Path], sources: Sources) -> Iterator[cpio.Entry]:
    for path in (Path("/etc/ld.so.cache"), Path(agentproto.__file__), *Path(__file__).parent.glob("*.py")):
        sources.note(path)
    yield from map(cpio.directory, _DIRECTORIES)
    yield cpio.file("init", sources.read(INIT), mode=0o755)
    yield cpio.file("etc/inittab", _INITTAB)
    yield cpio.file("etc/fstab.own", _OWN_MOUNTS)
    yield cpio.file("etc/fstab.workload", _WORKLOAD_MOUNTS)
    yield cpio.file("bin/busybox", sources.read(program("busybox", "busybox-static")), mode=0o755)
    text = joined(agent, sources.read)
    yield cpio.file("pvisor/agent.pl", text)
    for name, below in _DEVICE_LINKS.items():
        yield cpio.link(f"pvisor/dev/{name}", f"/proc/self/fd{below}")
    yield from _perl(text, sources)
    yield from _modules(kernel, sources)


def _perl(agent: bytes, sources: Sources) -> Iterator[cpio.Entry]:
    """The interpreter, and what the agent loads of its modules, at their paths on the host, which are built into it."""
    perl = program("perl", "perl-base")
    argv = [str(perl), f"-Mstrict; CHECK {{ {_PERL_LOADED} }}", "-c", "-"]
    try:
        done = subprocess.run(argv, input=agent, capture_output=True, check=False, timeout=_LDD_S)
    except subprocess.TimeoutExpired as error:
        raise VmSetupError(f"{perl} did not end in {_LDD_S} s", hint=_PERL_HINT) from error
    if done.returncode != 0:
        said = (done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}").splitlines()[0]
        raise VmSetupError(f"{perl} does not run the guest's agent: {said}", hint=_PERL_HINT)
    files = [Path(line) for line in sorted(os.fsdecode(done.stdout).splitlines())]
    yield cpio.file("usr/bin/perl", sources.read(perl), mode=0o755)
    for path in files:
        yield cpio.file(str(path).lstrip("/"), sources.read(path))
    for path in libraries([perl, *(path for path in files if path.suffix == ".so")]):
        yield cpio.file(str(path).lstrip("/"), sources.read(path), mode=0o755)


def _modules(kernel: Kernel, sources: Sources) -> Iterator[cpio.Entry]:
    """The modules, each once, and for each group a list of file names in the order in which they load."""
    for path in (kernel.modules, kernel.modules / "modules.dep", kernel.modules / "modules.builtin"):
        sources.note(path)
    tree = ModuleTree.read(kernel.modules)
    written: set[Path] = set()
    for group, names in MODULES.items():
        order = [path for path in tree.load_order(names) if path not in written]
        written.update(order)
        plain = {path: path.name.partition(".ko")[0] + ".ko" for path in order}
        for path, name in plain.items():
            sources.note(path)
            yield cpio.file(f"modules/{name}", content(path))
        yield cpio.file(f"modules/{group}", "".join(f"{name}\n" for name in plain.values()).encode())


def _remove_old(newest: Path) -> None:
    """Those of other kernels or versions; one that is younger may be about to be booted."""
    for path in newest.parent.glob("initramfs-*"):
        try:
            if path != newest and time.time() - path.stat().st_mtime > _OLD_S:
                path.unlink()
        except FileNotFoundError:
            continue
