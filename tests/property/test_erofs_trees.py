"""Any tree of ours, as the kernel sees it."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imaged.erofs.tree import Inode
from tests.support import erofs, trees
from tests.support.memory_store import MemoryStore

pytestmark = pytest.mark.root

NAMES = st.binary(min_size=1, max_size=255).filter(lambda name: name not in (b".", b"..") and not {0, 47} & set(name))
SHORT_NAMES = st.sampled_from([b"a", b"b", b"-", b"!", b"...", b"..a", b".a", b"\xff", b"aa"])
XATTR_NAMES = st.builds(
    lambda prefix, rest: prefix + rest,
    st.sampled_from([b"user.", b"trusted.", b"security."]),
    st.text("abc.", min_size=1, max_size=20).map(str.encode),
)
XATTRS = st.dictionaries(XATTR_NAMES, st.binary(max_size=40) | st.integers(0, 5000).map(bytes), max_size=4)
TIMES = st.just(trees.MTIME_NS) | st.integers(-(1 << 62), 1 << 62)
IDS = st.sampled_from([0, 1, 65535, 65536, 0xFFFFFFFE])
KINDS = (
    [stat.S_IFREG] * 4 + [stat.S_IFDIR] * 3 + [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK]
)


@st.composite
def file_trees(draw: st.DrawFn) -> tuple[MemoryStore, Inode]:
    """A root and up to 40 more names in it, some of them hard links."""
    store = MemoryStore()
    root = inode_of(draw, store, stat.S_IFDIR)
    directories, others = [root], []
    for _ in range(draw(st.integers(0, 40))):
        parent = draw(st.sampled_from(directories))
        name = draw(SHORT_NAMES | NAMES)
        if name in parent.children:
            continue
        if others and draw(st.integers(0, 5)) == 0:
            parent.children[name] = draw(st.sampled_from(others))
            continue
        kind = draw(st.sampled_from(KINDS))
        inode = parent.children[name] = inode_of(draw, store, kind)
        (directories if kind == stat.S_IFDIR else others).append(inode)
    return store, root


def inode_of(draw: st.DrawFn, store: MemoryStore, kind: int) -> Inode:
    if kind == stat.S_IFREG:
        size = draw(st.integers(0, 3 * trees.CHUNK_BYTES) | st.sampled_from([0, 1, 4095, 4096, 4097]))
        inode = trees.file(store, draw(st.binary(min_size=1, max_size=8)) * (size // 8))
    else:
        inode = Inode(mode=kind)
    permissions = 0o777 if kind == stat.S_IFLNK else draw(st.integers(0, 0o7777))
    inode.mode = kind | permissions
    inode.uid, inode.gid, inode.mtime_ns = draw(IDS), draw(IDS), draw(TIMES)
    inode.xattrs = draw(XATTRS)
    if kind == stat.S_IFLNK:
        inode.target = draw(st.binary(min_size=1, max_size=300).filter(lambda target: 0 not in target))
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        # The kernel refuses user attributes on other files, whatever is on disk.
        inode.xattrs = {name: value for name, value in inode.xattrs.items() if not name.startswith(b"user.")}
    if kind in (stat.S_IFCHR, stat.S_IFBLK):
        inode.major, inode.minor = draw(st.integers(0, 4095)), draw(st.integers(0, 0xFFFFF))
    return inode


@given(file_trees())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_the_kernel_sees_the_tree(tree: tuple[MemoryStore, Inode]) -> None:
    store, root = tree
    with tempfile.TemporaryDirectory() as work:
        built = erofs.build(store, root, Path(work))
        erofs.fsck(built.metadata, built.data)
        with erofs.mounted(built.metadata, built.data, Path(work, "mnt")) as top:
            found = trees.found(top)
    wanted = trees.expected(store, root)
    assert wanted.keys() == found.keys()
    assert [(name, wanted[name], found[name]) for name in wanted if wanted[name] != found[name]] == []
