"""Kernel images: their release, from made-up ones."""

from __future__ import annotations

import struct

import pytest

from imaged.errors import FormatError
from vmm.guest import bzimage


def image(release: bytes = b"6.1.0-9-cloud-amd64 (x@y) #1 SMP\0") -> bytes:
    setup = bytearray(1536)
    struct.pack_into("<4s", setup, 0x202, b"HdrS")
    struct.pack_into("<H", setup, 0x20E, 0x300)
    setup[0x500 : 0x500 + len(release)] = release
    return bytes(setup) + b"and the kernel"


def test_release() -> None:
    assert bzimage.release(image()) == "6.1.0-9-cloud-amd64"
    with pytest.raises(FormatError, match="expected a release text, found none"):
        bzimage.release(image(b"\0"))


@pytest.mark.parametrize("data", [b"", b"\0" * 4096, b"\x7fELF" + bytes(600), image()[:0x206]])
def test_not_a_kernel_image(data: bytes) -> None:
    with pytest.raises(FormatError, match="expected a bzImage of x86"):
        bzimage.release(data)
