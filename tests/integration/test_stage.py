"""Processes in stages on the real kernel: root, users, environment, exit codes, isolation, retained writes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fuse import linux
from stage.boundary import launch
from stage.boundary.process import ProcessSpec
from stage.boundary.streams import Streams
from stage.errors import CommandError, StageSetupError
from stage.kept.stages import Stages
from tests.support.busybox import busybox_root
from tests.support.stage_process import REPOSITORY, Host, eventually, processes_with

pytestmark = pytest.mark.root


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(lower=busybox_root(tmp_path / "lower"), stages=tmp_path / "stages")


def may_lower_oom_score() -> bool:
    """CAP_SYS_RESOURCE, which some virtual machines take from root."""
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> 24 & 1)


def snapshot(root: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.lstat().st_mode, path.lstat().st_mtime_ns) for path in root.rglob("*"))


def test_output_exit_code_and_nothing_left(host: Host) -> None:
    before = snapshot(host.lower)
    result = host.sh("echo out; echo err >&2; rm -r /home /etc/passwd; echo x > /new; exit 7")
    assert (result.stdout, result.stderr, result.returncode) == ("out\n", "err\n", 7)
    assert snapshot(host.lower) == before
    assert not list(host.stages.iterdir())
    assert str(host.stages) not in Path("/proc/self/mounts").read_text()


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        (("sh", "-c", "kill -TERM $$"), 143, ""),
        (("sh", "-c", "kill -KILL $$"), 137, ""),
        (("sh", "-c", "kill -SEGV $$"), 139, ""),
        (("nothing-here",), 127, "nothing-here: not found"),
        (("/no/such/file",), 127, "/no/such/file: not found"),
        (("/etc/passwd",), 126, "/etc/passwd: can not be executed: Permission denied"),
        (("/etc",), 126, "/etc: can not be executed"),
        (("/bad-interpreter",), 127, "interpreter or loader"),
        (("/not-a-program",), 126, "another machine"),
        (("",), 127, "empty"),
        ((), 125, "no Entrypoint and no Cmd"),
    ],
)
def test_exit_codes(host: Host, command: tuple[str, ...], code: int, text: str) -> None:
    for name, content in (("bad-interpreter", "#!/no/sh\n"), ("not-a-program", "junk")):
        (host.lower / name).write_text(content)
        (host.lower / name).chmod(0o755)
    result = host.run([], *command)
    assert result.returncode == code and text in result.stderr
    assert len(result.stderr.splitlines()) == (1 if text else 0)


def test_user_groups_home_and_workdir(host: Host) -> None:
    result = host.sh(
        "id -u; id -g; id -G; echo $HOME; pwd; umask; stat -c %a:%u /made/here", "-u", "agent", "-w", "/made/here"
    )
    assert result.stdout.split("\n")[:-1] == [
        "1000",
        "1000",
        "1000 10 50",
        "/home/agent",
        "/made/here",
        "0022",
        "755:0",
    ]
    assert host.sh("id -u; id -G; echo $HOME", "-u", "77:88", "-e", "HOME=/x").stdout == "77\n88\n/x\n"
    assert host.sh("id -u; id -G; echo $HOME").stdout == "0\n0 10\n/root\n"
    missing = host.sh("id", "-u", "nobody")
    assert missing.returncode == 125 and "'nobody' is not in the image's /etc/passwd" in missing.stderr
    relative = host.sh("id", "-w", "tmp")
    assert relative.returncode == 125 and "'tmp' is not an absolute path" in relative.stderr
    file = host.sh("id", "-w", "/etc/passwd/x")
    assert file.returncode == 125 and "working directory /etc/passwd/x" in file.stderr


@pytest.mark.parametrize("mask", [0, 0o077])
def test_what_is_made_on_the_way_is_nobody_elses_to_write(host: Host, mask: int) -> None:
    (host.lower / "etc/resolv.conf").symlink_to("../run/a/b/resolv.conf")
    script = "stat -c %a /made /made/on /made/on/the /run /run/a /run/a/b /proc/../dev /dev/null /etc/hosts; exec cat"
    options = ["-w", "/made/on/the", "--net", "host", "--stage", "s", "-i"]
    with host.started(options, "sh", "-c", script, stdin=subprocess.PIPE, umask=mask) as process:
        assert process.stdout is not None and process.stdin is not None
        modes = [process.stdout.readline() for _ in range(9)]
        assert modes == [b"755\n"] * 7 + [b"666\n", b"644\n"]
        joined = host.sh("stat -c %a /more /more/dirs", "-w", "/more/dirs", "--join", "s", umask=mask)
        assert joined.stdout == "755\n755\n"
        process.stdin.close()
        assert process.wait(10) == 0


def test_environment_is_only_what_was_asked(host: Host) -> None:
    environ = {**os.environ, "SECRET": "s", "SHARED": "yes"}
    result = host.run(["-e", "A=1", "-e", "SHARED"], "env", env=environ)
    names = dict(line.split("=", 1) for line in result.stdout.splitlines())
    assert names.pop("PATH").startswith("/usr/local/sbin:")
    assert names == {"A": "1", "SHARED": "yes", "HOME": "/root", "HOSTNAME": "stage"}
    assert host.sh("cat /proc/1/environ").returncode != 0


def test_kernel_file_systems(host: Host) -> None:
    script = """
    set -e
    test -r /proc/self/status; test -d /sys/class; touch /dev/shm/x; echo > /dev/null
    test "$(head -c 4 /dev/zero | wc -c)" = 4; head -c 1 /dev/urandom > /dev/null
    test -c /dev/full; test -c /dev/tty; test -d /dev/mqueue; test -c /dev/pts/ptmx
    echo through > /dev/stderr
    ! echo x 2>/dev/null > /sys/kernel/x; ! echo 1 2>/dev/null > /proc/sys/kernel/panic
    hostname
    """
    result = host.sh(script)
    assert (result.stdout, result.stderr, result.returncode) == ("stage\n", "through\n", 0)


def test_no_device_of_the_host_opens(host: Host) -> None:
    number = Path("/dev/zero").stat().st_rdev
    os.mknod(host.lower / "zero", 0o666 | 0o020000, number)
    script = "cat /zero; mknod /z c 1 5; mknod /dev/z c 1 5; mknod /dev/shm/z c 1 5"
    result = host.sh(f"{script}; chmod 600 /dev/null; echo end")
    assert result.stdout == "end\n" and result.stderr.count("Permission denied") == 1
    assert result.stderr.count("Operation not permitted") == 3
    assert Path("/dev/null").stat().st_mode & 0o777 == 0o666


def test_init_can_not_be_touched(host: Host) -> None:
    result = host.sh(
        "readlink /proc/1/fd/3; ls /proc/1/root/; cat /proc/1/mem; umount /proc; mount -t tmpfs x /tmp;"
        " kill -9 1; echo end"
    )
    assert result.stdout == "end\n" and result.returncode == 0


def test_network(host: Host) -> None:
    assert host.sh("ls /sys/class/net; cat /sys/class/net/lo/flags; cat /etc/hosts").stdout.startswith(
        "lo\n0x9\n127.0.0.1"
    )
    before, resolvers = interfaces(), Path("/etc/resolv.conf").read_text()
    with_host = host.sh("ls /sys/class/net; cat /etc/resolv.conf; echo changed > /etc/resolv.conf", "--net", "host")
    shown = with_host.stdout.removesuffix(resolvers).split()
    assert with_host.stdout.endswith(resolvers)
    assert before & interfaces() <= set(shown) <= before | interfaces()  # other tests make and remove some
    assert with_host.returncode == 0 and Path("/etc/resolv.conf").read_text() == resolvers


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def test_no_descriptor_is_inherited(host: Host) -> None:
    with open("/etc/hostname", "rb") as file:
        os.set_inheritable(file.fileno(), True)
        result = host.sh("ls /proc/self/fd", pass_fds=(file.fileno(),))
    assert result.stdout.split() == ["0", "1", "2", "3"]  # 3 is the listing itself


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_dev_null(host: Host, tmp_path: Path, closed: str) -> None:
    command = host.command(
        ["-i"], ["sh", "-c", "for n in 0 1 2; do readlink /proc/self/fd/$n; done > /workspace/out; exit 5"]
    )
    (tmp_path / "space").mkdir()
    command[command.index("--") : command.index("--")] = ["--workspace", str(tmp_path / "space"), "--stage", "kept"]
    result = subprocess.run(
        ["/bin/sh", "-c", f'"$@" {closed}', "sh", *command], cwd=REPOSITORY, input=b"", timeout=30, check=False
    )
    assert result.returncode == 5
    listed = (host.stages / "kept/workspace-upper/out").read_text().split()
    assert listed[1] == "/workspace/out"
    for number, sign in ((0, "<"), (2, "2>")):
        assert (listed[number] == "/dev/null") == (f" {sign}&-" in f" {closed}")


def test_stdin(host: Host) -> None:
    assert host.run(["-i"], "cat", input="typed").stdout == "typed"
    assert host.run([], "cat", input="typed").stdout == ""


def test_a_reader_that_leaves_ends_the_writer_with_sigpipe(host: Host) -> None:
    with host.started([], "yes") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"y\n"
        process.stdout.close()
        assert process.wait(10) == 128 + 13


def test_limits_are_kept_and_oom_protection_is_not(host: Host) -> None:
    score = -500 if may_lower_oom_score() else 300

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (123, 456))
        Path("/proc/self/oom_score_adj").write_text(str(score))
        os.umask(0o077)

    result = host.sh("ulimit -n; ulimit -Hn; cat /proc/self/oom_score_adj; umask", preexec_fn=prepare)
    assert result.stdout == f"123\n456\n{max(score, 0)}\n0022\n"


def test_orphans_are_reaped_and_end_with_the_workload(host: Host) -> None:
    tag = "31557.25"
    orphans = "{ for i in 1 2 3 4 5; do (true &); done; } | cat"  # until they have ended, all of them
    zombies = "grep -l State:.Z /proc/[0-9]*/status"
    reaped = f"n=0; while {zombies} > /tmp/found && [ $n -lt 500 ]; do n=$((n+1)); sleep 0.02; done; cat /tmp/found"
    script = f"{orphans}; {reaped}; (sleep {tag} &); echo end"
    assert host.sh(script).stdout == "end\n"
    assert processes_with(f"sleep\0{tag}") == []


def test_a_killed_caller_leaves_nothing_that_a_sweep_does_not_take(host: Host) -> None:
    tag = "31558.25"
    with host.started([], "sh", "-c", f"sleep {tag} & echo up; wait") as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        eventually(lambda: bool(processes_with(f"sleep\0{tag}")))
        process.kill()
        process.wait()
        eventually(lambda: not processes_with(f"sleep\0{tag}"))
    assert str(host.stages) not in Path("/proc/self/mounts").read_text()
    stages = Stages(host.stages)
    eventually(lambda: stages.sweep() == 1)
    assert not list(host.stages.iterdir())


def test_writes_are_retained_in_a_named_stage(host: Host) -> None:
    assert (
        host.sh(
            "echo one > /etc/image-file; adduser=1; echo new:x:5:5::/new: >> /etc/passwd", "--stage", "s"
        ).returncode
        == 0
    )
    assert host.sh("cat /etc/image-file; id -u; hostname", "--stage", "s", "-u", "new").stdout == "one\n5\ns\n"
    assert (host.stages / "s/upper/etc/image-file").read_text() == "one\n"
    assert (host.lower / "etc/image-file").read_text() == "from the image\n"


def test_workspace(host: Host, tmp_path: Path) -> None:
    space = tmp_path / "with, odd: name\\ "
    space.mkdir()
    (space / "file").write_text("host\n")
    script = "cat /workspace/file; echo stage > /workspace/file; rm -f /workspace/gone; cat /workspace/file"
    result = host.sh(script, "--stage", "s", "--workspace", str(space), "-w", "/workspace")
    assert (result.stdout, result.returncode) == ("host\nstage\n", 0)
    assert (space / "file").read_text() == "host\n"
    assert (host.stages / "s/workspace-upper/file").read_text() == "stage\n"
    assert host.sh("true", "--workspace", str(tmp_path / "none")).returncode == 125
    inside = host.sh("true", "--workspace", str(tmp_path))
    assert inside.returncode == 125 and "contains the stage's own directory" in inside.stderr


@pytest.mark.parametrize("stage", [[], ["--stage", "s"]])
def test_roots_look_as_what_they_lie_over(host: Host, tmp_path: Path, stage: list[str]) -> None:
    space = tmp_path / "space"
    for path, mode, owner in ((space, 0o700, (1000, 1001)), (host.lower, 0o2751, (3, 4))):
        path.mkdir(exist_ok=True)
        os.chown(path, *owner)
        path.chmod(mode)
    look = "stat -c %a:%u:%g / /workspace"
    options = ["--workspace", str(space), *stage]
    assert host.sh(f"{look}; chmod 711 /workspace; busybox chown 9 /", *options).stdout == "2751:3:4\n700:1000:1001\n"
    denied = host.sh("ls /workspace", *options, "-u", "2000")
    assert denied.returncode != 0 and "Permission denied" in denied.stderr
    if stage:  # what the workload changed stays
        assert host.sh(look, *stage).stdout == "2751:9:4\n711:1000:1001\n"
    assert (space.stat().st_mode & 0o7777, space.stat().st_uid) == (0o700, 1000)


def test_join_a_running_stage(host: Host) -> None:
    with host.started(
        ["--stage", "s", "-i"], "sh", "-c", "echo 1 > /dev/shm/mark; echo up; cat", stdin=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"up\n"
        busy = host.sh("true", "--stage", "s")
        assert busy.returncode == 125 and "in use by process" in busy.stderr
        joined = host.sh("cat /dev/shm/mark; hostname; id -u; ls /sys/class/net; exit 9", "--join", "s", "-u", "agent")
        assert (joined.stdout, joined.returncode) == ("1\ns\n1000\nlo\n", 9)
        assert host.sh("kill -KILL $$", "--join", "s").returncode == 137
        assert host.run(["--join", "s"], "no-such").returncode == 127
        with host.started(["--join", "s"], "sh", "-c", "echo in; sleep 1000") as other:
            assert other.stdout is not None and other.stdout.readline() == b"in\n"
            process.stdin.close()
            assert process.wait(10) == 0
            assert host.sh("cat /dev/shm/mark", "--join", "s").stdout == "1\n"  # the stage ends with its last command
            other.kill()
        eventually(lambda: Stages(host.stages).running("s") is None)


def comm(pid: int) -> str:
    """Of a process, or nothing when it has ended meanwhile, as those that a start passes through do."""
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def test_killing_a_joined_caller_ends_its_process_only(host: Host) -> None:
    tag = "31559.25"
    with host.started(["--stage", "s", "-i"], "sh", "-c", "echo up; cat", stdin=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"up\n"
        with host.started(["--join", "s"], "sleep", tag) as other:
            eventually(lambda: len(processes_with(f"sleep\0{tag}")) > 1)
            eventually(lambda: any(comm(pid) == "sleep\n" for pid in processes_with(tag)))
            other.kill()
            other.wait()
        eventually(lambda: not processes_with(tag))
        process.stdin.close()
        assert process.wait(10) == 0


def test_stages_at_the_same_time_in_threads(host: Host) -> None:
    stages, codes = Stages(host.stages), []
    (told, tell), (heard, say) = os.pipe(), os.pipe()

    def one(number: int) -> None:
        with stages.temporary(image="id") as stage:
            script = f"echo {number} > /x; echo up; read x; exit $(cat /x)"
            spec = ProcessSpec(argv=("sh", "-c", script), env={"PATH": "/bin"})
            codes.append(launch.run(host.lower, spec, stage, streams=Streams(stdin=told, stdout=say, stderr=2)))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    with os.fdopen(heard, "rb") as lines:
        assert [lines.readline() for _ in threads] == [b"up\n"] * 8  # all of them run
        os.write(tell, b"\n" * 8)
        for thread in threads:
            thread.join(30)
    for fd in (told, tell, say):
        os.close(fd)
    assert sorted(codes) == list(range(8))
    assert not list(host.stages.iterdir())
    assert Path("/proc/self/ns/pid").readlink() == Path("/proc/self/ns/pid_for_children").readlink()


def test_attributes_of_an_image_are_data(host: Host) -> None:
    for name, value in (("opaque", b"y"), ("opaque", b"x"), ("redirect", b"/etc"), ("metacopy", b"")):
        os.setxattr(host.lower / "home", f"trusted.overlay.{name}", value)
        os.setxattr(host.lower, f"trusted.overlay.{name}", value)
        assert host.sh("cat /etc/image-file; ls /home").stdout == "from the image\nagent\n"
    os.setxattr(host.lower / "etc/image-file", "trusted.overlay.metacopy", b"")
    os.setxattr(host.lower / "etc/image-file", "trusted.overlay.redirect", b"/etc/passwd")
    refused = host.sh("cat /etc/image-file")  # never the bytes of another file
    assert refused.stdout == "" and "Operation not permitted" in refused.stderr


def test_too_many_bytes_of_arguments(host: Host) -> None:
    with (
        Stages(host.stages).temporary(image="id") as stage,
        pytest.raises(CommandError, match="list too long") as caught,
    ):
        launch.run(host.lower, ProcessSpec(argv=("true", "x" * (1 << 17)), env={"PATH": "/bin"}), stage)
    assert caught.value.exit_code == 126


def test_an_upper_on_overlay_is_a_clear_error(host: Host, tmp_path: Path) -> None:
    for name in ("lower2", "upper2", "work2", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower2,upperdir={tmp_path}/upper2,workdir={tmp_path}/work2"
    linux.mount("overlay", tmp_path / "merged", "overlay", 0, options)
    try:
        refused = Host(lower=host.lower, stages=tmp_path / "merged/stages").sh("true")
        assert refused.returncode == 125
        assert "is on overlay, which the kernel refuses" in refused.stderr and "PVISOR_HOME" in refused.stderr
        assert not list((tmp_path / "merged/stages").iterdir())
    finally:
        linux.umount(tmp_path / "merged", linux.MNT_DETACH)


def test_not_root_is_a_clear_error(host: Host) -> None:
    script = (
        "import os, pathlib\nfrom stage.boundary import launch\nfrom stage.errors import StageSetupError\n"
        "os.setuid(65534)\n"
        "try:\n    launch.run(pathlib.Path('/'), None, None)\n"
        "except StageSetupError as error:\n    print(error.message)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False
    )
    assert result.stdout == "a stage needs root, this is uid 65534\n", result.stderr


def test_a_lower_that_is_gone(tmp_path: Path) -> None:
    with Stages(tmp_path / "stages").temporary(image="id") as stage, pytest.raises(StageSetupError, match="not there"):
        launch.run(tmp_path / "none", ProcessSpec(argv=("true",), env={}), stage)
