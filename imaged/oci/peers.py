"""Where a registry may send us: only one inside our network may name addresses inside it.

A registry names places to go on to: redirects, token servers, the urls of foreign layers. One on the internet that
names 127.0.0.1 or 169.254.169.254 would have us ask services that trust this host (server-side request forgery), and a
chunk server fetches from registries that its clients name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from imaged.errors import RegistryError

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether this IP address is one of the internet; those that stand for an IPv4 address are judged by that."""
    found = ipaddress.ip_address(address.strip("[]").partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not found.is_multicast


class Peers:
    """Judges the connections made for one registry, of which the first is to the registry itself.

    `trusted(HOST:PORT)` tells hosts that this host's own configuration vouches for. The addresses that count are those
    of the connections, whatever a name resolves to at another time.
    """

    def __init__(self, trusted: Callable[[str], bool]) -> None:
        self._trusted = trusted
        self._registry_is_public: bool | None = None

    def proxied(self, host: str, port: int) -> None:
        """A request through a proxy, which resolves names; RegistryError for an address that is not allowed."""
        if self._registry_is_public is None:
            self._registry_is_public = True
            return
        try:
            self._judge(host, port, host)
        except ValueError:
            return  # a name

    def connecting(self, host: str, port: int) -> None:
        """Before a connection: RegistryError without a packet sent when the name leads to an inner address."""
        if not self._registry_is_public:
            return
        try:
            found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except OSError:
            return  # connecting will say so
        for *_, address in found:
            self._judge(host, port, str(address[0]))

    def connected(self, host: str, port: int, address: str) -> None:
        """After a connection, before anything is sent on it; RegistryError when it may not be used."""
        if self._registry_is_public is None:
            self._registry_is_public = is_public(address)
        else:
            self._judge(host, port, address)

    def _judge(self, host: str, port: int, address: str) -> None:
        netloc = f"{host}:{port}"
        if self._registry_is_public and not is_public(address) and not self._trusted(netloc):
            raise RegistryError(
                f"the registry leads to {netloc}, which is inside this host's network while the registry is not",
                hint=f"list {netloc} in PVISOR_INSECURE_REGISTRIES if it is right",
            )

    def pools(self, **options: Any) -> urllib3.PoolManager:
        """Connection pools with every new connection judged here."""
        peers = self

        class Plain(HTTPConnection):
            def connect(self) -> None:
                peers.connecting(self.host, self.port)
                super().connect()
                peers.connected(self.host, self.port, self.sock.getpeername()[0])

        class Tls(HTTPSConnection):
            def connect(self) -> None:
                peers.connecting(self.host, self.port)
                super().connect()
                peers.connected(self.host, self.port, self.sock.getpeername()[0])

        class PlainPool(urllib3.HTTPConnectionPool):
            ConnectionCls = Plain

        class TlsPool(urllib3.HTTPSConnectionPool):
            ConnectionCls = Tls

        manager = urllib3.PoolManager(**options)
        manager.pool_classes_by_scheme = {"http": PlainPool, "https": TlsPool}
        return manager
