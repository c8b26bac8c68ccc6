"""The numbered cases of trees that broke other tools, and what lies around them."""

import itertools
import random
import stat

import pytest

from imaged.erofs.tree import Inode, walk
from imaged.errors import LayerError
from tests.support import tars
from tests.support.images import build, content
from tests.support.memory_store import MemoryStore
from tests.support.tars import archive, directory, hard_link, member, symlink

OPAQUE = b".wh..wh..opq"


def names(root: Inode) -> list[bytes]:
    return [path for path, _ in walk(root)][1:]


def at(root: Inode, path: bytes) -> Inode:
    for component in path.split(b"/"):
        root = root.children[component]
    return root


LOWER = archive(
    directory(b"d", mode=0o700, uid=5, mtime=9),
    member(b"d/old", b"old"),
    directory(b"d/sub"),
    member(b"d/sub/deep", b"deep"),
    member(b"f", b"file"),
    symlink(b"l", b"d"),
)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_case_1_opaque_hides_lower_entries_alone(order: tuple[int, ...]) -> None:
    upper = [directory(b"d", mode=0o711), member(b"d/" + OPAQUE), member(b"d/new", b"new")]
    root = build(LOWER, archive(*(upper[index] for index in order)))
    assert names(root) == [b"d", b"d/new", b"f", b"l"]
    assert stat.S_IMODE(at(root, b"d").mode) == 0o711


def test_case_1_opaque_without_the_directory_keeps_its_metadata() -> None:
    root = build(LOWER, archive(member(b"d/" + OPAQUE), member(b"d/sub/new")))
    assert names(root) == [b"d", b"d/sub", b"d/sub/new", b"f", b"l"]
    assert (stat.S_IMODE(at(root, b"d").mode), at(root, b"d").uid) == (0o700, 5)
    assert stat.S_IMODE(at(root, b"d/sub").mode) == 0o755


def test_case_1_opaque_root_and_opaque_elsewhere() -> None:
    assert names(build(LOWER, archive(member(b"new"), member(OPAQUE)))) == [b"new"]
    assert len(names(build(LOWER, archive(member(b"nowhere/" + OPAQUE))))) == 6
    assert len(names(build(LOWER, archive(member(b"f/" + OPAQUE))))) == 6


@pytest.mark.parametrize("name", [b".wh.none", b"none/.wh.x", b"f/.wh.x", b"d/sub/.wh.none", b"l/none/.wh.x"])
def test_case_2_whiteout_of_nothing(name: bytes) -> None:
    assert names(build(LOWER, archive(member(name)))) == names(build(LOWER))


@pytest.mark.parametrize("kind", [b"0", b"3", b"5"])
def test_whiteouts_of_any_type(kind: bytes) -> None:
    assert b"f" not in names(build(LOWER, archive(member(b".wh.f", kind=kind))))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (1, 0, 2)])
def test_case_3_removed_and_made_again(order: tuple[int, ...]) -> None:
    upper = [member(b".wh.d"), directory(b"d", mode=0o711), member(b"d/new", b"new")]
    root = build(LOWER, archive(*(upper[index] for index in order)))
    assert names(root) == [b"d", b"d/new", b"f", b"l"]
    assert (stat.S_IMODE(at(root, b"d").mode), at(root, b"d").uid) == (0o711, 0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_case_3_removed_and_made_again_by_a_child_alone(order: tuple[int, ...]) -> None:
    upper = [member(b".wh.d"), member(b"d/new")]
    root = build(LOWER, archive(*(upper[index] for index in order)))
    assert names(root) == [b"d", b"d/new", b"f", b"l"]
    assert (stat.S_IMODE(at(root, b"d").mode), at(root, b"d").uid, at(root, b"d").mtime_ns) == (0o755, 0, 0)


def test_whiteout_of_a_file_of_the_same_layer_leaves_it() -> None:
    for upper in ([member(b"f", b"new!!"), member(b".wh.f")], [member(b".wh.f"), member(b"f", b"new!!")]):
        assert at(build(LOWER, archive(*upper)), b"f").size_bytes == 5


def test_whiteout_through_a_symlinked_parent() -> None:
    assert b"d/old" not in names(build(LOWER, archive(member(b"l/.wh.old"))))
    assert b"d/old" not in names(build(LOWER, archive(member(b"l/" + OPAQUE))))


def test_whiteout_in_a_directory_that_replaces_a_symlink_spares_its_target() -> None:
    for name in (OPAQUE, b".wh.old"):
        for upper in ([directory(b"l"), member(b"l/" + name)], [member(b"l/" + name), directory(b"l")]):
            root = build(LOWER, archive(*upper))
            assert b"d/old" in names(root)
            assert at(root, b"l").is_directory


def test_a_symlink_that_is_whited_out_leaves_its_target() -> None:
    root = build(LOWER, archive(member(b".wh.l")))
    assert b"l" not in names(root)
    assert b"d/old" in names(root)


def test_case_4_hard_link_to_a_lower_file() -> None:
    root = build(LOWER, archive(hard_link(b"g", b"f"), hard_link(b"d/sub/h", b"./f"), hard_link(b"i", b"/l/old")))
    assert at(root, b"g") is at(root, b"f") is at(root, b"d/sub/h")
    assert at(root, b"i") is at(root, b"d/old")


def test_case_4_hard_links_to_symlinks_and_nodes() -> None:
    root = build(LOWER, archive(hard_link(b"l2", b"l"), member(b"p", kind=b"6"), hard_link(b"p2", b"p")))
    assert at(root, b"l2") is at(root, b"l")
    assert at(root, b"p2") is at(root, b"p")


def test_case_4_replacing_one_name_leaves_the_others() -> None:
    lower = archive(member(b"a", b"1"), hard_link(b"b", b"a"), hard_link(b"c", b"a"))
    root = build(lower, archive(member(b"a", b"22")))
    assert at(root, b"b") is at(root, b"c") is not at(root, b"a")
    assert (at(root, b"a").size_bytes, at(root, b"b").size_bytes) == (2, 1)


def test_case_5_link_before_its_target() -> None:
    upper = archive(hard_link(b"d/b", b"d/a"), hard_link(b"d/a", b"t"), hard_link(b"a0", b"d/b"), member(b"t", b"data"))
    store = MemoryStore()
    root = build(upper, store=store)
    assert at(root, b"t") is at(root, b"d/a") is at(root, b"d/b") is at(root, b"a0")
    assert content(at(root, b"t"), store) == b"data"


def test_case_5_a_long_chain_in_any_order() -> None:
    chain = [hard_link(b"%d" % (index + 1), b"%d" % index) for index in range(20_000)]
    random.Random(1).shuffle(chain)
    root = build(archive(*chain, member(b"0", b"data")))
    assert len(root.children) == 20_001
    assert len(set(map(id, root.children.values()))) == 1


def test_case_5_link_to_a_lower_file_that_is_replaced_afterwards() -> None:
    """In order, as every tool extracts it: the link is to what was there."""
    store = MemoryStore()
    root = build(LOWER, archive(hard_link(b"g", b"f"), member(b"f", b"upper")), store=store)
    assert content(at(root, b"g"), store) == b"file"
    assert content(at(root, b"f"), store) == b"upper"


def test_case_5_link_before_its_target_through_a_symlink() -> None:
    upper = archive(hard_link(b"h", b"l/t"), symlink(b"l", b"real"), member(b"real/t", b"data"))
    root = build(upper)
    assert at(root, b"h") is at(root, b"real/t")


def test_case_5_a_later_entry_wins_over_a_waiting_link() -> None:
    root = build(archive(hard_link(b"x", b"t"), member(b"x", b"mine"), member(b"t", b"theirs!")))
    assert (at(root, b"x").size_bytes, at(root, b"t").size_bytes) == (4, 7)


def test_hard_link_and_whiteout_of_its_target_is_a_rename() -> None:
    for upper in ([hard_link(b"g", b"d/old"), member(b"d/.wh.old")], [member(b".wh.d"), hard_link(b"g", b"d/old")]):
        store = MemoryStore()
        root = build(LOWER, archive(*upper), store=store)
        assert b"d/old" not in names(root)
        assert content(at(root, b"g"), store) == b"old"


@pytest.mark.parametrize(
    ("upper", "words"),
    [
        ([hard_link(b"h", b"none")], "not in the image"),
        ([hard_link(b"h", b"none/x")], "not in the image"),
        ([hard_link(b"h", b"f/x")], "not in the image"),
        ([hard_link(b"h", b"h")], "not in the image"),
        ([hard_link(b"a", b"b"), hard_link(b"b", b"a")], "not in the image"),
        ([hard_link(b"h", b"d")], "directory"),
        ([hard_link(b"h", b".")], "directory"),
        ([hard_link(b"d", b"d/old")], "below the link"),
        ([hard_link(b".", b"f")], "root"),
        ([member(b".")], "root"),
        ([symlink(b"./", b"/etc")], "root"),
        ([member(b"f/x")], "parent"),
        ([member(b"p", kind=b"6"), member(b"p/x")], "parent"),
        ([symlink(b"loop", b"loop"), member(b"loop/x")], "symlinks"),
        ([symlink(b"a", b"b"), symlink(b"b", b"a"), member(b"a/x")], "symlinks"),
    ],
)
def test_layers_that_can_not_be_applied(upper: list[bytes], words: str) -> None:
    with pytest.raises(LayerError, match=words) as caught:
        build(LOWER, archive(*upper))
    assert caught.value.entry is not None
    assert caught.value.hint


ENTRIES = {
    "directory": directory(b"x"),
    "file": member(b"x", b"data"),
    "symlink": symlink(b"x", b"d"),
    "fifo": member(b"x", kind=b"6"),
    "link": hard_link(b"x", b"f"),
}


@pytest.mark.parametrize("old", list(ENTRIES))
@pytest.mark.parametrize("new", list(ENTRIES))
@pytest.mark.parametrize("same_layer", [False, True])
def test_case_6_replacement(old: str, new: str, same_layer: bool) -> None:
    lower = [ENTRIES[old]]
    if old == "directory":
        lower.append(member(b"x/child"))
    layers = [archive(*lower, ENTRIES[new])] if same_layer else [archive(*lower), archive(ENTRIES[new])]
    root = build(LOWER, *layers)
    found = at(root, b"x")
    kinds = {"directory": stat.S_IFDIR, "file": stat.S_IFREG, "symlink": stat.S_IFLNK, "fifo": stat.S_IFIFO}
    assert stat.S_IFMT(found.mode) == kinds.get(new, stat.S_IFREG)
    assert list(found.children) == ([b"child"] if old == new == "directory" else [])
    assert (found is at(root, b"f")) == (new == "link")
    assert names(root)[:-1] == names(build(LOWER)) or list(found.children)


def test_case_6_entries_go_where_the_replacement_leads() -> None:
    upper = archive(member(b"x/one"), symlink(b"x", b"d"), member(b"x/two"), directory(b"x"), member(b"x/three"))
    assert names(build(LOWER, upper))[-2:] == [b"x", b"x/three"]
    assert b"d/two" in names(build(LOWER, upper))


def test_case_7_parents() -> None:
    root = build(archive(member(b"a/b/c", b"x", mode=0o600, uid=3)))
    for path in (b"a", b"a/b"):
        parent = at(root, path)
        assert (parent.mode, parent.uid, parent.gid, parent.mtime_ns) == (stat.S_IFDIR | 0o755, 0, 0, 0)
    root = build(archive(member(b"a/b", b"x"), directory(b"a", mode=0o700, uid=9)))
    assert (stat.S_IMODE(at(root, b"a").mode), at(root, b"a").uid) == (0o700, 9)


def test_case_8_last_one_wins() -> None:
    store = MemoryStore()
    layer = archive(member(b"x", b"first"), member(b"./x", b"second", mode=0o600), directory(b"e", mode=0o700))
    layer = archive(layer[:-1024], directory(b"e/", mode=0o711, uid=4))
    root = build(layer, store=store)
    assert content(at(root, b"x"), store) == b"second"
    assert stat.S_IMODE(at(root, b"x").mode) == 0o600
    assert (stat.S_IMODE(at(root, b"e").mode), at(root, b"e").uid) == (0o711, 4)


@pytest.mark.parametrize("name", [b"./", b".", b"/", b"./."])
def test_case_9_root_metadata(name: bytes) -> None:
    first = archive(directory(name, mode=0o555, uid=1), member(b"./a/b"))
    root = build(first)
    assert (root.mode, root.uid, names(root)) == (stat.S_IFDIR | 0o555, 1, [b"a", b"a/b"])
    upper = archive(
        tars.pax((b"mtime", b"5.5"), (b"SCHILY.xattr.user.r", b"1")) + directory(name, mode=0o1777, uid=2, gid=3)
    )
    root = build(first, upper)
    assert (root.mode, root.uid, root.gid, root.mtime_ns) == (stat.S_IFDIR | 0o1777, 2, 3, 5_500_000_000)
    assert (root.xattrs, names(root)) == ({b"user.r": b"1"}, [b"a", b"a/b"])
    root = build(upper, archive(directory(name)))
    assert (root.mode, root.xattrs) == (stat.S_IFDIR | 0o755, {})


def test_case_9_no_root_entry() -> None:
    root = build(archive(member(b"a")))
    assert (root.mode, root.uid, root.gid, root.mtime_ns) == (stat.S_IFDIR | 0o755, 0, 0, 0)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([member(b"../../x")], [b"x"]),
        ([member(b"/abs/x")], [b"abs", b"abs/x"]),
        ([member(b"a/../../b/../x")], [b"x"]),
        ([symlink(b"l", b"/etc"), member(b"l/x")], [b"etc", b"etc/x", b"l"]),
        ([symlink(b"l", b"../../../etc"), member(b"l/x")], [b"etc", b"etc/x", b"l"]),
        ([directory(b"r/s"), symlink(b"l", b"r/s"), member(b"l/t/x")], [b"l", b"r", b"r/s", b"r/s/t", b"r/s/t/x"]),
        ([directory(b"r/s"), symlink(b"r/l", b"../r/./s//"), member(b"r/l/x")], [b"r", b"r/l", b"r/s", b"r/s/x"]),
        ([symlink(b"a", b"b"), symlink(b"b", b"/c"), member(b"a/x")], [b"a", b"b", b"c", b"c/x"]),
        ([symlink(b"l", b"new/../r"), member(b"l/x")], [b"l", b"r", b"r/x"]),
        ([symlink(b"r/l", b".."), member(b"r/l/x")], [b"r", b"r/l", b"x"]),
        ([symlink(b"l", b"/"), member(b"l/x"), hard_link(b"l/y", b"l/l/x")], [b"l", b"x", b"y"]),
        ([symlink(b"l", b"../.."), hard_link(b"l/y", b"../../t"), member(b"t")], [b"l", b"t", b"y"]),
    ],
)
def test_case_10_never_outside_the_root(entries: list[bytes], expected: list[bytes]) -> None:
    assert names(build(archive(*entries))) == expected


def test_case_10_paths_are_resolved_anew_when_the_tree_changed() -> None:
    lower = archive(directory(b"d1"), directory(b"d2"), symlink(b"l", b"d1"), member(b"l/one"))
    root = build(lower, archive(member(b"l/two"), symlink(b"l", b"d2"), member(b"l/three")))
    assert names(root) == [b"d1", b"d1/one", b"d1/two", b"d2", b"d2/three", b"l"]
    root = build(lower, archive(member(b"d1/a"), member(b"d1", b"file"), directory(b"d1"), member(b"d1/b")))
    assert names(root) == [b"d1", b"d1/b", b"d2", b"l"]


def test_case_11_xattrs_are_data() -> None:
    attributes = [
        (b"user.bin", bytes(range(256))),
        (b"user.empty", b""),
        (b"security.capability", b"\1\0\0\2" + bytes(16)),
        (b"system.posix_acl_access", b"\2\0\0\0" + bytes(32)),
        (b"trusted.overlay.opaque", b"y"),
        (b"trusted.overlay.redirect", b"/elsewhere"),
    ]
    records = tars.pax(*((b"SCHILY.xattr." + name, value) for name, value in attributes))
    upper = archive(
        records + directory(b"d"), records + symlink(b"l", b"x"), records + member(b"f"), member(b"c", kind=b"3")
    )
    root = build(LOWER, upper)
    for path in (b"d", b"l", b"f"):
        assert at(root, path).xattrs == dict(attributes)
    assert b"d/old" in names(root)
    assert at(root, b"c").mode == stat.S_IFCHR | 0o644
    assert at(build(LOWER, upper, archive(directory(b"d"))), b"d").xattrs == {}


def test_case_12_nodes() -> None:
    root = build(
        archive(
            member(b"c", kind=b"3", major=4095, minor=1_048_575, mode=0o660),
            member(b"b", kind=b"4", major=259, minor=70_000),
            member(b"p", kind=b"6", mode=0o622),
        )
    )
    assert (at(root, b"c").mode, at(root, b"c").major, at(root, b"c").minor) == (stat.S_IFCHR | 0o660, 4095, 1_048_575)
    assert (at(root, b"b").mode, at(root, b"b").major, at(root, b"b").minor) == (stat.S_IFBLK | 0o644, 259, 70_000)
    assert at(root, b"p").mode == stat.S_IFIFO | 0o622


def test_case_13_modes_owners_times() -> None:
    root = build(
        archive(
            member(b"none", mode=0),
            member(b"all", mode=0o7777, uid=70_000, gid=4_294_967_294),
            tars.pax((b"mtime", b"-86400.000000001")) + member(b"before"),
            tars.pax((b"mtime", b"4294967296.999999999")) + member(b"after"),
            member(b"typed", mode=0o100644),
        )
    )
    assert at(root, b"none").mode == stat.S_IFREG
    assert at(root, b"all").mode == stat.S_IFREG | 0o7777
    assert (at(root, b"all").uid, at(root, b"all").gid) == (70_000, 4_294_967_294)
    assert at(root, b"before").mtime_ns == -86_400_000_000_001
    assert at(root, b"after").mtime_ns == 4_294_967_296_999_999_999
    assert at(root, b"typed").mode == stat.S_IFREG | 0o644


def test_case_14_names() -> None:
    odd = [b"n" * 255, b"\xff\xfe", b"new\nline", b"back\\slash", b"-dash", b" ", b"..."]
    deep = b"/".join([b"d" * 20] * 194) + b"/" + b"e" * 21
    assert len(deep) == 4095
    levels = b"/".join([b"x"] * 200)
    root = build(archive(*(member(name) for name in [*odd, deep, levels])))
    found = set(names(root))
    assert {*odd, deep, levels} <= found
    root = build(archive(*(member(name) for name in odd)), archive(*(member(b".wh." + name) for name in odd)))
    assert names(root) == []


def test_case_14_twenty_thousand_entries() -> None:
    root = build(archive(*(tars.header(b"big/%05d" % index) for index in range(20_000))))
    assert len(root.children[b"big"].children) == 20_000


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 65535, 65536, 65537, 200_000])
@pytest.mark.parametrize("zeros", [False, True])
def test_case_15_sizes(size: int, zeros: bool) -> None:
    data = bytes(size) if zeros else bytes(index * 7 % 251 for index in range(size))
    store = MemoryStore()
    root = build(archive(member(b"before", b"b"), member(b"f", data), member(b"after", b"a")), store=store)
    assert at(root, b"f").size_bytes == size
    assert content(at(root, b"f"), store) == data
    assert content(at(root, b"after"), store) == b"a"


def test_case_15_sparse() -> None:
    size = 300 << 30
    pieces = [(0, b"start"), (1 << 33, b"middle" * 1000), (size - 3, b"end")]
    numbers = b",".join(b"%d,%d" % (offset, len(data)) for offset, data in pieces)
    records = tars.pax((b"GNU.sparse.size", b"%d" % size), (b"GNU.sparse.map", numbers))
    store = MemoryStore()
    layer = archive(records + member(b"s", b"".join(data for _, data in pieces)), member(b"after", b"after"))
    root = build(layer, store=store)
    inode = at(root, b"s")
    assert inode.size_bytes == size
    assert sum(extent.block_count for extent in inode.extents) == size // 4096
    assert len(store.chunks) < 10
    position, kept = 0, {}
    for extent in inode.extents:
        if extent.chunk is not None:
            kept[position] = store.get(extent.chunk)[extent.first_block * 4096 :]
        position += extent.block_count * 4096
    assert kept[0].rstrip(b"\0") == b"start"
    assert kept[1 << 33].rstrip(b"\0") == b"middle" * 1000
    assert content(at(root, b"after"), store) == b"after"


def test_case_16_layers_with_no_files() -> None:
    for empty in (b"", bytes(512), bytes(1024), bytes(1 << 20)):
        assert names(build(LOWER, empty)) == names(build(LOWER))


def test_aufs_bookkeeping_is_left_out() -> None:
    upper = archive(
        directory(b".wh..wh.plnk"),
        member(b".wh..wh.plnk/1.2", b"x"),
        member(b".wh..wh.aufs"),
        member(b"d/.wh..wh.orph"),
    )
    assert names(build(LOWER, upper)) == names(build(LOWER))
