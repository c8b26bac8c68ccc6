"""What the kernel and fsck.erofs say of our EROFS images."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest

from fuse import linux
from imaged.blockbuilder import write_blob
from imaged.conversion.export import export_file
from imaged.erofs import reader
from imaged.erofs.format import Superblock
from imaged.erofs.tree import Inode
from imaged.errors import FormatError, PvisorError
from imaged.record import ImageRecord
from tests.support import erofs, trees
from tests.support.memory_store import MemoryStore

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryStore, Inode, erofs.Built]:
    store = MemoryStore()
    root = trees.sample(store)
    return store, root, erofs.build(store, root, tmp_path_factory.mktemp("sample"))


def record_of(store: MemoryStore, built: erofs.Built) -> ImageRecord:
    metadata = built.metadata.read_bytes()
    return ImageRecord(
        metadata=write_blob(store, metadata),
        metadata_bytes=len(metadata),
        data=built.data_id,
        data_bytes=built.data.stat().st_size,
        entries=1,
        platform="linux/amd64",
    )


def compare(store: MemoryStore, root: Inode, top: Path) -> None:
    wanted, found = trees.expected(store, root), trees.found(top)
    assert wanted.keys() == found.keys()
    assert [(name, wanted[name], found[name]) for name in wanted if wanted[name] != found[name]] == []


def test_fsck_accepts(sample: tuple[MemoryStore, Inode, erofs.Built]) -> None:
    _, _, built = sample
    assert built.placement.warnings == ()
    erofs.fsck(built.metadata, built.data)


def test_fsck_extracts_the_pair_and_an_export(tmp_path: Path) -> None:
    """Without a kernel: by erofs-utils' own reader. No sparse files, of which its version 1.5 leaves out the holes."""
    store, rng = MemoryStore(), random.Random(2)
    files = {b"%d" % size: trees.file(store, rng.randbytes(size)) for size in (0, 1, 4096, 70_000, 1 << 20)}
    built = erofs.build(store, trees.directory({b"d": trees.directory(dict(files))}), tmp_path)
    export_file(store, record_of(store, built), tmp_path / "single.erofs")
    erofs.fsck(tmp_path / "single.erofs", extract=tmp_path / "out")
    erofs.fsck(built.metadata, built.data, extract=tmp_path / "pair")
    for name, inode in files.items():
        for out in ("out", "pair"):
            assert Path(tmp_path, out, "d", os.fsdecode(name)).read_bytes() == trees.content(store, inode)


def test_kernel_mount_from_files(sample: tuple[MemoryStore, Inode, erofs.Built], tmp_path: Path) -> None:
    store, root, built = sample
    with erofs.mounted(built.metadata, built.data, tmp_path / "mnt") as top:
        compare(store, root, top)


def test_kernel_mount_from_loop_devices(sample: tuple[MemoryStore, Inode, erofs.Built], tmp_path: Path) -> None:
    store, root, built = sample
    with (
        erofs.loop_device(built.metadata) as metadata,
        erofs.loop_device(built.data) as data,
        erofs.mounted(metadata, data, tmp_path / "mnt") as top,
    ):
        compare(store, root, top)


def test_lookup_of_every_name_in_a_large_directory(
    sample: tuple[MemoryStore, Inode, erofs.Built], tmp_path: Path
) -> None:
    """Lookups search the blocks for a name, listing walks them: both must find all, and nothing else."""
    _, root, built = sample
    with erofs.mounted(built.metadata, built.data, tmp_path / "mnt") as top:
        for name in root.children[b"many"].children:
            assert os.lstat(os.path.join(os.fsencode(top), b"many", name)).st_size == 0
        for name in ("f", "f00000x", "zzz", "\x01", "f19999.", "f0999"):
            assert not Path(top, "many", name).exists()


def test_big_file_reads_at_random_places(tmp_path: Path) -> None:
    store, rng = MemoryStore(), random.Random(4)
    data = rng.randbytes(5 << 20)
    built = erofs.build(store, trees.directory({b"f": trees.file(store, data)}), tmp_path)
    with (
        erofs.mounted(built.metadata, built.data, tmp_path / "mnt") as top,
        open(top / "f", "rb") as stream,
    ):
        for _ in range(200):
            at, length = rng.randrange(len(data)), rng.randrange(1, 100_000)
            stream.seek(at)
            assert stream.read(length) == data[at : at + length]


def test_holes_of_a_large_sparse_file_read_as_zeros(
    sample: tuple[MemoryStore, Inode, erofs.Built], tmp_path: Path
) -> None:
    _, _, built = sample
    with (
        erofs.mounted(built.metadata, built.data, tmp_path / "mnt") as top,
        open(top / "lastlog", "rb") as stream,
    ):
        for at, wanted in ((0, bytes(4096)), (100 << 30, bytes(65536)), ((300 << 30) - 1, bytes(6))):
            assert os.pread(stream.fileno(), len(wanted), at) == wanted
        assert os.pread(stream.fileno(), 5001, 5 * 4096) == b"a" * 5000 + b"\0"
        assert os.pread(stream.fileno(), 70_002, (200 << 30) - 1) == b"\0" + b"b" * 70_000 + b"\0"


def test_the_smallest_image(tmp_path: Path) -> None:
    store = MemoryStore()
    root = trees.directory(mtime_ns=0)
    built = erofs.build(store, root, tmp_path)
    assert built.metadata.stat().st_size == 4096
    erofs.fsck(built.metadata, built.data)
    with erofs.mounted(built.metadata, built.data, tmp_path / "mnt") as top:
        compare(store, root, top)


def test_fsck_accepts_an_inode_that_ends_with_a_block(tmp_path: Path) -> None:
    store = MemoryStore()
    met = False
    for length in range(3, 60):
        names = {b"%03d" % number: trees.node(stat.S_IFIFO) for number in range(56)}
        names[b"n" * length] = trees.node(stat.S_IFIFO)
        built = erofs.build(store, trees.directory(names), tmp_path)
        image = built.metadata.read_bytes()
        root_nid = Superblock.parse(image[:4096]).root_nid
        if max(inode.tail_offset for inode in reader.inodes(image, root_nid)) % 4096 == 0:
            met = True
            erofs.fsck(built.metadata, built.data)
    assert met


def test_a_root_directory_of_many_blocks_and_xattrs(tmp_path: Path) -> None:
    """The root's number has 16 bits, so the root must come first however large it is."""
    store = MemoryStore()
    root = trees.directory({b"%05d" % number: trees.file(store, b"") for number in range(70_000)})
    root.xattrs = {b"trusted.x": bytes(60_000)}
    built = erofs.build(store, root, tmp_path)
    erofs.fsck(built.metadata, built.data)
    with erofs.mounted(built.metadata, built.data, tmp_path / "mnt") as top:
        with os.scandir(top) as entries:
            assert {os.fsencode(entry.name) for entry in entries} == root.children.keys()
        assert os.getxattr(top, "trusted.x") == bytes(60_000)


def test_more_hard_links_than_16_bits_count(tmp_path: Path) -> None:
    store = MemoryStore()
    inode = trees.file(store, b"linked")
    root = trees.directory({b"%05d" % number: inode for number in range(66_000)})
    built = erofs.build(store, root, tmp_path)
    with erofs.mounted(built.metadata, built.data, tmp_path / "mnt") as top:
        assert Path(top, "00000").stat().st_nlink == 66_000


def test_export_is_one_file_with_the_same_tree(sample: tuple[MemoryStore, Inode, erofs.Built], tmp_path: Path) -> None:
    store, root, built = sample
    path = tmp_path / "image.erofs"
    path.write_bytes(b"old")
    size_bytes = export_file(store, record_of(store, built), path)
    assert path.stat().st_size == size_bytes
    assert path.stat().st_blocks * 512 < 8 << 20, "the holes of the data device are not holes of the file"
    assert os.listdir(tmp_path) == ["image.erofs"]  # noqa: PTH208
    erofs.fsck(path)
    with erofs.mounted(path, None, tmp_path / "mnt") as top:
        compare(store, root, top)


def test_export_through_a_link_replaces_its_target(tmp_path: Path) -> None:
    store = MemoryStore()
    record = record_of(store, erofs.build(store, trees.directory({b"f": trees.file(store, b"x")}), tmp_path))
    (tmp_path / "real").mkdir()
    for name in ("old", "new"):
        (tmp_path / name).symlink_to(f"real/{name}")
    (tmp_path / "real/old").write_bytes(b"old")
    for name in ("old", "new"):
        size_bytes = export_file(store, record, tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "real" / name).lstat().st_size == size_bytes
        erofs.fsck(tmp_path / "real" / name)


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK])
def test_export_never_replaces_what_is_no_regular_file(tmp_path: Path, kind: int) -> None:
    store = MemoryStore()
    record = record_of(store, erofs.build(store, trees.directory({b"f": trees.file(store, b"x")}), tmp_path))
    path = tmp_path / "node"
    os.mknod(path, kind | 0o600, os.makedev(1, 3))
    before = path.stat()
    (tmp_path / "link").symlink_to("node")
    names = sorted(tmp_path.iterdir())
    for target in (path, tmp_path / "link"):
        with pytest.raises(PvisorError, match="not a regular file"):
            export_file(store, record, target)
    assert path.lstat() == before
    assert sorted(tmp_path.iterdir()) == names


def test_export_to_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    data = random.Random(1).randbytes(3 << 20)
    built = erofs.build(store, trees.directory({b"f": trees.file(store, data)}), tmp_path)
    small = tmp_path / "small"
    small.mkdir()
    linux.mount("tmpfs", small, "tmpfs", options="size=1m")
    try:
        with pytest.raises(PvisorError, match="No space left"):
            export_file(store, record_of(store, built), small / "image.erofs")
        assert list(small.iterdir()) == []
    finally:
        linux.umount(small, linux.MNT_DETACH)


def test_export_of_metadata_and_data_of_two_images_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    records = []
    for number, size in enumerate((5000, 9000)):
        work = tmp_path / str(number)
        work.mkdir()
        records.append(
            record_of(store, erofs.build(store, trees.directory({b"f": trees.file(store, b"x" * size)}), work))
        )
    mixed = ImageRecord(
        metadata=records[0].metadata,
        metadata_bytes=records[0].metadata_bytes,
        data=records[1].data,
        data_bytes=records[1].data_bytes,
        entries=1,
        platform="linux/amd64",
    )
    with pytest.raises(FormatError, match="data device of 8192 bytes"):
        export_file(store, mixed, tmp_path / "out.erofs")
    assert not Path(tmp_path, "out.erofs").exists()
