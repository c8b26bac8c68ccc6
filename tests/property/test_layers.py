"""Random layer stacks against a model that is as simple as it can be: a dict from path to what is there."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from imaged.conversion.layer import Layer
from imaged.conversion.tar import TarReader
from imaged.erofs.tree import walk
from imaged.errors import LayerError
from imaged.ids import ChunkId
from tests.support import tars
from tests.support.images import build, content, ingest
from tests.support.memory_store import MemoryStore

NAMES = (b"a", b"b", b"c")
Path = tuple[bytes, ...]


@dataclass(frozen=True)
class Op:
    """One entry: "d"irectory, "f"ile, "k" hard link, "w"hiteout or "o"paque; `number` tells entries apart."""

    kind: str
    path: Path
    number: int
    target: Path = ()


@dataclass(eq=False)
class Thing:
    """What a name stands for in the model; hard links are one Thing under two names."""

    number: int
    is_directory: bool


class RefusedError(Exception):
    """The model can not apply the layer."""


paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(tuple)


@st.composite
def operations(draw: st.DrawFn) -> Op:
    kind = draw(st.sampled_from("dddffffkwwo"))
    return Op(kind, draw(paths), draw(st.integers(1, 4000)), draw(paths))


def tar_of(op: Op) -> bytes:
    name = b"/".join(op.path)
    if op.kind == "d":
        return tars.directory(name, mode=0o700, uid=op.number)
    if op.kind == "f":
        return tars.member(name, b"%d" % op.number, uid=op.number)
    if op.kind == "k":
        return tars.hard_link(name, b"/".join(op.target))
    if op.kind == "w":
        return tars.member(b"/".join((*op.path[:-1], b".wh." + op.path[-1])))
    return tars.member(name + b"/.wh..wh..opq")


def apply_to_model(model: dict[Path, Thing], layer: list[Op]) -> None:
    """First what hides, then the entries in order, then the links that had to wait."""
    gone: dict[Path, Thing] = {}
    for op in layer:
        if op.kind in "wo":
            depth = len(op.path) if op.kind == "w" else len(op.path) + 1
            for path in [path for path in model if path[: len(op.path)] == op.path and len(path) >= depth]:
                gone[path] = model.pop(path)
    last = {op.path: index for index, op in enumerate(layer) if op.kind in "dfk"}
    waiting: list[Op] = []
    for index, op in enumerate(layer):
        if op.kind in "df":
            put(model, op.path, Thing(op.number, op.kind == "d"))
        elif op.kind == "k" and not link(model, gone, op) and last[op.path] == index:
            waiting.append(op)
    while waiting:
        left = [op for op in waiting if not link(model, gone, op)]
        if len(left) == len(waiting):
            raise RefusedError
        waiting = left


def link(model: dict[Path, Thing], gone: dict[Path, Thing], op: Op) -> bool:
    target = model.get(op.target) or gone.get(op.target)
    if target is None:
        return False
    if target.is_directory or op.target[: len(op.path)] == op.path != op.target:
        raise RefusedError
    put(model, op.path, target)
    return True


def put(model: dict[Path, Thing], path: Path, thing: Thing) -> None:
    for end in range(1, len(path)):
        if not model.setdefault(path[:end], Thing(0, True)).is_directory:
            raise RefusedError
    old = model.get(path)
    if old is not None and old.is_directory and not thing.is_directory:
        for below in [one for one in model if one[: len(path)] == path]:
            del model[below]
    model[path] = thing


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(operations(), max_size=8), min_size=1, max_size=4))
def test_stacks_of_layers_make_the_tree_of_the_model(stack: list[list[Op]]) -> None:
    model: dict[Path, Thing] = {}
    refused = False
    try:
        for layer in stack:
            apply_to_model(model, layer)
    except RefusedError:
        refused = True
    store = MemoryStore()
    layers = [tars.archive(*(tar_of(op) for op in layer)) for layer in stack]
    try:
        root = build(*layers, store=store)
    except LayerError:
        assert refused
        return
    assert not refused
    found = {tuple(path.split(b"/")): inode for path, inode in walk(root) if path}
    assert found.keys() == model.keys()
    for path, thing in model.items():
        inode = found[path]
        assert (inode.uid, inode.is_directory) == (thing.number, thing.is_directory)
        if not thing.is_directory:
            assert content(inode, store) == b"%d" % thing.number
    same = {(one, two) for one in model for two in model if model[one] is model[two]}
    assert same == {(one, two) for one in found for two in found if found[one] is found[two]}


members = st.tuples(
    st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), min_size=1, max_size=150),
    st.binary(max_size=1500),
    st.integers(0, 0o7777),
    st.integers(0, 1 << 40),
    # tarfile writes a float below 0.0001 with an exponent, which is no pax time.
    st.integers(-(1 << 40), 1 << 40) | st.integers(1 << 26, 1 << 60).map(lambda value: value / (1 << 26)),
    st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]),
    st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), min_size=1, max_size=150),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(members, max_size=5), st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]), st.integers(0, 3))
def test_archives_read_as_the_standard_library_reads_them(
    contents: list[tuple[str, bytes, int, int, float, bytes, str]], form: int, seed: int
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, encoding="utf-8") as archive:
        for name, data, mode, owner, mtime, kind, link in contents:
            info = tarfile.TarInfo(name)
            info.mode, info.uid, info.gid, info.type, info.linkname = mode, owner, owner // 3, kind, link
            info.mtime = mtime if form == tarfile.PAX_FORMAT else int(mtime)
            info.size = len(data) if kind == tarfile.REGTYPE else 0
            if seed:
                info.pax_headers = {"SCHILY.xattr.user.a": "é\n=" * seed}
            archive.addfile(info, io.BytesIO(data) if kind == tarfile.REGTYPE else None)
    raw = buffer.getvalue()
    reader = TarReader(io.BytesIO(raw))
    ours = [(entry, b"".join(reader.data())) for entry in reader]
    with tarfile.open(fileobj=io.BytesIO(raw), encoding="utf-8", errors="surrogateescape") as archive:
        theirs = archive.getmembers()
        assert len(ours) == len(theirs)
        for (entry, data), info in zip(ours, theirs, strict=True):
            assert entry.path.decode(errors="surrogateescape").rstrip("/") == info.name.rstrip("/")
            assert (entry.mode, entry.uid, entry.gid) == (info.mode, info.uid, info.gid)
            assert abs(entry.mtime_ns - int(info.mtime * 10**9)) <= max(1024, abs(info.mtime) * 10**9 * 2**-50)
            if info.issym() or info.islnk():
                assert entry.link.decode(errors="surrogateescape") == info.linkname
            if info.isreg():
                extracted = archive.extractfile(info)
                assert extracted is not None and extracted.read() == data
            xattrs = {b"user.a": ("é\n=" * seed).encode()} if seed and form == tarfile.PAX_FORMAT else {}
            assert entry.xattrs == xattrs


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_archives_never_pass_for_others(data: st.DataObject) -> None:
    """A flipped byte in a header is told; in file data it is the diff_id's to tell, and the other files are whole."""
    files = [(b"file%d" % number, bytes([number + 1]) * (number * 300)) for number in range(4)]
    raw = bytearray(tars.archive(*(tars.member(name, body) for name, body in files)))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    reader = TarReader(io.BytesIO(bytes(raw)))
    try:
        found = [(entry.path, b"".join(reader.data())) for entry in reader]
    except LayerError:
        return
    assert [name for name, _ in found] == [name for name, _ in files]
    assert sum(mine != theirs for mine, theirs in zip(found, files, strict=True)) <= 1


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=3000))
def test_any_bytes_are_an_archive_or_an_error(raw: bytes) -> None:
    for candidate in (raw, tars.member(b"ok", b"x") + raw):
        try:
            ingest(candidate, MemoryStore())
        except LayerError:
            continue


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(paths, st.binary(max_size=9000)), max_size=6))
def test_memos_give_the_layer_back(files: list[tuple[Path, bytes]]) -> None:
    store = MemoryStore()
    layer = ingest(tars.archive(*(tars.member(b"/".join(path), data) for path, data in files)), store)
    parsed = Layer.parse(layer.to_bytes())
    assert parsed.to_bytes() == layer.to_bytes()
    assert set(parsed.chunk_ids()) == {ChunkId.of(data) for data in store.chunks.values()}
