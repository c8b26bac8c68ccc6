"""The caller's terminal while a stage has one of its own, and the bytes that go between them."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_PIECE = 4096  # what a pipe that polls writable takes without blocking
_TIOCSPTLCK, _TIOCGPTPEER = 0x40045431, 0x5441
WINDOW_SIZE_BYTES = 8


class HostTerminal:
    """The terminal the caller sits at, if stdin is one; its settings can be put back any number of times."""

    def __init__(self) -> None:
        self._sizes_from = [fd for fd in (0, 1, 2) if _is_terminal(fd)]
        self.attributes: list[Any] | None = termios.tcgetattr(0) if 0 in self._sizes_from else None

    def raw(self) -> None:
        """Every key goes to the stage. Stops a background job until it is in front, as any change of settings does."""
        if self.attributes is not None:
            tty.setraw(0, termios.TCSADRAIN)

    def restore(self, fd: int = 0) -> None:
        """Puts the settings back; `fd` is a duplicate of stdin in a process that has closed it."""
        if self.attributes is not None:
            try:
                termios.tcsetattr(fd, termios.TCSANOW, self.attributes)
            except termios.error as error:
                if error.args[0] not in (errno.EIO, errno.ENOTTY, errno.EBADF):  # the terminal is gone
                    raise

    def window_size(self) -> bytes | None:
        """A struct winsize of the first terminal among stdin, stdout and stderr."""
        for fd in self._sizes_from:
            try:
                return fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(WINDOW_SIZE_BYTES))
            except OSError:  # hung up: the next one may still be there
                continue
        return None


@contextmanager
def raw_mode(terminal: HostTerminal | None) -> Iterator[None]:
    """Raw for the block; restored however it ends."""
    if terminal is None:
        yield
        return
    try:
        terminal.raw()
        yield
    finally:
        terminal.restore()


def open_pty(terminal: HostTerminal, uid: int) -> tuple[int, int]:
    """A new pty (master, slave) of the devpts at /dev/pts, set up like the caller's terminal and owned by `uid`."""
    master = os.open("/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY)
    fcntl.ioctl(master, _TIOCSPTLCK, bytes(4))
    slave = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    os.set_inheritable(slave, False)
    if terminal.attributes is not None:
        termios.tcsetattr(slave, termios.TCSANOW, terminal.attributes)
    size = terminal.window_size()
    if size is not None:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
    os.fchown(slave, uid, -1)
    return master, slave


def set_window_size(master: int, size: bytes | None) -> None:
    """The kernel tells the pty's foreground processes."""
    if size is not None:
        try:
            fcntl.ioctl(master, termios.TIOCSWINSZ, size)
        except OSError as error:
            if error.errno != errno.EIO:  # the other side is gone
                raise


class Copy:
    """Moves bytes one way, one piece in flight, so that a slow reader holds back the writer and nothing piles up.

    At the end of the source `end(last byte)` may give more to write. `done` is set after that, and when the target
    takes no more (`broken`). Not for sharing between threads.
    """

    def __init__(self, source: int, target: int, end: Callable[[bytes], bytes] | None = None) -> None:
        self.source, self.target = source, target
        self.broken = False
        self._end = end
        self._piece, self._last = b"", b"\n"
        self._source_open = True

    @property
    def done(self) -> bool:
        return self.broken or not (self._source_open or self._piece)

    def interest(self) -> tuple[int, int]:
        """The descriptor and the poll event that the next step waits for."""
        return (self.target, select.POLLOUT) if self._piece else (self.source, select.POLLIN)

    def step(self) -> None:
        """One read or write of a descriptor that polled ready; never blocks on a pipe or a pty."""
        try:
            if self._piece:
                self._write()
            else:
                self._read()
        except BlockingIOError:
            return

    def _write(self) -> None:
        try:
            self._piece = self._piece[os.write(self.target, self._piece) :]
        except BlockingIOError:
            raise
        except OSError:  # EPIPE, EIO: nobody is there any more, or it has no room for ever
            self.broken = True

    def _read(self) -> None:
        try:
            piece = os.read(self.source, _PIECE)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EBADF, errno.EISDIR):
                raise
            piece = b""
        if piece:
            self._piece, self._last = piece, piece[-1:]
        else:
            self._source_open = False
            self._piece = self._end(self._last) if self._end is not None else b""


def end_of_input(master: int) -> Callable[[bytes], bytes]:
    """For `Copy`: the end-of-file key of the pty; twice after an unfinished line, for the first only ends that line."""

    def end(last: bytes) -> bytes:
        try:
            key: bytes = termios.tcgetattr(master)[6][termios.VEOF]
        except termios.error:  # the other side is gone
            return b""
        return key if last in (b"\n", b"\r") else key * 2

    return end


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
