"""Which token goes to which chunk server. PVISOR_TOKEN is for the servers that were configured, and for no other.

Images remember the servers that they came from, and those may be anybody's: a server that is only remembered gets no
token. A token belongs to scheme, host and port, so that one for https:// never travels over http://.
"""

from __future__ import annotations

import re
import threading

from imaged.errors import InvalidNameError

VARIABLE = "PVISOR_TOKEN"
_SECRET = re.compile(r"[A-Za-z0-9._~+/-]{1,1024}=*")
_PORTS = {"http": 80, "https": 443}
Origin = tuple[str, str, int]


def parse_given(servers: str, text: str) -> dict[Origin, str]:
    """The token of each server: of all in the list with commas, or as a list of URL=TOKEN says.

    InvalidNameError, which never shows any part of the text.
    """
    found: dict[Origin, str] = {}
    for entry in _parts(text):
        if entry.startswith(("http://", "https://")):
            url, _, secret = entry.partition("=")
            urls = [url]
        else:
            urls, secret = _parts(servers), entry
        if _SECRET.fullmatch(secret) is None:
            hint = "a TOKEN, or URL=TOKEN for each server, with commas between them"
            raise InvalidNameError(f"{VARIABLE} is not a token", hint=hint)
        for url in urls:
            origin = origin_of(url)
            if origin is None:
                raise InvalidNameError(
                    f"{VARIABLE} names something that is no server", hint="such as https://HOST=TOKEN"
                )
            found[origin] = secret
    return found


def _parts(text: str) -> list[str]:
    return [part for one in text.split(",") if (part := one.strip())]


def origin_of(url: str) -> Origin | None:
    """Scheme, host and port; None when it is no URL of a server."""
    from urllib.parse import urlsplit  # commands that ask no server start without it

    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
    except (ValueError, KeyError):
        return None
    return (parts.scheme, parts.hostname, port) if parts.hostname else None


class Credentials:
    """What this process was given. Threads may share it. It never shows what it has."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[Origin, str] = {}
        self._has_learnt = False

    def __repr__(self) -> str:
        return f"Credentials({len(self._tokens)} servers)"

    def learn(self, servers: str, text: str) -> None:
        """What the environment says for these servers; the last that is said counts. InvalidNameError."""
        given = parse_given(servers, text)
        with self._lock:
            self._tokens.update(given)
            self._has_learnt |= bool(_parts(text))

    def authorization(self, origin: Origin | None) -> str:
        """The header for requests to this server, "" when there is none."""
        secret = self._tokens.get(origin) if origin is not None else None
        return f"Bearer {secret}" if secret else ""

    def lacks(self, origin: Origin | None) -> bool:
        """Whether something was given, and no token for this server."""
        return self._has_learnt and origin not in self._tokens


KNOWN = Credentials()
"""Of this process: a node daemon, or a command."""
