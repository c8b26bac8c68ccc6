"""Pieces of a process's memory, and runs of its own pages as the kernel finds them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
from pathlib import Path
from random import Random

import pytest

from vmm import gather as module
from vmm import pagemap, pagescan
from vmm.gather import gather
from vmm.pagemap import PAGE_BYTES, private_ranges

PAGES = 3000


def address_of(memory: mmap.mmap) -> int:
    view = ctypes.c_char.from_buffer(memory)
    return ctypes.addressof(view)


@pytest.mark.parametrize("error", [0, errno.EPERM, errno.ENOSYS], ids=["the call", "forbidden", "no such call"])
def test_pieces_come_one_after_the_other(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    if error:
        monkeypatch.setattr(module, "_LIBC", Refusing(error))
    with mmap.mmap(-1, 4 * PAGE_BYTES) as memory:
        memory[:] = Random(1).randbytes(4 * PAGE_BYTES)
        start = address_of(memory)
        assert gather(os.getpid(), [(start + 5, 10), (start + 3 * PAGE_BYTES, PAGE_BYTES), (start, 1)]) == (
            memory[5:15] + memory[3 * PAGE_BYTES :] + memory[:1]
        )
        assert gather(os.getpid(), []) == b""


@pytest.mark.parametrize("error", [0, errno.EPERM], ids=["the call", "forbidden"])
def test_what_can_not_be_had_ends_it_and_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """As touching a page of a file whose daemon is gone would."""
    if error:
        monkeypatch.setattr(module, "_LIBC", Refusing(error))
    path = tmp_path / "file"
    path.write_bytes(b"x" * 2 * PAGE_BYTES)
    with open(path, "r+b") as stream, mmap.mmap(stream.fileno(), 0) as memory:
        start = address_of(memory)
        stream.truncate(PAGE_BYTES)
        assert gather(os.getpid(), [(start, PAGE_BYTES), (start + PAGE_BYTES, 1), (start, 1)]) == b"x" * PAGE_BYTES
    ended = subprocess.Popen(["true"])
    ended.wait()
    if not error:
        assert gather(ended.pid, [(start, 1)]) == b""


class Refusing:
    """A C library whose call the kernel, or a filter, refuses."""

    def __init__(self, error: int) -> None:
        self._error = error

    def process_vm_readv(self, *_: object) -> int:
        ctypes.set_errno(self._error)
        return -1


def test_the_kernels_search_finds_what_the_page_map_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, random = tmp_path / "memory", Random(3)
    path.write_bytes(bytes(PAGES * PAGE_BYTES))
    with open(path, "rb") as stream:
        memory = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with memory:
        for page in range(0, PAGES, 2):
            if random.random() < 0.5:
                assert memory[page * PAGE_BYTES] == 0  # read, so of the file
        for page in random.sample(range(PAGES), PAGES // 3):
            memory[page * PAGE_BYTES] = 1
        for few in (7, 600, 4096):  # regions in the vector: what does not fit is asked for again
            monkeypatch.setattr(pagescan, "_REGION_COUNT", few)
            with pagemap.open_process(os.getpid(), "pagemap") as fd:
                start = pagemap.mappings(os.getpid(), path)[0].address
                scanned = pagescan.own_regions(fd, start, start + PAGES * PAGE_BYTES)
                read = list(pagemap._read_regions(fd, start, PAGES))
            if scanned is None:
                pytest.skip("this kernel has no PAGEMAP_SCAN")
            assert scanned == read
            assert len(read) > 500
        found = private_ranges(os.getpid(), path, PAGES * PAGE_BYTES)
        monkeypatch.setattr(pagescan, "own_regions", lambda *_: None)
        assert private_ranges(os.getpid(), path, PAGES * PAGE_BYTES) == found


@pytest.mark.parametrize("error", [errno.ENOTTY, errno.EINVAL])
def test_an_older_kernel_has_no_such_search(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def refuse(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    assert pagescan.own_regions(0, 0, PAGE_BYTES) is None
