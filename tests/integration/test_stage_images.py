"""Images that lack what a process expects, or that point out of their root."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.busybox import BUSYBOX, busybox_root
from tests.support.stage_process import Host

pytestmark = pytest.mark.root


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(lower=busybox_root(tmp_path / "lower"), stages=tmp_path / "stages")


def test_an_image_of_one_program(tmp_path: Path) -> None:
    (tmp_path / "lower").mkdir()
    shutil.copy2(BUSYBOX, tmp_path / "lower/busybox")
    host = Host(lower=tmp_path / "lower", stages=tmp_path / "stages")
    result = host.run([], "/busybox", "ls", "/")
    assert (result.stdout, result.returncode) == ("busybox\ndev\netc\nproc\nsys\n", 0)
    no_shell = host.run([], "/bin/sh", "-c", "true")
    assert no_shell.returncode == 127 and "/bin/sh: not found in the image" in no_shell.stderr
    assert [path.name for path in (tmp_path / "lower").iterdir()] == ["busybox"]


def test_an_image_with_an_empty_root(tmp_path: Path) -> None:
    (tmp_path / "lower").mkdir()
    assert Host(lower=tmp_path / "lower", stages=tmp_path / "stages").run([], "true").returncode == 127


@pytest.mark.parametrize("name", ["proc", "dev", "sys", "etc", "workspace", "tmp"])
@pytest.mark.parametrize("escape", ["absolute", "relative"])
def test_links_out_of_the_root_stay_inside(host: Host, tmp_path: Path, name: str, escape: str) -> None:
    outside, space = tmp_path / "outside", tmp_path / "space"
    outside.mkdir()
    space.mkdir()
    if (host.lower / name).exists():
        shutil.rmtree(host.lower / name)
    target = str(outside) if escape == "absolute" else "../" * 30 + str(outside).lstrip("/")
    (host.lower / name).symlink_to(target)
    result = host.sh(f"readlink -f /{name}; (echo x > /tmp/x); echo ran", "--net", "host", "--workspace", str(space))
    assert not list(outside.iterdir()) and not list(space.iterdir())
    inside = [] if name == "tmp" else [str(outside)]  # made in the stage; /tmp stays as the image has it
    assert (result.returncode, result.stdout.splitlines()) == (0, [*inside, "ran"])
    assert not list(host.stages.iterdir())


@pytest.mark.parametrize("name", ["proc", "dev", "sys"])
def test_a_needed_directory_that_can_not_be(host: Host, name: str) -> None:
    (host.lower / name).write_text("a file")
    result = host.sh("true")
    assert result.returncode == 125 and f"the image's /{name} is not a directory" in result.stderr
    (host.lower / name).unlink()
    for target in (name, "/"):
        (host.lower / name).symlink_to(target)
        result = host.sh("true")
        assert result.returncode == 125 and f"the image's /{name}" in result.stderr
        (host.lower / name).unlink()


@pytest.mark.parametrize("kind", ["file", "fifo", "link to itself", "link to a magic link"])
def test_etc_files_that_are_something_else(host: Host, kind: str) -> None:
    for name in ("hosts", "resolv.conf", "passwd", "group"):
        path = host.lower / "etc" / name
        path.unlink(missing_ok=True)
        if kind == "file":
            path.write_bytes(b"junk\0")
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(name if kind == "link to itself" else "/proc/1/fd/3")
    result = host.sh("echo ran; stat -c %u /proc/self", "--net", "host")
    assert (result.stdout, result.returncode) == ("ran\n0\n", 0)


def test_etc_that_is_a_file(host: Host) -> None:
    shutil.rmtree(host.lower / "etc")
    (host.lower / "etc").write_text("a file")
    assert host.sh("cat /etc").stdout == "a file"


def test_a_resolver_file_that_links_to_nothing_yet(host: Host) -> None:
    (host.lower / "etc/resolv.conf").symlink_to("../run/resolve/stub.conf")
    result = host.sh("cat /etc/resolv.conf", "--net", "host")
    assert result.stdout == Path("/etc/resolv.conf").read_text()


@pytest.mark.parametrize("workdir", ["/proc/self/fd/9", "/proc/1/cwd", "/proc/self/root/../..", "/escape"])
def test_a_working_directory_does_not_lead_out(host: Host, workdir: str) -> None:
    (host.lower / "escape").symlink_to("../../../..")
    result = host.sh("ls -d /../bin/busybox; cd ..; cd ../../..; ls bin/busybox etc/image-file", "-w", workdir)
    if result.returncode == 0:
        assert result.stdout == "/../bin/busybox\nbin/busybox\netc/image-file\n"
    else:
        assert result.returncode == 125 and "working directory" in result.stderr
