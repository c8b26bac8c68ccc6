"""The caller while its stage runs: signals, the terminal's bytes, messages of init, and the exit code."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Any

from stage import init
from stage.errors import NOT_EXECUTABLE, NOT_FOUND, CommandError, StageSetupError
from stage.terminal import Copy, HostTerminal, end_of_input, set_window_size

_ABORTING = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}
_MESSAGE_BYTES = 1 << 17
# Output that is still on its way through the pty after the end, while a background process keeps it open.
_DRAIN_MS = 100


def usable(fd: int) -> int | None:
    """A standard stream, unless it was closed when we were called and the number now means something of ours."""
    return None if fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC else fd


class Signals:
    """Blocks every signal, so that none is lost around the fork; `catch` then turns them into bytes on `fd`.

    Only the main thread can catch; elsewhere they stay with whoever has them.
    """

    def __init__(self) -> None:
        self.mask: frozenset[int] = frozenset()
        self.fd: int | None = None
        self._write_fd = -1
        self._old_wakeup = -1
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self.mask = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()))
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # there would be no exit code to wait for
            self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def catch(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._old_wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        except ValueError:  # not the main thread
            os.close(self._write_fd)
            os.close(self.fd)
            self.fd, self._write_fd = None, -1
        else:
            for number in init.FORWARDED:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, lambda _number, _frame: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if self.fd is not None:
            signal.set_wakeup_fd(self._old_wakeup)
            os.close(self._write_fd)
            os.close(self.fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)


class Caller:
    """The waiting side of one start. Used by one thread."""

    def __init__(
        self,
        pid: int,
        channel: socket.socket,
        terminal: HostTerminal | None,
        signals: Signals,
        on_ready: Callable[[int], None],
    ) -> None:
        self.input: Copy | None = None
        self.interactive = False
        self._pid, self._channel, self._terminal, self._signals = pid, channel, terminal, signals
        self._on_ready = on_ready
        self._output: Copy | None = None
        self._master: int | None = None
        self._ready = False
        self._aborted: int | None = None
        self._failure: dict[str, Any] | None = None
        self._channel_open = True

    def attend(self) -> int:
        """Until init has ended and its output is out. Whatever happens here, init does not outlive it."""
        pidfd = os.pidfd_open(self._pid)
        status: int | None = None
        try:
            while status is None or self._output is not None:
                ready = self._poll(pidfd if status is None else None)
                if not ready and status is not None:
                    break
                for fd in ready:
                    self._handle(fd)
                if status is None and pidfd in ready:
                    _, status = os.waitpid(self._pid, 0)
                    self._drain_channel()
        finally:
            if status is None:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            os.close(pidfd)
            self._close_copies()
        if self._aborted is not None:
            return 128 + self._aborted
        if self._failure is not None:
            raise _failure(self._failure)
        return init.exit_code(status)

    def _poll(self, pidfd: int | None) -> set[int]:
        poll = select.poll()
        wanted = [(fd, select.POLLIN) for fd in (pidfd, self._signals.fd) if fd is not None]
        if self._channel_open:
            wanted.append((self._channel.fileno(), select.POLLIN))
        wanted.extend(copy.interest() for copy in (self.input, self._output) if copy is not None)
        events: dict[int, int] = {}
        for fd, event in wanted:
            events[fd] = events.get(fd, 0) | event
        for fd, event in events.items():
            poll.register(fd, event)
        return {fd for fd, _ in poll.poll(_DRAIN_MS if pidfd is None else None)}

    def _handle(self, fd: int) -> None:
        if fd == self._signals.fd:
            for number in os.read(fd, 256):
                self._signal(number)
        elif self._channel_open and fd == self._channel.fileno():
            self._receive()
        for copy in (self._output, self.input):
            if copy is not None and copy.interest()[0] == fd:
                copy.step()
        if self._output is not None and self._output.done:
            self._close_copies()  # the pty is gone, or nobody reads: then its session is hung up
        if self.input is not None and self.input.done:
            self._end_input()

    def _signal(self, number: int) -> None:
        if number not in init.FORWARDED:
            return
        if number == signal.SIGWINCH and self._terminal is not None:
            if self._master is not None:
                set_window_size(self._master, self._terminal.window_size())
        elif not self._ready and number in _ABORTING:
            self._aborted = number
            os.kill(self._pid, signal.SIGKILL)
        else:
            os.kill(self._pid, number)
            if number == signal.SIGTSTP:
                self._suspend()

    def _suspend(self) -> None:
        if self._terminal is not None:
            self._terminal.restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        if self._terminal is not None:
            self._terminal.raw()

    def _receive(self) -> bool:
        """One message of init; False at the end."""
        data, fds, _, _ = socket.recv_fds(self._channel, _MESSAGE_BYTES, 1, socket.MSG_DONTWAIT)
        if not data:
            self._channel_open = False
            return False
        message = json.loads(data)
        if "ready" in message:
            self._ready = True
            self._on_ready(self._pid)
        if "ended" in message:
            self._channel.send(b"y")  # alive, and will restore the terminal
        if "error" in message:
            self._failure = message
        if fds:
            self._connect(fds[0])
        return True

    def _connect(self, master: int) -> None:
        os.set_blocking(master, False)
        self._master = master
        target = usable(1)
        self._output = Copy(master, target if target is not None else 1)
        if self.interactive:
            self.input = Copy(0, master, end_of_input(master))

    def _drain_channel(self) -> None:
        try:
            while self._channel_open and self._receive():
                pass
        except BlockingIOError:
            return

    def _end_input(self) -> None:
        if self.input is not None and self.input.target != self._master:
            os.close(self.input.target)
        self.input = None

    def _close_copies(self) -> None:
        self._end_input()
        self._output = None
        if self._master is not None:
            os.close(self._master)
            self._master = None


def _failure(message: dict[str, Any]) -> StageSetupError | CommandError:
    code = int(message["code"])
    if code in (NOT_EXECUTABLE, NOT_FOUND):
        return CommandError(message["error"], exit_code=code, hint=message["hint"])
    return StageSetupError(message["error"], hint=message["hint"])
