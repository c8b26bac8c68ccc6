"""The guest's agent without a guest, behind a port as QEMU has it: a socket for one client at a time, before a stream
that does not end with the client and on which the agent can not see a client go.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vmm.guest.program import joined

_PIECE = 1 << 16


class Port:
    """Carries bytes between whoever is connected to `path` and the agent. What is under way to a client that is gone is
    lost; what it had sent arrives."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._guest, self.agent_end = socket.socketpair()
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client: socket.socket | None = None
        towards_guest, towards_client = b"", b""
        while True:
            poll = select.poll()
            poll.register(self._stop, select.POLLIN)
            wants = (0 if towards_client else select.POLLIN) | (select.POLLOUT if towards_guest else 0)
            poll.register(self._guest, wants)
            if client is None:
                poll.register(self._listener, 0 if towards_guest else select.POLLIN)
            else:
                wants = (0 if towards_guest else select.POLLIN) | (select.POLLOUT if towards_client else 0)
                poll.register(client, wants)
            ready = dict(poll.poll())
            if self._stop in ready:
                break
            events = ready.get(self._guest.fileno(), 0)
            if events & select.POLLOUT:
                towards_guest = towards_guest[self._guest.send(towards_guest) :]
            if events & (select.POLLHUP | select.POLLERR):
                break
            if events & select.POLLIN:
                data = self._guest.recv(_PIECE)
                towards_client = data if client is not None else b""
            if client is None:
                if ready.get(self._listener.fileno()):
                    client = self._listener.accept()[0]
                continue
            events = ready.get(client.fileno(), 0)
            try:
                if events & select.POLLOUT:
                    towards_client = towards_client[client.send(towards_client) :]
                if events & select.POLLIN:
                    towards_guest = client.recv(_PIECE)
                gone = bool(events & (select.POLLIN | select.POLLHUP)) and not towards_guest
            except OSError:
                gone = True
            if gone:
                client.close()
                client, towards_client = None, b""
        if client is not None:
            client.close()

    def close(self) -> None:
        os.close(self._stopped)
        self._thread.join(timeout=10)
        os.close(self._stop)
        for end in (self._listener, self._guest, self.agent_end):
            end.close()


@contextmanager
def local_agent(directory: Path, *, root: Path, ports: int = 1) -> Iterator[Path]:
    """Starts it with its port sockets in a new `directory`, which is what `Agent.connect` takes.

    Its jobs run chrooted in `root`, which has /dev and /proc.
    """
    directory.mkdir()
    with ExitStack() as stack:
        made = [Port(directory / f"agent-{number}.sock") for number in range(ports)]
        for port in made:
            stack.callback(port.close)
        agent = directory / "agent.pl"
        agent.write_bytes(joined())
        process = subprocess.Popen(
            [*_agent_command(agent, root), *(f"fd:{port.agent_end.fileno()}" for port in made)],
            pass_fds=[port.agent_end.fileno() for port in made],
        )
        for port in made:
            port.agent_end.close()
        try:
            yield directory
            assert process.poll() is None, "the agent has ended"
        finally:
            process.kill()
            process.wait()


def _agent_command(agent: Path, root: Path) -> Sequence[str]:
    """In a mount and uts namespace of its own; the root gets what a guest's has of /proc and /dev."""
    script = """
        mount --rbind /dev "$1/dev" && mount -t proc proc "$1/proc" &&
        mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts "$1/dev/pts" || exit
        agent=$2 root=$1; shift 2; exec perl "$agent" --root "$root" "$@"
    """
    return ["unshare", "--mount", "--uts", "sh", "-c", script, "sh", str(root), str(agent)]
