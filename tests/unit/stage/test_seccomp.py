"""The system call filter against libseccomp: its numbers of the calls, and its filter from the same rules."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage.boundary import seccomp, syscalls
from stage.boundary.seccomp import ALLOW, ALLOWED, ERRNO, REFUSED

X86_64, I386 = seccomp.ARCHITECTURES
TABLES = {architecture: syscalls.numbers(table) for architecture, table in seccomp.ARCHITECTURES.items()}
# 32-bit programs may also make these through one call whose arguments no filter sees, which libseccomp allows.
SOCKETCALL = TABLES[I386]["socketcall"]
ARGUMENT = {"clone": 0, "unshare": 0, "personality": 0, "socket": 0, "ioctl": 1}
NE, EQ, MASKED_EQ = 1, 4, 7


class Comparison(ctypes.Structure):
    """struct scmp_arg_cmp."""

    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    ]


class Library:
    """libseccomp, as far as this test needs it."""

    def __init__(self) -> None:
        self.c = ctypes.CDLL("libseccomp.so.2")
        self.c.seccomp_init.restype = ctypes.c_void_p

    def number(self, architecture: int, name: str) -> int:
        return int(self.c.seccomp_syscall_resolve_name_arch(ctypes.c_uint32(architecture), name.encode()))

    def filter(self) -> bytes:
        context = ctypes.c_void_p(self.c.seccomp_init(ctypes.c_uint32(ERRNO | errno.ENOSYS)))
        assert self.c.seccomp_arch_add(context, ctypes.c_uint32(I386)) == 0
        for name, action, comparisons in rules():
            number = self.number(X86_64, name)
            if number == -1:  # newer than the library
                continue
            array = (Comparison * max(1, len(comparisons)))(*comparisons)
            words = context, ctypes.c_uint32(action), number, len(comparisons), array
            assert self.c.seccomp_rule_add_array(*words) == 0, name
        with tempfile.TemporaryFile() as file:
            assert self.c.seccomp_export_bpf(context, file.fileno()) == 0
            file.seek(0)
            return file.read()


def rules() -> Iterator[tuple[str, int, list[Comparison]]]:
    for name in ALLOWED.split():
        yield name, ALLOW, []
    for name in REFUSED.split():
        yield name, ERRNO | errno.EPERM, []
    yield "clone", ALLOW, [Comparison(0, MASKED_EQ, seccomp.NAMESPACES, 0)]
    yield "unshare", ALLOW, [Comparison(0, MASKED_EQ, seccomp.NAMESPACES_AND_TIME, 0)]
    for value in seccomp.PERSONALITIES:
        yield "personality", ALLOW, [Comparison(0, EQ, value, 0)]
    for value in seccomp.SOCKET_FAMILIES:
        yield "socket", ERRNO | errno.EAFNOSUPPORT, [Comparison(0, EQ, value, 0)]
    for value in seccomp.TERMINAL_INPUT:
        yield "ioctl", ERRNO | errno.EPERM, [Comparison(1, EQ, value, 0)]


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return Library()
    except OSError as error:
        pytest.skip(f"no libseccomp to compare with: {error}")


def run(code: bytes, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What a filter answers: the machine of Documentation/networking/filter.rst, as far as such filters use it."""
    words = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=IIQ6Q", number, architecture, 0, *words)
    program = list(struct.iter_unpack("=HBBI", code))
    accumulator = place = 0
    while True:
        operation, yes, no, operand = program[place]
        place += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, operand)
            case 0x05:
                place += operand
            case 0x15:
                place += yes if accumulator == operand else no
            case 0x25:
                place += yes if accumulator > operand else no
            case 0x35:
                place += yes if accumulator >= operand else no
            case 0x45:
                place += yes if accumulator & operand else no
            case 0x54:
                accumulator &= operand
            case 0x06:
                return int(operand)
            case _:
                raise AssertionError(f"instruction {operation:#x}")


def test_numbers_are_those_of_libseccomp(library: Library) -> None:
    for architecture, table in TABLES.items():
        known = {name: library.number(architecture, name) for name in table}
        assert {name: number for name, number in known.items() if number >= 0 and number != table[name]} == {}
        assert sum(number >= 0 for number in known.values()) > 340


def test_every_rule_names_a_call_and_no_call_has_two() -> None:
    names = [*ALLOWED.split(), *REFUSED.split(), *ARGUMENT, "clone3"]
    assert len(names) == len(set(names))
    assert set(names) - set(TABLES[X86_64]) - set(TABLES[I386]) == set()


def test_the_filter_is_that_of_libseccomp(library: Library) -> None:
    ours, theirs = seccomp.program(), library.filter()
    for architecture, table in TABLES.items():
        names = {number: name for name, number in table.items()}
        for number in range(600):
            name = names.get(number, "")
            if name in ARGUMENT or (architecture, number) == (I386, SOCKETCALL):
                continue
            if name and library.number(X86_64, name) == -1:
                continue
            assert run(ours, architecture, number) == run(theirs, architecture, number), name


@pytest.mark.parametrize("architecture", TABLES)
def test_the_checks_of_arguments_are_those_of_libseccomp(library: Library, architecture: int) -> None:
    ours, theirs, numbers = seccomp.program(), library.filter(), random.Random(1)
    interesting = [0, 1, 17, 0x1200011, 0x3D0F00, *seccomp.PERSONALITIES, *seccomp.SOCKET_FAMILIES]
    interesting += [
        *seccomp.TERMINAL_INPUT,
        *(1 << bit for bit in range(32)),
        *(numbers.getrandbits(32) for _ in range(64)),
    ]
    for name, place in ARGUMENT.items():
        for value in interesting:
            arguments = (0,) * place + (value,)
            answers = [run(code, architecture, TABLES[architecture][name], arguments) for code in (ours, theirs)]
            if name in ("socket", "ioctl"):  # all others are allowed, which libseccomp can not say beside an exception
                assert answers[0] == (ALLOW if answers[1] == ERRNO | errno.ENOSYS else answers[1])
            else:  # which error it is, is ours to choose
                assert (answers[0] == ALLOW) == (answers[1] == ALLOW)
                assert answers[0] in (ALLOW, ERRNO | errno.EPERM)


def test_upper_halves_of_arguments_change_nothing() -> None:
    """The kernel takes 32 bits of these, so a filter that looked at more could be passed by."""
    for name, place, value in (("socket", 0, 40), ("ioctl", 1, 0x5412), ("personality", 0, 8)):
        answers = {
            run(seccomp.program(), X86_64, TABLES[X86_64][name], (0,) * place + (value | high,))
            for high in (0, 1 << 32)
        }
        assert len(answers) == 1


def test_other_ways_to_call_are_no_calls() -> None:
    x32 = 0x40000000
    for number in (x32, x32 + TABLES[X86_64]["mount"], 0x7FFFFFFF, 0xFFFFFFFF):
        assert run(seccomp.program(), X86_64, number) == ERRNO | errno.ENOSYS
    assert run(seccomp.program(), 0xC00000B7, 0) == ERRNO | errno.ENOSYS  # AArch64
    assert run(seccomp.program(), I386, SOCKETCALL) == ERRNO | errno.ENOSYS
    assert run(seccomp.program(), X86_64, TABLES[X86_64]["clone3"]) == ERRNO | errno.ENOSYS


def test_the_kernel_takes_it() -> None:
    pid = os.fork()
    if pid == 0:
        seccomp.install()
        status = Path("/proc/self/status").read_text()
        os._exit(0 if "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status else 1)
    assert os.waitpid(pid, 0)[1] == 0
