"""The caller's terminal while its keys go to a virtual machine."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from stage.boundary.terminal import HostTerminal

if TYPE_CHECKING:
    from vmm.control import Control

_WINDOW = struct.Struct("=4H")


@contextmanager
def raw_keys() -> Iterator[HostTerminal]:
    """Keys are passed on as they are typed, Ctrl-C too, for the block; nothing changes when stdin is no terminal.

    However the block ends the settings are put back, and also when this process is killed: by a child that waits for
    its end. For a process with one thread.
    """
    terminal = HostTerminal()
    if terminal.attributes is None:
        yield terminal
        return
    with _guarding(terminal):
        try:
            terminal.raw()
            yield terminal
        finally:
            terminal.restore()


@contextmanager
def guest_terminal(control: Control, *, keys: bool) -> Iterator[tuple[int, int]]:
    """For a process with a terminal in a guest: the size of the caller's, (0, 0) when it has none.

    The guest's terminal is told of new sizes. With `keys` it gets what is typed as by `raw_keys`; otherwise Ctrl-C and
    the like stay signals to this process.
    """
    terminal = HostTerminal()

    def resize(_number: int, _frame: FrameType | None) -> None:
        control.window(*_size(terminal))

    def suspend(_number: int, _frame: FrameType | None) -> None:
        terminal.restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        terminal.raw()
        control.window(*_size(terminal))

    previous = signal.signal(signal.SIGWINCH, resize)
    try:
        if not keys:
            yield _size(terminal)
            return
        with raw_keys():
            stopping = signal.signal(signal.SIGTSTP, suspend)
            try:
                yield _size(terminal)
            finally:
                signal.signal(signal.SIGTSTP, stopping)
    finally:
        signal.signal(signal.SIGWINCH, previous)


def _size(terminal: HostTerminal) -> tuple[int, int]:
    """Rows and columns."""
    size = terminal.window_size()
    if size is None:
        return 0, 0
    rows, columns, _, _ = _WINDOW.unpack(size)
    return rows, columns


@contextmanager
def _guarding(terminal: HostTerminal) -> Iterator[None]:
    """A child puts the settings back when this process ends within the block."""
    theirs, ours = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            os.close(ours)
            _guard(terminal, theirs)
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        yield
    finally:
        with suppress(BrokenPipeError):  # somebody killed it
            os.write(ours, b"x")
        os.close(ours)
        with suppress(ChildProcessError):  # the caller of this program has no use for children
            os.waitpid(child, 0)


def _guard(terminal: HostTerminal, pipe: int) -> None:
    """No key and no end of a process group ends this, and it may change the settings from the background."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    for fd in (1, 2):  # whoever waits for the end of the output does not wait for this
        os.close(fd)
    if not os.read(pipe, 1):
        terminal.restore()
