"""What a namespace sees of a store, and that it can not tell what others have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from imaged import catalog
from imaged.blockimage import BlockImage
from imaged.chunkstore.refs import Ref
from imaged.chunkstore.store import ChunkStore
from imaged.chunkstore.tenant import ForeignNameError, TenantStore, name_within, tenant_view
from imaged.collection.collect import collect
from imaged.collection.owned import sweep
from imaged.conversion.convert import convert
from imaged.errors import ChunkCorruptError, ChunkMissingError, NotFoundError
from imaged.frame import Codec, Frame, FrameHeader
from imaged.ids import ChunkId
from imaged.measure import IncompleteError, measure
from imaged.names import ImageName, SourceName
from imaged.reach import reachable
from imaged.serving.denser import densify
from tests.support.oci import make_tar, write_layout
from tests.support.synthetic import Synthetic, add_image

DATA = b"what everybody may have " * 500


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store") as opened:
        yield opened


def ref_to(record: ChunkId) -> Ref:
    return Ref(record=record, created_at=1, source="test", origin="", chunks=1, stored_bytes=1)


def raw(data: bytes) -> Frame:
    return Frame(FrameHeader(ChunkId.of(data), Codec.RAW, len(data), len(data)), data)


def test_every_method_of_a_store_is_decided_on() -> None:
    """What a view inherits works on its own definitions, or fails: it has no index and no packs."""
    own = {
        "get",
        "frame",
        "frames",
        "packed_cached",
        "has",
        "sizes",
        "frames_bytes",
        "missing",
        "absent",
        "put",
        "put_all",
    }
    own |= {"put_frame", "flush", "close", "relying", "leases", "prepare"}
    assert own <= set(vars(TenantStore))
    public = {name for name in vars(ChunkStore) if not name.startswith("_")}
    inherited = {"lease", "keeping", "require_writable", "namespace"}  # of what the view has itself
    refused = {"open", "open_locked", "planner", "df", "is_direct", "probe", "bucket", "evict_copies"}
    assert public - own - inherited <= refused, "decide in imaged/chunkstore/tenant.py what a namespace sees of it"


def test_without_a_namespace_the_store_is_itself(store: ChunkStore) -> None:
    assert tenant_view(store, None) is store
    assert store.namespace is None
    for name in ("index", "df", "planner", "origins", "owned", "fills", "_writer"):
        with pytest.raises(AttributeError):
            method = getattr(tenant_view(store, "a"), name)
            method()


def test_what_others_have_is_not_here(store: ChunkStore) -> None:
    theirs = store.put(DATA)
    store.flush()
    view = tenant_view(store, "a")
    absent = ChunkId.of(b"nobody has this")
    for chunk in (theirs, absent):
        assert not view.has(chunk)
        assert view.frame(chunk) is None
        assert view.packed_cached(chunk) is None
        assert view.sizes(chunk) is None
        assert view.missing([chunk]) == view.absent([chunk]) == [chunk]
        assert list(view.frames([chunk, chunk])) == [Frame.missing(chunk)] * 2
        assert view.frames_bytes([chunk]) == Frame.missing(chunk).stored_bytes
        with pytest.raises(ChunkMissingError) as caught:
            view.get(chunk)
        assert caught.value.message == f"chunk {chunk}: not in the store"


@pytest.mark.parametrize("before", ["nothing", "compressed", "raw", "dense", "pending", "condemned"])
def test_an_upload_looks_the_same_whatever_was_there(store: ChunkStore, before: str) -> None:
    """Same answers, same frame back, same work: the frame is appended in any case."""
    chunk = ChunkId.of(DATA)
    if before in ("compressed", "pending"):
        store.put(DATA)
    elif before == "dense":
        store.put(DATA, level=19)
    elif before == "raw":
        store.put_frame(raw(DATA))
    if before not in ("nothing", "pending"):
        store.flush()
    view = tenant_view(store, "a")
    appended = sum(row.committed_bytes for row in store.index.packs().values())
    view.put_frame(raw(DATA))
    view.flush()
    assert view.has(chunk)
    assert view.missing([chunk]) == []
    frame = view.frame(chunk)
    assert frame == Frame.of(DATA)
    location = store.index.find(chunk)
    assert location is not None
    grown = sum(row.committed_bytes for row in store.index.packs().values()) - appended
    if before != "pending":
        assert grown >= location.stored_bytes
    assert store.frame(chunk) == frame
    # Whoever else has it is not told.
    assert not tenant_view(store, "b").has(chunk)


def test_the_same_for_what_is_put_here(store: ChunkStore) -> None:
    store.put(DATA, level=19)
    store.flush()
    view = tenant_view(store, "a")
    chunk = view.put(DATA, level=19)
    view.flush()
    assert view.frame(chunk) == Frame.of(DATA)
    assert view.put(DATA) == chunk


def test_what_a_namespace_holds_is_not_compressed_again(store: ChunkStore) -> None:
    data = b"".join(b"%d " % (number * number) for number in range(8000))
    chunk = store.put(data)
    store.flush()
    assert densify(store, [chunk]).chunks == 1
    view = tenant_view(store, "a")
    view.put(data)
    view.flush()
    assert densify(store, [chunk]).chunks == 0
    assert store.frame(chunk) == Frame.of(data)


def test_a_frame_that_does_not_match_gives_nothing(store: ChunkStore) -> None:
    chunk = store.put(DATA)
    store.flush()
    view = tenant_view(store, "a")
    other = b"x" * len(DATA)
    with pytest.raises(ChunkCorruptError):
        view.put_frame(Frame(FrameHeader(chunk, Codec.RAW, len(other), len(other)), other))
    view.flush()
    assert not view.has(chunk)
    assert store.get(chunk) == DATA


def test_names_are_those_of_the_namespace(store: ChunkStore) -> None:
    mine, theirs = add_image(store, "a/app:v1", seed=1), add_image(store, "b/app:v1", seed=2)
    add_image(store, "app:v2", seed=3)
    view = tenant_view(store, "a")
    assert [name for name, _ in view.refs.items()] == ["a/app:v1"]
    assert catalog.find(view, "app:v1").name == "a/app:v1"
    assert catalog.find(view, str(mine.id)).name == "a/app:v1"
    for text in ("b/app:v1", "app:v2", str(theirs.id), str(theirs.id)[:12]):
        with pytest.raises(NotFoundError) as caught:
            catalog.find(view, text)
        assert "b/app" not in f"{caught.value}{caught.value.hint}" or text == "b/app:v1"
    assert not view.refs.delete("b/app:v1")
    for name in ("b/app:v1", "app:v1", "ab/app:v1", "a.b/app:v1"):
        with pytest.raises(ForeignNameError):
            view.refs.set(name, ref_to(mine.id))
    assert view.refs.get("ab/app:v1") is None
    assert str(name_within("a", ImageName.parse("x:1"))) == "a/x:1"
    assert str(name_within("a", ImageName.parse("a/x:1"))) == "a/x:1"
    assert str(name_within("a", ImageName.parse("h:5000/x:1"))) == "a/h_5000/x:1"


def test_a_damaged_name_of_another_is_no_trouble(store: ChunkStore) -> None:
    add_image(store, "a/app:v1")
    with store.index.write("damage a name") as txn:
        store.index.put(txn, "refs", b"b/app:v1", b"{}")
    assert [name for name, _ in tenant_view(store, "a").refs.items()] == ["a/app:v1"]


def test_an_image_that_somebody_published_for_a_namespace_can_be_read(store: ChunkStore) -> None:
    image = add_image(store, "a/app:v1")
    view = tenant_view(store, "a")
    assert not view.has(image.id)
    catalog.find(view, "a/app:v1")
    assert view.missing(list(reachable(store, image.id))) == []
    assert not tenant_view(store, "b").has(image.id)


def test_a_record_that_names_what_others_have_is_incomplete(store: ChunkStore) -> None:
    """Who knows ids, from a log or a list, can not get the bytes by naming them in a record of his own."""
    image = add_image(store, "b/app:v1")
    view = tenant_view(store, "a")
    for data in (image.record.to_bytes(), store.get(image.record.data), store.get(image.record.metadata)):
        view.put(data)
    view.flush()
    with pytest.raises(IncompleteError):
        measure(view, "image", image.id, reachable)
    leaf = next(iter(BlockImage.open(store, image.record.data).leaf_ids()))
    with pytest.raises(ChunkMissingError):
        view.get(leaf)


def test_a_memo_counts_only_for_who_made_it(store: ChunkStore) -> None:
    blob = store.put(b"a parsed layer" * 9)
    store.memos.set("sha256:x", blob)
    mine, theirs = tenant_view(store, "a"), tenant_view(store, "b")
    assert mine.memos.get("sha256:x") is None
    mine.put(b"a parsed layer" * 9)
    mine.memos.set("sha256:x", blob)
    assert mine.memos.get("sha256:x") == blob
    assert theirs.memos.get("sha256:x") is None
    assert store.memos.get("sha256:x") == blob


def test_a_conversion_in_a_namespace_reads_layers_itself(store: ChunkStore, tmp_path: Path) -> None:
    """Whoever else has converted them: what a configuration calls its layers is only a claim."""
    layout = write_layout(tmp_path / "layout", [make_tar(("etc/", b""), ("etc/hello", b"hello\n" * 3000))])
    source = SourceName.parse(f"oci:{layout}")
    plain = convert(store, source, name=ImageName.parse("plain:v1"))
    for space in ("a", "b"):
        view = tenant_view(store, space)
        for reused in (0, 1):
            done = convert(view, source, name=ImageName.parse(f"{space}/app:v1"))
            assert (done.id, done.layers_reused) == (plain.id, reused)
        fresh = tenant_view(store, space)
        assert fresh.missing(list(reachable(fresh, done.id))) == []
        assert measure(fresh, "image", done.id, reachable).chunks == done.ref.chunks
    assert tenant_view(store, "c").refs.items() == []
    assert not tenant_view(store, "c").has(plain.id)


def test_profiles_are_each_namespaces_own(store: ChunkStore) -> None:
    image = add_image(store, "a/app:v1")
    chunks = [*BlockImage.open(store, image.record.data).leaf_ids()]
    views = [tenant_view(store, space) for space in ("a", "b")]
    views[0].profiles.merge(image.record.data, chunks)
    assert views[0].profiles.raw(image.record.data) is not None
    assert views[0].profiles.ids() == [image.record.data]
    assert views[1].profiles.raw(image.record.data) is None
    assert store.profiles.raw(image.record.data) is None
    assert store.profiles.ids() == []


def publish(view: ChunkStore, store: ChunkStore, image: Synthetic, name: str) -> None:
    for chunk in reachable(store, image.id):
        view.put(store.get(chunk))
    view.flush()
    view.refs.set(name, ref_to(image.id))


def test_rows_go_when_the_name_does_though_others_keep_the_chunks(store: ChunkStore) -> None:
    image = add_image(store, "b/app:v1")
    catalog.find(tenant_view(store, "b"), "b/app:v1")
    view = tenant_view(store, "a")
    publish(view, store, image, "a/app:v1")
    view.profiles.merge(image.record.data, [image.record.data])
    kept = list(reachable(store, image.id))
    stray = view.put(os.urandom(5000))
    view.flush()
    assert sweep(store) == 1
    assert not view.has(stray)
    assert view.missing(kept) == []
    view.refs.delete("a/app:v1")
    with store.lease("somebody who is about to name it again"):
        assert view.missing(kept[:1]) == []
        sweep(store)
        assert view.missing(kept) == []  # it was relied on under a lease that is as old
    sweep(store)
    assert view.missing(kept) == kept
    assert view.profiles.ids() == []
    assert tenant_view(store, "b").missing(kept) == []
    assert store.owned.namespaces() == ["b"]
    with pytest.raises(IncompleteError):
        measure(view, "image", image.id, reachable)


def test_what_a_lease_of_a_namespace_keeps_can_be_read_on(store: ChunkStore) -> None:
    image = add_image(store, "a/app:v1")
    catalog.find(tenant_view(store, "a"), "a/app:v1")
    kept = list(reachable(store, image.id))
    store.refs.set("other:latest", ref_to(image.id))
    store.refs.delete("a/app:v1")
    held = store.leases.grant("a node", keeps=[image.id], ttl_s=600, namespace="a")
    sweep(store)
    assert tenant_view(store, "a").missing(kept) == []
    assert store.leases.revoke(held.id, namespace="b") is False
    assert store.leases.revoke(held.id, namespace="a")
    sweep(store)
    assert tenant_view(store, "a").missing(kept) == kept
    assert store.missing(kept) == []


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_left_after_a_collection_does_not_tell_who_else_has_it(tmp_path: Path, shared: bool) -> None:
    with ChunkStore.open(tmp_path / "store") as store:
        image = add_image(store, "b/app:v1", chunks=3)
        data = store.get(next(iter(BlockImage.open(store, image.record.data).chunk_ids()))) if shared else DATA
        view = tenant_view(store, "a")
        chunk = view.put(data)
        view.flush()
    collect(tmp_path / "store")
    with ChunkStore.open(tmp_path / "store") as store:
        assert not tenant_view(store, "a").has(chunk)
        assert store.has(chunk) is shared
