"""Bytes between the host and the agent in a guest; docs/formats/agent.md tells what they mean.

A session begins with HELLO and WELCOME. After that each side sends frames, and each frame ends in the nonce that its
receiver chose: bytes of a session that was cut off anywhere are never taken for bytes of this one. All numbers are big
endian. No I/O here.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from imaged.errors import FormatError

VERSION = 1
COMMAND_PORT_COUNT = 8
"""Commands that run at once: each has a session, and a session a port of the guest, `pvisor.agent.0` and on."""
PORT_COUNT = COMMAND_PORT_COUNT + 1
"""With the last, on which pVisor itself speaks with the agent, whatever commands run."""
NONCE_BYTES = 8
NOBODY = bytes(NONCE_BYTES)
"""The nonce of BEGUN, which an agent says before it knows any host's."""
HELLO_MAGIC = b"\0\0\0\0pVisor hello"
WELCOME_MAGIC = b"\0\0\0\0pVisor agent"
GREETING = struct.Struct(">16s H 6x 8s 8s")
"""Magic, version, the nonce the sender chose, and the nonce its receiver chose (in HELLO the sender's once more)."""
HEADER = struct.Struct(">B x H")
"""Kind, a zero byte, length of the payload. The payload and the receiver's nonce follow."""
FRAME_BYTES = 32768
"""The most that the guest's kernel takes in one write to a virtio-serial port."""
TEXT_MAX = 4 << 10
"""Bytes of a text for people that are taken from the guest; the rest is left out."""
PAYLOAD_MAX = FRAME_BYTES - HEADER.size - NONCE_BYTES
STDIN_WINDOW = 128 * 1024
"""Bytes of stdin the host may send before the agent has given credit for more."""
REQUEST_MAX = 16 << 20
_FIELD = struct.Struct(">c I")
_ENDED = struct.Struct(">3B")
_CREDIT = struct.Struct(">I")
_PROCESS = struct.Struct(">I ? Q")
_WINDOW = struct.Struct(">2H")


class Kind(IntEnum):
    """What a frame is; below 0x40 to the agent, from 0x40 on to the host."""

    PING = 1
    PART = 2
    EXECUTE = 3
    STDIN = 4
    SIGNAL = 5
    WINDOW = 6
    CLOSE = 7
    IDENTIFY = 8
    SHUTDOWN = 9
    HOLD = 10
    LIST = 11
    KILL = 12
    PONG = 0x41
    STARTED = 0x42
    STDOUT = 0x43
    STDERR = 0x44
    CREDIT = 0x45
    ENDED = 0x46
    REFUSED = 0x47
    DONE = 0x48
    BEGUN = 0x49


class Frame(NamedTuple):
    """What one side tells the other at a time."""

    kind: Kind
    payload: bytes


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def hello(nonce: bytes) -> bytes:
    return GREETING.pack(HELLO_MAGIC, VERSION, nonce, nonce)


def pack(kind: Kind, payload: bytes | memoryview, nonce: bytes) -> bytes:
    """One frame for the side that chose `nonce`."""
    if len(payload) > PAYLOAD_MAX:
        raise ValueError(f"a payload of {len(payload)} bytes, more than {PAYLOAD_MAX}")
    return b"".join((HEADER.pack(kind, len(payload)), payload, nonce))


def fields(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A request: tagged byte strings one after the other. A tag is one byte."""
    return b"".join(_FIELD.pack(tag, len(value)) + value for tag, value in items)


def parse_fields(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    position = 0
    while position < len(data):
        if len(data) - position < _FIELD.size:
            raise FormatError("fields of the agent", expected=f"{_FIELD.size} bytes", found=str(len(data) - position))
        tag, length = _FIELD.unpack_from(data, position)
        position += _FIELD.size
        value = data[position : position + length]
        if len(value) != length:
            raise FormatError("a field of the agent", expected=f"{length} bytes", found=str(len(value)))
        yield tag, value
        position += length


def window_size(rows: int, columns: int) -> bytes:
    return _WINDOW.pack(rows, columns)


def credit(payload: bytes) -> int:
    """Payload of CREDIT: how many more bytes of stdin may be sent."""
    return int(_whole(_CREDIT, payload, "credit of the agent")[0])


def ended(payload: bytes) -> tuple[int, int, bool]:
    """Payload of ENDED: exit code, signal (0: none), whether the timeout ended it."""
    code, signal, timed_out = _whole(_ENDED, payload, "end of a job")
    return code, signal, bool(timed_out)


def process(value: bytes) -> tuple[int, bool, float, tuple[str, ...]]:
    """A field of the answer to LIST: process id, whether a session follows it, its age in seconds, and its words."""
    if len(value) < _PROCESS.size:
        raise FormatError("a process of the guest", expected=f"{_PROCESS.size} bytes", found=str(len(value)))
    pid, followed, age_ms = _PROCESS.unpack_from(value)
    words = value[_PROCESS.size :].removesuffix(b"\0")
    return pid, bool(followed), age_ms / 1000, tuple(text(word) for word in words.split(b"\0"))


def refused(payload: bytes) -> tuple[int, str]:
    """Payload of REFUSED: an exit code, 125 to 127, and why."""
    if not payload:
        raise FormatError("a refusal of the agent", expected="an exit code", found="nothing")
    return payload[0], text(payload[1:])


def text(payload: bytes) -> str:
    """What an agent says for people; a hostile one may say anything, and much."""
    return payload[:TEXT_MAX].decode("utf-8", "backslashreplace")


def _whole(layout: struct.Struct, payload: bytes, what: str) -> tuple[int, ...]:
    if len(payload) != layout.size:
        raise FormatError(what, expected=f"{layout.size} bytes", found=str(len(payload)))
    return layout.unpack(payload)


class Incoming:
    """The host's side of a session's bytes: finds the WELCOME to its HELLO, then the frames after it.

    What comes before that WELCOME is left over from earlier sessions. Not for sharing between threads.
    """

    def __init__(self, nonce: bytes) -> None:
        self._nonce = nonce
        self._data = bytearray()
        self.agent_nonce: bytes | None = None
        self.version = 0

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are whole with these bytes; BEGUN among them means that no session is left.

        FormatError when the agent sends something else.
        """
        self._data += data
        if self.agent_nonce is None and not self._find_welcome():
            return []
        frames: list[Frame] = []
        position = 0
        while len(self._data) - position >= HEADER.size:
            if self._data.startswith(WELCOME_MAGIC[: HEADER.size], position):  # an answer to a HELLO sent again
                if len(self._data) - position < GREETING.size:
                    break
                position += GREETING.size
                continue
            kind, length = HEADER.unpack_from(self._data, position)
            end = position + HEADER.size + length + NONCE_BYTES
            if len(self._data) < end:
                break
            begun = kind == Kind.BEGUN and not length
            if self._data[end - NONCE_BYTES : end] != (NOBODY if begun else self._nonce):
                raise FormatError("a frame of the agent", expected="this session's nonce", found="another")
            payload = bytes(memoryview(self._data)[position + HEADER.size : end - NONCE_BYTES])
            frames.append(Frame(_kind(kind), payload))
            position = end
        del self._data[:position]
        return frames

    def _find_welcome(self) -> bool:
        position = self._data.find(WELCOME_MAGIC)
        while position >= 0 and len(self._data) - position >= GREETING.size:
            _, version, agent_nonce, nonce = GREETING.unpack_from(self._data, position)
            if nonce == self._nonce:
                self.agent_nonce, self.version = agent_nonce, version
                del self._data[: position + GREETING.size]
                return True
            position = self._data.find(WELCOME_MAGIC, position + 1)
        keep = len(self._data) - position if position >= 0 else len(WELCOME_MAGIC) - 1
        del self._data[: max(0, len(self._data) - keep)]
        return False


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError as error:
        raise FormatError("a frame of the agent", expected="a known kind", found=str(number)) from error
