"""The node daemon as commands see it. On the hot path of `pvisor run`, so: the standard library, and little of it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

from fuse import protocol, rundir
from fuse.errors import NodeError
from fuse.opened import OpenImage, OpenSnapshot
from imaged.config import Config
from imaged.errors import FormatError

__all__ = [
    "Node",
    "OpenImage",
    "OpenSnapshot",
    "Opening",
    "begin_open",
    "check_snapshot",
    "connect",
    "ensure",
    "open_image",
    "open_snapshot",
    "required_keys",
    "stop",
]
_CONNECT_S = 10.0
_STATUS_S = 10.0
_OPEN_S = 600.0
"""Opening an image may pull it first, and its server may be slow."""


class Node:
    """A daemon that was there when this object was made. Threads may share it: each request has its own connection."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def open_image(
        self, name: str, *, server: str | None = None, start: bool = False, require: Sequence[str] = ()
    ) -> OpenImage:
        """Make an image ready to mount: by name, unique end of a name, or id.

        One that is not in the local store is pulled lazily from `server`, or from the daemon's server. With `start` a
        process is about to start in it, and what that touches may be recorded. `require` are public keys in hex: one of
        them must have signed it. NodeError carries what the daemon says.
        """
        return self.begin_open(name, server=server, start=start, require=require).wait()

    def begin_open(
        self, name: str, *, server: str | None = None, start: bool = False, require: Sequence[str] = ()
    ) -> Opening:
        """As `open_image`, while the caller does something else. NodeError."""
        return Opening(_Call(self.config, "open", _OPEN_S, _opening(name, server, start, require)))

    def open_snapshot(self, name: str, *, server: str | None = None) -> OpenSnapshot:
        """Make a snapshot ready to be restored: by name, id, or the start of an id. Nothing is mounted.

        What its memory's first run touched is on its way when this returns; when none was recorded, the next one is.
        `server` is where its image comes from when nothing here says it. NodeError names what is missing or damaged of
        what a restore begins with: the record, device state, maps of memory and disk, and the image's metadata.
        """
        return OpenSnapshot.from_json(self._ask("open_snapshot", _OPEN_S, name=name, server=server))

    def check_snapshot(self, name: str) -> None:
        """Return when the memory that a machine touches first, going on from this snapshot, was had and verified.

        NodeError names the chunk that nobody has, or has whole. As `open_snapshot` began with it, there is little to
        wait for by the time QEMU is ready.
        """
        self._ask("check_snapshot", _OPEN_S, name=name)

    def pull(self, name: str, *, server: str, require: Sequence[str] = ()) -> dict[str, Any]:
        """As `open_image`, after asking the server what the name means now: `id` and full `name`, and what that cost.

        The name is set when this returns, and the chunks of the image's startup profile are on their way. NodeError.
        """
        return self._ask("pull", _OPEN_S, name=name, server=server, require=list(require) or None)

    def fill(self, image: str, *, bytes_per_s: int | None = None) -> None:
        """Fetch in the background all that an image, by its id, lacks; also after this daemon. NodeError.

        `status` tells how far it is. `bytes_per_s` bounds what comes over the wire; None is the daemon's own bound.
        """
        self._ask("fill", _OPEN_S, image=image, bytes_per_s=bytes_per_s)

    def tidy(self) -> None:
        """Let go of what nobody uses any more, so that a collection may take it. NodeError."""
        self._ask("tidy", _STATUS_S)

    def limit_cache(self, max_bytes: int) -> None:
        """Keep no more than so many bytes of what servers can give again. NodeError."""
        self._ask("limit_cache", _STATUS_S, max_bytes=max_bytes)

    def status(self) -> dict[str, Any]:
        """pid, uptime_s, server, home, mount, `images` (by image id its name and counters), `fills` (by image id its
        name, state, chunks, present_chunks, counters and error), `vms` (the name of each that runs on this host) and
        `cache` (its bound and use, and what was evicted)."""
        return self._ask("status", _STATUS_S)

    def stop(self) -> None:
        """As `stop`."""
        stop(self.config)

    def _ask(self, operation: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        with contextlib.closing(_Call(self.config, operation, timeout_s, fields)) as call:
            return call.result()


class Opening:
    """An image on its way: the daemon opens it, and pulls it first if need be."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def is_answered(self, within_s: float) -> bool:
        """Whether `wait` would return by then."""
        return self._call.is_answered(within_s)

    def wait(self) -> OpenImage:
        """The image, once. NodeError carries what the daemon says."""
        with contextlib.closing(self._call) as call:
            return OpenImage.from_json(call.result())

    def close(self) -> None:
        """Nobody waits for it any more."""
        self._call.close()


class _Call:
    """One request to the daemon, sent when this is made."""

    def __init__(
        self,
        config: Config,
        operation: str,
        timeout_s: float,
        fields: dict[str, Any],
        connection: socket.socket | None = None,
    ) -> None:
        self._config, self._operation, self._timeout_s = config, operation, timeout_s
        request = {"op": operation, "protocol": protocol.PROTOCOL, "home": str(config.home), **fields}
        if "PVISOR_TOKEN" in os.environ:  # the daemon may have been started without it, or with one that is revoked now
            servers = fields.get("server") or config.server or ""
            request["credentials"] = {"servers": servers, "token": os.environ["PVISOR_TOKEN"]}
        try:
            self._connection = connection or _connected(config)
        except OSError as error:
            raise self._gone(error) from error
        try:
            self._connection.settimeout(timeout_s)
            protocol.send_line(self._connection, request)
        except OSError as error:
            self.close()
            raise self._gone(error) from error
        except BaseException:
            self.close()
            raise

    def is_answered(self, within_s: float) -> bool:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def result(self) -> dict[str, Any]:
        """What the daemon answers. NodeError."""
        try:
            answer = protocol.receive_line(self._connection)
        except TimeoutError as error:
            pid = rundir.daemon_pid(self._config)
            raise NodeError(
                f"the node daemon (pid {pid}) does not answer within {self._timeout_s:.0f} s",
                hint=f"`pvisor node stop` ends it; its log is {rundir.log_path(self._config)}",
            ) from error
        except (OSError, FormatError) as error:
            raise self._gone(error) from error
        if not answer.get("ok"):
            message = str(answer.get("error", "the node daemon gave no reason"))
            raise NodeError(message, hint=str(answer.get("hint", "")))
        result: dict[str, Any] = answer["result"]
        return result

    def close(self) -> None:
        self._connection.close()

    def _gone(self, error: Exception) -> NodeError:
        return NodeError(
            f"the node daemon went away during {self._operation!r}: {error}",
            hint=f"the next command starts it again; its log is {rundir.log_path(self._config)}",
        )


def begin_open(config: Config, name: str, *, server: str | None = None, start: bool = False) -> Opening:
    """`Node.begin_open` at the daemon, which is started when there is none, with the signature that the configuration
    requires. NodeError; OSError, SignatureError for a key file."""
    require = required_keys(config)
    connection = _reached(config)
    if connection is None:
        return ensure(config).begin_open(name, server=server, start=start, require=require)
    return Opening(_Call(config, "open", _OPEN_S, _opening(name, server, start, require), connection))


def required_keys(config: Config) -> list[str]:
    """The public keys of which one must have signed an image, in hex. OSError, SignatureError."""
    if not config.require_signature:
        return []
    from imaged.signature import Trust  # not on the way of most starts

    return Trust.read(config.require_signature).keys()


def open_image(config: Config, name: str, *, server: str | None = None, start: bool = False) -> OpenImage:
    """As `begin_open`, and wait for it."""
    return begin_open(config, name, server=server, start=start).wait()


def open_snapshot(config: Config, name: str, *, server: str | None = None) -> OpenSnapshot:
    """`Node.open_snapshot` at the daemon, which is started when there is none. NodeError."""
    connection = _reached(config)
    if connection is None:
        return ensure(config).open_snapshot(name, server=server)
    with contextlib.closing(
        _Call(config, "open_snapshot", _OPEN_S, {"name": name, "server": server}, connection)
    ) as call:
        return OpenSnapshot.from_json(call.result())


def _opening(name: str, server: str | None, start: bool, require: Sequence[str]) -> dict[str, Any]:
    """The fields of the request."""
    return {"name": name, "server": server, "start": start, "require": list(require) or None}


def check_snapshot(config: Config, name: str) -> None:
    """`Node.check_snapshot` at the daemon that opened it. NodeError."""
    Node(config).check_snapshot(name)


def connect(config: Config) -> Node | None:
    """The daemon that runs, or None."""
    connection = _reached(config)
    if connection is None:
        return None
    connection.close()
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


def _reached(config: Config) -> socket.socket | None:
    """A connection to the daemon; None when none runs."""
    try:
        return _connected(config)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        return None
    except OSError as error:
        raise NodeError(
            f"can not connect to the node daemon at {rundir.socket_path(config)}: {error}",
            hint="run as the user who started it",
        ) from error


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
