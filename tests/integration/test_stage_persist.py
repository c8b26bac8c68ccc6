"""Stages that are kept: their writes outlive processes, crashes and the host; several commands share one; drop."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stage
from fuse import linux, rundir
from imaged.config import Config
from stage.boundary.supervise import staying
from stage.errors import StageTimeoutError
from stage.kept.stages import Stages
from tests.support.command import Host, busybox_layout, host, pvisor_mounts
from tests.support.node import kill_daemon
from tests.support.stage_process import eventually

pytestmark = [pytest.mark.root, pytest.mark.fuse]
IMAGE = "box:v1"
# Beside a workload of ours these say that it is up, and end it.
UNTIL_EOF = "echo up; cat > /dev/null; exit"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def layout(scratch: Path) -> Path:
    return busybox_layout(scratch)


@pytest.fixture(scope="module")
def local(scratch: Path, layout: Path) -> Iterator[Host]:
    with host(scratch / "local") as made:
        made.run("convert", f"oci:{layout}:v1")
        yield made


@pytest.fixture(autouse=True)
def no_stages(local: Host) -> Iterator[None]:
    """What a failed test left is not the next one's."""
    yield
    for path in (local.root / "home/stages").glob("[!.]*"):
        local.run("stage", "drop", "--force", path.name)


@pytest.fixture
def space(tmp_path: Path) -> Path:
    made = tmp_path / "space"
    made.mkdir()
    (made / "file").write_text("host\n")
    return made


@contextlib.contextmanager
def running(local: Host, *argv: str, script: str = UNTIL_EOF) -> Iterator[subprocess.Popen[bytes]]:
    """A command that has said that it is up, until the end of its input or of the block."""
    process = local.start(*argv, "--", "sh", "-c", script, stdin=subprocess.PIPE)
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == b"up\n", (line, process.stderr.read() if process.stderr else b"")
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def config(local: Host) -> Config:
    return Config(home=local.root / "home", run=local.root / "run", server=None)


def listed(local: Host, name: str) -> dict[str, Any]:
    (found,) = [stage for stage in local.json("stage", "ls") if stage["name"] == name]
    return dict(found)


def listed_with(local: Host, name: str, *words: str) -> dict[str, Any]:
    """As `listed`, once its processes are these programs: a shell that has said that it is up may start more yet, and
    who was killed ends a moment later."""
    found: dict[str, Any] = {}

    def there() -> bool:
        found.update(listed(local, name))
        with contextlib.suppress(OSError):
            lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found["pids"]]
            return sorted(line.split(b"\0")[0].decode() for line in lines) == sorted(words)
        return False

    eventually(there, 60)
    assert found["processes"] == len(found["pids"]) == len(words)
    return found


def test_what_is_kept_and_listed(local: Host, space: Path) -> None:
    before = time.time()
    write = "echo one > /etc/new; dd if=/dev/zero of=file bs=64k count=16 2> /dev/null"
    local.run("run", "--stage", "fix", "--workspace", str(space), IMAGE, "--", "sh", "-c", write)
    assert local.run("stage", "exec", "fix", "--", "sh", "-c", "cat /etc/new; wc -c < file").stdout == b"one\n1048576\n"
    found = listed(local, "fix")
    assert (found["image_name"], found["workspace"]) == (IMAGE, str(space))
    assert found["image"] == local.json("image", "inspect", IMAGE)["id"]
    assert int(before) <= found["created_at"] <= time.time()
    assert 1 << 20 <= found["written_bytes"] < (1 << 20) + (256 << 10)
    assert (found["running"], found["processes"], found["pids"]) == (False, 0, [])
    assert found["limits"] == {"memory_bytes": None, "cpus": None, "pids": None}
    text = local.run("stage", "ls").stdout.decode()
    assert text.split("\n")[0].split() == ["STAGE", "IMAGE", "AGE", "WRITES", "PROCESSES", "LIMITS", "WORKSPACE"]
    assert f"fix    {IMAGE}" in text and "1.0 MiB  -" in text and str(space) in text
    assert (space / "file").read_text() == "host\n"
    local.run("stage", "drop", "fix")
    assert local.json("stage", "ls") == []
    assert not list((local.root / "home/stages").iterdir())
    for argv in (["stage", "exec", "fix", "--", "true"], ["stage", "drop", "fix"]):
        assert "no stage 'fix'" in local.error(*argv, code=125 if "exec" in argv else 1)


def test_processes_of_a_running_stage(local: Host) -> None:
    """Those of the command, of one that joined, and what both left in the background; not pVisor's own."""
    argv = ["run", "-i", "--stage", "fix", "--memory", "64M", "--pids", "50", IMAGE]
    with running(local, *argv, script=f"sleep 1000 & {UNTIL_EOF}") as first:
        listed_with(local, "fix", "sh", "sleep", "cat")
        with running(local, "stage", "exec", "-i", "fix"):
            found = listed_with(local, "fix", "sh", "sleep", "cat", "sh", "cat")
            assert found["running"]
            assert found["limits"] == {"memory_bytes": 64 << 20, "cpus": None, "pids": 50}
            assert "  5          64.0 MiB, 50 pids" in local.run("stage", "ls").stdout.decode()
        first.communicate(b"", timeout=20)
    eventually(lambda: not listed(local, "fix")["running"], 60)
    assert listed(local, "fix")["processes"] == 0
    local.run("stage", "drop", "fix")


def test_a_running_stage_is_joined_by_exec_only(local: Host) -> None:
    with running(local, "run", "-i", "--stage", "fix", IMAGE, script=f"echo mine > /dev/shm/x; {UNTIL_EOF}") as first:
        said = local.error("run", "--stage", "fix", IMAGE, "--", "true", code=125)
        assert "stage 'fix' is in use by process" in said and "pvisor stage exec fix -- CMD" in said
        said = local.error("stage", "drop", "fix")
        assert "stage 'fix' is in use by process" in said and "`pvisor stage drop --force fix`" in said
        assert "exec" not in said
        assert local.run("stage", "exec", "fix", "--", "cat", "/dev/shm/x").stdout == b"mine\n"
        first.communicate(b"", timeout=20)
        assert first.returncode == 0
    local.run("stage", "drop", "fix")


def test_commands_that_come_to_an_idle_stage_at_once(local: Host) -> None:
    """One begins, the others join it: each sees what all of them wrote. None fails for coming too early or too late."""
    count = 6
    local.run("run", "--stage", "fix", IMAGE, "--", "true")
    script = f"""
        echo > /tmp/here.$0
        while set -- /tmp/here.*; test $# -lt {count}; do sleep 0.05; done
        echo met; cat > /dev/null
    """
    argv = ["stage", "exec", "-i", "fix", "--", "sh", "-c", script]
    processes = [
        local.start(*argv, str(number), stdin=subprocess.PIPE, stderr=subprocess.STDOUT) for number in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == b"met\n"
    finally:
        for process in processes:
            process.communicate(b"", timeout=20)
    assert [process.returncode for process in processes] == [0] * count
    assert not listed(local, "fix")["running"]
    local.run("stage", "drop", "fix")


def test_the_first_command_ends_and_others_stay(local: Host, space: Path) -> None:
    """Its caller has the exit code at once. The stage ends with the last command, whichever that is."""
    argv = ["run", "-i", "--stage", "fix", "--workspace", str(space), IMAGE]
    begin = f"echo mine > /dev/shm/x; sleep 1000 > /dev/null 2>&1 & {UNTIL_EOF} 7"
    with running(local, *argv, script=begin) as first, running(local, "stage", "exec", "-i", "fix") as second:
        first.communicate(b"", timeout=20)
        assert first.returncode == 7 and second.poll() is None
        listed_with(local, "fix", "sh", "cat", "sleep")  # the sleep is what the first one left
        assert "in use by process" in local.error("stage", "drop", "fix")
        assert "process" in local.error("node", "stop")
        look = "cat /dev/shm/x; echo more > file; cat /etc/image-file"
        assert local.run("stage", "exec", "fix", "--", "sh", "-c", look).stdout == b"mine\nfrom the image\n"
        pids = listed(local, "fix")["pids"]
        second.communicate(b"", timeout=20)
        assert second.returncode == 0
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert local.run("stage", "exec", "fix", "--", "sh", "-c", "cat file; ls /dev/shm").stdout == b"more\n"
    local.run("stage", "drop", "fix")


def test_killing_the_first_caller_ends_its_command_only(local: Host, space: Path) -> None:
    argv = ["run", "-i", "--stage", "fix", "--workspace", str(space), IMAGE]
    with running(local, *argv) as first, running(local, "stage", "exec", "-i", "fix") as second:
        listed_with(local, "fix", "sh", "cat", "sh", "cat")
        first.kill()
        first.communicate(timeout=20)
        listed_with(local, "fix", "sh", "cat")
        assert second.poll() is None
        assert local.run("stage", "exec", "fix", "--", "cat", "file").stdout == b"host\n"
        second.communicate(b"", timeout=20)
        assert second.returncode == 0
    eventually(lambda: Stages(local.root / "home/stages").running("fix") is None)
    local.run("run", "--stage", "fix", IMAGE, "--", "true")
    local.run("stage", "drop", "fix")


def test_killing_the_only_caller_ends_the_stage(local: Host) -> None:
    with running(local, "run", "-i", "--stage", "fix", IMAGE) as first:
        pids = listed(local, "fix")["pids"]
        first.kill()
        first.communicate(timeout=20)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    local.run("stage", "drop", "fix")


def test_a_timeout_ends_its_command_only(local: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PVISOR_HOME", "PVISOR_RUN"):
        monkeypatch.setenv(name, local.env[name])
    said, say = os.pipe()
    caught: list[BaseException] = []

    def first() -> None:
        try:
            stage.run(IMAGE, ["sh", "-c", "echo up; sleep 1000"], stage="fix", stdout=say, timeout_s=3)
        except StageTimeoutError as error:
            caught.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert os.read(said, 10) == b"up\n"
    with running(local, "stage", "exec", "-i", "fix") as second:
        thread.join(20)
        assert len(caught) == 1 and second.poll() is None
        second.communicate(b"", timeout=20)
        assert second.returncode == 0
    for fd in (said, say):
        os.close(fd)


def test_many_short_commands_at_once_all_end_as_they_should(local: Host) -> None:
    """Whichever is first, and however close to its end the others come."""
    local.run("run", "--stage", "fix", IMAGE, "--", "true")
    codes: list[int] = []

    def loop(number: int) -> None:
        for _ in range(6):
            process = local.start("stage", "exec", "fix", "--", "sh", "-c", f"exit {number}")
            process.communicate(timeout=60)
            codes.append(process.returncode - number)

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert codes == [0] * 24
    local.run("stage", "drop", "fix")


def test_an_init_that_stayed_is_no_zombie_of_a_program(local: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that runs many stages: a later run reaps it."""
    for name in ("PVISOR_HOME", "PVISOR_RUN"):
        monkeypatch.setenv(name, local.env[name])
    gate, opener = os.pipe()
    said, say = os.pipe()
    codes: list[int] = []

    def first() -> None:
        codes.append(
            stage.run(IMAGE, ["sh", "-c", "echo up; read line"], stage="fix", stdin=gate, stdout=say).exit_code
        )

    thread = threading.Thread(target=first)
    thread.start()
    assert os.read(said, 10) == b"up\n"
    with running(local, "stage", "exec", "-i", "fix") as second:
        os.write(opener, b"\n")
        thread.join(20)
        assert codes == [0] and len(staying) == 1
        second.communicate(b"", timeout=20)
        assert second.returncode == 0
    eventually(lambda: Stages(local.root / "home/stages").running("fix") is None)
    assert stage.run(IMAGE, ["true"], stage="fix").exit_code == 0
    assert staying == []
    for fd in (gate, opener, said, say):
        os.close(fd)


def test_commands_one_after_the_other_never_miss_each_other(local: Host) -> None:
    """A stage whose last command is just ending is waited for."""
    local.run("run", "--stage", "fix", IMAGE, "--", "true")
    for _ in range(3):
        with running(local, "stage", "exec", "-i", "fix") as first:
            assert first.stdin is not None
            first.stdin.close()
            second = local.start("stage", "exec", "fix", "--", "sh", "-c", "exit 7")
            _, said = second.communicate(timeout=20)
            assert second.returncode == 7, said
            assert first.wait(20) == 0
    local.run("stage", "drop", "fix")


def test_kill_of_everything_loses_no_write(local: Host, space: Path) -> None:
    """The command, its init and the node daemon, with -9, while it writes."""
    argv = ["run", "-i", "--stage", "fix", "--workspace", str(space), IMAGE]
    write = "echo kept > /etc/new; rm /home -r; mkdir -p dir/of; echo kept > dir/of/file; rm file"
    with running(local, *argv, script=f"{write}; echo up; yes > /big; exit") as process:
        stage = listed_with(local, "fix", "sh", "sh")  # the other one is `yes`, for which busybox executes nothing
        os.kill(int(json.loads((local.root / "home/stages/fix/init").read_text())["pid"]), signal.SIGKILL)
        process.kill()
        kill_daemon(config(local))
        process.wait()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in stage["pids"]))
    look = "cat /etc/new dir/of/file; ls /home file 2>&1; test -s /big"
    done = local.run("stage", "exec", "fix", "--", "sh", "-c", look)
    assert done.stdout.startswith(b"kept\nkept\n") and done.stdout.count(b"No such file") == 2
    assert not listed(local, "fix")["running"]
    local.run("stage", "drop", "fix")


@contextlib.contextmanager
def disk(image: Path, target: Path) -> Iterator[Path]:
    """The file system in an image file, on a directory."""
    target.mkdir()
    # Nothing gets there by itself, as it does after five seconds otherwise: a copy of it may take longer.
    subprocess.run(["mount", "-o", "loop,commit=600", str(image), str(target)], check=True)
    try:
        yield target
    finally:
        linux.umount(target, linux.MNT_DETACH)


def test_power_loss_loses_no_write_of_a_command_that_has_ended(tmp_path: Path, layout: Path, space: Path) -> None:
    """What has reached the disk when the command returns is all there is after the power comes back."""
    image, cut = tmp_path / "disk", tmp_path / "cut"
    with image.open("wb") as file:
        file.truncate(96 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    with disk(image, tmp_path / "before") as directory, host(directory) as made:
        made.run("convert", f"oci:{layout}:v1")
        write = "echo one > new; mkdir -p a/b; echo two > a/b/c; rm file; chmod 600 /etc/passwd; rm -r /home"
        stage = ["run", "--stage", "fix", "--workspace", str(space), IMAGE, "--", "sh", "-c"]
        made.run(*stage, write)
        daemon = rundir.daemon_pid(config(made))
        assert daemon is not None
        os.kill(daemon, signal.SIGSTOP)  # what it keeps of the run later takes everything along
        try:
            (directory / "in memory only").write_text("x")
            shutil.copyfile(image, cut)
        finally:
            os.kill(daemon, signal.SIGCONT)
    with disk(cut, tmp_path / "after") as directory:
        assert not (directory / "in memory only").exists()  # the copy has what the disk had, not what the kernel had
        with host(directory) as made:
            (found,) = made.json("stage", "ls")
            assert (found["name"], found["workspace"], found["running"]) == ("fix", str(space), False)
            look = "cat new a/b/c; stat -c %a /etc/passwd; ls /home file"
            done = made.start("stage", "exec", "fix", "--", "sh", "-c", look)
            out, errors = done.communicate(timeout=60)
            assert out == b"one\ntwo\n600\n" and errors.count(b"No such file") == 2, (out, errors)


def test_a_stage_is_on_the_disk_when_its_command_begins(tmp_path: Path) -> None:
    """Then what the command itself syncs is found again by name."""
    image, cut = tmp_path / "disk", tmp_path / "cut"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    before = disk(image, tmp_path / "before")
    with before as directory, Stages(directory / "stages").use("fix", image="id", workspace=tmp_path) as stage:
        shutil.copyfile(image, cut)
    with disk(cut, tmp_path / "after") as directory:
        assert Stages(directory / "stages").list() == [stage.info]


def test_forced_drop_of_a_running_stage(local: Host, space: Path) -> None:
    argv = ["run", "-i", "--stage", "fix", "--workspace", str(space), IMAGE]
    with running(local, *argv) as first, running(local, "stage", "exec", "-i", "fix") as second:
        pids = listed_with(local, "fix", "sh", "cat", "sh", "cat")["pids"]
        assert local.json("stage", "drop", "--force", "fix") == {"dropped": "fix"}
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        for process in (first, second):
            said = process.communicate(timeout=20)[1]
            assert process.returncode == 137 and b"the stage was ended by signal 9 while" in said
    assert not list((local.root / "home/stages").iterdir())
    assert not pvisor_mounts(local.root / "home")
    local.run("run", "--stage", "fix", IMAGE, "--", "true")
    local.run("stage", "drop", "--force", "fix")  # nothing runs: as without


# Killed in the middle of what it removes, of which each file with its two directories takes five looks.
KILLED_REMOVAL = """
import os, signal
from stage import hostpath
plain, left = hostpath._remove, 2500
def remove(name, directory):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(name, directory)
hostpath._remove = remove
from cli.main import main
main()
"""


def test_a_drop_that_was_cut_off_is_finished_by_the_next(local: Host) -> None:
    for name in ("big", "other"):
        local.run("run", "--stage", name, IMAGE, "--", "true")
    upper = local.root / "home/stages/big/upper"
    for number in range(1000):
        directory = upper / f"d{number}/e"
        directory.mkdir(parents=True)
        (directory / "f").touch()
    command = [sys.executable, "-c", KILLED_REMOVAL, "stage", "drop", "big"]
    assert subprocess.run(command, env=local.env, timeout=60).returncode == -signal.SIGKILL
    left = [path.name for path in (local.root / "home/stages").iterdir()]
    assert "big" not in left and "other" in left
    (trash,) = [local.root / "home/stages" / name for name in left if name != "other"]
    assert 0 < sum(path.name == "f" for path in trash.rglob("*")) < 1000
    local.run("stage", "drop", "other")
    assert not list((local.root / "home/stages").iterdir())


def test_what_a_stage_stands_on_is_not_collected(tmp_path: Path, layout: Path) -> None:
    with host(tmp_path / "worker") as made:
        made.run("convert", f"oci:{layout}:v1")
        made.run("run", "--stage", "fix", IMAGE, "--", "sh", "-c", "echo kept > /new")
        made.run("image", "rm", IMAGE)
        made.run("node", "stop")
        made.run("store", "gc")
        assert made.run("stage", "exec", "fix", "--", "cat", "/new", "/etc/image-file").stdout == (
            b"kept\nfrom the image\n"
        )
        made.run("stage", "drop", "fix")
        made.run("node", "stop")
        assert made.json("store", "gc")["removed_chunks"] > 0
