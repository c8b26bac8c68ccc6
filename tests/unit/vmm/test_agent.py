"""The agent and its host side over a port without a machine: it refuses what would change this host."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import vmm.agent
from tests.support.agentport import local_agent
from tests.support.busybox import busybox_root
from tests.support.node import wait_for
from vmm import agentlink, agentproto
from vmm.agent import Agent, Ended
from vmm.agentproto import Incoming, Kind
from vmm.control import Control
from vmm.errors import AgentBusyError, AgentError, AgentKilledError, AgentTimeoutError, VmCommandError, VmSetupError
from vmm.guest.program import joined

pytestmark = pytest.mark.root
HANG_S = 60.0


@dataclass
class Job:
    """One run, and what it wrote."""

    agent: Agent
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)

    def __call__(self, *argv: str | bytes, **options: Any) -> Ended:
        self.out.clear()
        self.err.clear()
        options.setdefault("stdout", self.out.extend)
        options.setdefault("stderr", self.err.extend)
        return self.agent.execute(argv, **options)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = busybox_root(tmp_path / "root")
    for name in ("dev", "proc"):
        (made / name).mkdir()
    return made


@pytest.fixture
def ports(tmp_path: Path, root: Path) -> Iterator[Path]:
    with local_agent(tmp_path / "run", root=root, ports=3) as directory:
        yield directory


@pytest.fixture
def job(ports: Path) -> Iterator[Job]:
    with Agent.connect(ports, timeout_s=HANG_S) as agent:
        yield Job(agent)


def test_output_streams_and_exit_code_are_the_programs_own(job: Job) -> None:
    assert job("sh", "-c", "echo out; echo err >&2; exit 3") == Ended(code=3, signal=None)
    assert (bytes(job.out), bytes(job.err)) == (b"out\n", b"err\n")
    assert job("true").exit_code == 0
    assert (bytes(job.out), bytes(job.err)) == (b"", b"")


def test_a_signal_is_told_apart_from_an_exit_code(job: Job) -> None:
    ended = job("sh", "-c", "kill -9 $$")
    assert (ended.code, ended.signal, ended.exit_code) == (None, 9, 137)


def test_arguments_and_environment_are_any_bytes(job: Job) -> None:
    every = bytes(range(1, 256))
    job("echo", "-n", every, b"", b" two  spaces\n")
    assert bytes(job.out) == every + b"  " + b" two  spaces\n"
    job("env", env={b"A": every.replace(b"\n", b""), b"EMPTY": b"", b"WITH": b"a=b"})
    assert set(bytes(job.out).split(b"\n")) >= {
        b"A=" + every.replace(b"\n", b""),
        b"EMPTY=",
        b"WITH=a=b",
        b"HOME=/root",
    }


def test_an_environment_larger_than_a_frame_arrives(job: Job) -> None:
    values = {f"V{number}": "x" * 10_000 for number in range(100)}
    job("env", env=values)
    lines = bytes(job.out).decode().splitlines()
    assert set(lines) >= {f"{name}={value}" for name, value in values.items()}


def test_what_can_not_be_executed_is_126_or_127(job: Job) -> None:
    with pytest.raises(VmCommandError, match=r"^'nothere': No such file") as missing:
        job("nothere")
    with pytest.raises(VmCommandError, match=r"^'': No such file"):
        job("")
    with pytest.raises(VmCommandError, match=r"^'/etc': Permission denied") as directory:
        job("/etc")
    assert (missing.value.exit_code, directory.value.exit_code) == (127, 126)
    assert job("true").code == 0, "the session goes on"


def test_a_directory_or_user_that_is_not_there_is_refused(job: Job) -> None:
    with pytest.raises(VmSetupError, match="working directory /etc/passwd/sub: Not a directory"):
        job("pwd", cwd="/etc/passwd/sub")
    with pytest.raises(VmSetupError, match="user stranger"):
        job("id", user="stranger")
    with pytest.raises(VmSetupError, match="group strangers"):
        job("id", user="agent:strangers")
    with pytest.raises(VmSetupError, match="NUL"):
        job("echo", "a\0b")


def test_a_directory_that_is_missing_is_made_for_any_user(job: Job, root: Path) -> None:
    script = 'pwd; stat -c "%a %u %g" . ..'
    assert job("sh", "-c", script, cwd="/new/er/dir", user="agent").code == 0
    assert bytes(job.out) == b"/new/er/dir\n755 0 0\n755 0 0\n"
    (root / "link").symlink_to("new")
    assert job("sh", "-c", "pwd -P", cwd="/link/other").code == 0
    assert bytes(job.out) == b"/new/other\n"


@pytest.mark.parametrize(
    ("user", "uid", "gid", "others", "home"),
    [
        (None, 0, 0, {10}, "/root"),
        ("agent", 1000, 1000, {10, 50}, "/home/agent"),
        ("1000:50", 1000, 50, set(), "/home/agent"),
        ("4000000000", 4_000_000_000, 0, set(), "/"),
        ("7:staff", 7, 50, set(), "/"),
    ],
)
def test_users_are_those_of_the_guests_own_files(
    job: Job, user: str | None, uid: int, gid: int, others: set[int], home: str
) -> None:
    job("sh", "-c", 'id -u; id -g; id -G; echo "$HOME"; pwd; echo to a file >> /dev/stdout', user=user, cwd="/tmp")
    found_uid, found_gid, groups, *rest = bytes(job.out).decode().splitlines()
    assert (int(found_uid), int(found_gid)) == (uid, gid)
    assert {int(group) for group in groups.split()} - {gid} == others
    assert rest == [home, "/tmp", "to a file"]


def test_a_job_has_its_own_root_session_and_signals(job: Job, root: Path) -> None:
    (root / "marker").write_text("inside")
    job("sh", "-c", "cat /marker; kill -TERM $$; echo survived")
    assert bytes(job.out) == b"inside", "SIGTERM is not ignored"


def test_stdin_of_any_size_and_its_end(job: Job) -> None:
    data = random.Random(1).randbytes(5_000_001)
    assert job("sha256sum", stdin=data).code == 0
    assert bytes(job.out).split()[0].decode() == hashlib.sha256(data).hexdigest()
    job("cat", stdin=b"")
    assert bytes(job.out) == b""
    job("cat")
    assert bytes(job.out) == b"", "/dev/null without stdin"


def test_stdin_from_a_descriptor(job: Job, tmp_path: Path) -> None:
    data = random.Random(2).randbytes(3_000_000)
    (tmp_path / "data").write_bytes(data)
    with open(tmp_path / "data", "rb") as stream:
        job("cat", stdin=stream.fileno())
    assert bytes(job.out) == data


def test_a_program_that_reads_no_stdin_holds_nothing_up(job: Job) -> None:
    assert job("true", stdin=bytes(10_000_000)).code == 0
    assert job("sh", "-c", "exec <&-; sleep 0.2; echo done", stdin=bytes(10_000_000)).code == 0
    assert bytes(job.out) == b"done\n"


@pytest.mark.slow
def test_a_hundred_megabytes_on_both_streams_are_complete(job: Job, root: Path) -> None:
    out, err, wanted = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    with open(root / "data", "wb") as stream:
        for _ in range(100):
            piece = os.urandom(1_000_000)
            stream.write(piece)
            wanted.update(piece)
    script = "cat /data & cat /data >&2; wait"
    assert job("sh", "-c", script, stdout=out.update, stderr=err.update).code == 0
    assert (out.hexdigest(), err.hexdigest()) == (wanted.hexdigest(), wanted.hexdigest())


def test_what_was_written_before_the_end_arrives_however_slowly_it_is_taken(job: Job) -> None:
    """The pipes are full when the program has long ended."""
    pieces: list[bytes] = []

    def slowly(data: bytes) -> None:
        time.sleep(0.02)
        pieces.append(data)

    job("sh", "-c", "seq 1 200000; echo last >&2", stdout=slowly, stderr=slowly)
    said = b"".join(pieces)
    assert said.count(b"\n") == 200_001
    assert b"\n200000\n" in said
    assert b"last\n" in said


def test_a_process_left_behind_neither_holds_the_end_up_nor_dies(job: Job, root: Path) -> None:
    script = "(sleep 0.5; echo late; echo later; touch /tmp/alive; sleep 100) & echo $!"
    assert job("sh", "-c", script, timeout_s=HANG_S).code == 0
    pid = int(bytes(job.out).split()[0])
    until = time.monotonic() + HANG_S
    while not (root / "tmp/alive").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    assert job("kill", str(pid)).code == 0, "it was alive after it had written to nobody"


def test_a_timeout_ends_all_of_a_job(job: Job) -> None:
    script = "sleep 1000 & (trap '' TERM; sleep 1000; sleep 1000) & echo $$; sleep 1000"
    ended = job("sh", "-c", script, timeout_s=2)
    assert ended.timed_out
    assert ended.signal == signal.SIGTERM
    wait_for(lambda: not in_session(int(bytes(job.out))))  # who was killed may take a moment to go


def test_a_program_that_ends_in_time_did_not_time_out(job: Job) -> None:
    assert job("sh", "-c", "exit 4", timeout_s=HANG_S) == Ended(code=4, signal=None)
    script = "trap 'echo cleaned; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    assert job("sh", "-c", script, timeout_s=3) == Ended(code=9, signal=None, timed_out=True)
    assert bytes(job.out) == b"ready\ncleaned\n"


def test_signals_reach_the_group_of_the_job(job: Job) -> None:
    with Control() as control:

        def started(data: bytes) -> None:
            if data == b"ready\n":
                control.signal(signal.SIGINT)

        script = "(trap 'echo child >&2; exit' INT; echo ready; while :; do sleep 0.05; done)"
        ended = job("sh", "-c", script, stdout=started, control=control)
    assert ended in (Ended(code=None, signal=2), Ended(code=0, signal=None), Ended(code=130, signal=None))
    assert bytes(job.err) == b"child\n"


def test_a_signal_does_not_wait_behind_stdin(job: Job) -> None:
    with Control() as control:
        ended = job(
            *("sh", "-c", "echo ready; exec sleep 1000"),
            stdin=bytes(10_000_000),
            stdout=lambda _: control.signal(signal.SIGTERM),
            control=control,
        )
    assert ended.signal == signal.SIGTERM


def test_a_reader_that_is_gone_ends_a_writer(job: Job) -> None:
    def closed(data: bytes) -> None:
        raise BrokenPipeError

    assert job("yes", stdout=closed).signal == signal.SIGPIPE
    assert job("sh", "-c", "echo lost; echo kept >&2", stdout=closed).code == 0
    assert bytes(job.err) == b"kept\n"


def test_sessions_on_different_ports_are_apart(ports: Path) -> None:
    results: dict[int, tuple[Ended, bytes]] = {}

    def run(number: int) -> None:
        with Agent.connect(ports, timeout_s=HANG_S) as agent:
            job = Job(agent)
            ended = job("sh", "-c", f"seq {number} 100000; exit {number}")
            results[number] = ended, bytes(job.out)

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    for number in (1, 2, 3):
        wanted = b"".join(b"%d\n" % value for value in range(number, 100_001))
        assert results[number] == (Ended(code=number, signal=None), wanted)


def test_when_all_ports_are_in_use_the_next_one_is_told(tmp_path: Path, root: Path) -> None:
    with local_agent(tmp_path / "eight", root=root, ports=8) as directory:
        agents = [Agent.connect(directory, timeout_s=HANG_S) for _ in range(8)]
        with pytest.raises(AgentBusyError, match="8 commands run in the guest"):
            Agent.connect(directory, timeout_s=0.1)
        agents[5].close()
        Agent.connect(directory, timeout_s=HANG_S).close()
        for agent in agents:
            agent.close()


def test_nobody_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="no QEMU serves"):
        Agent.connect(tmp_path / "nothing", timeout_s=1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent-0.sock"))
        with pytest.raises(AgentError, match="Connection refused"):
            Agent.connect(tmp_path, timeout_s=1)
        listener.listen()
        with pytest.raises(AgentTimeoutError, match="did not answer in"):
            Agent.connect(tmp_path, timeout_s=0.5)


def test_a_port_that_answers_nobody_is_connected_to_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of QEMU's that stayed throttled: its client must go before the guest's bytes come again."""
    monkeypatch.setattr(agentlink, "_SILENCE_S", 0.05)
    greetings = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent-0.sock"))
        listener.listen()

        def serve() -> None:
            for is_stuck in (True, True, False):
                with listener.accept()[0] as port:
                    greetings.append(port.recv(agentproto.GREETING.size, socket.MSG_WAITALL))
                    if is_stuck:
                        while port.recv(1 << 16):
                            pass
                        continue
                    _, _, nonce, _ = agentproto.GREETING.unpack(greetings[-1])
                    port.sendall(
                        agentproto.GREETING.pack(agentproto.WELCOME_MAGIC, agentproto.VERSION, b"agent---", nonce)
                    )
                    port.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        Agent.connect(tmp_path, timeout_s=HANG_S).close()
        thread.join(HANG_S)
    assert len(greetings) == 3 and len(set(greetings)) == 1  # it is one session


def test_an_agent_that_takes_no_request_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vmm.agent, "ANSWER_TIMEOUT_S", 0.2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent-0.sock"))
        listener.listen()

        def serve() -> None:
            with listener.accept()[0] as port:
                _, _, nonce, _ = agentproto.GREETING.unpack(port.recv(agentproto.GREETING.size, socket.MSG_WAITALL))
                port.sendall(agentproto.GREETING.pack(agentproto.WELCOME_MAGIC, agentproto.VERSION, b"agent---", nonce))
                while port.recv(4096):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        with (
            Agent.connect(tmp_path, timeout_s=HANG_S) as agent,
            pytest.raises(AgentTimeoutError, match=r"said nothing for 0\.2 s"),
        ):
            agent.execute(["x"], stdout=print, stderr=print)
        thread.join(HANG_S)


@contextmanager
def killed_agent(directory: Path, last_words: bytes) -> Iterator[Path]:
    """A port whose agent takes a request, says something, and is killed: another one begins there."""
    over = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "agent-0.sock"))
        listener.listen()

        def serve() -> None:
            with listener.accept()[0] as port:
                magic, version, nonce, _ = agentproto.GREETING.unpack(port.recv(agentproto.GREETING.size))
                assert (magic, version) == (agentproto.HELLO_MAGIC, agentproto.VERSION)
                port.sendall(agentproto.GREETING.pack(agentproto.WELCOME_MAGIC, agentproto.VERSION, b"agent---", nonce))
                port.recv(4096)
                said = agentproto.pack(Kind.STDOUT, last_words, nonce) if last_words else b""
                port.sendall(said + agentproto.pack(Kind.BEGUN, b"", agentproto.NOBODY))
                over.wait(HANG_S)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield directory
        finally:
            over.set()
            thread.join(HANG_S)


def test_what_an_agent_said_before_it_was_killed_is_heard_and_then_that_it_was(tmp_path: Path) -> None:
    said = bytearray()
    with killed_agent(tmp_path, b"last words") as directory, Agent.connect(directory, timeout_s=HANG_S) as agent:
        with pytest.raises(AgentKilledError, match="was killed"):
            agent.execute(["x"], stdout=said.extend, stderr=said.extend)
        with pytest.raises(AgentKilledError):
            agent.ping()
    assert said == b"last words"


@pytest.mark.parametrize(
    "ask",
    [
        Agent.ping,
        Agent.hold,
        Agent.processes,
        Agent.shutdown,
        lambda agent: agent.identify(time_ns=1),
        lambda agent: agent.kill(7, 9),
    ],
)
def test_no_question_waits_for_an_agent_that_was_killed(tmp_path: Path, ask: Callable[[Agent], object]) -> None:
    with (
        killed_agent(tmp_path, b"") as directory,
        Agent.connect(directory, timeout_s=HANG_S) as agent,
        pytest.raises(AgentKilledError),
    ):
        ask(agent)


def test_an_agent_that_takes_no_signal_does_not_hold_its_client(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stands still, or is so old that it does not say when it has begun."""
    with Control() as control:
        stopped: list[int] = []

        def stop(data: bytes) -> None:
            stopped.append(int(data))
            os.kill(stopped[0], signal.SIGSTOP)
            monkeypatch.setattr(vmm.agent, "ANSWER_TIMEOUT_S", 0.2)
            control.signal(signal.SIGTERM)

        try:
            with pytest.raises(AgentTimeoutError, match=r"said nothing for 0\.2 s"):
                job("sh", "-c", "echo $PPID; exec sleep 1000", stdout=stop, control=control)
        finally:
            os.kill(stopped[0], signal.SIGCONT)


def test_signals_that_are_taken_are_no_answer_to_another_question(job: Job) -> None:
    with Control() as control:
        script = "trap 'echo got' USR1; trap 'exit 3' TERM; echo ready; while :; do sleep 0.01; done"

        def answer(data: bytes) -> None:
            control.signal(signal.SIGUSR1 if b"ready" in data else signal.SIGTERM)

        assert job("sh", "-c", script, stdout=answer, control=control).code == 3
    job.agent.ping()
    assert job("true").code == 0


def test_an_agent_says_that_it_begins(tmp_path: Path) -> None:
    """Before anything else, to a host that was in a session with another one."""
    program = tmp_path / "agent.pl"
    program.write_bytes(joined())
    host, guest = socket.socketpair()
    with host, guest:
        host.settimeout(HANG_S)
        number = guest.fileno()
        with subprocess.Popen(["perl", str(program), f"fd:{number}"], pass_fds=[number]) as agent:
            guest.close()
            try:
                begun = agentproto.pack(Kind.BEGUN, b"", agentproto.NOBODY)
                assert host.recv(len(begun), socket.MSG_WAITALL) == begun
            finally:
                agent.kill()


def test_a_workload_goes_on_without_its_client(ports: Path, root: Path) -> None:
    with pytest.raises(KeyError), Agent.connect(ports, timeout_s=HANG_S) as agent:
        script = "echo ready; cat > /tmp/stdin; yes | head -c 3000000; echo done > /tmp/done"
        agent.execute(["sh", "-c", script], stdin=b"kept", stdout=raise_key_error, stderr=raise_key_error)
    until = time.monotonic() + HANG_S
    while not (root / "tmp/done").exists():
        assert time.monotonic() < until
        Agent.connect(ports, timeout_s=HANG_S).close()  # which is when this port learns of the end
    assert (root / "tmp/stdin").read_bytes() in (b"", b"kept")


def test_a_client_that_dies_at_any_byte_harms_no_other(ports: Path, root: Path) -> None:
    """No byte that was not its own reaches a program, and the next session works at once or by asking again."""
    request = agentproto.fields([(b"a", b"sh"), (b"a", b"-c"), (b"a", b"cat > /tmp/got"), (b"i", b"")])
    frames = [(Kind.PING, b"x"), (Kind.EXECUTE, request), (Kind.STDIN, b"one\n" * 30), (Kind.SIGNAL, b"\0")]
    greeting = agentproto.hello(b"12345678")
    length = len(greeting) + sum(len(agentproto.pack(kind, payload, b"12345678")) for kind, payload in frames)
    for cut in [*range(1, length, 7), length]:
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(ports / "agent-0.sock"))
        incoming = Incoming(b"12345678")
        client.sendall(greeting[:cut])
        if cut > len(greeting):
            while incoming.agent_nonce is None:
                incoming.feed(client.recv(4096))
            stream = b"".join(agentproto.pack(kind, payload, incoming.agent_nonce) for kind, payload in frames)
            client.sendall(stream[: cut - len(greeting)])
        client.close()
        with Agent.connect(ports, timeout_s=HANG_S) as agent:
            job = Job(agent)
            assert job("echo", "again").code == 0
            assert bytes(job.out) == b"again\n"
            job("sh", "-c", "while ps | grep -q '[c]at$'; do sleep 0.01; done")
        got = root / "tmp/got"
        if got.exists():
            assert got.read_bytes() in (b"", b"one\n" * 30)
            got.unlink()


def test_stdin_that_looks_like_a_session_is_stdin(ports: Path) -> None:
    forged = agentproto.hello(b"forged!!") + agentproto.pack(Kind.SIGNAL, b"\x09", b"forged!!")
    with Agent.connect(ports, timeout_s=HANG_S) as agent:
        job = Job(agent)
        data = b"\0" * 5 + forged * 2000
        assert job("cat", stdin=data).code == 0
        assert bytes(job.out) == data


def test_an_agent_that_does_not_own_the_machine_leaves_it_alone(job: Job) -> None:
    before = socket.gethostname()
    with pytest.raises(VmSetupError, match="--machine"):
        job.agent.identify(hostname="other", time_ns=0, entropy=bytes(64))
    with pytest.raises(VmSetupError, match="--machine"):
        job.agent.hold()
    with pytest.raises(VmSetupError, match="--machine"):
        job.agent.shutdown()
    assert socket.gethostname() == before
    job.agent.ping()


def test_a_job_gets_a_terminal(job: Job) -> None:
    with Control() as control:

        def resize(data: bytes) -> None:
            job.out.extend(data)
            if data.count(b"ready"):
                control.window(50, 132)

        script = "tty; stty size; trap 'stty size; exit 3' WINCH; echo ready; while :; do sleep 0.05; done"
        ended = job("sh", "-c", script, terminal=(24, 80), stdout=resize, control=control)
    assert bytes(job.out).split(b"\r\n") == [b"/dev/pts/0", b"24 80", b"ready", b"50 132", b""]
    assert ended.code == 3


def test_a_terminal_reads_lines_keys_and_the_end(job: Job) -> None:
    job("sh", "-c", "stty -echo; cat; echo end", terminal=(24, 80), stdin=b"one\ntwo")
    assert bytes(job.out).endswith(b"one\r\ntwoend\r\n")  # behind an echo of it, if it came before stty did
    assert job("sleep", "1000", terminal=(24, 80), stdin=b"\x03").signal == signal.SIGINT


def test_a_terminal_that_nobody_reads_hangs_up(job: Job) -> None:
    def closed(data: bytes) -> None:
        raise BrokenPipeError

    assert job("yes", terminal=(24, 80), stdin=b"", stdout=closed).signal == signal.SIGHUP


def test_output_of_a_terminal_is_complete(job: Job) -> None:
    job("seq", "100000", terminal=(24, 80))
    assert bytes(job.out) == b"".join(b"%d\r\n" % number for number in range(1, 100_001))


def raise_key_error(data: bytes) -> None:
    raise KeyError(data)


def in_session(session: int) -> list[str]:
    """Processes of this session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = path.read_text().rpartition(") ")[2].split()[:4]
        except OSError:
            continue
        if int(sid) == session and state != "Z":
            found.append(path.parent.name)
    return found
