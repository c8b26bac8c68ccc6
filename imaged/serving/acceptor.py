"""Takes new connections off a listening socket, which other processes may share."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from imaged.serving.guard import HANDSHAKE_S

log = logging.getLogger(__name__)
_ALONE, _SHARED = 64, 4
"""Connections taken in one turn of the event loop, by the only process that listens and by one of several.

A turn also answers whoever is connected: of a hundred clients that come together the last would wait for thirty turns,
ten times as long as for any later answer. Several processes leave more to each other instead.
"""
_EXHAUSTED_S = 0.5


class Acceptor:
    """For one event loop. Not asyncio's own server: that takes all that wait, in the process that wakes first."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[socket.socket], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext | None],
        processes: int,
    ) -> None:
        """`protocol` is made for each connection, of the socket it is on; `tls` is asked for each, so that certificates
        can change. `processes` share the socket."""
        listener.setblocking(False)
        self._at_once = _ALONE if processes == 1 else _SHARED
        self._listener, self._protocol, self._tls = listener, protocol, tls
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._accepting = False

    def start(self) -> None:
        self._timer = None
        self._accepting = True
        self._loop.add_reader(self._listener, self._accept)

    async def stop(self) -> None:
        """Take no more; what is half-way through a handshake is dropped. The socket stays open."""
        if self._timer is not None:
            self._timer.cancel()
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(self._at_once):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors or memory: the connection waits, and so do we.
                log.error("can not take a connection: %s", error.strerror)
                self._accepting = False
                self._loop.remove_reader(self._listener)
                self._timer = self._loop.call_later(_EXHAUSTED_S, self.start)
                return
            sock.setblocking(False)
            task = self._loop.create_task(self._connect(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, sock: socket.socket) -> None:
        context = self._tls()
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(sock),
                sock,
                ssl=context,
                ssl_handshake_timeout=None if context is None else HANDSHAKE_S,
            )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            log.info("a connection came to nothing: %s", error)
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise
