"""A terminal on a VM's serial line."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.terminal import raw_keys
from fuse import protocol
from imaged.calls import writer
from imaged.flock import try_lock
from vmm.errors import VmBusyError, VmStateError

_ESCAPE = b"\x1d"  # Ctrl-]
_PIECE_BYTES = 1 << 16
_END_S = 1.0


def converse(path: Path) -> None:
    """Carry bytes between this program's terminal and the serial line, until Ctrl-] or the end of either.

    VmStateError when nobody listens at `path`, VmBusyError when another program uses it so: QEMU would let this one
    wait without a word. With stdin not a terminal its bytes are sent as they are, and what comes back within a second
    after its end is shown.
    """
    with _alone(path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        try:
            with protocol.address(path) as address:
                line.connect(address)
        except OSError as error:
            raise _no_line(path, error) from error
        with raw_keys():
            _carry(line)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    try:
        fd = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _no_line(path, error) from error
    try:
        if not try_lock(fd):
            hint = "one at a time: end that one with Ctrl-], or use `pvisor vm exec -it`"
            raise VmBusyError("another `vm console` uses this serial line", hint=hint)
        yield
    finally:
        os.close(fd)


def _no_line(path: Path, error: OSError) -> VmStateError:
    return VmStateError(f"no serial line at {path}: {error.strerror}", hint="`pvisor vm ls` tells more")


def _carry(line: socket.socket) -> None:
    """A guest that takes nothing holds up no key: Ctrl-] is always one."""
    terminal, show = os.isatty(0), writer(1)
    line.setblocking(False)
    outgoing, typing = bytearray(), True
    while True:
        readers: list[int | socket.socket] = [line]
        if typing and (terminal or len(outgoing) < _PIECE_BYTES):
            readers.append(0)
        readable, writable, _ = select.select(readers, [line] if outgoing else [], [], None if typing else _END_S)
        if not readable and not writable:
            return
        leaving = False
        if 0 in readable:
            data = _typed()
            typed, escape, _ = data.partition(_ESCAPE) if terminal else (data, b"", b"")
            outgoing += typed
            typing = bool(data)
            leaving = bool(escape) or (terminal and not data)
        if (outgoing and not _send(line, outgoing)) or leaving:
            return
        if line in readable:
            data = _received(line)
            if not data:
                return
            show(data)


def _typed() -> bytes:
    """Nothing at the end, and when the terminal hung up."""
    try:
        return os.read(0, _PIECE_BYTES)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""


def _send(line: socket.socket, outgoing: bytearray) -> bool:
    """Sends what the line takes now; whether the VM is still there."""
    try:
        del outgoing[: line.send(outgoing)]
    except BlockingIOError:
        return True
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _received(line: socket.socket) -> bytes:
    """Nothing when the VM has ended."""
    try:
        return line.recv(_PIECE_BYTES)
    except ConnectionResetError:
        return b""
