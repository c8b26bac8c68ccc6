"""Snapshots that came from elsewhere get no network by themselves; and damage where nothing is known yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from imaged import snapshots
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from tests.support.chunkserver import chunk_server
from tests.support.command import Host
from tests.support.parked import damage
from tests.support.vm import qemus, sh, start, vm_host

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.qemu, pytest.mark.slow]


def reaches(made: Host, name: str, port: int) -> bool:
    """Whether the VM gets through to the loopback of this host."""
    script = f"timeout 20 bash -c 'echo > /dev/tcp/10.0.2.2/{port}' 2> /dev/null && echo yes || echo no"
    return sh(made, name, script) == b"yes\n"


def test_a_pulled_snapshot_has_a_network_only_with_the_users_word(tmp_path: Path) -> None:
    with chunk_server(tmp_path / "server") as server:
        port = int(server.url.rpartition(":")[2])
        with vm_host(tmp_path / "first", server=server.url) as first:
            start(first, "far", "--net", "user")
            assert reaches(first, "far", port)
            first.run("vm", "park", "far")
            assert first.json("vm", "resume", "far")[0]["network"] == "user", "it was made here"
            assert reaches(first, "far", port)
            first.run("vm", "park", "far")
            first.run("snapshot", "push", "far")
        with vm_host(tmp_path / "second", image=False, server=server.url) as second:
            second.run("snapshot", "pull", "far")
            done = second.run("vm", "resume", "far")
            assert b"--net user" in done.stderr
            assert second.json("vm", "ls")[0]["network"] == "restricted"
            assert not reaches(second, "far", port)
            second.run("vm", "park", "far", "--as", "mine")
            second.run("vm", "rm", "--keep-snapshot", "far")
            # A child is as restricted, also on its own; the user's word changes that, and is kept.
            assert second.json("vm", "resume", "mine")[0]["network"] == "restricted"
            assert not reaches(second, "mine", port)
            assert [one["network"] for one in second.json("vm", "fork", "far", "--net", "user")] == ["user"]
            assert reaches(second, "far-1", port)
            second.run("vm", "park", "far-1")
            assert second.json("vm", "resume", "far-1")[0]["network"] == "user"
            assert reaches(second, "far-1", port)
            second.run("vm", "rm", "mine", "far-1")


def test_damaged_memory_is_named_by_the_first_resume_that_touches_it(tmp_path: Path) -> None:
    """Nothing is known of what it touches, so it is not looked at before."""
    with vm_host(tmp_path / "host") as made:
        start(made, "lone")
        assert "without a network" in _refused_network(made)
        made.run("node", "stop")
        with ChunkStore.open(made.root / "home" / "store") as store:
            memory = BlockImage.open(store, snapshots.find(store, "lone").record.memory)
            chunks = list(memory.chunk_ids())
            for chunk in chunks:
                damage(store, chunk)
        told = made.error("vm", "resume", "lone")
        assert "snapshot lone: chunk " in told
        assert any(str(chunk) in told for chunk in chunks), told
        assert [one["state"] for one in made.json("vm", "ls")] == ["parked"]
        assert qemus(made) == []


def _refused_network(made: Host) -> str:
    made.run("vm", "park", "lone")
    return made.error("vm", "resume", "lone", "--net", "user", code=2)
