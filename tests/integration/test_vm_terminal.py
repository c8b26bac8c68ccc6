"""`vm exec -t`, `vm run -t` and `vm console` on a real terminal: keys, sizes, and its settings put back."""

from __future__ import annotations

import os
import signal
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.busybox import busybox_root
from tests.support.command import Host
from tests.support.stage_process import Terminal, eventually
from tests.support.vm import MEMORY, shown, start, state, vm_host
from tests.support.vmterminal import OnTerminal

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.qemu, pytest.mark.slow]
BOX = "box:1"
HANG_S = 60.0
SHELL = ("vm", "exec", "-it", "term")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    root = tmp_path_factory.mktemp("vm")
    with vm_host(root / "host", image=False) as host:
        host.run("convert", f"dir:{busybox_root(root / 'box')}", "--name", BOX)
        start(host, "term", image=BOX)
        yield host


def expect(terminal: Terminal, text: bytes) -> bytes:
    return terminal.expect(text, HANG_S)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_shell_with_job_control(made: Host) -> None:
    with Terminal(OnTerminal(made), SHELL, "sh") as terminal:
        before = termios.tcgetattr(terminal.fd)
        expect(terminal, b"# ")
        assert termios.tcgetattr(terminal.fd) != before
        terminal.type(b"tty; echo $TERM; test -t 0 -a -t 1 -a -t 2 && echo all\r")
        expect(terminal, b"/dev/pts/0\r\nxterm\r\nall\r\n")
        expect(terminal, b"# ")
        terminal.type(b"sh -c 'echo asleep; exec sleep 1000'\r")
        expect(terminal, b"asleep\r\n")
        terminal.type(b"\x03")
        expect(terminal, b"# ")
        terminal.type(b"exit 4\r")
        assert terminal.wait(HANG_S) == 4
        assert termios.tcgetattr(terminal.fd) == before


def test_window_size(made: Host) -> None:
    script = "trap 'stty size' WINCH; echo up; read x; stty size; while :; do sleep 0.1; done"
    with Terminal(OnTerminal(made), SHELL, "sh", "-c", script) as terminal:
        expect(terminal, b"up")
        termios.tcsetwinsize(terminal.fd, (33, 101))
        terminal.type(b"\r")
        expect(terminal, b"33 101")
        termios.tcsetwinsize(terminal.fd, (44, 122))
        expect(terminal, b"44 122")


@pytest.mark.parametrize(("end", "status"), [("exit", 3), ("SIGTERM", 143), ("SIGKILL", 137)])
def test_the_terminal_is_restored(made: Host, end: str, status: int) -> None:
    script = "echo up; read x; exit 3"
    with Terminal(OnTerminal(made), SHELL, "sh", "-c", script, under_shell=True) as terminal:
        before = termios.tcgetattr(terminal.fd)
        expect(terminal, b"up")
        assert termios.tcgetattr(terminal.fd) != before
        if end == "exit":
            terminal.type(b"\r")
        else:
            os.kill(terminal.child, getattr(signal, end))
        expect(terminal, b"status %d" % status)
        eventually(lambda: termios.tcgetattr(terminal.fd) == before)


def test_a_suspended_command_gives_the_terminal_back_meanwhile(made: Host) -> None:
    with Terminal(OnTerminal(made), SHELL, "sh", "-c", "echo up; read x; exit 3", under_shell=True) as terminal:
        before = termios.tcgetattr(terminal.fd)
        expect(terminal, b"up")
        os.kill(terminal.child, signal.SIGTSTP)
        eventually(lambda: is_stopped(terminal.child))
        assert termios.tcgetattr(terminal.fd) == before
        os.kill(terminal.child, signal.SIGCONT)
        eventually(lambda: termios.tcgetattr(terminal.fd) != before)
        terminal.type(b"\r")
        expect(terminal, b"status 3")


def test_a_failed_start_restores_the_terminal(made: Host) -> None:
    with Terminal(OnTerminal(made), SHELL, "no-such-program") as terminal:
        before = termios.tcgetattr(terminal.fd)
        assert terminal.wait(HANG_S) == 127
        assert b"no-such-program" in terminal.output
        assert termios.tcgetattr(terminal.fd) == before


def test_without_keys_an_interrupt_is_a_signal(made: Host) -> None:
    script = "trap 'echo got INT; exit 5' INT; test -t 1 && echo up; while :; do sleep 0.1; done"
    with Terminal(OnTerminal(made), ("vm", "exec", "-t", "term"), "sh", "-c", script) as terminal:
        before = termios.tcgetattr(terminal.fd)
        expect(terminal, b"up")
        assert termios.tcgetattr(terminal.fd) == before
        terminal.type(b"\x03")
        expect(terminal, b"got INT")
        assert terminal.wait(HANG_S) == 5


@pytest.mark.parametrize(("text", "shown_text"), [(b"hello\n", b"hello\r\nhello\r\n"), (b"", b"")])
def test_end_of_a_pipe_goes_through_the_terminal(made: Host, text: bytes, shown_text: bytes) -> None:
    assert made.run("vm", "exec", "-it", "term", "--", "cat", stdin=text).stdout == shown_text


def test_a_hung_up_terminal_ends_the_process(made: Host) -> None:
    terminal = Terminal(OnTerminal(made), SHELL, "sh", "-c", "echo up; sleep 4321; sleep 4321")
    expect(terminal, b"up")
    os.close(terminal.fd)
    os.waitpid(terminal.pid, 0)
    count = ("vm", "exec", "term", "--", "sh", "-c", "ps | grep -c '[s]leep 4321' || true")
    eventually(lambda: made.run(*count).stdout == b"0\n", HANG_S)


def test_run_has_a_terminal_too(made: Host) -> None:
    options = ("vm", "run", "-it", "--name", "once", "--memory", MEMORY, BOX)
    with Terminal(OnTerminal(made), options, "sh", "-c", "tty; read x; exit 3") as terminal:
        before = termios.tcgetattr(terminal.fd)
        expect(terminal, b"/dev/pts/0\r\n")
        terminal.type(b"\r")
        assert terminal.wait(HANG_S) == 3
        assert termios.tcgetattr(terminal.fd) == before
    assert state(made, "once") == "gone"
    assert "-t" in made.error("vm", "run", "-t", BOX, code=2)


def test_the_console_is_attached_and_left(made: Host) -> None:
    for text, heard in ((b"cd /tmp; echo first $((6*7))\r", b"first 42"), (b"echo $PWD $((1+1))\r", b"/tmp 2")):
        with Terminal(OnTerminal(made), ("vm", "console", "term")) as terminal:
            before = termios.tcgetattr(terminal.fd)
            expect(terminal, b"Ctrl-] ends this")
            eventually(lambda t=terminal, b=before: termios.tcgetattr(t.fd) != b)  # type: ignore[misc]
            terminal.type(text)
            expect(terminal, heard)
            assert "another `vm console`" in made.error("vm", "console", "term")
            terminal.type(b"\x1d")
            assert terminal.wait(HANG_S) == 0
            assert termios.tcgetattr(terminal.fd) == before
    assert state(made, "term") == "running"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_console_that_is_killed_restores_the_terminal(made: Host, number: signal.Signals) -> None:
    with Terminal(OnTerminal(made), ("vm", "console", "term"), under_shell=True) as terminal:
        before = termios.tcgetattr(terminal.fd)
        eventually(lambda: termios.tcgetattr(terminal.fd) != before)
        os.kill(terminal.child, number)
        expect(terminal, b"status %d" % (128 + number))
        eventually(lambda: termios.tcgetattr(terminal.fd) == before)


def test_bytes_of_a_pipe_reach_the_console(made: Host) -> None:
    done = subprocess.run(
        OnTerminal(made).command(("vm", "console", "term"), ()),
        input=b"echo piped $((2+3))\n",
        capture_output=True,
        timeout=HANG_S,
        check=True,
    )
    assert b"piped 5" in done.stdout


def test_the_end_of_the_vm_restores_both(made: Host) -> None:
    start(made, "short", image=BOX)
    session = ("vm", "exec", "-it", "short")
    with (
        Terminal(OnTerminal(made), session, "sh", "-c", "echo up; sleep 1000") as terminal,
        Terminal(OnTerminal(made), ("vm", "console", "short")) as console,
    ):
        before = termios.tcgetattr(terminal.fd)
        expect(terminal, b"up")
        eventually(lambda: termios.tcgetattr(console.fd) != before)
        found = shown(made, "short")
        assert found is not None
        os.kill(found["pid"], signal.SIGKILL)
        assert terminal.wait(HANG_S) == 125
        assert console.wait(HANG_S) == 0
        assert termios.tcgetattr(terminal.fd) == termios.tcgetattr(console.fd) == before
    made.run("vm", "rm", "short")
