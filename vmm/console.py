"""What a guest prints on its serial line, kept in case it has to be explained why it did not boot, or why it ended.

While it boots a thread reads the line; from then on QEMU appends it to a file, of which only the end is kept.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from pathlib import Path

from fuse import protocol

_KEPT_BYTES = 1 << 16
_RECEIVE_BYTES = 1 << 12
_END_S = 10.0
_LOG_LIMIT_BYTES = 1 << 20
_OUT_OF_MEMORY = re.compile(rb"[Oo]ut of memory: Killed process \d+ \(([^)\r\n]*)\)")
_PANIC = re.compile(rb"Kernel panic - not syncing: ([^\r\n]*)")


class Console:
    """A connection to the serial line, read by a thread: a guest stands still when nobody reads what it prints.

    Make it before QEMU starts, at the socket that listens already: then nothing is lost. May be shared by threads.
    """

    def __init__(self, path: Path) -> None:
        self._kept = bytearray()
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._read, name="vm-console", daemon=True)
        try:
            with protocol.address(path) as address:
                self._socket.connect(address)
            self._thread.start()
        except BaseException:
            self._socket.close()
            raise

    def take(self) -> str:
        """The last 64 KiB of what came since the last call."""
        with self._lock:
            text = self._kept.decode(errors="replace")
            self._kept.clear()
        return text

    def close(self) -> None:
        """Let others have the line."""
        with contextlib.suppress(OSError):  # QEMU has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_END_S)
        self._socket.close()

    def _read(self) -> None:
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except OSError:  # reset by a QEMU that was killed
                return
            if not data:
                return
            with self._lock:
                self._kept += data
                del self._kept[:-_KEPT_BYTES]


def panic(log: Path) -> str:
    """What a guest's kernel said last when it gave up, or "" when it did not, by the file of its serial line."""
    found = _PANIC.findall(_tail(log))
    return found[-1].decode(errors="replace").strip() if found else ""


def killed_for_memory(log: Path, since: int) -> str:
    """What a guest's kernel has ended for lack of memory since its file was so long, or ""."""
    more_bytes = size(log) - since
    found = _OUT_OF_MEMORY.findall(_tail(log)[-more_bytes:]) if more_bytes > 0 else []
    return found[-1].decode(errors="replace") if found else ""


def size(log: Path) -> int:
    """0 when there is none."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def trim(log: Path) -> None:
    """Only the end of a long file is kept; QEMU appends to it meanwhile."""
    with contextlib.suppress(OSError):
        if size(log) > _LOG_LIMIT_BYTES:
            end = _tail(log)
            os.truncate(log, 0)
            with open(log, "ab") as stream:
                stream.write(end)


def _tail(log: Path) -> bytes:
    try:
        with open(log, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _KEPT_BYTES))
            return stream.read()
    except OSError:
        return b""
