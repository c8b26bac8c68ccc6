"""What a guest prints on its serial line while it boots, kept in case it has to be explained why it did not."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

from fuse import protocol

_KEPT_BYTES = 1 << 16
_RECEIVE_BYTES = 1 << 12
_END_S = 10.0


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
