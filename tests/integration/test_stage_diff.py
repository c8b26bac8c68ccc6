"""`pvisor stage diff` and `stage.diff`: text that other programs take, short forms, and stages that run."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

import stage
from imaged.config import Config
from stage.edits import content
from stage.edits.changes import Kind
from stage.errors import StageError
from stage.kept.stages import Stages
from stage.review import root_review
from tests.support.busybox import busybox_root
from tests.support.command import Host, busybox_layout, host
from tests.support.overlay import Layers, layers, patch_text
from tests.support.stage_process import Host as StageHost

pytestmark = [pytest.mark.root, pytest.mark.fuse]
OUTSIDE_GIT = {"PATH": os.environ["PATH"], "GIT_DIR": "/nonexistent"}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    scratch = tmp_path_factory.mktemp("diff")
    with host(scratch / "local") as made:
        made.run("convert", f"oci:{busybox_layout(scratch)}:v1")
        yield made


@pytest.fixture
def space(tmp_path: Path) -> Path:
    made = tmp_path / "space"
    made.mkdir()
    (made / "file").write_text("one\ntwo\n")
    (made / "src").mkdir()
    (made / "src/main").write_text("main\n")
    return made


def edited(local: Host, space: Path | None, script: str) -> None:
    local.run(
        "run", "--stage", "fix", *(["--workspace", str(space)] if space else []), "box:v1", "--", "sh", "-ec", script
    )


def test_workspace_root_and_short_forms(local: Host, space: Path) -> None:
    edited(
        local, space, "echo three >> file; mv src lib; printf 'a\\0' > bin; echo root > /etc/new; mkdir /a; echo > /a/b"
    )
    try:
        shown = local.run("stage", "diff", "fix").stdout
        assert b"+three\n" in shown and b"rename to lib/main\n" in shown and b"/etc" not in shown
        assert b"# binary file added: bin (2 bytes)\n" in shown and b"# directory renamed: src -> lib\n" in shown
        root = local.run("stage", "diff", "--root", "fix").stdout
        assert root.count(b"diff --git") == 2 and b"# " not in root  # nothing of what pVisor makes
        assert local.run("stage", "diff", "--root", "fix", "/etc").stdout.count(b"diff --git") == 1
        names = local.run("stage", "diff", "--name-only", "-z", "fix").stdout
        assert names == b"bin\0file\0lib\0lib/main\0"
        for given in ("lib", "/workspace/src", str(space / "lib/main")):
            assert b"lib/main\n" in local.run("stage", "diff", "--name-only", "fix", given).stdout
        assert "neither in the workspace nor changed" in local.error("stage", "diff", "fix", "nothing/of/this/name")
        assert "neither in the image nor changed" in local.error("stage", "diff", "--root", "fix", "nothing")
        assert local.run("stage", "diff", "--root", "fix", "bin").stdout == b""
        assert "is not in the workspace" in local.error("stage", "diff", "fix", "../x")
        assert "-z goes with --name-only" in local.error("stage", "diff", "-z", "fix", code=2)
        assert local.run("stage", "diff", "--stat", "fix").stdout.decode().splitlines() == [
            " bin                  | Bin 0 -> 2 bytes",
            " file                 |   1 +",
            " src => lib           | renamed directory",
            " src/main => lib/main | renamed file",
            " 3 files changed, 1 insertion(+)",
        ]
        found = local.json("stage", "diff", "fix")
        assert (found["stage"], found["base"]) == ("fix", str(space))
        told = {change["path"]: change for change in found["changes"]}
        assert told["file"]["added_lines"] == 1 and told["file"]["new"]["size_bytes"] == 14
        assert told["bin"]["binary"] and told["bin"]["old"] is None
        assert told["lib/main"]["kind"] == "renamed" and told["lib/main"]["old_path"] == "src/main"
    finally:
        local.run("stage", "drop", "fix")
    assert "no stage 'fix'" in local.error("stage", "diff", "fix")


def test_the_image_is_meant_without_a_workspace(local: Host) -> None:
    edited(local, None, "echo new > /etc/new; rm /etc/image-file")
    try:
        names = [change["path"] for change in local.json("stage", "diff", "fix")["changes"]]
        assert names == ["etc/image-file", "etc/new"]
    finally:
        local.run("stage", "drop", "fix")


def test_what_pvisor_makes_is_no_change(tmp_path: Path, space: Path) -> None:
    """Wherever the links of the image lead; what the workload makes beside it is one."""
    runner = StageHost(lower=busybox_root(tmp_path / "lower"), stages=tmp_path / "stages")
    (runner.lower / "etc/resolv.conf").symlink_to("../run/a/b/resolv.conf")
    (runner.lower / "dev").symlink_to("/run/c/dev")
    options = ["--net", "host", "--stage", "s", "--workspace", str(space)]

    def changed(script: str) -> list[bytes]:
        assert runner.sh(script, *options).returncode == 0
        with root_review(Stages(runner.stages), "s", lambda info: nullcontext(runner.lower)) as found:
            return [change.path for change in found.changes]

    assert changed("true") == []
    assert changed("touch /run/a/mine; mkdir /run/k; echo x > /root/new") == [b"root/new", b"run/a/mine", b"run/k"]


def test_a_stage_that_runs(local: Host, space: Path) -> None:
    argv = ["run", "-i", "--stage", "fix", "--workspace", str(space), "box:v1", "--", "sh", "-c"]
    process = local.start(
        *argv, "echo more >> file; echo up; read line; rm -r src; echo end; cat", stdin=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == b"up\n"
        assert local.run("stage", "diff", "--name-only", "fix").stdout == b"file\n"
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"end\n"
        assert local.run("stage", "diff", "--name-only", "fix").stdout == b"file\nsrc/main\n"
    finally:
        process.communicate(timeout=20)
        local.run("stage", "drop", "fix")


def test_what_was_applied_is_not_shown_again(local: Host, space: Path) -> None:
    edited(local, space, "echo more >> file; rm -r src; echo n > n")
    try:
        local.run("stage", "apply", "fix", "file")
        (space / "file").write_text("the host goes on\n")
        assert local.run("stage", "diff", "--name-only", "fix").stdout == b"n\nsrc/main\n"
        local.run("stage", "apply", "fix")
        assert local.run("stage", "diff", "fix").stdout == b""
    finally:
        local.run("stage", "drop", "fix")


def test_from_python(local: Host, space: Path) -> None:
    edited(local, space, "echo more >> file; mv src/main src/other")
    try:
        config = Config.resolve(environ=local.env)
        found = stage.diff("fix", config=config)
        assert [(item.path, item.kind, item.old_path) for item in found.files] == [
            (b"file", Kind.MODIFIED, None),
            (b"src/other", Kind.RENAMED, b"src/main"),
        ]
        assert found.base == space and found.patch == local.run("stage", "diff", "fix").stdout
        assert stage.diff("fix", ["src"], config=config).files == found.files[1:]
        assert stage.diff("fix", root=True, config=config).files == ()
    finally:
        local.run("stage", "drop", "fix")


def tree(top: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(top)): (
            path.lstat().st_mode,
            os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes(),
        )
        for path in top.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def assert_accepted(made: Layers, *, tools: tuple[str, ...] = ("git", "patch")) -> bytes:
    """Both programs make of the base what the overlay shows."""
    text = patch_text(made)
    commands = {"git": ["git", "apply", "--whitespace=nowarn"], "patch": ["patch", "-p1", "--silent"]}
    with made.mounted() as merged:
        wanted = tree(merged)
    for tool in tools:
        target = made.root / tool
        shutil.copytree(made.base, target, symlinks=True)
        done = subprocess.run(commands[tool], cwd=target, input=text, capture_output=True, env=OUTSIDE_GIT)
        assert done.returncode == 0, (tool, done.stdout, done.stderr, text)
        assert tree(target) == wanted, tool
        shutil.rmtree(target)
    return text


# What the base is made by, and what is done in the overlay.
EDITS = {
    "new files": ("", "echo n > n; : > empty; mkdir -p a/b; echo b > a/b/c"),
    "lines": ("seq 50 > n; : > empty; : > gone", "sed -i 's/25/x/; 40,42d' n; echo now > empty; rm gone"),
    "last lines": (
        "printf a > a; printf 'b\\n' > b; printf c > c",
        "printf 'a\\n' > a; printf b > b; printf 'c2' > c",
    ),
    "line ends": (
        "printf 'a\\r\\nb\\r\\n' > dos; printf 'a\\nb\\n' > unix",
        "printf 'a\\r\\nc\\r\\n' > dos; printf 'a\\r\\nb\\r\\n' > unix",
    ),
    "modes": ("echo a > a; echo b > b; chmod +x b; seq 9 > c", "chmod +x a c; chmod -x b; echo 10 >> c"),
    "links": ("ln -s a l; ln -s b m; ln -s c n", "ln -sfn x l; rm m; ln -s new o; mv n moved"),
    "files and links": ("echo f > f; ln -s t l", "rm f l; ln -s t f; echo l > l"),
    "renames": (
        "seq 30 > a; mkdir -p d/e; seq 9 > d/x; seq 8 > d/e/y",
        "mv a b; echo 31 >> b; mv d m; echo 10 >> m/x; chmod +x m/e/y",
    ),
    "directories swapped": ("mkdir d e; echo 1 > d/x; echo 2 > e/x", "mv d t; mv e d; mv t e"),
    "new files where renamed ones were": (
        "mkdir d; seq 5 > d/x; seq 6 > d/y",
        "mv d m; rm m/x; mv m/y z; mkdir d; seq 7 > d/x",
    ),
    "files back in a new directory": (
        "mkdir d; seq 5 > d/x; seq 6 > d/y",
        "mv d m; mkdir d; mv m/x d/x; mv m/y d/z; rmdir m",
    ),
    "files back and changed": (
        "mkdir d; seq 5 > d/x; seq 6 > d/y; echo > d/k",
        "mv d m; mkdir d; mv m/x d/x; echo 6 >> d/x; rm m/y; ln -s t m/y",
    ),
    "spaces": (
        "mkdir 'a b'; echo 1 > 'a b/c d'; : > 'e f'",
        "echo 2 >> 'a b/c d'; mv 'e f' 'g h'; : > 'i j'; mv 'a b' ' k'",
    ),
    "any bytes in names": (
        'printf 1 > "$(printf \'new\\nline\')"; printf 2 > "$(printf \'\\377\\"\\\\\\t\')"',
        'for f in *; do echo more >> "$f"; done; mv "$(printf \'new\\nline\')" "$(printf \'\\001 \\303\\244\')"',
    ),
    "lines like those of a patch": (
        "echo '-- a' > a; echo '++ b' >> a; echo '@@ -1 +1 @@' > b",
        "echo '++ c' > a; echo 'diff --git a/a b/a' > b",
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_text_is_accepted(tmp_path: Path, case: str) -> None:
    base, script = EDITS[case]
    made = layers(tmp_path, base)
    made.edit(script)
    assert_accepted(made)


def test_files_that_become_directories_and_back(tmp_path: Path) -> None:
    """GNU patch removes files last, so this is for git only."""
    made = layers(tmp_path, "echo f > f; mkdir -p d/e; echo x > d/e/x")
    made.edit("rm f; mkdir f; echo n > f/n; rm -r d; echo d > d")
    assert_accepted(made, tools=("git",))


def test_binary_files_that_become_directories_and_links(tmp_path: Path) -> None:
    """Their content is only noted, and they are in nobody's way all the same."""
    made = layers(tmp_path, "printf 'x\\0' > f; printf 'y\\0' > 'g h'; printf 'z\\0' > k")
    made.edit("rm f; mkdir f; echo n > f/n; rm 'g h'; ln -s t 'g h'; rm k; mkdir k")
    text = assert_accepted(made, tools=("git",))
    assert text.count(b"# binary file deleted: ") == 3


def test_what_text_can_not_say_is_noted(tmp_path: Path) -> None:
    made = layers(
        tmp_path, "mkdir -p d empty; echo a > a; echo b > b; printf 'x\\0' > bin; echo h > h; mkfifo p; ln h i"
    )
    made.edit(
        "chmod 600 a; chown 7:8 b; mkdir -p n; rmdir empty; printf 'y\\0y' > bin; printf '\\0' > new; chmod 700 d;"
        " mkfifo q; rm p; setfattr -n user.k -v v a; ln b c; echo s > s; chmod 4755 s; mv h t; mv t h; sed -i s/h/H/ i"
    )
    text = assert_accepted_but_for(made, "bin", "new")
    notes = [line[2:] for line in text.split(b"\n") if line.startswith(b"# ")]
    assert notes == [
        b"mode 0644 -> 0600: a",
        b"attributes of a: user.k",
        b"owner 0:0 -> 7:8: b",
        b"binary file changed: bin (2 -> 3 bytes)",
        b"owner 7:8: c",
        b"hard link: c = b",
        b"mode 0755 -> 0700: d",
        b"directory deleted: empty",
        b"hard link broken: i was one of 2 names of a file",
        b"directory added: n",
        b"binary file added: new (1 bytes)",
        b"fifo deleted: p",
        b"fifo added: q",
        b"mode 4755: s",
    ]


def assert_accepted_but_for(made: Layers, *names: str) -> bytes:
    text = patch_text(made)
    with made.mounted() as merged:
        wanted = tree(merged)
    for name, command in (("git", ["git", "apply"]), ("patch", ["patch", "-p1", "-s"])):
        target = made.root / name
        shutil.copytree(made.base, target, symlinks=True, ignore=shutil.ignore_patterns("p"))
        subprocess.run(command, cwd=target, input=text, capture_output=True, env=OUTSIDE_GIT, check=True)
        assert {path: row[1] for path, row in tree(target).items() if path not in names} == {
            path: row[1] for path, row in wanted.items() if path not in names
        }
    return text


def test_against_the_commit_it_was_made_from(tmp_path: Path) -> None:
    """The blob names are git's own: a patch finds its base though the file has changed since."""
    made = layers(tmp_path, "git init -q .; seq 20 > n; git add n; git -c user.name=a -c user.email=a commit -qm 1")
    made.edit("sed -i s/^2$/two/ n")
    text = patch_text(made)
    (made.base / "n").write_text("".join(f"{number}\n" for number in range(2, 21)))
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", "commit", "-qam2"], cwd=made.base, check=True)
    done = subprocess.run(["git", "apply", "--3way"], cwd=made.base, input=text, capture_output=True)
    assert b"with conflicts" in done.stderr or done.returncode == 0
    assert b"lacks the necessary blob" not in done.stderr


def test_bad_cases_take_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that repeat without end are compared for as long as allowed, then replaced as a whole."""
    monkeypatch.setattr(content, "COMPARE_LIMIT_S", 1)
    rng = random.Random(1)
    made = layers(tmp_path, "touch dull long")
    (made.base / "dull").write_bytes(b"".join(rng.choice([b"a\n", b"b\n"]) for _ in range(600_000)))
    (made.base / "long").write_bytes(b"x" * 20_000_000)
    dull = b"".join(rng.choice([b"a\n", b"b\n"]) for _ in range(600_000))

    def work(merged: Path) -> None:
        (merged / "dull").write_bytes(dull)
        (merged / "long").write_bytes(b"x" * 19_999_999 + b"y\n")

    made.edit_with(work)
    text = assert_accepted(made)
    assert b"@@ -1,600000 +1,600000 @@\n" in text


def test_files_too_large_to_show_are_named(tmp_path: Path) -> None:
    made = layers(tmp_path, f"truncate -s {content.TEXT_LIMIT_BYTES + 1} large; truncate -s 100G huge")
    made.edit(f"truncate -s {content.TEXT_LIMIT_BYTES + 2} large; touch huge; truncate -s 200G sparse")
    assert patch_text(made).decode().splitlines() == [
        f"# binary file changed: large ({content.TEXT_LIMIT_BYTES + 1} -> {content.TEXT_LIMIT_BYTES + 2} bytes)",
        f"# binary file added: sparse ({200 << 30} bytes)",
    ]


def test_without_the_program_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = layers(tmp_path, "echo a > a")
    made.edit("echo b >> a")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StageError, match="diff is not there"):
        patch_text(made)


def test_output_is_cut_off_quietly(local: Host, space: Path) -> None:
    edited(local, space, "seq 100000 > many")
    try:
        process = local.start("stage", "diff", "fix")
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 141 and process.stderr.read() == b""
        process.stderr.close()
    finally:
        local.run("stage", "drop", "fix")


def test_json_has_any_name(local: Host, space: Path) -> None:
    edited(local, space, "printf x > \"$(printf '\\377')\"")
    try:
        text = local.run("stage", "diff", "fix", "--json").stdout
        assert os.fsencode(json.loads(text)["changes"][0]["path"]) == b"\xff"
        assert local.run("stage", "diff", "fix", "--name-only").stdout == b'"\\377"\n'
    finally:
        local.run("stage", "drop", "fix")
