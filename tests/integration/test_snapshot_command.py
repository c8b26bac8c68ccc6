"""`pvisor snapshot` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imaged import snapshots
from imaged.chunkstore.pack import pack_path
from imaged.chunkstore.store import ChunkStore
from imaged.ids import ChunkId
from imaged.record import ImageRecord
from imaged.snapshot import SnapshotRecord
from tests.support.chunkserver import chunk_server
from tests.support.command import Host
from tests.support.snapshots import build_snapshot
from tests.support.store_images import block_bytes, build_image, name_image

MEMORY = [*range(100, 140), *[None] * 100]
LATER = [900, *range(101, 140), *[None] * 100]


@pytest.fixture
def worker(tmp_path: Path) -> Host:
    return Host(tmp_path / "a")


@pytest.fixture
def image(worker: Host) -> ImageRecord:
    with ChunkStore.open(worker.root / "home" / "store") as store:
        record = build_image(store, range(10))
        name_image(store, "box:1", record)
    return record


@pytest.fixture
def family(worker: Host, image: ImageRecord) -> tuple[SnapshotRecord, SnapshotRecord]:
    """A snapshot `ready`, and its child `later`."""
    with ChunkStore.open(worker.root / "home" / "store") as store:
        parent = build_snapshot(store, image, MEMORY, vm="first")
        snapshots.publish(store, "ready", parent)
        created_ns = parent.created_ns + 1
        child = build_snapshot(store, image, LATER, disk=[7], parent=parent.id, created_ns=created_ns, vm="second")
        snapshots.publish(store, "later", child)
    return parent, child


def test_nothing_there(worker: Host) -> None:
    assert worker.json("snapshot", "ls") == []
    assert worker.json("snapshot", "tree") == []
    assert worker.run("snapshot", "ls").stdout.decode().split()[:3] == ["NAME", "ID", "AGE"]
    for verb in ("inspect", "verify", "rm"):
        assert "hint:" in worker.error("snapshot", verb, "ready")


def test_ls_inspect_and_tree(worker: Host, family: tuple[SnapshotRecord, SnapshotRecord]) -> None:
    parent, child = family
    listed = {one["name"]: one for one in worker.json("snapshot", "ls")}
    assert listed.keys() == {"ready", "later"}
    assert listed["later"]["id"] == str(child.id)
    assert listed["later"]["parent"] == str(parent.id)
    assert listed["later"]["vm"] == "second"
    assert listed["later"]["complete"] is True
    assert listed["later"]["chunks"] == listed["later"]["present_chunks"] > 50
    shown = json.loads(worker.run("snapshot", "inspect", "later").stdout)
    assert shown == worker.json("snapshot", "inspect", str(child.id)[:12])
    assert shown["image_names"] == ["box:1"]
    assert shown["parent_names"] == ["ready"]
    assert shown["machine"]["machine"] == "pc-q35-7.2"
    # Of 30 KB of device state most.
    assert 30_000 < shown["own_bytes"] < 60_000 < shown["stored_bytes"]
    branches = worker.json("snapshot", "tree")
    assert [(one["names"], one["depth"], one["gone"]) for one in branches] == [
        (["ready"], 0, False),
        (["later"], 1, False),
    ]
    lines = worker.run("snapshot", "tree").stdout.decode().splitlines()
    assert lines[0].startswith("ready  ") and lines[1].startswith("  later  ") and "second" in lines[1]
    text = worker.run("snapshot", "ls").stdout.decode()
    assert "complete" in text and "later" in text


def test_a_parent_that_is_gone(worker: Host, family: tuple[SnapshotRecord, SnapshotRecord]) -> None:
    assert worker.json("snapshot", "rm", "ready") == {"removed": ["ready"]}
    branches = worker.json("snapshot", "tree")
    assert [(one["names"], one["gone"]) for one in branches] == [([], False), (["later"], False)]
    worker.run("image", "rm", "box:1")
    worker.run("store", "gc")
    branches = worker.json("snapshot", "tree")
    assert [(one["names"], one["gone"], one["depth"]) for one in branches] == [([], True, 0), (["later"], False, 1)]
    assert "(gone)" in worker.run("snapshot", "tree").stdout.decode()
    assert worker.json("snapshot", "inspect", "later")["own_bytes"] is None
    assert worker.json("snapshot", "verify", "later")["sound"] is True
    worker.assert_sound()


def test_verify_tells_of_damage(worker: Host, family: tuple[SnapshotRecord, SnapshotRecord]) -> None:
    chunk = ChunkId.of(block_bytes(105))
    with ChunkStore.open(worker.root / "home" / "store") as store:
        location = store.index.find(chunk)
    assert location is not None
    with pack_path(worker.root / "home" / "store", location.pack).open("r+b") as file:
        file.seek(location.offset + 60)
        file.write(b"damage")
    done = worker.run("snapshot", "verify", "ready", code=1)
    assert f"corrupt: chunk {chunk}" in done.stdout.decode()
    assert worker.json("snapshot", "verify", "ready", code=1)["absent"] == 1
    errors = worker.json("store", "fsck", code=1)["errors"]
    assert [error for error in errors if error.startswith("snapshot ready: 1 chunks are missing")]
    assert "snapshot verify" in worker.error("store", "gc")


def test_push_and_pull(tmp_path: Path, worker: Host, family: tuple[SnapshotRecord, SnapshotRecord]) -> None:
    _, child = family
    with chunk_server(tmp_path / "server") as server:
        pushed = worker.json("snapshot", "push", "later", "--server", server.url)
        assert (pushed["name"], pushed["id"]) == ("later", str(child.id))
        assert pushed["pushed_chunks"] > 50
        with ChunkStore.open(worker.root / "home" / "store") as store:
            ref = store.snapshots.get("ready")
            assert ref is not None
            store.snapshots.set("later", ref)
        told = worker.error("snapshot", "push", "later", "--server", server.url)
        assert "another snapshot 'later'" in told and "--force" in told
        assert "only this host has" in worker.error("snapshot", "pull", "later", "--server", server.url)
        assert worker.json("snapshot", "push", "--force", "later", "--server", server.url)["id"] == str(ref.record)
        worker.run("snapshot", "push", "ready", "--server", server.url)
        with ChunkStore.open(worker.root / "home" / "store") as store:
            snapshots.publish(store, "later", child)
        assert worker.json("snapshot", "push", "later", "--server", server.url)["id"] == str(child.id), "a child of it"
        other = Host(tmp_path / "b", server.url)
        assert [one["name"] for one in other.json("snapshot", "ls", "--remote")] == ["later", "ready"]
        assert other.run("snapshot", "ls", "--server", server.url).stdout.decode().count("\n") == 3
        pulled = other.json("snapshot", "pull", "later")
        assert (pulled["id"], pulled["requests"]) == (str(child.id), 1)
        listed = other.json("snapshot", "ls")[0]
        assert (listed["complete"], listed["origin"]) == (False, server.url)
        assert listed["present_chunks"] < 15 < listed["chunks"]
        assert "lazy" in other.run("snapshot", "ls").stdout.decode()
        report = other.json("snapshot", "verify", "later")
        assert report["sound"] and report["lazy"] and report["absent"] > 40
        # A lazy one survives a collection, and can be completed without naming the server again.
        other.run("store", "gc")
        local = Host(tmp_path / "b")
        local.run("snapshot", "pull", "--complete", "later")
        assert local.json("snapshot", "ls")[0]["complete"] is True
    assert local.json("snapshot", "verify", "later")["absent"] == 0
    local.assert_sound()


def test_wrong_usage(worker: Host, family: tuple[SnapshotRecord, SnapshotRecord]) -> None:
    assert "no server" in worker.error("snapshot", "push", "ready", code=2)
    assert "no server" in worker.error("snapshot", "ls", "--remote", code=2)
    assert "not a snapshot name" in worker.error("snapshot", "inspect", "a/b", code=2)
    assert "goes with neither" in worker.error(
        "snapshot", "ls", "--remote", "--store", str(worker.root / "home" / "store"), code=2
    )
    worker.error("snapshot", "pull", "ready", "--server", "http://127.0.0.1:9")


@pytest.mark.parametrize("verb", ["ls", "inspect", "tree", "verify", "rm", "push", "pull"])
def test_help_has_an_example(worker: Host, verb: str) -> None:
    text = worker.run("snapshot", verb, "--help").stdout.decode()
    assert f"pvisor snapshot {verb}" in text and "Example" in text


def test_the_group_lists_them(worker: Host) -> None:
    text = worker.run("--help").stdout.decode()
    assert "snapshot" in text and "vm" in text
