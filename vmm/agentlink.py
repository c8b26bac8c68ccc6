"""One session on one of a guest's agent ports: the port's lock, the greeting, and frames both ways with one poll.

QEMU serves a port's socket to one client at a time, and a second one would wait without a word; so a client first locks
`agent-N.sock.lock`, which the kernel gives back when the client dies.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fuse import protocol
from imaged.errors import FormatError
from vmm import agentproto
from vmm.agentproto import COMMAND_PORT_COUNT, PORT_COUNT, Frame, Incoming, Kind
from vmm.errors import AgentBusyError, AgentError, AgentKilledError, AgentTimeoutError

_PORT_POLL_S = 0.02
_COMMAND_PORTS = range(COMMAND_PORT_COUNT)
_CONTROL_PORTS = (*range(COMMAND_PORT_COUNT, PORT_COUNT), *_COMMAND_PORTS)
_GREETING_AGAIN_S = 0.3
_SILENCE_S = 2.0
"""Without an answer on a new connection it is made anew, the next time after twice as long."""
_RECEIVE_BYTES = 1 << 18
_LONGEST_S = 1e6
"""A wait of more milliseconds than an int has is two."""
_HINT_CONSOLE = "the guest may still boot, be paused or hang: see pvisor vm ls and pvisor vm console"


class AgentLink:
    """Frames to and from the agent. `ready` holds the other descriptors that the last `turn` found ready."""

    def __init__(self, path: Path, connection: socket.socket, lock: int, nonce: bytes) -> None:
        self._path, self._connection, self._lock = path, connection, lock
        self._incoming = Incoming(nonce)
        self._nonce = nonce
        self._outgoing = bytearray()
        self._poll = select.poll()
        self._is_over = False
        self.ready: set[int] = set()

    @classmethod
    def open(
        cls, run_dir: Path, *, timeout_s: float, control: bool = False, waiting: Callable[[], None] | None = None
    ) -> AgentLink:
        """See `Agent.connect`."""
        until = time.monotonic() + timeout_s
        path, connection, lock = _take_port(run_dir, until, timeout_s, _CONTROL_PORTS if control else _COMMAND_PORTS)
        link = cls(path, connection, lock, agentproto.new_nonce())
        try:
            link._greet(until, timeout_s, waiting)
        except BaseException:
            link.close()
            raise
        return link

    @property
    def backlog(self) -> int:
        """Bytes that the guest has not taken yet."""
        return len(self._outgoing)

    def send(self, kind: Kind, payload: bytes | memoryview) -> None:
        """Queues a frame and writes what the socket takes at once; `turn` writes the rest."""
        if self._incoming.agent_nonce is None:
            raise AgentError("the session with the agent has not begun")
        self._outgoing += agentproto.pack(kind, payload, self._incoming.agent_nonce)
        self._flush()

    def turn(self, wait_s: float | None, others: Mapping[int, int] | None = None) -> list[Frame]:
        """Waits until frames can be read or written, an event of `others` (descriptor: poll events) or the time is up.

        Returns the frames that came. AgentError when QEMU has closed the connection; AgentKilledError once all that an
        agent had said before it was killed has been returned.
        """
        if self._is_over:
            raise AgentKilledError(
                "the agent in the guest was killed, and another one began: what it was doing for this is not known",
                hint="the guest runs on: try again",
            )
        watched = dict(others or {})
        watched[self._connection.fileno()] = select.POLLIN | (select.POLLOUT if self._outgoing else 0)
        for descriptor, events in watched.items():
            self._poll.register(descriptor, events)
        try:
            happened = dict(self._poll.poll(None if wait_s is None else min(max(0.0, wait_s), _LONGEST_S) * 1000))
        finally:
            for descriptor in watched:
                self._poll.unregister(descriptor)
        events = happened.pop(self._connection.fileno(), 0)
        self.ready = set(happened)
        if events & select.POLLOUT:
            self._flush()
        return self._receive() if events & ~select.POLLOUT else []

    def close(self) -> None:
        """Ends the session: the agent goes on with what was started in it."""
        self._connection.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _flush(self) -> None:
        try:
            while self._outgoing:
                sent = self._connection.send(self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _gone() from error

    def _receive(self) -> list[Frame]:
        try:
            data = self._connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except ConnectionResetError as error:
            raise _gone() from error
        if not data:
            raise _gone()
        try:
            frames = self._incoming.feed(data)
        except FormatError as error:
            raise AgentError(error.message, hint="the session with the guest is broken; try again") from error
        for at, frame in enumerate(frames):
            if frame.kind is Kind.BEGUN:
                self._is_over = True
                return frames[:at]
        return frames

    def _greet(self, until: float, timeout_s: float, waiting: Callable[[], None] | None) -> None:
        """HELLO, again as long as the guest takes it and does not answer, until WELCOME.

        The agent may be waiting for the rest of a frame that a killed client began: zeros fill it up. And QEMU may pass
        on nothing of the guest's: when a client goes while the guest takes no more input, and QEMU notices that as it
        writes, the port stays throttled until its next client goes, too.
        """
        greeting = agentproto.hello(self._nonce)
        self._outgoing += greeting
        self._flush()
        again = time.monotonic() + _GREETING_AGAIN_S
        silence_s = _SILENCE_S
        anew = time.monotonic() + silence_s
        while self._incoming.agent_nonce is None:
            now = time.monotonic()
            if now >= until:
                raise AgentTimeoutError(f"the agent in the guest did not answer in {timeout_s:g} s", hint=_HINT_CONSOLE)
            if now >= anew:
                self._connect_anew(until)
                self._outgoing[:] = greeting
                self._flush()
                silence_s *= 2
                now = time.monotonic()
                again, anew = now + _GREETING_AGAIN_S, now + silence_s
            if now >= again:
                if waiting is not None:
                    waiting()
                if not self._outgoing and self._untaken_bytes() == 0:
                    self._outgoing += bytes(agentproto.FRAME_BYTES) + greeting
                    self._flush()
                again = now + _GREETING_AGAIN_S
            if self.turn(min(until, again, anew) - now):
                raise AgentError("the agent spoke first", hint="this is a defect, please report it")
        if self._incoming.version != agentproto.VERSION:
            raise AgentError(
                f"the agent in the guest speaks version {self._incoming.version} of its protocol, not "
                f"{agentproto.VERSION}",
                hint="the snapshot was made by another pVisor: use that one, or boot the VM anew",
            )

    def _connect_anew(self, until: float) -> None:
        """To the same port, in the same session. AgentError when QEMU has ended."""
        self._connection.close()
        self._incoming = Incoming(self._nonce)
        while True:
            try:
                self._connection = _connected(self._path)
                return
            except BlockingIOError:  # QEMU's queue is full
                if time.monotonic() >= until:
                    raise AgentTimeoutError(f"QEMU serves {self._path} to nobody", hint=_HINT_CONSOLE) from None
                time.sleep(_PORT_POLL_S)
            except OSError as error:
                raise _gone() from error

    def _untaken_bytes(self) -> int:
        answer = fcntl.ioctl(self._connection, termios.TIOCOUTQ, bytes(4))
        return int(struct.unpack("i", answer)[0])


def _gone() -> AgentError:
    return AgentError(
        "the connection to the guest ended: its VM was parked, removed, or its QEMU died",
        hint="see pvisor vm ls",
    )


def _take_port(
    run_dir: Path, until: float, timeout_s: float, numbers: Sequence[int]
) -> tuple[Path, socket.socket, int]:
    """The first free port of these, a connection to it, and its lock. A port whose socket is gone is not one."""
    while True:
        absent: AgentError | None = None
        busy = False
        for number in numbers:
            path = run_dir / f"agent-{number}.sock"
            try:
                taken = _try_port(path)
            except AgentError as error:
                absent = absent or error
                continue
            if taken is not None:
                return path, *taken
            busy = True
        if absent is not None and not busy:
            raise absent
        if time.monotonic() >= until:
            raise AgentBusyError(
                f"{len(numbers)} commands run in the guest at once, and none ended in {timeout_s:g} s",
                hint="wait for a running `pvisor vm exec` to end; `pvisor vm ps` lists what runs",
            )
        time.sleep(_PORT_POLL_S)


def _try_port(path: Path) -> tuple[socket.socket, int] | None:
    lock = None
    try:
        lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _connected(path), lock
    except BaseException as error:
        if lock is not None:
            os.close(lock)
        if isinstance(error, BlockingIOError):  # locked, or QEMU's queue is full
            return None
        if isinstance(error, OSError):
            raise AgentError(f"no QEMU serves {path}: {error.strerror}", hint="see pvisor vm ls") from error
        raise


def _connected(path: Path) -> socket.socket:
    """OSError, of which BlockingIOError says that QEMU's queue is full."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        with protocol.address(path) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection
