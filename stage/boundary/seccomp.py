"""Which system calls a workload may make: an allow-list in the manner of container engines, as a kernel filter.

What is not listed is ENOSYS, so that libraries fall back as on an older kernel; what is refused on purpose is EPERM.
What only a capability would allow that no stage has (mounts, namespaces, modules, clocks) is refused here too, and so
is what namespaces do not separate (keys, the kernel's log) and what has been a door into kernels (bpf, userfaultfd,
io_uring, perf, AF_ALG, AF_VSOCK). It follows the profile of containers-common, seccomp.json.

The kernel runs such a program before every call, but knows since 5.11 which calls it always allows.
Format: linux/filter.h, linux/seccomp.h (struct seccomp_data), linux/audit.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from functools import cache

from stage.boundary import syscalls
from stage.errors import StageSetupError

ALLOWED = """
    _llseek _newselect accept accept4 access adjtimex alarm arch_prctl bind brk cachestat capget capset chdir chmod
    chown chown32 chroot clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime
    clock_gettime64 clock_nanosleep clock_nanosleep_time64 close close_range connect copy_file_range creat dup dup2
    dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old
    eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fadvise64_64 fallocate
    fanotify_mark fchdir fchmod fchmodat fchmodat2 fchown fchown32 fchownat fcntl fcntl64 fdatasync fgetxattr
    file_getattr file_setattr flistxattr flock fork fremovexattr fsetxattr fstat fstat64 fstatat64 fstatfs fstatfs64
    fsync ftruncate ftruncate64 futex futex_requeue futex_time64 futex_wait futex_waitv futex_wake futimesat
    get_mempolicy get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid getegid32 geteuid
    geteuid32 getgid getgid32 getgroups getgroups32 getitimer getpeername getpgid getpgrp getpid getppid getpriority
    getrandom getresgid getresgid32 getresuid getresuid32 getrlimit getrusage getsid getsockname getsockopt gettid
    gettimeofday getuid getuid32 getxattr getxattrat inotify_add_watch inotify_init inotify_init1 inotify_rm_watch
    io_cancel io_destroy io_getevents io_setup io_submit ioprio_get ioprio_set ipc kill landlock_add_rule
    landlock_create_ruleset landlock_restrict_self lchown lchown32 lgetxattr link linkat listen listxattr
    listxattrat llistxattr lremovexattr lseek lsetxattr lstat lstat64 madvise map_shadow_stack mbind membarrier
    memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mmap2 modify_ldt
    mprotect mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64
    mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall munmap name_to_handle_at nanosleep
    newfstatat open openat openat2 pause pidfd_getfd pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free
    pkey_mprotect poll ppoll ppoll_time64 prctl pread64 preadv preadv2 prlimit64 process_mrelease process_vm_readv
    process_vm_writev pselect6 pselect6_time64 ptrace pwrite64 pwritev pwritev2 read readahead readdir readlink
    readlinkat readv recvfrom recvmmsg recvmmsg_time64 recvmsg remap_file_pages removexattr removexattrat rename
    renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo
    rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_get_priority_max
    sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
    sched_rr_get_interval_time64 sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield
    seccomp select semctl semget semop semtimedop semtimedop_time64 sendfile sendfile64 sendmmsg sendmsg sendto
    set_mempolicy set_mempolicy_home_node set_robust_list set_thread_area set_tid_address setfsgid setfsgid32
    setfsuid setfsuid32 setgid setgid32 setgroups setgroups32 setitimer setpgid setpriority setregid setregid32
    setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit setsid setsockopt setuid setuid32
    setxattr setxattrat shmat shmctl shmdt shmget shutdown sigaction sigaltstack signal signalfd signalfd4
    sigpending sigprocmask sigreturn sigsuspend socketpair splice stat stat64 statfs statfs64 statx symlink
    symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun
    timer_gettime timer_gettime64 timer_settime timer_settime64 timerfd_create timerfd_gettime timerfd_gettime64
    timerfd_settime timerfd_settime64 times tkill truncate truncate64 ugetrlimit umask uname unlink unlinkat
    uretprobe utime utimensat utimensat_time64 utimes vfork wait4 waitid waitpid write writev
"""
REFUSED = """
    _sysctl acct add_key bdflush bpf clock_settime clock_settime64 create_module delete_module fanotify_init
    finit_module fsconfig fsmount fsopen fspick get_kernel_syms init_module io_pgetevents io_pgetevents_time64
    ioperm iopl kcmp kexec_file_load kexec_load keyctl lookup_dcookie migrate_pages mount mount_setattr move_mount
    move_pages nfsservctl nice oldfstat oldlstat oldolduname oldstat olduname open_by_handle_at open_tree
    open_tree_attr perf_event_open pivot_root process_madvise query_module quotactl quotactl_fd reboot request_key
    setdomainname sethostname setns settimeofday sgetmask ssetmask stime swapoff swapon sysfs syslog umount umount2
    uselib userfaultfd ustat vhangup vm86 vm86old vmsplice
"""

# New namespaces: mount, cgroup, uts, ipc, user, pid, net; and time, whose bit is part of a signal's number for clone.
NAMESPACES = 0x7E020000
NAMESPACES_AND_TIME = NAMESPACES | 0x80
# Linux, Linux of 32 bits, either with uname as of 2.6, and the question what it is.
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
# AF_ALG gives the kernel's crypto page cache pages that all stages share; AF_VSOCK leads to the hypervisor.
SOCKET_FAMILIES = (38, 40)
# TIOCSTI and TIOCLINUX type into a terminal; a workload may have the caller's as its output.
TERMINAL_INPUT = (0x5412, 0x541C)

ALLOW, ERRNO = 0x7FFF0000, 0x00050000
ARCHITECTURES = {0xC000003E: syscalls.X86_64, 0x40000003: syscalls.I386}
_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _JUMP, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x05, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_INSTRUCTION = struct.Struct("=HBBI")  # code, jump if true, jump if not, operand
_SET_NO_NEW_PRIVS, _SET_MODE_FILTER, _SYS_SECCOMP = 38, 1, 317

_libc = ctypes.CDLL(None, use_errno=True)
_prctl, _seccomp = _libc["prctl"], _libc["syscall"]
_prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_seccomp.argtypes = [ctypes.c_long, ctypes.c_uint, ctypes.c_uint, ctypes.c_char_p]

Instruction = tuple[int, int, int, int]
Code = list[Instruction]


@cache
def program() -> bytes:
    """The filter as an array of struct sock_filter; made once a process."""
    allowed, refused, checks = frozenset(ALLOWED.split()), frozenset(REFUSED.split()), _checks()
    code: Code = [(_LOAD, 0, 0, _ARCHITECTURE)]
    for architecture, table in ARCHITECTURES.items():
        answers = dict[int, Code]()
        for name, number in syscalls.numbers(table).items():
            if name in allowed:
                answers[number] = _give(ALLOW)
            elif name in refused:
                answers[number] = _give(ERRNO | errno.EPERM)
            elif name in checks:
                answers[number] = checks[name]
        body = [(_LOAD, 0, 0, _NUMBER), *_search(_runs(answers))]
        code += [(_EQUAL, 1, 0, architecture), (_JUMP, 0, 0, len(body)), *body]
    code += _give(ERRNO | errno.ENOSYS)
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in code)


def install() -> None:
    """No new privileges, and this filter, for the calling thread and all it starts."""
    code = program()
    filters = ctypes.create_string_buffer(code, len(code))
    arguments = struct.pack("=H6xQ", len(code) // _INSTRUCTION.size, ctypes.addressof(filters))  # struct sock_fprog
    if _prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise _refusal("no_new_privs")
    if _seccomp(_SYS_SECCOMP, _SET_MODE_FILTER, 0, arguments) != 0:
        raise _refusal("seccomp")


def _refusal(what: str) -> StageSetupError:
    reason = os.strerror(ctypes.get_errno())
    return StageSetupError(f"{what}: {reason}", hint="the kernel needs CONFIG_SECCOMP_FILTER")


def _checks() -> dict[str, Code]:
    """Calls that are allowed or not by their arguments. clone3 takes its own in memory, where no filter sees them."""
    return {
        "clone": [(_LOAD, 0, 0, _ARGUMENTS), (_ANY_BIT, 0, 1, NAMESPACES), *_choice(ERRNO | errno.EPERM, ALLOW)],
        "clone3": _give(ERRNO | errno.ENOSYS),
        "unshare": [
            (_LOAD, 0, 0, _ARGUMENTS),
            (_ANY_BIT, 0, 1, NAMESPACES_AND_TIME),
            *_choice(ERRNO | errno.EPERM, ALLOW),
        ],
        "personality": _among(0, PERSONALITIES, ALLOW, ERRNO | errno.EPERM),
        "socket": _among(0, SOCKET_FAMILIES, ERRNO | errno.EAFNOSUPPORT, ALLOW),
        "ioctl": _among(1, TERMINAL_INPUT, ERRNO | errno.EPERM, ALLOW),
    }


def _give(action: int) -> Code:
    return [(_RETURN, 0, 0, action)]


def _choice(first: int, second: int) -> Code:
    return _give(first) + _give(second)


def _among(argument: int, values: Iterable[int], action: int, otherwise: int) -> Code:
    """`action` when the low half of the argument is one of the values; the kernel reads no more of these either."""
    values = tuple(values)
    tests = [(_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *tests, *_choice(otherwise, action)]


def _runs(answers: dict[int, Code]) -> list[tuple[int, Code]]:
    """Ranges of numbers with the same answer, as (first number, answer); the numbers of x32 are in the last one."""
    unknown = _give(ERRNO | errno.ENOSYS)
    found: list[tuple[int, Code]] = []
    for number in range(max(answers) + 2):
        answer = answers.get(number, unknown)
        if not found or found[-1][1] != answer:
            found.append((number, answer))
    return found


def _search(runs: list[tuple[int, Code]]) -> Code:
    """A binary search for the range of the number; a jump reaches 255 instructions, which a half stays below."""
    if len(runs) == 1:
        return runs[0][1]
    middle = len(runs) // 2
    low, high = _search(runs[:middle]), _search(runs[middle:])
    return [(_ABOVE, len(low), 0, runs[middle][0]), *low, *high]
