"""Many pieces of a process's memory with one system call: process_vm_readv(2).

A read of `/proc/PID/mem` for each run of pages takes longer than the copying. And a page that can not be had, because
the file below it has no daemon any more, ends this call early, where touching it would end the program with SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections.abc import Sequence

PIECES_LIMIT = 1024
"""UIO_MAXIOV."""
_FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS)
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.process_vm_readv.restype = ctypes.c_ssize_t


def gather(pid: int, pieces: Sequence[tuple[int, int]]) -> bytearray:
    """What the process has at these addresses (address, length in bytes; at most PIECES_LIMIT), one after the other.

    Shorter when it ended, or when a page can not be had: then all is there up to that one. OSError when this process
    may not look at the other.
    """
    data = bytearray(sum(length for _, length in pieces))
    if not data:
        return data
    remote = array("Q", [number for piece in pieces for number in piece])
    target = (ctypes.c_char * len(data)).from_buffer(data)
    local = array("Q", [ctypes.addressof(target), len(data)])
    count = _LIBC.process_vm_readv(pid, *_vector(local, 1), *_vector(remote, len(pieces)), ctypes.c_ulong(0))
    del target  # else the bytes can not be cut
    if count < 0:
        error = ctypes.get_errno()
        if error in _FORBIDDEN:  # by a filter of system calls, as a rule: what it guards can still be read as a file
            return _read(pid, pieces)
        if error not in (errno.ESRCH, errno.EFAULT):
            raise OSError(error, os.strerror(error))
    del data[max(count, 0) :]
    return data


def _vector(numbers: array[int], count: int) -> tuple[ctypes.c_void_p, ctypes.c_ulong]:
    return ctypes.c_void_p(numbers.buffer_info()[0]), ctypes.c_ulong(count)


def _read(pid: int, pieces: Sequence[tuple[int, int]]) -> bytearray:
    """As `gather`, piece by piece."""
    data = bytearray()
    fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for address, length in pieces:
            try:
                got = os.pread(fd, length, address)
            except OSError as error:
                if error.errno in (errno.EIO, errno.EFAULT):
                    break
                raise
            data += got
            if len(got) != length:
                break
    finally:
        os.close(fd)
    return data
