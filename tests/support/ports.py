"""Ports for servers that can not be told to take any free one."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(18_000, 32_000)
"""The kernel gives none of these to an outgoing connection, and two processes hardly choose the same."""


def free_port() -> int:
    """A loopback port that nobody listens on."""
    while True:
        port = random.SystemRandom().choice(_BELOW_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
