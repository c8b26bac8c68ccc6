"""Terminals and signals: what a user's keys and a supervisor's kill do to the workload, exactly once."""

from __future__ import annotations

import os
import signal
import subprocess
import termios
import time
from pathlib import Path

import pytest

from tests.support.busybox import busybox_root
from tests.support.stage_process import Host, Terminal, eventually, processes_with

pytestmark = pytest.mark.root

COUNTING = """
n=0
for name in INT TERM HUP QUIT USR1 USR2; do trap "n=\\$((n+1)); echo got $name \\$n" $name; done
echo up
while :; do sleep 0.05; done
"""


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(lower=busybox_root(tmp_path / "lower"), stages=tmp_path / "stages")


def lines_until_quiet(process: subprocess.Popen[bytes], quiet: float = 0.3, *, first: float = 0.0) -> list[str]:
    """What it says until it is quiet for so long; the first line may take `first` seconds."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    text, end = b"", time.monotonic() + max(first, quiet)
    while time.monotonic() < end:
        piece = process.stdout.read()
        if piece:
            text, end = text + piece, time.monotonic() + quiet
        time.sleep(0.01)
    os.set_blocking(process.stdout.fileno(), True)
    return [line for line in text.decode().splitlines() if line not in ("Hangup", "Quit")]  # of the shell's child


def test_signals_are_passed_on_once(host: Host) -> None:
    with host.started([], "sh", "-c", COUNTING) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        for count, name in enumerate(("INT", "TERM", "HUP", "QUIT", "USR1", "USR2"), 1):
            process.send_signal(getattr(signal, f"SIG{name}"))
            assert lines_until_quiet(process, first=30) == [f"got {name} {count}"]


def test_signals_to_the_whole_group_arrive_once(host: Host) -> None:
    with host.started([], "sh", "-c", COUNTING, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        os.killpg(process.pid, signal.SIGTERM)
        assert lines_until_quiet(process, first=30) == ["got TERM 1"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_workload_that_dies_of_the_signal(host: Host, number: signal.Signals, code: int) -> None:
    with host.started([], "sh", "-c", "echo up; sleep 1000; echo no") as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.send_signal(number)
        assert process.wait(10) == code
    assert not list(host.stages.iterdir())


def test_what_the_caller_ignores_stays_ignored(host: Host) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with host.started([], "sh", "-c", "echo up; kill -HUP $$; sleep 0.2; echo alive", preexec_fn=ignore) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.read() == b"alive\n"


def test_a_caller_that_ignores_sigchld(host: Host) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    result = host.sh("sleep 0.01; (exit 3); echo $?; exit 7", preexec_fn=ignore)
    assert (result.stdout, result.returncode) == ("3\n", 7)


def test_signal_dispositions_and_mask_are_plain(host: Host) -> None:
    result = host.sh("exec grep -E '^Sig(Blk|Ign)' /proc/self/status")
    # Signals 32 and 33 are glibc's own: no program can set them, so they stay as whoever started us has them.
    changeable = ~(0b11 << 31)
    assert [int(line.split()[1], 16) & changeable for line in result.stdout.splitlines()] == [0, 0]


def test_keys_without_a_pty_reach_the_group_once(host: Host) -> None:
    with Terminal(host, ["-i"], "sh", "-c", COUNTING) as terminal:
        terminal.expect(b"up")
        terminal.type(b"\x03")
        terminal.expect(b"got INT 1")
        terminal.type(b"\x03")
        terminal.expect(b"got INT 2")
        terminal.type(b"\x1c")
        terminal.expect(b"got QUIT 3")


def test_ctrl_c_ends_a_pipeline_of_children(host: Host) -> None:
    with Terminal(host, [], "sh", "-c", "echo up; sleep 1000; sleep 1000") as terminal:
        terminal.expect(b"up")
        time.sleep(0.1)
        terminal.type(b"\x03")
        assert terminal.wait() == 130


def test_typing_without_a_pty(host: Host) -> None:
    with Terminal(host, ["-i"], "sh", "-c", "test -t 0 || echo pipe; cat") as terminal:
        terminal.expect(b"pipe")
        terminal.type(b"line\n")
        terminal.expect(b"line\r\nline\r\n")  # the host terminal's echo, then cat
        terminal.type(b"\x04")
        assert terminal.wait() == 0


def test_stop_and_continue(host: Host) -> None:
    with host.started(
        [], "sh", "-c", "echo up; while :; do echo x; sleep 0.02; done", start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGTSTP)
        eventually(lambda: Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "T")
        lines_until_quiet(process)
        assert lines_until_quiet(process, 0.2) == []
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == b"x\n"


def test_a_shell_with_job_control(host: Host) -> None:
    with Terminal(host, ["-i", "-t"], "sh") as terminal:
        terminal.expect(b"# ")
        terminal.type(b"tty; echo $TERM; test -t 0 -a -t 1 -a -t 2 && echo all\r")
        terminal.expect(b"/dev/pts/0\r\nxterm\r\nall\r\n")
        terminal.expect(b"# ")
        terminal.type(b"sleep 31562.25\r")
        eventually(lambda: bool(processes_with("sleep\00031562.25")), 30)  # it has the terminal by then
        terminal.type(b"\x03")
        terminal.expect(b"# ")
        terminal.type(b"sleep 31563.25\r")
        eventually(lambda: bool(processes_with("sleep\00031563.25")), 30)
        terminal.type(b"\x1a")
        terminal.expect(b"Stopped")
        terminal.type(b"exit 4\rexit 4\r")  # the first one warns of the stopped job
        assert terminal.wait() == 4


def test_window_size(host: Host) -> None:
    with Terminal(
        host, ["-i", "-t"], "sh", "-c", "trap 'stty size' WINCH; read x; stty size; while :; do sleep 0.02; done"
    ) as terminal:
        termios.tcsetwinsize(terminal.fd, (33, 101))
        terminal.type(b"\r")
        terminal.expect(b"33 101")
        termios.tcsetwinsize(terminal.fd, (44, 122))
        terminal.expect(b"44 122")


@pytest.mark.parametrize(("end", "status"), [("exit", 3), ("SIGTERM", 143), ("SIGKILL", 137)])
def test_the_terminal_is_restored(host: Host, end: str, status: int) -> None:
    with Terminal(host, ["-i", "-t"], "sh", "-c", "echo up; read x; exit 3", under_shell=True) as terminal:
        before = terminal.attributes
        terminal.expect(b"up")
        assert termios.tcgetattr(terminal.fd) != before
        if end == "exit":
            terminal.type(b"\r")
        else:
            os.kill(terminal.child, getattr(signal, end))
        terminal.expect(b"status %d" % status)
        eventually(lambda: termios.tcgetattr(terminal.fd) == before)


def test_a_failed_start_restores_the_terminal(host: Host) -> None:
    with Terminal(host, ["-i", "-t"], "no-such-program") as terminal:
        before = terminal.attributes
        assert terminal.wait() == 127
        assert b"not found in the image" in terminal.output
        assert termios.tcgetattr(terminal.fd) == before


def test_a_hung_up_terminal_ends_the_stage(host: Host) -> None:
    tag = "31561.25"
    terminal = Terminal(host, ["-i", "-t"], "sh", "-c", f"echo up; sleep {tag}; sleep {tag}")
    terminal.expect(b"up")
    eventually(lambda: bool(processes_with(f"sleep\0{tag}")))
    os.close(terminal.fd)
    eventually(lambda: not processes_with(f"sleep\0{tag}"))
    os.waitpid(terminal.pid, 0)


@pytest.mark.parametrize(("text", "shown"), [("hello\n", "hello\r\nhello\r\n"), ("hello", "hellohello"), ("", "")])
def test_end_of_a_pipe_goes_through_the_pty(host: Host, text: str, shown: str) -> None:
    with host.started(["-i", "-t"], "cat", stdin=subprocess.PIPE) as process:
        out, _ = process.communicate(text.encode(), timeout=10)
    assert (out.decode(), process.returncode) == (shown, 0)


def test_much_output_through_the_pty(host: Host) -> None:
    with host.started(["-t"], "seq", "1", "300000") as process:
        out, _ = process.communicate(timeout=30)
    assert out == b"".join(b"%d\r\n" % number for number in range(1, 300001))
    assert process.returncode == 0


def test_much_input_through_the_pty(host: Host) -> None:
    text = b"".join(b"line %d\n" % number for number in range(20000))
    script = "stty -echo; echo go; sha256sum"
    with host.started(["-i", "-t"], "sh", "-c", script, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"go\r\n"
        process.stdin.write(text)
        process.stdin.close()
        digest = process.stdout.readline().split()[0].decode()
        assert process.wait(20) == 0
    assert (
        digest == subprocess.run(["sha256sum"], input=text, capture_output=True, check=True).stdout.split()[0].decode()
    )


def test_a_reader_that_leaves_hangs_up_the_pty(host: Host) -> None:
    with host.started(["-t"], "yes") as process:
        assert process.stdout is not None and process.stdout.readline() == b"y\r\n"
        process.stdout.close()
        assert process.wait(10) == 129


def test_a_terminal_in_a_joined_stage(host: Host) -> None:
    with host.started(["--stage", "s", "-i"], "sh", "-c", "echo up; cat", stdin=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        with Terminal(host, ["--join", "s", "-i", "-t"], "sh") as terminal:
            before = terminal.attributes
            terminal.expect(b"# ")
            terminal.type(b"tty; sleep 1000 & \r")
            terminal.expect(b"/dev/pts/0")
            terminal.type(b"exit 6\r")
            assert terminal.wait() == 6  # though a background process keeps the pty open
            assert termios.tcgetattr(terminal.fd) == before


def test_interrupt_while_the_stage_is_set_up(host: Host) -> None:
    for delay in (0.0, 0.01, 0.03, 0.06, 0.09):
        with host.started([], "sleep", "1000", stderr=subprocess.PIPE) as process:
            eventually(host.stages.exists)
            time.sleep(delay)
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) in (143, -15)
        eventually(lambda: not processes_with(str(host.stages)))
