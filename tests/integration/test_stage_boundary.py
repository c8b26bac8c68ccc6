"""The boundary of a stage, from inside: what is tried there works on the host, and comes to nothing in the stage."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path

import pytest

from stage.boundary import launch
from stage.boundary.process import ProcessSpec
from stage.boundary.streams import Streams
from stage.kept.stages import Stages
from tests.support import probes
from tests.support.probes import PROBES, Facts
from tests.support.pythonroot import PYTHON, python_root
from tests.support.stage_process import Host

pytestmark = pytest.mark.root
Outcomes = dict[str, str]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    lower = python_root(tmp_path_factory.mktemp("root") / "lower")
    os.mknod(lower / "node", 0o666 | 0o020000, Path("/dev/zero").stat().st_rdev)
    (lower / "node").chmod(0o666)
    (lower / "probes.py").write_bytes(Path(probes.__file__).read_bytes())
    return Host(lower=lower, stages=tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def facts(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facts]:
    """What a host has that is nobody else's: files, a process, sockets, shared memory."""
    here = tmp_path_factory.mktemp("host")
    secret, space, token = here / "secret", here / "space", os.urandom(8).hex()
    secret.write_text(token)
    space.mkdir()
    (space / "absolute-link").symlink_to(secret)
    (space / "relative-link").symlink_to("../secret")
    os.mkfifo(space / "fifo")
    kind, handle = file_handle(secret)
    with ExitStack() as stack:
        listeners = [socket.socket(family) for family in (socket.AF_UNIX, socket.AF_UNIX, socket.AF_UNIX)]
        for listener, address in zip(
            listeners, (str(here / "socket"), str(space / "socket"), f"\0pvisor-{token}"), strict=True
        ):
            listener.bind(address)
        listeners.append(socket.create_server(("127.0.0.1", 0)))
        for listener in listeners:
            stack.enter_context(listener).listen()
        reader = os.open(space / "fifo", os.O_RDONLY | os.O_NONBLOCK)
        stack.callback(os.close, reader)
        (here / "disk").write_bytes(bytes(1 << 20))
        disk = stack.enter_context(loop_device(here / "disk"))
        victim = stack.enter_context(subprocess.Popen(["sleep", "1000"]))
        stack.callback(victim.kill)
        key = int.from_bytes(os.urandom(3)) + 1
        shared = ctypes.CDLL(None).shmget(key, 4096, 0o1600)
        stack.callback(ctypes.CDLL(None).shmctl, shared, 0, None)
        yield Facts(
            secret=str(secret),
            token=token,
            workspace=str(space),
            lower=str(host.lower),
            disk=disk,
            victim=victim.pid,
            port=listeners[-1].getsockname()[1],
            abstract=f"pvisor-{token}",
            shm_key=key,
            handle=handle.hex(),
            handle_type=kind,
        )


@contextmanager
def loop_device(path: Path) -> Iterator[int]:
    """A disk of the host, by its number."""
    words = ["losetup", "--find", "--show", "--read-only", str(path)]
    name = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    try:
        yield Path(name).stat().st_rdev
    finally:
        subprocess.run(["losetup", "--detach", name], timeout=30, check=True)


def file_handle(path: Path) -> tuple[int, bytes]:
    buffer = ctypes.create_string_buffer(struct.pack("=Ii", 128, 0) + bytes(128))
    assert ctypes.CDLL(None).name_to_handle_at(-100, os.fsencode(path), buffer, ctypes.byref(ctypes.c_int()), 0) == 0
    length, kind = struct.unpack_from("=Ii", buffer)
    return kind, buffer.raw[8 : 8 + length]


@pytest.fixture(scope="module")
def outside(facts: Facts) -> Outcomes:
    words = [str(PYTHON), "-I", str(probes.__file__), json.dumps(asdict(facts))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def inside(host: Host, facts: Facts) -> Outcomes:
    seen = json.dumps(asdict(replace(facts, workspace="/workspace")))
    done = host.run(["--workspace", facts.workspace], str(PYTHON), "-I", "/probes.py", seen, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", PROBES)
def test_what_works_on_the_host_comes_to_nothing_in_a_stage(name: str, outside: Outcomes, inside: Outcomes) -> None:
    probe = PROBES[name]
    assert inside[name] in probe.inside
    if outside[name] != probe.outside and outside[name] in ("ENOSYS", "EAFNOSUPPORT", "ENOENT"):
        pytest.skip(f"this kernel has no such thing: {outside[name]}")
    assert outside[name] == probe.outside


STATUS = {"CapInh": 0, "CapPrm": 0x800405FB, "CapEff": 0x800405FB, "CapBnd": 0x800405FB, "CapAmb": 0}


@pytest.mark.parametrize("user", ["root", "agent"])
def test_privileges_of_what_runs_and_what_joins(host: Host, user: str) -> None:
    expected = STATUS if user == "root" else {**STATUS, "CapPrm": 0, "CapEff": 0}
    show = "grep -E 'Cap|NoNew|Seccomp:' /proc/self/status"
    with host.started(
        ["--stage", "s", "-i", "-u", user], "sh", "-c", f"{show}; echo up; cat", stdin=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        lines = (line.decode() for line in process.stdout)
        shown = "".join(takewhile(lambda line: line != "up\n", lines))
        joined = host.sh(show, "--join", "s", "-u", user).stdout
        process.stdin.close()
        assert process.wait(10) == 0
    for text in (shown, joined):
        fields = dict(line.split(":\t") for line in text.splitlines())
        assert {name: int(fields[name], 16) for name in expected} == expected
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_directory_as_a_standard_stream_leads_nowhere(host: Host, facts: Facts, number: int, tmp_path: Path) -> None:
    """From a descriptor of a host's directory, `..` would go past the root of the stage."""
    said, other = tmp_path / "said", 1 if number == 2 else 2
    words = ("sh", "-c", f"exec 5<&{number}; cat /proc/self/fd/5/../secret >&{other} 2>&1")
    directory = os.open(facts.workspace, os.O_RDONLY | os.O_DIRECTORY)
    file = os.open(said, os.O_RDWR | os.O_CREAT)
    streams = [directory if place == number else file for place in range(3)]
    try:
        outside = subprocess.run(words, stdin=streams[0], stdout=streams[1], stderr=streams[2], timeout=30, check=False)
        assert outside.returncode == 0 and said.read_text() == facts.token
        spec = ProcessSpec(argv=words, env={"PATH": "/bin"})
        with Stages(host.stages).temporary(image="image") as stage:
            given = Streams(stdin=streams[0], stdout=streams[1], stderr=streams[2])
            assert launch.run(host.lower, spec, stage, streams=given) == 1
        assert "Not a directory" in said.read_text()
        assert said.read_text().count(facts.token) == 1
    finally:
        os.close(directory)
        os.close(file)


@pytest.mark.parametrize("place", ["image", "workspace"])
def test_a_set_user_id_program_gives_nothing(host: Host, facts: Facts, place: str) -> None:
    program = (host.lower if place == "image" else Path(facts.workspace)) / f"cat-as-root-{place}"
    program.write_bytes(Path("/bin/cat").read_bytes())
    program.chmod(0o4755)
    closed = host.lower / "closed"
    closed.write_text("for root\n")
    closed.chmod(0o600)
    for parent in {*program.parents, *closed.parents} - set(Path("/tmp").parents):  # pytest's own are closed to others
        parent.chmod(parent.stat().st_mode | 0o011)
    words = [str(program), str(closed)]
    outside = subprocess.run(words, user=1000, capture_output=True, text=True, cwd="/", timeout=30, check=False)
    assert outside.stdout == "for root\n", outside.stderr
    seen = f"/{program.name}" if place == "image" else f"/workspace/{program.name}"
    inside = host.run(["--workspace", facts.workspace, "-u", "1000"], seen, "/closed")
    assert inside.stdout == "" and "Permission denied" in inside.stderr


def test_signals_to_everybody_reach_nobody_else(host: Host, facts: Facts) -> None:
    result = host.sh("trap 'echo mine' TERM; kill -TERM -1; kill -KILL 1; echo alive")
    assert "alive" in result.stdout and result.returncode == 0
    os.kill(facts.victim, 0)


def test_the_program_that_starts_a_stage_can_not_be_overwritten_from_it(host: Host) -> None:
    """An image whose program is a link to /proc/self/exe is started with the host's interpreter as its executable."""
    (host.lower / "itself").unlink(missing_ok=True)
    (host.lower / "itself").symlink_to("/proc/self/exe")
    before = PYTHON.read_bytes()
    script = (
        "import os; fd = os.open('/proc/self/exe', os.O_RDONLY); os.set_inheritable(fd, True);"
        "os.execv('/bin/sh', ['sh', '-c', f'echo found; echo x >> /proc/self/fd/{fd}'])"
    )
    result = host.run([], "/itself", "-I", "-c", script)
    assert result.stdout == "found\n" and "Text file busy" in result.stderr
    assert PYTHON.read_bytes() == before


def test_the_network_of_the_host_is_given_when_asked_only(host: Host, facts: Facts) -> None:
    ask = [str(PYTHON), "-I", "-c", f"import socket; socket.create_connection(('127.0.0.1', {facts.port}), 3)"]
    assert "Connection refused" in host.run([], *ask).stderr
    assert host.run(["--net", "host"], *ask).returncode == 0
