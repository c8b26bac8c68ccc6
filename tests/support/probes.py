"""Attempts to leave a stage. The same program makes them on the host, where they succeed, and in a stage.

`python probes.py FACTS` prints {"probe": outcome, ...}; an outcome is "reached", "nothing", or the name of an errno.
Standard library only: inside a stage there is no repository.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import pty
import signal
import socket
import struct
import sys
import termios
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REACHED, NOTHING = "reached", "nothing"
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
NEW_UTS, NEW_USER, NEW_NS = 0x4000000, 0x10000000, 0x20000
libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Facts:
    """What the host has: `secret` is a file with `token`, `victim` a process; `workspace` is where it is seen here."""

    secret: str
    token: str
    workspace: str
    lower: str
    disk: int
    victim: int
    port: int
    abstract: str
    shm_key: int
    handle: str
    handle_type: int


@dataclass(frozen=True)
class Probe:
    """`inside` is what it comes to in a stage; `outside` what it comes to on the host."""

    function: Callable[[Facts], Any]
    inside: tuple[str, ...]
    outside: str


PROBES: dict[str, Probe] = {}


def probe(*inside: str, outside: str = REACHED) -> Callable[[Callable[[Facts], Any]], Callable[[Facts], Any]]:
    def register(function: Callable[[Facts], Any]) -> Callable[[Facts], Any]:
        PROBES[function.__name__] = Probe(function, inside, outside)
        return function

    return register


def call(number: int, *arguments: int | bytes | None) -> int:
    """A system call of x86-64. OSError."""
    words = [ctypes.c_long(word) if isinstance(word, int) else ctypes.c_char_p(word) for word in arguments]
    result = int(libc.syscall(ctypes.c_long(number), *words))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def opens(path: str, flags: int = os.O_WRONLY) -> bool:
    os.close(os.open(path, flags))
    return True


def has_token(facts: Facts, path: str) -> bool:
    return read(path) == facts.token.encode()


# Paths.


@probe("ENOENT")
def absolute_path(facts: Facts) -> bool:
    return has_token(facts, facts.secret)


@probe("ENOENT")
def dots(facts: Facts) -> bool:
    return has_token(facts, "../" * 64 + facts.secret)


@probe("ENOENT")
def own_symlink(facts: Facts) -> bool:
    link = Path(f"/tmp/link-{os.getpid()}")
    link.symlink_to(facts.secret)
    try:
        return has_token(facts, str(link))
    finally:
        link.unlink()


@probe("ENOENT")
def absolute_symlink_of_the_host(facts: Facts) -> bool:
    return has_token(facts, f"{facts.workspace}/absolute-link")


@probe("ENOENT")
def relative_symlink_of_the_host(facts: Facts) -> bool:
    return has_token(facts, f"{facts.workspace}/relative-link")


@probe("ENOENT")
def parent_of_the_workspace(facts: Facts) -> bool:
    return has_token(facts, f"{facts.workspace}/../{Path(facts.secret).name}")


@probe("ENOENT")
def lower_layer_by_its_path(facts: Facts) -> bool:
    return bool(list(Path(facts.lower).iterdir()))


@probe(NOTHING)
def roots_of_processes(facts: Facts) -> bool:
    """/proc/PID/root and cwd of every process there is, the stage's init among them."""
    for name in filter(str.isdigit, (path.name for path in Path("/proc").iterdir())):
        for way in ("root", "cwd", "task/" + name + "/root"):
            try:
                if has_token(facts, f"/proc/{name}/{way}/{'../' * 64}{facts.secret}"):
                    return True
            except OSError:
                continue
    return False


@probe("EACCES")
def descriptors_of_another_process(facts: Facts) -> bool:
    return any(path.readlink() for path in Path(f"/proc/{other_process(facts)}/fd").iterdir())


@probe("EACCES")
def memory_of_another_process(facts: Facts) -> bool:
    return opens(f"/proc/{other_process(facts)}/mem", os.O_RDONLY)


def other_process(facts: Facts) -> int:
    """The victim; in a stage its init, which is the only process that is not the workload's own."""
    return facts.victim if Path(f"/proc/{facts.victim}").exists() else 1


@probe("EPERM")
def file_handle(facts: Facts) -> bool:
    """A handle of the secret, which a process of the host can open on any file system that it is on."""
    handle = bytes.fromhex(facts.handle)
    where = os.open(facts.workspace, os.O_RDONLY | os.O_DIRECTORY)
    fd = call(304, where, struct.pack("=Ii", len(handle), facts.handle_type) + handle, os.O_RDONLY)
    return os.read(fd, 4096) == facts.token.encode()


@probe("ENOENT")
def chroot_and_back(facts: Facts) -> bool:
    jail = Path(f"/tmp/jail-{os.getpid()}")
    jail.mkdir()
    outer = os.open("/", os.O_RDONLY)
    try:
        os.chroot(jail)
        os.fchdir(outer)
        for _ in range(64):
            os.chdir("..")
        os.chroot(".")
        return has_token(facts, facts.secret)
    finally:
        os.fchdir(outer)
        Path(f".{jail}").rmdir()


# Mounts and namespaces.


def mount(source: str, target: str, kind: str | None, flags: int) -> bool:
    call(165, source.encode(), target.encode(), kind.encode() if kind else None, flags, None)
    return True


@probe("EPERM")
def bind_mount(facts: Facts) -> bool:
    return mount("/", "/tmp", None, MS_BIND)


@probe("EPERM")
def another_proc(facts: Facts) -> bool:
    return mount("proc", "/tmp", "proc", 0)


@probe("EPERM")
def another_sysfs(facts: Facts) -> bool:
    return mount("sysfs", "/tmp", "sysfs", 0)


@probe("EPERM")
def remount_for_writing(facts: Facts) -> bool:
    return mount("", "/proc", None, MS_REMOUNT | MS_BIND)


@probe("EPERM")
def unmount(facts: Facts) -> int:
    return call(166, b"/dev/shm", 2) == 0


@probe("EPERM")
def pivot_root(facts: Facts) -> bool:
    try:
        return call(155, b"/tmp", b"/tmp") == 0
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EBUSY):  # privileged enough, but /tmp is no mount
            return True
        raise


@probe("EPERM")
def detached_copy_of_the_root(facts: Facts) -> bool:
    return call(428, -100, b"/", 0x8001) >= 0  # open_tree, OPEN_TREE_CLONE | AT_RECURSIVE


@probe("EPERM")
def file_system_context(facts: Facts) -> bool:
    return call(430, b"tmpfs", 0) >= 0


@probe("EPERM")
def mount_attributes(facts: Facts) -> bool:
    return call(442, -100, b"/dev/shm", 0, struct.pack("=QQQQ", 0, 1, 0, 0), 32) == 0


@probe("EPERM")
def new_user_namespace(facts: Facts) -> bool:
    return call(272, NEW_USER) == 0


@probe("EPERM")
def new_mount_namespace(facts: Facts) -> bool:
    return call(272, NEW_NS) == 0


@probe("EPERM")
def new_time_namespace(facts: Facts) -> bool:
    return call(272, 0x80) == 0


@probe("EPERM")
def clone_into_a_user_namespace(facts: Facts) -> bool:
    pid = call(56, NEW_USER | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return os.waitpid(pid, 0)[0] == pid


@probe("ENOSYS")
def clone3_into_a_user_namespace(facts: Facts) -> bool:
    pid = call(435, struct.pack("=11Q", NEW_USER, 0, 0, 0, signal.SIGCHLD, *[0] * 6), 88)
    if pid == 0:
        os._exit(0)
    return os.waitpid(pid, 0)[0] == pid


@probe("EPERM")
def enter_a_namespace(facts: Facts) -> bool:
    return call(308, os.open("/proc/self/ns/uts", os.O_RDONLY), 0) == 0


@probe("EPERM")
def call_of_a_32_bit_program(facts: Facts) -> bool:
    """unshare through int 0x80, where it has another number."""
    code = b"\x53\xb8\x36\x01\x00\x00\xbb" + struct.pack("=I", NEW_UTS) + b"\xcd\x80\x5b\xc3"
    with mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(code)
        start = ctypes.c_char.from_buffer(page)
        result = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(start))()
        del start
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return True


# Processes.


@probe("ESRCH")
def signal_a_process_of_the_host(facts: Facts) -> bool:
    os.kill(facts.victim, 0)
    return True


@probe("EPERM")
def trace_another_process(facts: Facts) -> bool:
    pid = other_process(facts)
    call(101, 16, pid, 0, 0)  # PTRACE_ATTACH
    os.waitpid(pid, 0x40000000)  # __WALL
    call(101, 17, pid, 0, 0)
    return True


@probe("EPERM")
def read_memory_of_another_process(facts: Facts) -> bool:
    start = 0
    if other_process(facts) == facts.victim:
        start = int(Path(f"/proc/{facts.victim}/maps").read_text().partition("-")[0], 16)
    buffer = ctypes.create_string_buffer(16)
    local = struct.pack("=QQ", ctypes.addressof(buffer), 16)
    return call(310, other_process(facts), local, 1, struct.pack("=QQ", start, 16), 1, 0) == 16


@probe("EPERM")
def take_a_descriptor_of_another_process(facts: Facts) -> bool:
    pidfd = os.pidfd_open(other_process(facts))
    return call(438, pidfd, 0, 0) >= 0


# Sockets and other ways to talk.


def connects(family: int, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(5)
        connection.connect(address)
    return True


@probe("ENOENT")
def unix_socket_of_the_host(facts: Facts) -> bool:
    return connects(socket.AF_UNIX, f"{Path(facts.secret).parent}/socket")


@probe("ECONNREFUSED")
def unix_socket_in_the_workspace(facts: Facts) -> bool:
    return connects(socket.AF_UNIX, f"{facts.workspace}/socket")


@probe("ENXIO")
def fifo_in_the_workspace(facts: Facts) -> bool:
    """Which a process of the host reads."""
    return opens(f"{facts.workspace}/fifo", os.O_WRONLY | os.O_NONBLOCK)


@probe("ECONNREFUSED")
def abstract_socket_of_the_host(facts: Facts) -> bool:
    return connects(socket.AF_UNIX, "\0" + facts.abstract)


@probe("ECONNREFUSED")
def loopback_of_the_host(facts: Facts) -> bool:
    return connects(socket.AF_INET, ("127.0.0.1", facts.port))


@probe("ENOENT")
def shared_memory_of_the_host(facts: Facts) -> bool:
    return call(29, facts.shm_key, 0, 0) >= 0


@probe("EPERM")
def packets_of_the_network(facts: Facts) -> bool:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
    return True


@probe("EAFNOSUPPORT")
def hypervisor_socket(facts: Facts) -> bool:
    socket.socket(40, socket.SOCK_STREAM).close()
    return True


@probe("EAFNOSUPPORT")
def kernel_crypto_socket(facts: Facts) -> bool:
    socket.socket(38, socket.SOCK_SEQPACKET).close()
    return True


@probe("EPERM")
def type_into_a_terminal(facts: Facts) -> bool:
    pid, master = pty.fork()
    if pid == 0:
        try:
            fcntl.ioctl(0, termios.TIOCSTI, b"x")
        except OSError as error:
            os._exit(error.errno or 255)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(master)
    if code:
        raise OSError(code, os.strerror(code))
    return True


# Devices and the kernel.


def device(kind: int, major: int, minor: int) -> bool:
    path = Path(f"/tmp/node-{os.getpid()}")
    os.mknod(path, 0o600 | kind, os.makedev(major, minor))
    try:
        return opens(str(path), os.O_RDONLY | os.O_NONBLOCK)
    finally:
        path.unlink()


@probe("EPERM")
def kernel_log_device(facts: Facts) -> bool:
    return device(0o020000, 1, 11)


@probe("EPERM")
def fuse_device(facts: Facts) -> bool:
    return device(0o020000, 10, 229)


@probe("EPERM")
def disk(facts: Facts) -> bool:
    return device(0o060000, os.major(facts.disk), os.minor(facts.disk))


@probe("EACCES")
def device_node_of_the_image(facts: Facts) -> bool:
    return opens(f"{facts.lower if Path(facts.lower).exists() else ''}/node", os.O_RDONLY)


@probe("EROFS", "ENOENT")
def sysrq(facts: Facts) -> bool:
    return opens("/proc/sysrq-trigger")


@probe("EROFS")
def core_pattern(facts: Facts) -> bool:
    return opens("/proc/sys/kernel/core_pattern")


@probe("EROFS")
def panic_setting(facts: Facts) -> bool:
    return opens("/proc/sys/kernel/panic")


@probe("EROFS")
def kernel_setting(facts: Facts) -> bool:
    return opens("/sys/kernel/mm/transparent_hugepage/enabled")


@probe(NOTHING)
def release_agent(facts: Facts) -> bool:
    found = list(Path("/sys/fs/cgroup").rglob("release_agent"))
    return bool(found) and opens(str(found[0]))


@probe("EPERM")
def cgroup_file_system(facts: Facts) -> bool:
    return mount("none", "/tmp", "cgroup2", 0)


@probe(NOTHING)
def kernel_timers(facts: Facts) -> bool:
    return bool(read("/proc/timer_list"))


@probe(NOTHING)
def keys_of_the_host(facts: Facts) -> bool:
    return bool(read("/proc/keys"))


@probe(NOTHING)
def firmware(facts: Facts) -> bool:
    return bool(list(Path("/sys/firmware").iterdir()))


@probe("EPERM")
def kernel_log(facts: Facts) -> bool:
    return call(103, 10, None, 0) > 0


@probe("EPERM")
def keyring(facts: Facts) -> bool:
    return call(250, 0, -4, 1) > 0  # KEYCTL_GET_KEYRING_ID of the user's keyring


@probe("EPERM")
def add_key(facts: Facts) -> bool:
    return call(248, b"user", b"probe", b"x", 1, -1) > 0  # into the thread's own keyring


@probe("EPERM")
def bpf(facts: Facts) -> bool:
    return call(321, 0, struct.pack("=IIII32x", 2, 4, 4, 1), 48) >= 0  # an array of one number


@probe("EPERM")
def perf(facts: Facts) -> bool:
    attributes = struct.pack("=IIQ96x", 1, 112, 0)  # PERF_TYPE_SOFTWARE, PERF_COUNT_SW_CPU_CLOCK
    return call(298, attributes, 0, -1, -1, 0) >= 0


@probe("ENOSYS")
def io_uring(facts: Facts) -> bool:
    return call(425, 1, bytes(120)) >= 0


@probe("EPERM")
def userfaultfd(facts: Facts) -> bool:
    return call(323, 0) >= 0


@probe("EPERM")
def kexec(facts: Facts) -> bool:
    return call(246, 0, 0, None, 0) == 0  # unloads what is not loaded


@probe("EPERM", outside="ENOEXEC")
def kernel_module(facts: Facts) -> bool:
    return call(175, b"junk", 4, b"") == 0


@probe("EPERM", outside="EINVAL")
def reboot(facts: Facts) -> bool:
    return call(169, 0, 0, 0, None) == 0  # without the magic numbers


@probe("EPERM", outside="ENOENT")
def swap(facts: Facts) -> bool:
    return call(167, b"/nowhere", 0) == 0


@probe("EPERM")
def clock(facts: Facts) -> bool:
    return call(164, None, None) == 0  # settimeofday of nothing


@probe("EPERM")
def host_name(facts: Facts) -> bool:
    name = socket.gethostname().encode()
    return call(170, name, len(name)) == 0


@probe("EPERM")
def ports_of_the_machine(facts: Facts) -> bool:
    return call(173, 0x80, 1, 1) == 0


# What a process must be able to do all the same.


@probe(REACHED)
def a_thread(facts: Facts) -> bool:
    done = threading.Event()
    thread = threading.Thread(target=done.set)
    thread.start()
    thread.join(5)
    return done.is_set()


@probe(REACHED)
def a_traced_child(facts: Facts) -> bool:
    pid = os.fork()
    if pid == 0:
        call(101, 0, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    stopped = os.WIFSTOPPED(os.waitpid(pid, 0)[1])
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return stopped


@probe(REACHED)
def a_change_of_user(facts: Facts) -> bool:
    os.setgroups([7])
    os.setresgid(1000, 1000, 1000)
    os.setresuid(1000, 1000, 1000)
    return (os.getuid(), os.getgid(), os.getgroups()) == (1000, 1000, [7])


@probe(REACHED)
def a_server_on_a_low_port(facts: Facts) -> bool:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 321))
    return True


def outcome(one: Probe, facts: Facts) -> str:
    try:
        return REACHED if one.function(facts) else NOTHING
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))


def attempt(one: Probe, facts: Facts) -> str:
    """In a process of its own, which the probe may leave as it likes."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        with contextlib.suppress(OSError):  # on the host: its mounts are not to be touched
            call(272, NEW_NS)
            mount("", "/", None, MS_REC | MS_PRIVATE)
        try:
            os.write(writer, outcome(one, facts).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        told = stream.read().decode()
    status = os.waitpid(pid, 0)[1]
    return told or f"ended with status {status}"


def main() -> None:
    facts = Facts(**json.loads(sys.argv[1]))
    print(json.dumps({name: attempt(one, facts) for name, one in PROBES.items()}))


if __name__ == "__main__":
    main()
