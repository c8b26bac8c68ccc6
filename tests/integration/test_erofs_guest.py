"""Debian's 6.1 kernel, in a guest with two virtio disks, reads the same tree from our images as the host's kernel."""

from __future__ import annotations

import hashlib
from decimal import Decimal
from pathlib import Path

import pytest

from imaged.conversion.export import export_file
from tests.integration.test_erofs import record_of
from tests.support import erofs, guest, trees
from tests.support.memory_store import MemoryStore

pytestmark = [pytest.mark.qemu, pytest.mark.slow]

LISTING = r"""
list() {
  cd /mnt
  /usr/bin/find . -exec /usr/bin/stat --printf '%n\0%f\0%u\0%g\0%s\0%h\0%.9Y\0%t:%T\0%i\0' {} +
  printf '==\0'
  /usr/bin/find . -type l -printf '%p\0%l\0'
  printf '==\0'
  /usr/bin/find . -type f -size -100M -exec /usr/bin/sha256sum -z {} +
  printf '==\0'
  /usr/bin/getfattr -R -h -d -m - -e hex . 2>/dev/null
  printf '\0==\0'
  cd /
}
set -e
mount -t erofs -o ro,device=/dev/vdb /dev/vda /mnt
list
/usr/bin/dd if=/mnt/lastlog bs=4096 skip=52428799 count=20 2>/dev/null | sha256sum
printf '\0'
umount /mnt
mount -t erofs -o ro /dev/vdc /mnt
list
"""


def rows_of(fields: list[bytes]) -> tuple[dict[bytes, tuple[object, ...]], bytes, list[bytes]]:
    """The rows of one listing as `trees.found` makes them but for xattrs, the xattr dump, and what is left."""
    sections = []
    for _ in range(4):
        end = fields.index(b"==")
        sections.append(fields[:end])
        fields = fields[end + 1 :]
    stats, links, sums, dump = sections
    targets = dict(zip(links[::2], links[1::2], strict=True))
    digests = {line[66:]: line[:64].decode() for line in sums}
    first: dict[bytes, bytes] = {}
    rows: dict[bytes, tuple[object, ...]] = {}
    columns = [stats[at : at + 9] for at in range(0, len(stats), 9)]
    # The names come as the guest lists them; a link group is known by its first name in the order of `walk`.
    for name, mode, uid, gid, size, links_count, mtime, device, inode in sorted(
        columns, key=lambda row: row[0].split(b"/")
    ):
        bits = int(mode, 16)
        kind: object = None
        if name in targets:
            kind = targets[name]
        elif bits & 0o170000 == 0o100000:
            kind = int(size), digests.get(name)
        elif bits & 0o170000 in (0o020000, 0o060000):
            major, minor = device.split(b":")
            kind = int(major, 16), int(minor, 16)
        path = name[2:]
        mtime_ns = int(Decimal(mtime.decode()) * 10**9)
        rows[path] = (oct(bits), int(uid), int(gid), mtime_ns, int(links_count), first.setdefault(inode, path), kind)
    return rows, b"\0".join(dump), fields


def test_a_6_1_kernel_reads_both_forms(tmp_path: Path) -> None:
    store = MemoryStore()
    root = trees.sample(store, many=3000)
    built = erofs.build(store, root, tmp_path)
    single = tmp_path / "single.erofs"
    export_file(store, record_of(store, built), single)
    output = guest.run(
        LISTING, [built.metadata, built.data, single], programs=("find", "stat", "sha256sum", "getfattr", "dd")
    )
    expected = trees.expected(store, root)
    wanted = {path: row[:-1] for path, row in expected.items()}
    rows, dump, rest = rows_of(output.split(b"\0"))
    assert rows.keys() == wanted.keys()
    assert [(name, wanted[name], rows[name]) for name in wanted if wanted[name] != rows[name]] == []
    for row in expected.values():
        for name, value in row[-1]:  # type: ignore[attr-defined]
            encoded = b"0x" + value.hex().encode() if value else b""
            assert (name + b"=" + encoded if encoded else name) in dump
    part = (bytes(4096) + b"b" * 70_000).ljust(20 * 4096, b"\0")
    assert rest[0].split()[0].decode() == hashlib.sha256(part).hexdigest()
    again, dump_again, _ = rows_of(rest[1:])
    assert (again, dump_again) == (rows, dump)
