"""The agent in a guest, as the host sees it: run processes, give the guest its identity, end it.

One `Agent` is one session on one of the guest's ports, and does one thing at a time; several in parallel (up to eight)
are several `Agent.connect`. When a session ends, however it ends, what it has started in the guest goes on.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from vmm import agentproto
from vmm.agentinput import Input
from vmm.agentlink import AgentLink
from vmm.agentproto import PAYLOAD_MAX, Frame, Kind
from vmm.control import Control
from vmm.errors import NOT_EXECUTABLE, NOT_FOUND, AgentError, AgentTimeoutError, VmCommandError, VmSetupError

ANSWER_TIMEOUT_S = 60.0
"""How long a question that takes the agent no time may wait: a VM can be paused while it is captured."""
_ENTROPY_BYTES = 64
_TAKEN = b"taken"
"""A PING behind a request or a signal; its answer says that the agent has taken both."""
_EXHAUSTED = (
    "the guest has no memory or no process ids left: `pvisor vm ps` lists what runs, `pvisor vm kill` ends it; or boot "
    "one with more --memory"
)


class Ended(NamedTuple):
    """How a process ended: by itself (`code`), or by a signal. `timed_out` when its timeout ended it."""

    code: int | None
    signal: int | None
    timed_out: bool = False

    @property
    def exit_code(self) -> int:
        """As a shell gives it: the code, or 128 + the signal."""
        return self.code if self.code is not None else 128 + (self.signal or 0)


class GuestProcess(NamedTuple):
    """A process in a guest. `followed`: it is a command whose caller is there. `age_s` is in the guest's own time."""

    pid: int
    followed: bool
    age_s: float
    argv: tuple[str, ...]


class Agent:
    """A session with the agent. Not for sharing between threads; after an error only `close` is useful."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        self._heard_by: float | None = None

    @classmethod
    def connect(
        cls,
        run_dir: Path,
        *,
        timeout_s: float = 30.0,
        control: bool = False,
        waiting: Callable[[], None] | None = None,
    ) -> Agent:
        """Takes a free port (`agent-N.sock` in `run_dir`) and waits until the agent answers on it.

        `control` is for what is no command: it has a port of its own. `waiting` is called from time to time while the
        agent does not answer; what it raises ends that.

        AgentBusyError when no port became free in the time, AgentTimeoutError when the agent did not answer (the guest
        still boots, is paused or hangs), AgentError when no QEMU listens or it ended meanwhile.
        """
        return cls(AgentLink.open(run_dir, timeout_s=timeout_s, control=control, waiting=waiting))

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def ping(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Returns when the agent has answered."""
        token = agentproto.new_nonce()
        self._link.send(Kind.PING, token)
        if self._answer(Kind.PONG, timeout_s) != token:
            raise AgentError("the agent answered another question")

    def execute(
        self,
        argv: Sequence[str | bytes],
        *,
        env: Mapping[str, str] | Mapping[bytes, bytes] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: int | bytes | None = None,
        stdout: Callable[[bytes], object],
        stderr: Callable[[bytes], object],
        timeout_s: float | None = None,
        terminal: tuple[int, int] | None = None,
        control: Control | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Ended:
        """Runs a program in the guest and hands its output over as it comes, complete, in the order of each stream.

        `env` is the whole environment (PATH and HOME are added where missing); str arguments may hold surrogate
        escapes for bytes that are no UTF-8. `user` is `name` or `uid`, either with `:group`, by the guest's own
        /etc/passwd. `stdin` is a descriptor that is read as the program takes it, bytes, or nothing (/dev/null).
        A callback that blocks holds the program back; one that raises BrokenPipeError has its stream closed in the
        guest, so that the program gets SIGPIPE; other exceptions end the session, not the program.

        After `timeout_s` on the guest's clock (it stands while the VM is paused) all processes of the job get SIGTERM,
        two seconds later SIGKILL. `terminal` is (rows, columns): the program gets a terminal of this size, and all of
        its output comes to `stdout`. `on_start` is called once the program runs.

        Returns when the program has ended and what it wrote is handed over; processes it left behind go on.
        VmCommandError (126, 127) when it can not be executed, VmSetupError for a user that is not there or a directory
        that is not and can not be made, AgentError when the connection broke, as when the agent was killed, or
        nothing is said for a minute after the request or a signal: the program then goes on if it was started and the
        VM lives.
        """
        self._request(Kind.EXECUTE, _job(argv, env, cwd, user, timeout_s, stdin is not None, terminal))
        self._expect_word()
        source = Input(stdin)
        until = None if timeout_s is None else time.monotonic() + timeout_s + ANSWER_TIMEOUT_S
        outputs = {Kind.STDOUT: stdout, Kind.STDERR: stderr}
        while True:
            for frame in self._turn(source, control, until):
                if frame.kind in outputs:
                    try:
                        outputs[frame.kind](frame.payload)
                    except BrokenPipeError:
                        outputs[frame.kind] = _discard
                        self._link.send(Kind.CLOSE, b"\1" if frame.kind is Kind.STDOUT else b"\2")
                elif frame.kind is Kind.CREDIT:
                    source.credit += agentproto.credit(frame.payload)
                elif frame.kind is Kind.STARTED:
                    if on_start is not None:
                        on_start()
                elif frame.kind is Kind.ENDED:
                    code, signal, timed_out = agentproto.ended(frame.payload)
                    return Ended(code=None if signal else code, signal=signal or None, timed_out=timed_out)
                else:
                    raise self._unexpected(frame)

    def identify(
        self,
        *,
        hostname: str | None = None,
        machine_id: str | None = None,
        time_ns: int | None = None,
        entropy: bytes | None = None,
        mac: str | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> tuple[str, ...]:
        """Makes the guest another than its siblings; what is None stays as it is. Then jobs that are held go on.

        `machine_id` is 32 hex digits, `time_ns` the wall clock (Unix time), `entropy` at least 32 bytes that no other
        guest gets, mixed into the kernel's generator, which is then reseeded; `mac` is xx:xx:xx:xx:xx:xx, for the first
        network interface. Returns what could not be done and does no harm (files of a full root); AgentError
        when clock, generator, hostname or address could not be set.
        """
        items: list[tuple[bytes, bytes]] = []
        if entropy is not None:
            if len(entropy) < 32:
                raise ValueError(f"{len(entropy)} bytes of entropy, fewer than 32")
            items.append((b"r", entropy[:_ENTROPY_BYTES]))
        if hostname is not None:
            items.append((b"h", hostname.encode()))
        if machine_id is not None:
            items.append((b"m", machine_id.encode()))
        if mac is not None:
            items.append((b"n", bytes.fromhex(mac.replace(":", ""))))
        if time_ns is not None:
            items.append((b"c", struct.pack(">2Q", *divmod(time_ns, 10**9))))
        self._request(Kind.IDENTIFY, items)
        return _texts(self._answer(Kind.DONE, timeout_s))

    def hold(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> tuple[str, ...]:
        """Holds all jobs still, until `identify` or, without one, for five seconds of the guest's time.

        Returns what could not be done: a text when some did not stand still within a second. AgentError when nothing
        can be held.
        """
        self._link.send(Kind.HOLD, b"")
        return _texts(self._answer(Kind.DONE, timeout_s))

    def processes(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> tuple[tuple[GuestProcess, ...], tuple[str, ...]]:
        """What commands have started and what that has started, as far as it lives; and, as texts, that there is more
        than one answer has room for. AgentError."""
        self._link.send(Kind.LIST, b"")
        fields = list(agentproto.parse_fields(self._answer(Kind.DONE, timeout_s)))
        found = tuple(GuestProcess(*agentproto.process(value)) for tag, value in fields if tag == b"p")
        return found, tuple(agentproto.text(value) for tag, value in fields if tag == b"f")

    def kill(self, pid: int, signal: int, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Send a signal to one of `processes`, and where it is a command to all of its group. VmSetupError when it is
        none of them."""
        self._request(Kind.KILL, [(b"p", str(pid).encode()), (b"s", str(signal).encode())])
        self._answer(Kind.DONE, timeout_s)

    def shutdown(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Makes the guest's init end all processes, unmount the disks and power off; QEMU ends when that is done.

        Returns when it has begun, with all that was written until then on the guest's disks.
        """
        self._link.send(Kind.SHUTDOWN, b"")
        self._answer(Kind.DONE, timeout_s)

    def _request(self, kind: Kind, items: Sequence[tuple[bytes, bytes]]) -> None:
        """PART frames as needed, the last as `kind`."""
        data = memoryview(agentproto.fields(items))
        if len(data) > agentproto.REQUEST_MAX:
            raise VmSetupError(f"arguments and environment are {len(data)} bytes, more than {agentproto.REQUEST_MAX}")
        while len(data) > PAYLOAD_MAX:
            self._link.send(Kind.PART, data[:PAYLOAD_MAX])
            data = data[PAYLOAD_MAX:]
        self._link.send(kind, data)

    def _answer(self, kind: Kind, timeout_s: float) -> bytes:
        until = time.monotonic() + timeout_s
        while True:
            for frame in self._link.turn(until - time.monotonic()):
                if frame == (Kind.PONG, _TAKEN):
                    continue
                if frame.kind is kind:
                    return frame.payload
                raise self._unexpected(frame)
            if time.monotonic() >= until:
                raise AgentTimeoutError(
                    f"the agent did not answer in {timeout_s:g} s: what it did is not known",
                    hint="the guest is paused or hangs; pvisor vm console shows its console",
                )

    def _turn(self, source: Input, control: Control | None, until: float | None) -> list[Frame]:
        """Waits for something to do, does it, and returns the frames that came."""
        wait_s = None if until is None else until - time.monotonic()
        if wait_s is not None and wait_s <= 0:
            raise AgentTimeoutError("the agent did not end the job at its timeout: what became of it is not known")
        if self._heard_by is not None:
            left_s = self._heard_by - time.monotonic()
            wait_s = left_s if wait_s is None else min(wait_s, left_s)
        others: dict[int, int] = {}
        if control is not None:
            others[control.fileno()] = select.POLLIN
        if source.wants and not self._link.backlog:
            if source.descriptor is None:
                wait_s = 0.0
            else:
                others[source.descriptor] = select.POLLIN
        frames = self._hear(self._link.turn(wait_s, others))
        if control is not None and control.fileno() in self._link.ready:
            for what, first, second in control.take():
                if what == b"s":
                    self._link.send(Kind.SIGNAL, bytes([first]))
                    self._expect_word()
                else:
                    self._link.send(Kind.WINDOW, agentproto.window_size(first, second))
        if (
            source.wants
            and not self._link.backlog
            and (source.descriptor is None or source.descriptor in self._link.ready)
        ):
            for piece in source.take():
                self._link.send(Kind.STDIN, piece)
        return frames

    def _expect_word(self) -> None:
        """The agent answers what was just sent, or says anything else, or `_hear` gives it up."""
        self._link.send(Kind.PING, _TAKEN)
        if self._heard_by is None:
            self._heard_by = time.monotonic() + ANSWER_TIMEOUT_S

    def _hear(self, frames: list[Frame]) -> list[Frame]:
        """Without what only says that a request or a signal was taken. AgentTimeoutError when that is not said, nor
        anything else: who sends a signal wants an end, also of a command whose guest hangs."""
        if (Kind.PONG, _TAKEN) in frames:
            self._heard_by = None
        elif self._heard_by is not None:
            now = time.monotonic()
            if frames:
                self._heard_by = now + ANSWER_TIMEOUT_S
            elif now >= self._heard_by:
                raise AgentTimeoutError(
                    f"the agent said nothing for {ANSWER_TIMEOUT_S:g} s: what became of the command is not known",
                    hint="the guest is paused or hangs: see pvisor vm ls and pvisor vm console",
                )
        return [frame for frame in frames if frame != (Kind.PONG, _TAKEN)]

    def _unexpected(self, frame: Frame) -> Exception:
        if frame.kind is not Kind.REFUSED:
            return AgentError(f"the agent answered with {frame.kind.name}", hint="this is a defect, please report it")
        code, text = agentproto.refused(frame.payload)
        if code in (NOT_EXECUTABLE, NOT_FOUND):
            return VmCommandError(text, exit_code=code)
        return VmSetupError(text, hint=_EXHAUSTED if text.startswith(("fork: ", "clone3: ")) else "")


def _texts(answer: bytes) -> tuple[str, ...]:
    return tuple(agentproto.text(value) for _, value in agentproto.parse_fields(answer))


def _discard(data: bytes) -> None:
    del data


def _job(
    argv: Sequence[str | bytes],
    env: Mapping[str, str] | Mapping[bytes, bytes] | None,
    cwd: str | None,
    user: str | None,
    timeout_s: float | None,
    has_stdin: bool,
    terminal: tuple[int, int] | None,
) -> list[tuple[bytes, bytes]]:
    """The fields of EXECUTE. VmSetupError."""
    items = [(b"a", os.fsencode(argument)) for argument in argv]
    items += [(b"e", os.fsencode(name) + b"=" + os.fsencode(value)) for name, value in (env or {}).items()]
    if any(b"\0" in value for _, value in items):
        raise VmSetupError("an argument or variable has a NUL byte, which none can have")
    if cwd is not None:
        items.append((b"d", os.fsencode(cwd)))
    if user is not None:
        items.append((b"u", os.fsencode(user)))
    if timeout_s is not None:
        items.append((b"t", str(max(1, round(timeout_s * 1000))).encode()))
    if has_stdin:
        items.append((b"i", b""))
    if terminal is not None:
        items.append((b"w", agentproto.window_size(*terminal)))
    return items
