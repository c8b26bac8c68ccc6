"""Generations of VMs do not need their ancestors; many VMs at once share the host; damage is told, not restored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from imaged import snapshots
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.ids import ChunkId
from tests.support.command import Host
from tests.support.parked import damage, lose
from tests.support.vm import IMAGE, qemus, sh, start, state, vm_host

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.qemu, pytest.mark.slow]


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with vm_host(tmp_path_factory.mktemp("vm")) as host:
        yield host


def test_the_youngest_goes_on_when_all_before_it_are_gone(made: Host) -> None:
    start(made, "eve", "--disk", "1G")
    sh(made, "eve", "echo 1 > /run/generation; head -c 2M /dev/urandom > /noise; sha256sum /noise > /sum; sync")
    made.run("vm", "park", "eve")
    last = "eve"
    for generation in (2, 3):
        (last,) = [child["name"] for child in made.json("vm", "fork", last)]
        sh(made, last, f"echo {generation} >> /run/generation; echo {generation} >> /disk; sync")
        made.run("vm", "park", last)
    assert last == "eve-1-1"
    made.run("vm", "rm", "eve", "eve-1")
    made.run("image", "rm", IMAGE)
    made.run("node", "stop")
    removed = made.json("store", "gc")
    assert removed["removed_chunks"] > 0
    assert removed["kept_by_vms"] == [last]
    assert made.run("store", "gc").stdout.decode().splitlines()[1:] == [f"{IMAGE}: kept by VM {last}"]
    made.assert_sound()
    made.run("vm", "resume", last)
    (found,) = made.json("vm", "ls")
    shown = made.run("vm", "ls").stdout.decode()
    assert (found["image_name"], found["image"][:12] in shown, found["image"] in shown) == (None, True, False)
    assert sh(made, last, "cat /run/generation /disk; cd /; sha256sum -c --quiet /sum") == b"1\n2\n3\n2\n3\n"
    assert sh(made, last, "cat /etc/debian_version").startswith(b"12")
    made.run("vm", "rm", last)
    made.run("snapshot", "rm", last)
    made.run("node", "stop")
    made.json("store", "gc")
    assert made.json("store", "df")["chunks"] == 0


@pytest.mark.timeout(1500)
def test_sixteen_at_once_are_parked_and_resumed(made: Host) -> None:
    start(made, "many")
    sh(made, "many", "echo from many > /root/file")
    names = [child["name"] for child in made.json("vm", "fork", "many", "-n", "16")]
    assert len(names) == 16
    together(made, [("vm", "exec", name, "--", "sh", "-c", "echo mine > /root/own") for name in names])
    together(made, [("vm", "park", name) for name in names])
    assert len(qemus(made)) == 1
    some, others = names[:8], names[8:]
    together(made, [("vm", "resume", name) for name in some])
    for _ in range(2):  # some are parked while others resume
        pairs = zip(some, others, strict=True)
        together(made, [argv for one, other in pairs for argv in (("vm", "park", one), ("vm", "resume", other))])
        assert [state(made, name) for name in (*some, *others)] == ["parked"] * 8 + ["running"] * 8
        some, others = others, some
    together(made, [("vm", "resume", name) for name in others])
    assert [state(made, name) for name in names] == ["running"] * 16
    together(made, [("vm", "exec", name, "--", "cat", "/root/file", "/root/own") for name in names])
    made.run("vm", "rm", "many", *names)
    assert qemus(made) == []
    made.assert_sound()


def together(made: Host, commands: list[tuple[str, ...]]) -> None:
    started = [made.start(*argv) for argv in commands]
    deadline = time.monotonic() + 400
    for argv, process in zip(commands, started, strict=True):
        _, errors = process.communicate(timeout=max(1, deadline - time.monotonic()))
        assert process.returncode == 0, (argv, errors)


def test_a_snapshot_of_another_machine_is_refused_with_both_values(made: Host) -> None:
    start(made, "here")
    made.run("vm", "park", "here")
    with ChunkStore.open(made.root / "home" / "store") as store:
        record = snapshots.find(store, "here").record
        changes: dict[str, dict[str, Any]] = {"build": {"qemu": "6.0.1 (Other)"}, "chip": {"cpu": "host (Other)"}}
        for name, change in changes.items():
            snapshots.publish(store, name, replace(record, machine=replace(record.machine, **change)))
    told = made.error("vm", "resume", "build")
    assert "6.0.1 (Other)" in told
    assert record.machine.qemu in told
    assert "host (Other)" in made.error("vm", "fork", "chip", "-n", "2")
    assert [one["name"] for one in made.json("vm", "ls")] == ["here"]
    assert qemus(made) == []


@pytest.mark.parametrize("spoil", [lose, damage])
def test_a_chunk_that_is_lost_or_damaged_is_named_and_nothing_is_restored(
    made: Host, spoil: Callable[[ChunkStore, ChunkId], None]
) -> None:
    start(made, "whole")
    made.run("vm", "park", "whole", "--as", "base")
    made.run("vm", "resume", "whole")  # what this touches is recorded
    assert sh(made, "whole", "echo up") == b"up\n"
    made.run("vm", "park", "whole")
    made.run("node", "stop")
    with ChunkStore.open(made.root / "home" / "store") as store:
        record = snapshots.find(store, "base").record
        (state_chunk,) = BlockImage.open(store, record.state).chunk_ids()
        profile = store.profiles.get(record.memory)
        assert profile is not None
        for chunk in (state_chunk, profile.chunks[0]):
            with_it = store.get(chunk)
            spoil(store, chunk)
            told = made.error("vm", "resume", "base", "--name", "again")
            assert str(chunk) in told
            assert [one["name"] for one in made.json("vm", "ls")] == ["whole"]
            assert qemus(made) == []
            store.put(with_it)
            store.flush()
    assert made.json("vm", "resume", "base", "--name", "again")[0]["name"] == "again"
