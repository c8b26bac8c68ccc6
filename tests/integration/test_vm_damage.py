"""Damage below a VM: an error where it is, never other bytes, and nothing else is held up by it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

from fuse import rundir
from imaged import catalog, snapshots
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.config import Config
from imaged.ids import ChunkId
from tests.support.busybox import busybox_root
from tests.support.command import Host
from tests.support.parked import damage, lose
from tests.support.vm import qemus, sh, shown, start, state, vm_host, wait_until

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.qemu, pytest.mark.slow]
BOX = "box:1"
KNOWN = random.Random(7).randbytes(1 << 20)
NOISE = random.Random(8).randbytes(16 << 20)
PAGE = 4096


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Host]:
    """A host with an image that has a file of known bytes."""
    box = busybox_root(tmp_path / "box")
    (box / "known").write_bytes(KNOWN)
    with vm_host(tmp_path / "host", image=False) as host:
        host.run("convert", f"dir:{box}", "--name", BOX)
        yield host


def opened(made: Host) -> ChunkStore:
    return ChunkStore.open(made.root / "home" / "store")


def found_in(store: ChunkStore, block_image: ChunkId, pages: Container[bytes], but: Container[ChunkId] = ()) -> ChunkId:
    """A chunk of a block image that has these bytes alone, none of `but`."""
    for chunk in BlockImage.open(store, block_image).chunk_ids():
        if chunk in but:
            continue
        data = store.get(chunk)
        if all(data[at : at + PAGE] in pages for at in range(0, len(data), PAGE)):
            return chunk
    raise AssertionError("no chunk has these bytes")


def test_a_block_of_the_image_that_nobody_has_is_an_io_error(made: Host) -> None:
    start(made, "reader", image=BOX)
    sh(made, "reader", "echo 3 > /proc/sys/vm/drop_caches")
    with opened(made) as store:
        data = catalog.find(store, BOX).record.data
        for spoil, middle in ((lose, 1 << 18), (damage, 3 << 18)):
            pages = {KNOWN[at : at + PAGE] for at in range(middle, middle + (1 << 18), PAGE)}
            chunk = found_in(store, data, pages)
            whole = store.get(chunk)
            at = KNOWN.find(whole)
            assert at > 0 and at % PAGE == 0
            spoil(store, chunk)
            read = f"dd if=/known bs={PAGE} skip={at // PAGE} count=1"
            assert sh(made, "reader", f"{read} 2> /tmp/error", code=1) == b""
            assert b"Input/output error" in sh(made, "reader", "cat /tmp/error")
            digest = hashlib.sha256(KNOWN[:at]).hexdigest()
            assert sh(made, "reader", f"head -c {at} /known | sha256sum").split()[0].decode() == digest
            store.put(whole)
            store.flush()
            wait_until(lambda read=read, want=whole[:PAGE]: sh(made, "reader", f"{read} 2> /dev/null; true") == want)  # type: ignore[misc]
    assert sh(made, "reader", "sha256sum /known").split()[0].decode() == hashlib.sha256(KNOWN).hexdigest()
    made.run("vm", "rm", "reader")


def test_memory_that_is_damaged_where_nothing_was_looked_at_ends_the_vm(made: Host) -> None:
    start(made, "noisy", image=BOX)
    sh(made, "noisy", "cat > /dev/shm/noise", "-i", stdin=NOISE)
    made.run("vm", "park", "noisy", "--as", "base")
    made.run("vm", "resume", "noisy")  # what this touches is recorded
    assert sh(made, "noisy", "echo up") == b"up\n"
    made.run("vm", "park", "noisy", "--as", "later")
    made.run("node", "stop")
    pages = {NOISE[at : at + PAGE] for at in range(0, len(NOISE), PAGE)}
    with opened(made) as store:
        memory = snapshots.find(store, "base").record.memory
        profile = store.profiles.get(memory)
        assert profile is not None
        chunk = found_in(store, memory, pages, but=profile.chunks)
        whole = store.get(chunk)
        lose(store, chunk)
        assert str(chunk) in made.error("vm", "resume", "base", "--name", "never")
        store.put(whole)
        store.flush()
        made.run("node", "stop")
        first = profile.chunks[-1]
        kept = store.get(first)
        damage(store, first)
        for _ in range(2):  # the store has dropped it by then
            told = made.error("vm", "resume", "base", "--name", "never")
            assert f"chunk {first}: damaged in pack" in told
        store.put(kept)
        store.flush()
        made.run("node", "stop")
        damage(store, chunk)
    made.run("vm", "resume", "base", "--name", "doomed")
    assert sh(made, "doomed", "echo up") == b"up\n"
    done = made.run("vm", "exec", "doomed", "--", "sha256sum", "/dev/shm/noise", code=125)
    assert done.stdout == b""
    found = shown(made, "doomed")
    assert found is not None
    assert (found["state"], found["pid"]) == ("ended", None)
    assert "SIGBUS" in found["detail"]
    log = rundir.log_path(Config(home=made.root / "home", run=made.root / "run")).read_text()
    assert str(chunk) in log
    made.run("vm", "rm", "doomed", "noisy")
    made.run("snapshot", "rm", "base")
    made.run("snapshot", "rm", "later")


def test_records_that_can_not_be_read_hold_up_no_other_vm(made: Host) -> None:
    start(made, "good", image=BOX)
    start(made, "bad", image=BOX)
    made.run("vm", "park", "bad")
    with opened(made) as store:
        damage(store, snapshots.find(store, "bad").id)
    vms = made.root / "home" / "vms"
    for number, raw in enumerate((b"\xff\xfe{", b"[" * 100_000, b'{"version": 99}', b"")):
        directory = vms / f"odd-{number}"
        directory.mkdir()
        (directory / "vm.json").write_bytes(raw)
    listed = made.run("vm", "ls")
    odd = [f"odd-{number}" for number in range(4)]
    assert [line.split()[:2] for line in listed.stdout.decode().splitlines()[1:]] == [
        ["bad", "parked"],
        ["good", "running"],
        *([name, "damaged"] for name in odd),
    ]
    assert all(f"`pvisor vm rm {name}`" in listed.stdout.decode() for name in odd)
    assert [one["name"] for one in made.json("vm", "ls")] == ["bad", "good", *odd]
    for _ in range(2):
        made.run("vm", "park", "good")
        assert "good" in [one["name"] for one in made.json("snapshot", "ls")]
        made.run("vm", "resume", "good")
    (child,) = [one["name"] for one in made.json("vm", "fork", "good")]
    assert sh(made, child, "echo up") == b"up\n"
    assert "bad" in made.error("vm", "resume", "bad")
    assert state(made, "bad") == "parked"
    made.run("vm", "rm", "good", child, *odd)
    made.run("vm", "rm", "bad")
    assert made.json("vm", "ls") == []
    assert list(Path(vms).iterdir()) == []
    assert qemus(made) == []
