"""Stages as a user of the command meets them: the workspace they were made with, a server that is gone, a busy node."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chunkserver import chunk_server
from tests.support.command import Host, busybox_layout, host
from tests.support.tars import archive, member

pytestmark = [pytest.mark.root, pytest.mark.fuse]
# A script that is big enough for chunks of its own.
SCRIPT = b"#!/bin/sh\necho ran\nexit 0\n#" + random.Random(5).randbytes(4 << 20).replace(b"\n", b"")
# Lies before it, and is more than what is fetched ahead of who reads what lies before that.
PADDING = random.Random(6).randbytes(8 << 20)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def local(scratch: Path) -> Iterator[Host]:
    with host(scratch / "local") as made:
        files = archive(member(b"padding", PADDING), member(b"script", SCRIPT, mode=0o755))
        made.run("convert", f"oci:{busybox_layout(scratch, files)}:v1")
        yield made


def test_a_stage_keeps_its_workspace(local: Host, tmp_path: Path) -> None:
    space = tmp_path / "a space"
    space.mkdir()
    (space / "file").write_text("host\n")
    look = ["--", "sh", "-c", "pwd; cat file; echo more >> file"]
    shown = [local.run("run", "--stage", "fix", "--workspace", str(space), "box:v1", *look).stdout]
    shown.append(local.run("run", "--stage", "fix", "box:v1", *look).stdout)
    shown.append(local.run("stage", "exec", "fix", *look).stdout)
    assert shown == [b"/workspace\nhost\n" + b"more\n" * count for count in range(3)]
    assert (space / "file").read_text() == "host\n"
    for argv in (["run", "--stage", "fix", "-w", "/etc", "box:v1"], ["stage", "exec", "-w", "/etc", "fix"]):
        assert local.run(*argv, "--", "pwd").stdout == b"/etc\n"
    assert local.run("run", "--workspace", str(space), "box:v1", "--", "pwd").stdout == b"/workspace\n"
    said = local.error("run", "--stage", "fix", "--workspace", str(tmp_path), "box:v1", "--", "true", code=125)
    assert f"give --workspace '{space}'" in said and "stage exec fix" in said and "drop" not in said
    local.run("stage", "drop", "fix")


def test_a_command_beside_a_workspace_starts_there(local: Host, tmp_path: Path) -> None:
    argv = ["run", "-i", "--stage", "fix", "--workspace", str(tmp_path), "box:v1", "--", "sh", "-c", "echo up; cat"]
    process = local.start(*argv, stdin=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    try:
        assert local.run("stage", "exec", "fix", "--", "pwd").stdout == b"/workspace\n"
    finally:
        process.communicate(b"", timeout=20)
    local.run("stage", "drop", "fix")


def test_bytes_that_do_not_come(local: Host, tmp_path: Path) -> None:
    """Of the program, and of the files that say who the user is. Both starts wait for the server at once."""
    with (
        chunk_server(local.root / "home/store") as server,
        host(tmp_path / "warm", server.url) as warm,
        host(tmp_path / "cold", server.url) as cold,
    ):
        # First, while no run has told the server what a start reads, which would come with the pull.
        cold.run("pull", "--lazy", "box:v1")
        cold.run("node", "start")
        mounted = tmp_path / "mnt"
        mounted.mkdir()
        cold.run("mount", "box:v1", str(mounted))
        cold.run("umount", str(mounted))  # its metadata is here
        warm.run("run", "box:v1", "--", "sh", "-c", "cat /bin/busybox /etc/* > /dev/null")
        server.stop()
        program = warm.start("run", "box:v1", "--", "/script")
        user = cold.start("run", "box:v1", "--", "true")
        said = program.communicate(timeout=60)[1].decode()
        assert program.returncode == 126, said
        assert "/script: the image's bytes could not be fetched: Input/output error" in said
        assert "server" in said and "pvisor node status" in said and "node.log" in said
        said = user.communicate(timeout=60)[1].decode()
        assert user.returncode == 125 and "the image's bytes could not be fetched" in said
        assert "pvisor node status" in said


def test_a_node_that_is_in_use_is_not_stopped(local: Host, tmp_path: Path) -> None:
    """A user's directory and a running stage are there and readable after the refusals."""
    mounted = tmp_path / "mnt"
    mounted.mkdir()
    local.run("mount", "box:v1", str(mounted))
    words = ["run", "-i", "box:v1", "--", "sh", "-c", "echo up; read _; cat /script | wc -c"]
    process = local.start(*words, stdin=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    said = local.error("node", "stop")
    assert f"{mounted} (box:v1 is mounted there)" in said and f"process {process.pid}" in said
    assert f"`pvisor umount {mounted}`" in said
    assert subprocess.run(["findmnt", str(mounted)], capture_output=True).returncode == 0
    assert (mounted / "etc/image-file").read_text() == "from the image\n"
    local.run("umount", str(mounted))
    assert f"process {process.pid}" in local.error("node", "stop")
    out, _ = process.communicate(b"go\n", timeout=20)
    assert (process.returncode, int(out)) == (0, len(SCRIPT))
    assert local.json("node", "stop") == {"stopped": True}
