"""Starts `stage_runner` as a process, with pipes or behind a host terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A lower and a place for stages."""

    lower: Path
    stages: Path

    def command(self, options: Sequence[str], command: Sequence[str]) -> list[str]:
        head = [sys.executable, "-m", "tests.support.stage_runner", "--lower", str(self.lower), "--stages"]
        return [*head, str(self.stages), *options, "--", *command]

    def run(self, options: Sequence[str], *command: str, **rest: Any) -> subprocess.CompletedProcess[str]:
        """To the end, with the output as text."""
        rest = {"stdin": subprocess.DEVNULL, "timeout": 30} | rest
        if "input" in rest:
            del rest["stdin"]
        return subprocess.run(self.command(options, command), cwd=REPOSITORY, capture_output=True, text=True, **rest)

    def sh(self, script: str, *options: str, **rest: Any) -> subprocess.CompletedProcess[str]:
        return self.run(options, "sh", "-c", script, **rest)

    @contextmanager
    def started(self, options: Sequence[str], *command: str, **rest: Any) -> Iterator[subprocess.Popen[bytes]]:
        """A running one; killed at the end of the block when it still runs."""
        rest = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": False,
        } | rest
        process = subprocess.Popen(self.command(options, command), cwd=REPOSITORY, **rest)
        with process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()


class Commands(Protocol):
    """Makes command lines."""

    def command(self, options: Sequence[str], command: Sequence[str]) -> list[str]: ...


class Terminal:
    """A host terminal with a runner in its foreground, which is the first process of the session, or a child of a shell
    (`under_shell`) as for a user: the end of the first one hangs up the terminal.
    """

    def __init__(self, host: Commands, options: Sequence[str], *command: str, under_shell: bool = False) -> None:
        self.output = b""
        shell = ["/bin/sh", "-c", '"$@"; echo "status $?"; sleep 30', "sh"] if under_shell else []
        words = [*shell, *host.command(options, command)]
        ready, looked = os.pipe()
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                os.close(looked)
                os.read(ready, 1)
                os.chdir(REPOSITORY)
                os.execv(words[0], words)
            finally:
                os._exit(99)
        self.attributes = termios.tcgetattr(self.fd)
        """As they were before the runner changed them."""
        os.close(ready)
        os.close(looked)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)

    @property
    def child(self) -> int:
        """The runner under the shell."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0])

    def type(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def expect(self, text: bytes, timeout: float = 60) -> bytes:
        """Reads until `text` came; returns everything up to it and forgets that."""
        end = time.monotonic() + timeout
        while text not in self.output:
            ready, _, _ = select.select([self.fd], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {text!r} within {timeout} s, but {self.output!r}"
            try:
                piece = os.read(self.fd, 65536)
            except OSError:
                piece = b""
            assert piece, f"ended without {text!r}: {self.output!r}"
            self.output += piece
        before, _, self.output = self.output.partition(text)
        return before

    def wait(self, timeout: float = 60) -> int:
        """The exit code (negative: signal), while output is read on."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            ready, _, _ = select.select([self.fd], [], [], 0.02)
            if ready:
                try:
                    self.output += os.read(self.fd, 65536)
                except OSError:
                    time.sleep(0.01)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
        raise AssertionError(f"still running after {timeout} s: {self.output!r}")


def eventually(condition: Callable[[], bool], timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s"
        time.sleep(0.01)


def processes_with(text: str) -> list[int]:
    """Processes of this host whose command line has `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
