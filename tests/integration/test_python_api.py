"""`stage.run` as a program meets it: streams, limits of time, threads, signals, and what it leaves behind."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import stage
from fuse import node
from fuse.errors import NodeError
from imaged.chunkstore.store import ChunkStore
from imaged.config import Config
from imaged.conversion.convert import convert
from imaged.errors import InvalidNameError
from imaged.names import ImageName, SourceName
from stage.errors import ArgumentError, CommandError, StageBusyError, StageTimeoutError
from stage.kept import disposal
from stage.options import RunOptions
from tests.support.busybox import busybox_root
from tests.support.command import ROOT
from tests.support.node import node_directories, wait_for

pytestmark = [pytest.mark.root, pytest.mark.fuse]

Run = Callable[..., stage.Result]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """A host with busybox as debian:12, so that the documentation's example is true."""
    scratch = tmp_path_factory.mktemp("api")
    busybox_root(scratch / "root")
    with node_directories(scratch) as made:
        with ChunkStore.open(made.store) as store:
            source = SourceName.parse(f"dir:{scratch / 'root'}")
            convert(store, source, name=ImageName.parse("debian:12"), platform=None)
        yield made


@pytest.fixture
def run(config: Config) -> Run:
    return partial(stage.run, "debian:12", config=config)


def environment(config: Config) -> dict[str, str]:
    paths = {"PVISOR_HOME": str(config.home), "PVISOR_RUN": str(config.run), "PYTHONPATH": str(ROOT)}
    return {**os.environ, **paths}


def descriptors() -> set[str]:
    disposal.wait()
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208


def stages(config: Config) -> list[str]:
    disposal.wait()
    return sorted(path.name for path in config.stages.iterdir()) if config.stages.is_dir() else []


def test_the_example_of_the_documentation(config: Config, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example], env=environment(config), cwd=tmp_path, capture_output=True, timeout=60
    )
    shown = b"3 b'hello\\n'\n[b'when']\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, b"")
    assert (tmp_path / "log").read_bytes() == b"" and (tmp_path / "when").read_text()
    assert stages(config) == []


def test_output_input_and_exit_code(run: Run) -> None:
    result = run(["sh", "-c", "cat; echo told >&2; exit 7"], input=b"asked\n" * 100_000, capture_output=True)
    assert result == stage.Result(exit_code=7, stdout=b"asked\n" * 100_000, stderr=b"told\n")
    assert run(["cat"], capture_output=True).stdout == b""
    assert run(["true"], input=b"nobody reads this" * 100_000).exit_code == 0
    assert run(["sh", "-c", "kill -9 $$"]).exit_code == 137
    assert run(["sh", "-c", "echo one > /dev/stderr; echo two > /dev/stderr"], capture_output=True).stderr == (
        b"one\ntwo\n"
    )


def test_files_and_descriptors(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_bytes(b"some text\n")
    with open(tmp_path / "in", "rb") as given, open(tmp_path / "out", "wb") as out:
        assert run(["sh", "-c", "cat; echo told >&2"], stdin=given, stdout=out, stderr=out.fileno()).exit_code == 0
    assert (tmp_path / "out").read_bytes() == b"some text\ntold\n"
    run(["sh", "-c", "echo mine; echo yours >&2"])
    assert capfd.readouterr() == ("mine\n", "yours\n")
    with pytest.raises(ValueError, match="capture_output"):
        run(["true"], capture_output=True, stdout=1)
    with pytest.raises(ValueError, match="input"):
        run(["true"], input=b"", stdin=0)


def test_environment_directory_and_user(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_PROGRAM", "1")
    script = "pwd; id -u; echo $A-$OF_THE_PROGRAM-"
    result = run(["sh", "-c", script], env={"A": "b = c"}, workdir="/etc", user="123", capture_output=True)
    assert result.stdout == b"/etc\n123\nb = c--\n"


def test_a_named_stage_keeps_its_writes(run: Run, config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("host\n")
    for count in (1, 2):
        result = run(
            ["sh", "-c", "echo more >> file; wc -l < file"], stage="kept", workspace=tmp_path, capture_output=True
        )
        assert int(result.stdout) == 1 + count
    assert (tmp_path / "file").read_text() == "host\n"
    assert stages(config) == ["kept"]
    stage.drop("kept", config=config)


def test_errors(run: Run, config: Config) -> None:
    with pytest.raises(CommandError, match="not found") as missing:
        run(["no-such-program"])
    assert missing.value.exit_code == 127
    with pytest.raises(NodeError, match="no image other"):
        stage.run("other", ["true"], config=config)
    with pytest.raises(InvalidNameError):
        stage.run("not a name", ["true"], config=config)
    assert stages(config) == []


@pytest.mark.parametrize(
    "given",
    [
        {"net": "anything"},
        {"net": None},
        {"argv": "true"},
        {"argv": [b"true"]},
        {"argv": 3},
        {"env": ["A=b"]},
        {"env": {"A": 1}},
        {"env": {"A=B": "c"}},
        {"workspace": ""},
        {"workspace": b"/tmp"},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"timeout_s": -1},
        {"timeout_s": "1"},
        {"pids": 1.5},
        {"cpus": float("nan")},
        {"memory_bytes": "1G"},
        {"input": "text"},
        {"stdout": io.BytesIO()},
        {"stdin": "text"},
    ],
)
def test_arguments_that_make_no_sense(run: Run, config: Config, given: dict[str, Any]) -> None:
    before = descriptors()
    with pytest.raises(ArgumentError):
        run(**{"argv": ["true"]} | given)
    assert stages(config) == [] and descriptors() <= before


def test_only_host_is_the_hosts_network(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else comes through to the launcher: it has no network."""
    monkeypatch.setattr(RunOptions, "__post_init__", lambda _self: None)
    own = os.readlink("/proc/self/ns/net")  # noqa: PTH115
    for net, is_own in (("host", True), ("none", False), ("Host", False), (None, False), ("", False)):
        shown = run(["readlink", "/proc/self/ns/net"], net=net, capture_output=True).stdout.decode().strip()
        assert (shown == own) == is_own, net


@pytest.mark.parametrize("script", ["echo begun; sleep 1000", "echo begun; sleep 3.6; exec yes begun"])
def test_time_runs_out(run: Run, config: Config, script: str) -> None:
    """The start counts too, and takes a busy host long: there is time for it, and little for output without end."""
    with pytest.raises(StageTimeoutError, match=r"within 4\.0 s") as late:
        run(["sh", "-c", script], timeout_s=4, capture_output=True)
    assert late.value.stdout.startswith(b"begun\n")
    assert stages(config) == []


def test_nothing_stays_open_and_the_image_is_given_back(run: Run, config: Config) -> None:
    run(["true"], input=b"x", capture_output=True)
    before = descriptors()
    for _ in range(3):
        run(["echo"], input=b"x", capture_output=True)
    with pytest.raises(CommandError):
        run(["no-such-program"], input=b"x", capture_output=True)
    with pytest.raises(StageTimeoutError):
        run(["sleep", "1000"], input=b"x" * 1_000_000, capture_output=True, timeout_s=0.1)
    assert descriptors() <= before  # what an earlier test left may have been closed meanwhile
    wait_for(lambda: stopped(config))  # another stage of this host may hold the mount for the moment of its start
    assert run(["echo", "again"], capture_output=True).stdout == b"again\n"


def stopped(config: Config) -> bool:
    try:
        return node.stop(config)
    except NodeError as error:
        assert f"process {os.getpid()}" not in error.message
        return False


def test_threads(run: Run, config: Config) -> None:
    """Each has its own stage, its output and its exit code; a stage is free as soon as `run` returns."""
    barrier = threading.Barrier(8)

    def work(index: int) -> None:
        barrier.wait()
        for turn in range(4):
            script = f"cat /turns; echo {turn} >> /turns; exit {index}"
            result = run(["sh", "-c", script], stage=f"thread-{index}", capture_output=True)
            turns = b"".join(b"%d\n" % earlier for earlier in range(turn))
            assert (result.exit_code, result.stdout) == (index, turns)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert stages(config) == [f"thread-{index}" for index in range(8)]
    for name in stages(config):
        stage.drop(name, config=config)


def test_a_stage_in_use_is_an_error(run: Run, config: Config) -> None:
    given, giving = os.pipe()
    telling, told = os.pipe()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, ["sh", "-c", "echo up; cat"], stage="busy", stdin=given, stdout=told)
        try:
            assert os.read(telling, 100) == b"up\n"
            with pytest.raises(StageBusyError, match="'busy' is in use by process"):
                run(["true"], stage="busy")
        finally:
            os.close(giving)  # the end of its input
        assert first.result(timeout=20).exit_code == 0
    for fd in (given, telling, told):
        os.close(fd)
    stage.drop("busy", config=config)


def test_a_handler_that_raises_ends_the_process(config: Config, tmp_path: Path) -> None:
    """KeyboardInterrupt comes up, and what ran is gone with its stage."""
    code = (
        "import stage\n"
        "try:\n"
        "    stage.run('debian:12', ['sh', '-c', 'echo up; exec sleep 1000'])\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(config), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output, errors) == (0, b"interrupted\n", b"")
    assert stages(config) == []


def test_signals_stay_the_programs_own(run: Run) -> None:
    seen: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        reading, writing = os.pipe()

        def interrupt() -> None:
            os.read(reading, 1)
            os.kill(os.getpid(), signal.SIGUSR1)
            fifo_answer.set()

        fifo_answer = threading.Event()
        helper = threading.Thread(target=interrupt)
        helper.start()
        result = run(["sh", "-c", "echo up; exec sleep 0.2"], stdout=writing)
        helper.join(timeout=20)
        assert fifo_answer.is_set() and result.exit_code == 0
        assert seen == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGUSR1, old)
        os.close(reading)
        os.close(writing)


def test_no_process_of_the_workload_lives_when_the_result_is_there(run: Run) -> None:
    """Init may still be ending; what the workload left behind, and could write, is dead."""
    reading, writing = os.pipe()
    try:
        for _ in range(5):
            assert run(["sh", "-c", "sleep 1000 & (sleep 1000 & sleep 1000) & exit 3"], stdout=writing).exit_code == 3
        os.close(writing)
        os.set_blocking(reading, False)
        assert os.read(reading, 1) == b""  # nobody else holds the other end
    finally:
        os.close(reading)


def test_a_program_has_no_child_left_when_the_stage_is_removed(config: Config) -> None:
    script = (
        "import os, stage\n"
        "from stage.kept import disposal\n"
        "stage.run('debian:12', ['true'])\n"
        "disposal.wait()\n"
        "try:\n"
        "    print(os.waitpid(-1, os.WNOHANG))\n"
        "except ChildProcessError:\n"
        "    print('none')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(config), capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("none\n", "")


def test_a_program_that_ends_at_once_leaves_no_stage(run: Run, config: Config) -> None:
    """It has the result before what was dropped is removed, and does not end before."""
    script = (
        "import os, pathlib, stage\n"
        "stage.run('debian:12', ['sh', '-c', 'for n in $(seq 2000); do echo > /tmp/$n; done'])\n"
        "home = pathlib.Path(os.environ['PVISOR_HOME'])\n"
        "print([path.name[:4] for path in (home / 'stages').iterdir()])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(config), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout in ("['.tmp']\n", "[]\n") and done.stderr == ""
    assert stages(config) == []


def test_more_removals_at_once_than_threads(run: Run, config: Config) -> None:
    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(lambda number: run(["sh", "-c", f"exit {number}"]).exit_code, range(36)))
    assert results == list(range(36))
    assert stages(config) == []
