"""Limits of memory, processor time and processes, on the cgroups that this host has."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage.errors import StageSetupError
from stage.kept import cgroups, hierarchy
from stage.kept import running as stage_processes
from stage.kept.cgroups import Limits
from stage.kept.stages import Stages
from tests.support import command
from tests.support.busybox import busybox_root
from tests.support.stage_process import Host, eventually

pytestmark = pytest.mark.root
HUNGRY = "exec dd if=/dev/zero of=/dev/null bs=60M count=1 2> /dev/null"
MEMORY = ["--memory", str(32 << 20)]
KILLED = "pvisor: out of memory within the stage's 32 MiB: the kernel killed 1 process"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(lower=busybox_root(tmp_path / "lower"), stages=tmp_path / "stages")


def directories(stage: Path) -> list[Path]:
    """The cgroups of what runs in a stage."""
    return [Path(path) for path in json.loads((stage / "cgroups").read_bytes())["directories"]]


def running(host: Host, *options: str) -> subprocess.Popen[bytes]:
    words = host.command([*options, "-i"], ["sh", "-c", "echo up; cat"])
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    return process


def test_memory(host: Host) -> None:
    assert host.sh(HUNGRY).returncode == 0
    killed = host.sh(HUNGRY, *MEMORY)
    assert killed.returncode == 137 and killed.stderr == KILLED + "\n"
    within = host.sh("dd if=/dev/zero of=/dev/null bs=1M count=1 2> /dev/null", *MEMORY)
    assert (within.returncode, within.stderr) == (0, "")
    killed_itself = host.sh("kill -9 $$", *MEMORY)  # not by the kernel
    assert (killed_itself.returncode, killed_itself.stderr) == (137, "")


def test_a_child_that_was_killed_for_memory_is_told_of_too(host: Host) -> None:
    result = host.sh(f"sh -c '{HUNGRY}'; echo child $?", *MEMORY)
    assert result.stdout == "child 137\n" and result.returncode == 0
    assert KILLED in result.stderr


def test_memory_counts_what_tmpfs_holds(host: Host) -> None:
    fill = "head -c 50000000 /dev/zero > /dev/shm/x"
    assert host.sh(fill).returncode == 0
    assert KILLED in host.sh(fill, *MEMORY).stderr


def at_once(count: int) -> str:
    """A script with so many children that run at the same time: each waits for a line that comes when all are there."""
    each = f"n=0; while [ $n -lt {count} ]; do n=$((n+1));"
    return f"mknod /tmp/f p; exec 3<>/tmp/f; {each} read x <&3 & done; {each} echo >&3; done; wait"


def test_processes(host: Host) -> None:
    script = at_once(8)
    assert host.sh(script).stderr == ""
    assert host.sh(script, "--pids", "9").stderr == ""  # eight and the shell: pVisor's own do not count
    assert "can't fork" in host.sh(script, "--pids", "8").stderr


def test_processor_time(host: Host) -> None:
    script = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; echo counted; cat"
    with host.started(["--stage", "s", "-i", "--cpus", "0.2"], "sh", "-c", script, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"counted\n"
        stat = (directories(host.stages / "s")[0] / "cpu.stat").read_text().split()
        assert int(stat[stat.index("nr_throttled") + 1]) > 0
        process.stdin.close()
        assert process.wait(10) == 0


def test_the_stage_sees_its_own_cgroup_only(host: Host) -> None:
    for options in ([], [*MEMORY, "--pids", "50"]):
        shown = host.sh("cut -d: -f3 /proc/self/cgroup; ls /sys/fs/cgroup", *options)
        assert set(shown.stdout.split()) == {"/"}


def test_without_limits_nothing_is_made(host: Host) -> None:
    process = running(host, "--stage", "s")
    try:
        assert not (host.stages / "s/cgroups").exists()
        eventually(lambda: stage_processes.find(host.stages / "s") is not None)
        init = stage_processes.find(host.stages / "s")
        assert init is not None
        workload, *_ = stage_processes.processes([init])[init]
        assert Path(f"/proc/{workload}/cgroup").read_text() == Path("/proc/self/cgroup").read_text()
    finally:
        process.communicate(b"", timeout=20)


def test_what_joins_has_the_same_limits(host: Host) -> None:
    process = running(host, "--stage", "s", *MEMORY)
    try:
        made = directories(host.stages / "s")
        assert all(path.is_dir() for path in made)
        assert cgroups.limits_of(host.stages / "s") == Limits(memory_bytes=32 << 20)
        joined = host.sh(HUNGRY, "--join", "s")
        assert joined.returncode == 137 and joined.stderr == KILLED + "\n"
        assert all(path.is_dir() for path in made)
    finally:
        process.communicate(b"", timeout=20)
    assert process.returncode == 0  # what was killed was the other one
    assert not any(path.exists() for path in made)
    assert cgroups.limits_of(host.stages / "s") == Limits()


@pytest.mark.parametrize("stage", [[], ["--stage", "s"]])
def test_a_killed_command_leaves_no_cgroup(host: Host, stage: list[str]) -> None:
    process = running(host, *stage, *MEMORY, "--pids", "50", "--cpus", "1")
    (path,) = host.stages.iterdir()
    made = directories(path)
    assert all(directory.is_dir() for directory in made)
    process.kill()
    process.communicate()
    stages = Stages(host.stages)
    if stage:
        assert host.sh("echo again", *stage).stdout == "again\n"
    else:
        eventually(lambda: stages.sweep() == 1)
    assert not any(directory.exists() for directory in made)


def test_a_killed_command_leaves_no_cgroup_when_its_stage_is_dropped(host: Host) -> None:
    process = running(host, "--stage", "s", *MEMORY)
    made = directories(host.stages / "s")
    process.kill()
    process.communicate()
    stages = Stages(host.stages)
    stages.end("s")
    stages.drop("s")
    assert not any(directory.exists() for directory in made)


def test_a_start_that_fails_leaves_no_cgroup(host: Host) -> None:
    before = own_children()
    assert host.run([*MEMORY, "--stage", "s"], "no-such-command").returncode == 127
    assert not (host.stages / "s/cgroups").exists()
    # Another test process has stages with limits in the same place: they come and go, what is left behind stays.
    new = own_children() - before
    eventually(lambda: not any(path.exists() for path in new), 60)


def own_children() -> set[Path]:
    places = hierarchy.places(["memory", "cpu", "pids"])
    return {path for place in places for path in place.directory.glob("pvisor-*")}


@pytest.mark.parametrize("values", [{"memory_bytes": 1000}, {"cpus": 0.0}, {"cpus": -1}, {"pids": 0}])
def test_limits_that_nothing_can_run_in(values: dict[str, int]) -> None:
    with pytest.raises(StageSetupError, match="no "):
        Limits(**values)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[command.Host]:
    scratch = tmp_path_factory.mktemp("limits")
    with command.host(scratch / "host") as made:
        made.run("convert", f"oci:{command.busybox_layout(scratch)}:v1")
        yield made


@pytest.mark.fuse
def test_the_options_of_the_command(local: command.Host) -> None:
    killed = local.run("run", "--memory", "32M", "--cpus", "1.5", "box:v1", "--", "sh", "-c", HUNGRY, code=137)
    assert killed.stderr.decode() == KILLED + "\n"
    forks = local.run("run", "--pids", "3", "box:v1", "--", "sh", "-c", at_once(3), code=2)
    assert b"can't fork" in forks.stderr
    for wrong in (["--memory", "some"], ["--memory", "10"], ["--cpus", "0"], ["--pids", "0"]):
        local.error("run", *wrong, "box:v1", "--", "true", code=2)


@pytest.mark.fuse
def test_limits_of_a_running_stage_stay(local: command.Host) -> None:
    process = local.start(
        "run",
        "-i",
        "--memory",
        "32M",
        "--stage",
        "s",
        "box:v1",
        "--",
        "sh",
        "-c",
        "echo up; cat",
        stdin=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    try:
        said = local.error("stage", "exec", "--memory", "64M", "s", "--", "true", code=125)
        assert "is running" in said and "leave out --memory" in said
        said = local.error("stage", "exec", "--net", "host", "s", "--", "true", code=125)
        assert "has its network already" in said and "leave out --net" in said
        assert local.run("stage", "exec", "s", "--", "sh", "-c", HUNGRY, code=137).stderr.decode() == KILLED + "\n"
    finally:
        process.communicate(b"", timeout=20)
    assert process.returncode == 0
    assert local.run("stage", "exec", "--pids", "1", "s", "--", "sh", "-c", "echo $$").returncode == 0
    local.run("stage", "drop", "s")
