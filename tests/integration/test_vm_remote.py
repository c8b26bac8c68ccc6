"""A snapshot of one host goes on at another that has nothing: lazily, from a chunk server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chunkserver import chunk_server
from tests.support.vm import sh, start, vm_host

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.qemu, pytest.mark.slow]


def test_a_pushed_snapshot_resumes_lazily_elsewhere_and_is_parked_there(tmp_path: Path) -> None:
    with chunk_server(tmp_path / "server") as server:
        with vm_host(tmp_path / "first", server=server.url) as first:
            start(first, "far", "--disk", "1G")
            sh(first, "far", "head -c 8M /dev/urandom > /noise; sync; sha256sum /noise > /sum; echo here > /run/where")
            first.run("vm", "park", "far")
            first.run("snapshot", "push", "far")
        with vm_host(tmp_path / "second", image=False, server=server.url) as second:
            second.run("snapshot", "pull", "far")
            assert second.json("vm", "resume", "far")[0]["name"] == "far"
            assert sh(second, "far", "cat /run/where; cd /; sha256sum -c --quiet /sum") == b"here\n"
            taken = second.json("store", "df")["stored_bytes"]
            whole = second.json("snapshot", "inspect", "far")["stored_bytes"]
            assert whole is None or taken < whole
            sh(second, "far", "echo there > /run/where")
            second.run("vm", "park", "far", "--as", "back")
            assert second.json("vm", "resume", "far")[0]["name"] == "far"
            assert sh(second, "far", "cat /run/where; cd /; sha256sum -c --quiet /sum") == b"there\n"
            second.run("vm", "rm", "far")
        with vm_host(tmp_path / "third", image=False, server=server.url) as third:
            (child,) = [one["name"] for one in third.json("vm", "fork", "far")]  # pulled by this
            assert child == "far-1"
            assert sh(third, child, "cat /run/where; cd /; sha256sum -c --quiet /sum") == b"here\n"
            assert third.json("snapshot", "ls")[0]["name"] == "far"
            third.run("vm", "rm", child)
            told = third.error("vm", "fork", "nowhere", "-n", "2")
            assert "no snapshot nowhere on this host" in told and f"none at {server.url}" in told
            assert "http://127.0.0.1:1" in third.error("vm", "resume", "nowhere", "--server", "http://127.0.0.1:1")
            assert third.json("vm", "ls") == []
