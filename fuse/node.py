"""The node daemon as commands see it. On the hot path of `pvisor run`, so: the standard library, and little of it."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fuse import protocol, rundir
from fuse.errors import NodeError
from imaged.config import Config
from imaged.errors import FormatError

_CONNECT_S = 10.0
_STATUS_S = 10.0
_OPEN_S = 600.0
"""Opening an image may pull it first, and its server may be slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenImage:
    """An image whose metadata is in a local file and whose data the daemon serves.

    `id` is the image's id, `data_id` its data block image (both 64 hex digits; the types that check them would cost
    the hot path an import). `config` is the `config` object of the OCI image configuration.
    """

    id: str
    name: str
    config: dict[str, Any]
    platform: str
    metadata_path: Path
    data_id: str
    data_path: Path

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "config": self.config,
            "platform": self.platform,
            "metadata_path": str(self.metadata_path),
            "data_id": self.data_id,
            "data_path": str(self.data_path),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        return cls(
            id=document["id"],
            name=document["name"],
            config=document["config"],
            platform=document["platform"],
            metadata_path=Path(document["metadata_path"]),
            data_id=document["data_id"],
            data_path=Path(document["data_path"]),
        )


class Node:
    """A daemon that was there when this object was made. Threads may share it: each request has its own connection."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def open_image(self, name: str, *, server: str | None = None) -> OpenImage:
        """Make an image ready to mount: by name, unique end of a name, or id.

        One that is not in the local store is pulled lazily from `server`, or from the daemon's server. NodeError
        carries what the daemon says.
        """
        return OpenImage.from_json(self._request("open", _OPEN_S, name=name, server=server))

    def status(self) -> dict[str, Any]:
        """pid, uptime_s, server, home, mount, and `images`: by image id its name and counters."""
        return self._request("status", _STATUS_S)

    def stop(self) -> None:
        """As `stop`."""
        stop(self.config)

    def _request(self, operation: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        request = {"op": operation, "protocol": protocol.PROTOCOL, "home": str(self.config.home), **fields}
        try:
            with _connected(self.config) as connection:
                connection.settimeout(timeout_s)
                protocol.send_line(connection, request)
                answer = protocol.receive_line(connection)
        except TimeoutError as error:
            pid = rundir.daemon_pid(self.config)
            raise NodeError(
                f"the node daemon (pid {pid}) does not answer within {timeout_s:.0f} s",
                hint=f"`pvisor node stop` ends it; its log is {rundir.log_path(self.config)}",
            ) from error
        except (OSError, FormatError) as error:
            raise NodeError(
                f"the node daemon went away during {operation!r}: {error}",
                hint=f"the next command starts it again; its log is {rundir.log_path(self.config)}",
            ) from error
        if not answer.get("ok"):
            message = str(answer.get("error", "the node daemon gave no reason"))
            raise NodeError(message, hint=str(answer.get("hint", "")))
        result: dict[str, Any] = answer["result"]
        return result


def connect(config: Config) -> Node | None:
    """The daemon that runs, or None."""
    try:
        _connected(config).close()
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        return None
    except OSError as error:
        raise NodeError(
            f"can not connect to the node daemon at {rundir.socket_path(config)}: {error}",
            hint="run as the user who started it",
        ) from error
    return Node(config)


def ensure(config: Config) -> Node:
    """The daemon; started when there is none, after cleaning up what a dead one left mounted."""
    node = connect(config)
    if node is not None:
        return node
    from fuse.starter import start

    return start(config)


def stop(config: Config) -> bool:
    """Unmount every image and end the daemon; whether one ran. NodeError names the mounts that are in use."""
    from fuse import starter

    return starter.stop(config)


def _connected(config: Config) -> socket.socket:
    """A connection. A full backlog gives EAGAIN at once, so that is waited for here."""
    deadline = time.monotonic() + _CONNECT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with protocol.address(rundir.socket_path(config)) as address:
                connection.connect(address)
            return connection
        except BlockingIOError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        except BaseException:
            connection.close()
            raise
