"""What a command and the node daemon say to each other: one JSON object on one line each way, over a unix socket.

    request   {"op": "open" | "pull" | "fill" | "open_snapshot" | "check_snapshot" | "status", "protocol": 3,
               "home": "/var/lib/pvisor", ...its own fields}
    answer    {"ok": true, "result": {...}}  or  {"ok": false, "error": "...", "hint": "..."}

One connection carries one request. The socket and its directory belong to one user, who is the only one to connect.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from imaged.errors import FormatError

PROTOCOL = 3
"""Raised whenever a daemon of another version would misunderstand a command or the other way round."""
LINE_LIMIT_BYTES = 16 << 20
_ADDRESS_LIMIT_BYTES = 107
_RECEIVE_BYTES = 1 << 16


@contextlib.contextmanager
def address(path: Path) -> Iterator[str]:
    """A socket address for `path`; a path that is too long for one is named through its directory's descriptor."""
    if len(os.fsencode(path)) <= _ADDRESS_LIMIT_BYTES:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def send_line(connection: socket.socket, document: dict[str, Any]) -> None:
    """One object. OSError as `sendall`."""
    connection.sendall(json.dumps(document, separators=(",", ":")).encode("ascii") + b"\n")


def receive_line(connection: socket.socket) -> dict[str, Any]:
    """One object; FormatError when the other side closes before its end, or sends something else."""
    parts: list[bytes] = []
    size_bytes = 0
    while not parts or not parts[-1].endswith(b"\n"):
        part = connection.recv(_RECEIVE_BYTES)
        size_bytes += len(part)
        if not part or size_bytes > LINE_LIMIT_BYTES:
            limit = f"one line of at most {LINE_LIMIT_BYTES} bytes"
            raise FormatError("message on the node socket", expected=limit, found=f"{size_bytes} bytes without an end")
        parts.append(part)
    try:
        document = json.loads(b"".join(parts))
    except ValueError as error:
        raise FormatError("message on the node socket", expected="JSON", found=str(error)) from error
    if not isinstance(document, dict):
        raise FormatError("message on the node socket", expected="a JSON object", found=type(document).__name__)
    return document
