"""The caller while its stage runs: signals, the terminal's bytes, messages of init, and the exit code."""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from stage.boundary import init
from stage.boundary.streams import Pump
from stage.boundary.terminal import Copy, HostTerminal, end_of_input, set_window_size
from stage.errors import NOT_EXECUTABLE, NOT_FOUND, CommandError, StageEndedError, StageSetupError, StageTimeoutError

_ABORTING = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}
_MESSAGE_BYTES = 1 << 17
# Output that is still on its way through the pty after the end, while a background process keeps it open.
_DRAIN_MS = 100
# Also where a background process in a stage that stays goes on writing.
_DRAIN_S = 1.0

# How long init may take to end a workload that is given up.
_END_S = 5.0

# Inits that stayed for commands of others when the one of this process had ended.
staying: list[int] = []
_reaping = threading.Lock()


def reap() -> None:
    """Leaves no zombie of an init that stayed and has ended since. Threads may call this at once."""
    if not staying:
        return
    with _reaping:  # a pid that another thread has just reaped may be that of a new child
        for pid in tuple(staying):
            try:
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            except ChildProcessError:  # the program ignores SIGCHLD, or waits for any child
                pass
            staying.remove(pid)


def usable(fd: int) -> int | None:
    """A standard stream, unless it was closed when we were called and the number now means something of ours."""
    return None if fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC else fd


def await_end(pid: int) -> None:
    """Until this init has ended, and with it the stage's mounts. Any thread may wait."""
    with suppress(ChildProcessError):  # the program ignores SIGCHLD, or waits for any child
        os.waitpid(pid, 0)


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
        self.release()

    def release(self) -> None:
        """Leaves them to the handlers of the program."""
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
        self.pumps: Sequence[Pump] = ()
        self.interactive = False
        self.shared = False  # others may run in the stage, too
        self.ending: Callable[[int], object] = staying.append  # takes an init that lives on when it told the exit code
        self._pid, self._channel, self._terminal, self._signals = pid, channel, terminal, signals
        self._on_ready = on_ready
        self._output: Copy | None = None
        self._master: int | None = None
        self._ready = False
        self._aborted: int | None = None
        self._failure: dict[str, Any] | None = None
        self._channel_open = True
        self._deadline: float | None = None
        self._expired = False
        self._ending = False
        self._exit_code: int | None = None

    def attend(self, *, timeout_s: float | None, catch: bool) -> int:
        """Until init has ended and its output is out. Init outlives it only while other commands run in the stage.

        Without `catch`, signals have the handlers of the program again, which may raise.
        """
        pidfd = -1
        status: int | None = None
        try:
            pidfd = os.pidfd_open(self._pid)
            self._deadline = time.monotonic() + timeout_s if timeout_s is not None else None
            (self._signals.catch if catch else self._signals.release)()
            while status is None or self._output is not None or not all(pump.done for pump in self.pumps):
                ready = self._poll(pidfd if status is None else None)
                if status is not None and (not ready or self._rest_ms() == 0):
                    break
                if status is None and self._rest_ms() == 0:
                    self._end(expired=True)
                for fd in ready:
                    self._handle(fd)
                if status is None and self._exit_code is not None:
                    status = self._stays()
                if status is None and pidfd in ready:
                    _, status = os.waitpid(self._pid, 0)
                    self._deadline = None
                    self._drain_channel()
        finally:
            if status is None:
                self._give_up(pidfd)
            if pidfd >= 0:
                os.close(pidfd)
            self._close_copies()
        if self._aborted is not None:
            return 128 + self._aborted
        if self._expired:
            raise StageTimeoutError(f"the process did not end within {timeout_s} s")
        if self._failure is not None:
            raise _failure(self._failure)
        if os.WIFSIGNALED(status):
            raise StageEndedError(
                f"the stage was ended by signal {os.WTERMSIG(status)} while the command ran in it",
                exit_code=init.exit_code(status),
                hint="someone ran `pvisor stage drop --force`, or killed the first process or command of the stage",
            )
        return init.exit_code(status)

    def _end(self, *, expired: bool = False) -> None:
        """Ends the workload, and with it all that runs in the stage, but where others have joined it."""
        self._expired = self._expired or expired
        if self._ready and self.shared and not self._ending:
            self._ending, self._deadline = True, time.monotonic() + _END_S
            os.kill(self._pid, init.PARENT_DIED)
        else:
            self._deadline = None
            os.kill(self._pid, signal.SIGKILL)

    def _give_up(self, pidfd: int) -> None:
        """Ends the workload and waits for that alone."""
        if pidfd < 0:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            return
        self._end()
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if self._channel_open:
            poll.register(self._channel, select.POLLIN)
        while self._exit_code is None:
            ready = {fd for fd, _ in poll.poll(self._rest_ms())}
            if pidfd in ready:
                os.waitpid(self._pid, 0)
                return
            if not ready:
                self._end()
            elif not self._receive():
                poll.unregister(self._channel)
        self._stays()

    def _stays(self) -> int:
        """Init has told the exit code, and runs on for others or is ending. Returns the code as a wait status."""
        self.ending(self._pid)
        self._deadline = time.monotonic() + _DRAIN_S
        return (self._exit_code or 0) << 8

    def _poll(self, pidfd: int | None) -> set[int]:
        poll = select.poll()
        wanted = [(fd, select.POLLIN) for fd in (pidfd, self._signals.fd) if fd is not None]
        if self._channel_open:
            wanted.append((self._channel.fileno(), select.POLLIN))
        wanted.extend(copy.interest() for copy in (self.input, self._output) if copy is not None)
        wanted.extend(pump.interest() for pump in self.pumps if not pump.done)
        events: dict[int, int] = {}
        for fd, event in wanted:
            events[fd] = events.get(fd, 0) | event
        for fd, event in events.items():
            poll.register(fd, event)
        return {fd for fd, _ in poll.poll(_DRAIN_MS if pidfd is None else self._rest_ms())}

    def _rest_ms(self) -> int | None:
        if self._deadline is None:
            return None
        return max(0, math.ceil((self._deadline - time.monotonic()) * 1000))

    def _handle(self, fd: int) -> None:
        if fd == self._signals.fd:
            for number in os.read(fd, 256):
                self._signal(number)
        elif self._channel_open and fd == self._channel.fileno():
            self._receive()
        for copy in (self._output, self.input):
            if copy is not None and copy.interest()[0] == fd:
                copy.step()
        for pump in self.pumps:
            if not pump.done and pump.interest()[0] == fd:
                pump.step()
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
            self._on_ready(self._pid)  # when that fails, nobody has joined, and all of it ends
            self._ready = True
        if "ended" in message:
            self._channel.send(b"y")  # alive, and will restore the terminal
        if "exit" in message:
            self._exit_code = message["exit"]
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
