"""Images of layer tars for comparing with another tool: ordinary, adversarial, and random from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support import tars
from tests.support.tars import archive, directory, hard_link, member, symlink

OPAQUE = b".wh..wh..opq"
TIME = 1_600_000_000


@dataclass(frozen=True, slots=True)
class Image:
    """Layer tars, lowest first. What the other tool can not tell us of it is said with the reason.

    Modification times of `untimed` paths are not compared: directories that no entry describes, which it makes at
    the time of unpacking.
    """

    name: str
    layers: tuple[bytes, ...]
    untimed: frozenset[bytes] = frozenset()


def _image(name: str, *layers: bytes, untimed: tuple[bytes, ...] = ()) -> Image:
    return Image(name, (ROOT, *layers), frozenset(untimed))


def d(name: bytes, **fields: int | bytes) -> bytes:
    return directory(name, mtime=TIME, **fields)  # type: ignore[arg-type]


def f(name: bytes, data: bytes = b"", **fields: int | bytes) -> bytes:
    return member(name, data, mtime=TIME + 1, **fields)  # type: ignore[arg-type]


def s(name: bytes, target: bytes, **fields: int | bytes) -> bytes:
    return symlink(name, target, mtime=TIME + 2, **fields)


def x(*attributes: tuple[bytes, bytes]) -> bytes:
    return tars.pax(*((b"SCHILY.xattr." + name, value) for name, value in attributes))


ROOT = archive(d(b"./"))
LOWER = archive(
    d(b"d", mode=0o700, uid=5),
    f(b"d/old", b"old"),
    d(b"d/sub"),
    f(b"d/sub/deep", b"deep"),
    f(b"f", b"file" * 3000),
    s(b"l", b"d"),
    s(b"dangling", b"nowhere/else"),
)
CAPABILITY = b"\1\0\0\2\0\4\0\0" + bytes(12)
ACL = b"\2\0\0\0" + b"".join(
    tag + bits + identity
    for tag, bits, identity in (
        (b"\1\0", b"\7\0", b"\xff" * 4),
        (b"\2\0", b"\4\0", (70_000).to_bytes(4, "little")),
        (b"\4\0", b"\5\0", b"\xff" * 4),
        (b"\x10\0", b"\5\0", b"\xff" * 4),
        (b"\x20\0", b"\5\0", b"\xff" * 4),
    )
)


def handmade() -> Iterator[Image]:
    """One image for each thing that went wrong somewhere."""
    yield _image("opaque before", LOWER, archive(f(b"d/" + OPAQUE), d(b"d"), f(b"d/new", b"n")))
    yield _image("opaque after", LOWER, archive(d(b"d"), f(b"d/new", b"n"), f(b"d/" + OPAQUE)))
    yield _image("opaque between", LOWER, archive(d(b"d"), f(b"d/" + OPAQUE), f(b"d/new", b"n")))
    yield _image("opaque alone", LOWER, archive(f(b"d/" + OPAQUE)))
    yield _image("opaque root", LOWER, archive(f(OPAQUE), f(b"new")))
    yield _image("opaque of nothing", LOWER, archive(f(b"none/" + OPAQUE)))
    yield _image("opaque through a symlink", LOWER, archive(f(b"l/" + OPAQUE)))
    yield _image("whiteout file", LOWER, archive(f(b".wh.f")))
    yield _image("whiteout directory", LOWER, archive(f(b".wh.d")))
    yield _image("whiteout nothing", LOWER, archive(f(b".wh.none"), f(b"none/.wh.none"), f(b"f/.wh.none")))
    yield _image("whiteout symlink", LOWER, archive(f(b".wh.l")))
    yield _image("whiteout through a symlink", LOWER, archive(f(b"l/.wh.old")))
    yield _image("whiteout and again", LOWER, archive(f(b".wh.d"), d(b"d", mode=0o711), f(b"d/new")))
    # umoci sets the time of `d` back for what it puts into it, but not for what it removes from it.
    yield _image("again and whiteout", LOWER, archive(d(b"d", mode=0o711), f(b"d/new"), f(b".wh.d")), untimed=(b"d",))
    yield _image("file and its whiteout", LOWER, archive(f(b"f", b"upper"), f(b".wh.f")))
    yield _image("whiteouts are of any type", LOWER, archive(d(b".wh.d"), s(b".wh.f", b"x")))
    yield _image(
        "link to lower", LOWER, archive(hard_link(b"g", b"f"), hard_link(b"d/h", b"/f"), hard_link(b"i", b"./g"))
    )
    yield _image("link through a symlink", LOWER, archive(hard_link(b"g", b"l/old"), hard_link(b"l/h", b"f")))
    yield _image("link to a symlink", LOWER, archive(hard_link(b"l2", b"l"), hard_link(b"d/l3", b"l2")))
    yield _image(
        "link to nodes", archive(f(b"p", kind=b"6"), hard_link(b"p2", b"p"), f(b"c", kind=b"3"), hard_link(b"c2", b"c"))
    )
    yield _image("rename as link and whiteout", LOWER, archive(hard_link(b"g", b"f"), f(b".wh.f")))
    yield _image("linked name replaced", LOWER, archive(hard_link(b"g", b"f")), archive(f(b"f", b"new")))
    yield _image("linked name removed", LOWER, archive(hard_link(b"g", b"f")), archive(f(b".wh.f")))
    yield _image("link over a file", LOWER, archive(hard_link(b"d/old", b"f")))
    kinds = {"dir": d(b"x"), "file": f(b"x", b"12"), "symlink": s(b"x", b"d"), "fifo": f(b"x", kind=b"6")}
    for old in kinds:
        for new in kinds:
            below = [f(b"x/child", b"c")] if old == "dir" else []
            yield _image(f"{new} over {old}", LOWER, archive(kinds[old], *below), archive(kinds[new]))
            yield _image(f"{new} over {old} in one layer", LOWER, archive(kinds[old], *below, kinds[new]))
    yield _image("parents", archive(f(b"a/b/c", b"c", uid=3)), untimed=(b"", b"a", b"a/b"))
    yield _image("parents afterwards", archive(f(b"a/c", b"c"), d(b"a", mode=0o700)), untimed=(b"",))
    yield _image("twice", archive(f(b"t", b"first"), f(b"./t", b"second", mode=0o600), d(b"e"), d(b"e/", mode=0o711)))
    yield Image("root is a dot", (archive(d(b".", mode=0o555, uid=2), f(b"./a")), archive(f(b"./b"))))
    yield Image("root is absent", (archive(f(b"a")),), frozenset({b""}))
    yield _image("root in an upper layer", LOWER, archive(x((b"user.r", b"1")), d(b"./", mode=0o1777, uid=9, gid=8)))
    yield _image("root with attributes", archive(x((b"user.r", b"1")) + d(b"/", mode=0o1777, uid=9, gid=8)))
    yield _image("dots", archive(f(b"../../up"), f(b"/abs", b"a"), f(b"a/../../b/../x")))
    yield _image("absolute symlink", archive(d(b"etc"), s(b"e", b"/etc"), f(b"e/x", b"x")))
    yield _image("escaping symlink", archive(d(b"etc"), s(b"e", b"../../../../etc"), f(b"e/x", b"x")))
    yield _image("symlink chain", archive(d(b"c"), s(b"a", b"b"), s(b"b", b"/c"), f(b"a/x", b"x")))
    yield _image("symlink to nowhere", archive(s(b"a", b"no/where"), f(b"a/x")), untimed=(b"", b"no", b"no/where"))
    yield _image("symlink with dots", archive(d(b"r"), s(b"a", b"none/../r/./"), f(b"a/x", b"x")))
    yield _image(
        "symlink changes", archive(d(b"1"), d(b"2"), s(b"l", b"1"), f(b"l/a")), archive(s(b"l", b"2"), f(b"l/b"))
    )
    yield _image(
        "attributes",
        archive(
            x((b"user.bin", bytes(range(256))), (b"trusted.t", b"t"), (b"security.x", b"x")) + d(b"dir"),
            x((b"trusted.on.link", b"1"), (b"security.on.link", b"2")) + s(b"link", b"dir"),
            x((b"security.capability", CAPABILITY), (b"system.posix_acl_access", ACL)) + f(b"file", mode=0o755),
            x((b"system.posix_acl_default", ACL)) + d(b"default"),
            x((b"user." + b"n" * 250, b"v" * 2000)) + f(b"long"),
        ),
    )
    yield _image(
        "attributes replaced",
        archive(x((b"user.a", b"1")) + d(b"e"), x((b"user.a", b"1")) + f(b"g")),
        archive(d(b"e"), f(b"g")),
    )
    yield _image(
        "nodes",
        archive(
            f(b"c", kind=b"3", major=4095, minor=1_048_575),
            f(b"b", kind=b"4", major=259, minor=70_000, mode=0o660),
            f(b"zero", kind=b"3"),
            f(b"p", kind=b"6", mode=0o622),
        ),
    )
    yield _image(
        "owners and modes",
        archive(
            f(b"none", b"n", mode=0),
            f(b"all", b"a", mode=0o7777, uid=70_000, gid=4_294_967_294),
            d(b"dir", mode=0o7777, uid=4_294_967_294),
            s(b"owned", b"x", uid=70_000, gid=70_001),
            f(b"typed", mode=0o100644),
        ),
    )
    yield _image(
        "times",
        archive(
            tars.pax((b"mtime", b"1600000000.123456789")) + f(b"ns"),
            tars.pax((b"mtime", b"-86400.5")) + f(b"before"),
            tars.pax((b"mtime", b"5000000000.000000001")) + f(b"after"),
            tars.pax((b"mtime", b"1.9999999999")) + d(b"long"),
            tars.pax((b"mtime", b"2.5")) + s(b"link", b"x"),
            member(b"negative", mtime=-7),
        ),
    )
    names = [b"n" * 255, b"\xff\xfe", b"new\nline", b"back\\slash", b"-dash", b" ", b"...", b"'\"$`"]
    yield _image("names", archive(*(f(name, name) for name in names)))
    yield _image(
        "names whited out", archive(*(f(name) for name in names)), archive(*(f(b".wh." + name) for name in names[1:]))
    )
    yield _image("many entries", archive(d(b"many"), *(f(b"many/%05d" % index) for index in range(20_000))))
    levels = [b"/".join([b"v"] * depth) for depth in range(1, 201)]
    yield _image("many levels", archive(*(d(name) for name in levels), f(levels[-1] + b"/bottom", b"b")))
    sizes = (0, 1, 4095, 4096, 4097, 65535, 65536, 65537, 300_000)
    rng = random.Random(1)
    yield _image("sizes", archive(*(f(b"%d" % size, rng.randbytes(size)) for size in sizes)))
    yield _image("zeros", archive(*(f(b"%d" % size, bytes(size)) for size in sizes)))
    yield _image("sparse", archive(*_pax_sparse()))
    yield _image("empty layers", b"", archive(f(b"a")), bytes(1024), bytes(20480))
    yield _image("no end blocks", archive(f(b"a", b"data"))[:-1024])
    yield _image("padding", archive(f(b"a", b"data")) + bytes(9 * 512))
    yield _image("gnu names", archive(_gnu_long(b"d" * 90 + b"/" + b"n" * 200)), untimed=(b"", b"d" * 90))


def _gnu_long(name: bytes) -> bytes:
    long_name = tars.header(b"././@LongLink", b"L", size=len(name) + 1) + tars.pad(name + b"\0")
    return long_name + f(name[:100], b"long")


SPARSE = ((0, b"h" * 512), (1 << 20, b"M" * 5120), ((4 << 20) - 512, b"z" * 512))
SPARSE_BYTES = (5 << 20) + 1
SPARSE_DATA = b"".join(piece for _, piece in SPARSE)


def _pax_sparse() -> list[bytes]:
    """The same file in the three pax forms."""
    size = b"%d" % SPARSE_BYTES
    numbers = [b"%d" % number for offset, piece in SPARSE for number in (offset, len(piece))]
    sized = [(b"GNU.sparse.size", size), (b"GNU.sparse.numblocks", b"3")]
    repeated = list(sized)
    for offset, length in zip(numbers[::2], numbers[1::2], strict=True):
        repeated += [(b"GNU.sparse.offset", offset), (b"GNU.sparse.numbytes", length)]
    listed = [*sized, (b"GNU.sparse.name", b"listed"), (b"GNU.sparse.map", b",".join(numbers))]
    inside = [
        (b"GNU.sparse.major", b"1"),
        (b"GNU.sparse.minor", b"0"),
        (b"GNU.sparse.name", b"inside"),
        (b"GNU.sparse.realsize", size),
    ]
    table = tars.pad(b"\n".join([b"3", *numbers, b""]))
    return [
        tars.pax(*repeated) + f(b"repeated", SPARSE_DATA),
        tars.pax(*listed) + f(b"x", SPARSE_DATA),
        tars.pax(*inside) + f(b"x", table + SPARSE_DATA),
    ]


def old_gnu_sparse() -> Image:
    """A sparse file in the old GNU form."""
    # Archivers end the map of a file that ends in a hole with an empty piece.
    pieces = [*((offset, len(piece)) for offset, piece in SPARSE), (SPARSE_BYTES, 0)]
    pairs = b"".join(tars.octal(offset, 12) + tars.octal(length, 12) for offset, length in pieces)
    tail = bytes(41) + pairs.ljust(96, b"\0") + b"\0" + tars.octal(SPARSE_BYTES, 12)
    head = tars.header(b"old", b"S", size=len(SPARSE_DATA), mtime=TIME, magic=b"ustar  \0", tail=tail)
    return _image("old GNU sparse", archive(head + tars.pad(SPARSE_DATA)))


def random_image(seed: int) -> Image:
    """A stack of layers on a few short names, so that they meet; every directory on the way has its entry."""
    rng = random.Random(seed)
    layers = [ROOT]
    present: dict[bytes, str] = {b"": "d"}
    layers += [_random_layer(rng, present) for _ in range(rng.randint(2, 4))]
    return Image(f"random {seed}", tuple(layers))


def _random_layer(rng: random.Random, present: dict[bytes, str]) -> bytes:
    """Entries that change what is present, which is kept up to date: path to type (d, f, l, p)."""
    lower, upper = dict(present), set[bytes]()
    entries: list[bytes] = []
    for _ in range(rng.randint(3, 14)):
        parents = [path for path, kind in present.items() if kind == "d"]
        parent = rng.choice(parents)
        path = (parent + b"/" if parent else b"") + rng.choice([b"a", b"b", b"c", b"e"])
        if path.count(b"/") > 3:
            continue
        action = rng.choice("dddfffflpkkwwo")
        if action == "o" and parent and parent in lower:
            entries.append(f(parent + b"/" + OPAQUE))
            _forget(present, lower, upper, parent + b"/")
        elif action == "w" and path not in upper and path in lower:
            directory_name, _, name = path.rpartition(b"/")
            entries.append(f((directory_name + b"/" if directory_name else b"") + b".wh." + name))
            _forget(present, lower, upper, path + b"/")
            present.pop(path, None)
        elif action in "dflpk":
            files = [one for one, kind in present.items() if kind == "f" and one != path]
            if action == "k" and not files:
                continue
            if action != "d" or present.get(path) != "d":
                for below in [one for one in present if one.startswith(path + b"/")]:
                    del present[below]
                    upper.discard(below)
            files = [one for one in files if one in present]
            if action == "k" and not files:
                continue
            entries.append(_random_entry(rng, action, path, files))
            present[path] = "f" if action == "k" else action
            upper.update(
                path[:end] for end in range(1, len(path) + 1) if end == len(path) or path[end : end + 1] == b"/"
            )
    return archive(*entries)


def _forget(present: dict[bytes, str], lower: dict[bytes, str], upper: set[bytes], prefix: bytes) -> None:
    for path in [one for one in lower if one.startswith(prefix) and one not in upper]:
        present.pop(path, None)


def _random_entry(rng: random.Random, action: str, path: bytes, files: list[bytes]) -> bytes:
    owner = {"uid": rng.choice([0, 1000, 70_000]), "gid": rng.choice([0, 8])}
    mode = rng.choice([0o755, 0o644, 0o600, 0o4711, 0o1777])
    attributes = x((b"user.k", rng.randbytes(3))) if rng.random() < 0.2 and action in "df" else b""
    if action == "d":
        return attributes + d(path, mode=mode, **owner)
    if action == "f":
        return attributes + f(path, rng.randbytes(rng.choice([0, 10, 5000])), mode=mode, **owner)
    if action == "l":
        return s(path, rng.choice([b"a", b"../b", b"/c/a", b"nowhere"]), **owner)
    if action == "p":
        return f(path, kind=b"6", mode=mode, **owner)
    return hard_link(path, rng.choice(files))
