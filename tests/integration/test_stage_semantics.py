"""What a process in a stage sees of its writes: the same as if it ran in the directory itself, which stays as it was.

Each row runs twice, in a stage over a workspace and directly in a copy of it. Output and exit code are compared, then
the trees: the copy, and what the stage's next command sees.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fuse import linux
from stage.boundary.overlay import OVER_WORKSPACE, mount_overlay
from stage.kept.stages import Stages
from tests.support.busybox import busybox_root
from tests.support.stage_process import REPOSITORY, Host
from tests.support.trees import found

pytestmark = pytest.mark.root

# In the workspace: a, dir/{b,sub/c}, empty/, link -> a, run.sh (0755), hard1 = hard2, odd<newline><0xff>.
ROWS = {
    "nothing": "true",
    "read": "cat a dir/sub/c link",
    "write": "echo new > a; cat a",
    "append": "echo more >> dir/b; cat dir/b",
    "create": "echo new > fresh; mkdir -p x/y; echo deep > x/y/z; cat fresh x/y/z",
    "delete": "rm a; ls",
    "delete all": "rm -r dir empty a link run.sh hard1 hard2; rm odd*; ls -A",
    "delete and recreate": "rm a; echo again > a; cat a",
    "recreate as a link": "rm a; ln -s dir/b a; cat a",
    "delete what was created": "echo x > fresh; mkdir d; rm -r fresh d; ls",
    "directory deleted and recreated": "rm -r dir; mkdir dir; ls -A dir; echo x > dir/only; ls dir",
    "directory recreated twice": "rm -r dir; mkdir dir; echo 1 > dir/b; rm -r dir; mkdir dir; ls -A dir",
    "directory replaced by a file": "rm -r dir; echo file > dir; cat dir",
    "directory replaced by a file and back": "rm -r dir; echo file > dir; rm dir; mkdir dir; ls -A dir; echo x > dir/b",
    "directory replaced by a link": "rm -r dir; ln -s empty dir; ls dir/",
    "file replaced by a directory": "rm a; mkdir a; echo in > a/a; cat a/a link 2> /dev/null",
    "file replaced by a directory and back": "rm a; mkdir a; touch a/x; rm -r a; echo back > a; cat a link",
    "rename of a file": "mv a renamed; cat renamed; ls",
    "rename over a file": "mv a dir/b; cat dir/b; ls",
    "rename there and back": "mv a x; mv x a; cat a",
    "rename of a directory": "mv dir moved; cat moved/b moved/sub/c; ls",
    "rename of a directory that is recreated": "mv dir moved; mkdir dir; echo new > dir/b; cat moved/b dir/b; ls dir",
    "rename of a new directory": "mkdir n; echo x > n/f; mv n m; cat m/f",
    "mode": "chmod 600 a; chmod 700 dir; chmod 644 run.sh; stat -c %a a dir run.sh",
    "executable": "./run.sh; echo 'echo changed' >> run.sh; ./run.sh",
    "hard links of its own": "echo x > h1; ln h1 h2; echo y >> h2; cat h1; stat -c %h h1",
    "one of two names written": "echo more >> hard1; cat hard2; stat -c %h hard2",
    "one of two names deleted": "rm hard1; cat hard2; stat -c %h hard2",
    "a third name": "ln hard1 hard3; echo x >> hard3; cat hard1 hard2",
    "truncate": ": > dir/b; wc -c < dir/b",
    "overwrite a part": "dd if=/bin/busybox of=a bs=1 count=2 seek=1 conv=notrunc 2> /dev/null; wc -c < a",
    "hole": "dd if=/dev/zero of=hole bs=1 count=1 seek=9999999 2> /dev/null; wc -c < hole",
    "fifo": "mknod fifo p; (echo through > fifo &); cat fifo",
    "odd names": 'for f in odd*; do echo x >> "$f"; done; echo x > "$(printf \'a\\\\tb\\\\nc\\\\200\')"; ls | wc -l',
    "many files": "mkdir n; for i in $(seq 300); do echo $i > n/$i; done; rm n/1*; ls n | wc -l",
    "empty directory goes": "rm -r empty; ls",
    "open while deleted": "exec 3< a; rm a; cat <&3; ls",
    "times": "touch -d '2001-02-03 04:05:06' a dir/b; stat -c %Y a dir/b",
}


def make_space(space: Path) -> Path:
    space.mkdir()
    for name, text in (("a", "one\n"), ("dir/b", "two\n"), ("dir/sub/c", "three\n"), ("run.sh", "echo ran\n")):
        (space / name).parent.mkdir(parents=True, exist_ok=True)
        (space / name).write_text(text)
    (space / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (space / "run.sh").chmod(0o755)
    (space / "empty").mkdir()
    (space / "link").symlink_to("a")
    (space / "hard1").write_text("hard\n")
    (space / "hard2").hardlink_to(space / "hard1")
    Path(os.fsdecode(os.fsencode(space) + b"/odd\n\xff")).write_text("odd\n")
    return space


def tree(top: Path) -> dict[bytes, tuple[object, ...]]:
    """Without what two runs of one script do not share: times, and a directory's link count."""
    rows = {}
    for path, (mode, uid, gid, _mtime, links, first, kind, xattrs) in found(top).items():
        rows[path] = mode, uid, gid, links if kind is not None else 0, first, kind, xattrs
    return rows


@pytest.mark.parametrize("script", [pytest.param(script, id=name) for name, script in ROWS.items()])
def test_as_if_it_had_run_in_the_directory(tmp_path: Path, script: str) -> None:
    host = Host(lower=busybox_root(tmp_path / "lower"), stages=tmp_path / "stages")
    space, direct, merged = make_space(tmp_path / "space"), tmp_path / "direct", tmp_path / "merged"
    subprocess.run(["cp", "-a", str(space), str(direct)], check=True)
    before = found(space)
    shell = [str(host.lower / "bin/busybox"), "sh", "-c", script]
    environment = {"PATH": f"{host.lower}/bin"}
    expected = subprocess.run(shell, cwd=direct, env=environment, capture_output=True, timeout=30, umask=0o022)

    command = host.command(
        ["--stage", "s", "--workspace", str(space), "-w", "/workspace", "-e", "PATH=/bin"], ["sh", "-c", script]
    )
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, timeout=30)
    assert (done.stdout, done.returncode) == (expected.stdout, expected.returncode), done.stderr
    assert found(space) == before

    stage = Stages(host.stages).files("s")
    merged.mkdir()
    mount_overlay(space, stage.workspace_upper, stage.workspace_work, merged, options=OVER_WORKSPACE)
    try:
        assert tree(merged) == tree(direct)
    finally:
        linux.umount(merged)
    assert found(space) == before
