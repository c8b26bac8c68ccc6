"""Full disks, values that make no sense and workspaces that are refused, as a user of the command meets them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuse import linux
from tests.support.command import Host, busybox_layout, host

pytestmark = [pytest.mark.root, pytest.mark.fuse]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    scratch = tmp_path_factory.mktemp("output")
    with host(scratch / "local") as made:
        made.run("convert", f"oci:{busybox_layout(scratch)}:v1")
        yield made


@pytest.fixture
def space(tmp_path: Path) -> Path:
    (tmp_path / "space").mkdir()
    (tmp_path / "space/a").write_text("a\n")
    return tmp_path / "space"


def prepare(local: Host, space: Path) -> None:
    local.run("run", "--stage", "fix", "--workspace", str(space), "box:v1", "--", "sh", "-c", "echo more >> a")


def test_output_that_can_not_be_written(local: Host, space: Path) -> None:
    prepare(local, space)
    for argv in (
        ["stage", "diff", "fix"],
        ["stage", "apply", "fix"],
        ["stage", "ls", "--json"],
        ["stage", "drop", "fix"],
    ):
        with open("/dev/full", "wb") as full:
            process = local.start(*argv, stdout=full, stderr=subprocess.PIPE)
            _, said = process.communicate(timeout=60)
        assert process.returncode == 1, said
        assert b"has done its work, but its output could not be written: No space left" in said
        assert said.count(b"\n") == 2 and b"Errno" not in said
    assert (space / "a").read_text() == "a\nmore\n"
    assert local.run("stage", "ls", "--json").stdout == b"[]\n"


@pytest.mark.parametrize(
    "options", [["--cpus", "nan"], ["--cpus", "inf"], ["--pids", "4194305"], ["--pids", "0"], ["--net", "hosts"]]
)
def test_values_that_make_no_sense_are_wrong_usage(local: Host, options: list[str]) -> None:
    said = local.error("run", *options, "box:v1", "--", "true", code=2)
    assert "Traceback" not in said and "unexpected" not in said


def test_an_empty_path_is_wrong_usage(local: Host, space: Path) -> None:
    prepare(local, space)
    for command in ("diff", "apply"):
        assert "an empty path is no path" in local.error("stage", command, "fix", "", code=2)
    assert (space / "a").read_text() == "a\n"
    local.run("stage", "drop", "fix")


def test_a_workspace_that_is_refused_makes_no_stage(local: Host, space: Path) -> None:
    said = local.error("run", "--stage", "fix", "--workspace", "/", "box:v1", "--", "true", code=125)
    assert "contains the stage's own directory" in said
    assert local.run("stage", "ls", "--json").stdout == b"[]\n"
    prepare(local, space)
    local.run("stage", "drop", "fix")


def test_a_program_that_does_not_exist_leaves_a_stage_that_works(local: Host, space: Path) -> None:
    local.error("run", "--stage", "fix", "--workspace", str(space), "box:v1", "--", "nowhere", code=127)
    local.run("run", "--stage", "fix", "box:v1", "--", "true")
    local.run("stage", "drop", "fix")


def test_a_home_that_is_full(local: Host, space: Path) -> None:
    """What can not be started says where space is missing; what ran has its own exit code."""
    stages = local.root / "home/stages"
    stages.mkdir(exist_ok=True)
    linux.mount("tmpfs", stages, "tmpfs", 0, "size=256k")
    try:
        prepare(local, space)
        with open(stages / "rest", "wb", buffering=0) as rest, pytest.raises(OSError, match="No space"):
            while True:
                rest.write(bytes(4096))
        for argv in (["stage", "exec", "fix"], ["run", "--stage", "fix", "box:v1"]):
            process = local.start(*argv, "--", "sh", "-c", "exit 7", stderr=subprocess.PIPE)
            _, said = process.communicate(timeout=60)
            assert process.returncode in (7, 125), said
            if process.returncode == 125:
                assert b"No space left" in said and b"space on the file system of PVISOR_HOME" in said
                assert str(stages).encode() in said and b"Errno" not in said
            else:
                assert said == b""
        said_by_apply = local.error("stage", "apply", "fix", code=1)
        assert "nothing was applied" in said_by_apply and "make space" in said_by_apply
        assert b"+more" in local.run("stage", "diff", "fix").stdout
        local.run("stage", "drop", "fix")
    finally:
        linux.umount(stages, linux.MNT_DETACH)
