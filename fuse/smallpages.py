"""Starting a program that may not ask for huge pages.

QEMU asks for them for all of a guest's memory (`madvise(MADV_HUGEPAGE)`), which no option turns off. To the kernel that
also means: read 2 MiB or more of the mapped file at each page fault. Of a memory image of 256 MiB, 2,000 scattered
touches then had 222 MiB read instead of 21, and the node daemon took four times as long; from a server, all of it would
be fetched. Nothing is lost: pages that a guest writes to are copied 4 KiB at a time in any case.

A seccomp filter refuses just this advice, and is inherited by what is started. It is set on a thread that ends
afterwards, because it can not be taken away again. Layout: seccomp(2), <linux/filter.h>, <linux/seccomp.h>.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ARCHITECTURE, _MADVISE, _MADV_HUGEPAGE = 0xC000003E, 28, 14
"""AUDIT_ARCH_X86_64, and its number of madvise(2)."""
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ADVICE_AT = 0, 4, 32
"""In struct seccomp_data; the advice is the third argument, of which the lower half counts."""
_FILTER = b"".join(
    struct.pack("<HBBI", code, if_true, if_false, value)
    for code, if_true, if_false, value in (
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IF_EQUAL, 0, 5, _ARCHITECTURE),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_EQUAL, 0, 3, _MADVISE),
        (_LOAD, 0, 0, _ADVICE_AT),
        (_IF_EQUAL, 0, 1, _MADV_HUGEPAGE),
        (_RETURN, 0, 0, _ERRNO | errno.EINVAL),
        (_RETURN, 0, 0, _ALLOW),
    )
)


def without_huge_pages(start: Callable[[], T]) -> T:
    """What `start` returns or raises. It runs on a thread of its own, and what it starts can not ask for huge pages.

    OSError where the kernel has no seccomp filters.
    """
    result: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            _refuse_advice()
            result.append(start())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="small-pages")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return result[0]


def _refuse_advice() -> None:
    """For this thread, and for good."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(_FILTER, len(_FILTER))
    program = Program(len(_FILTER) // 8, ctypes.addressof(code))
    # Without the right to administer the system, a filter is only taken from who can gain no rights.
    may_not = os.geteuid() != 0 and libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
    if may_not or libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp filter: {os.strerror(number)}")
