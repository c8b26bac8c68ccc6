"""Requests that a page of another site has somebody's browser send: such a browser is inside the network, or signed in.

Browsers let any page send forms and plain POSTs to any address, and say in the request whose page it was. Clients that
are no browsers say nothing, and are not concerned.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

from imaged.errors import PvisorError

log = logging.getLogger(__name__)
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""They change nothing, and no page can read the answer of another site."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ForeignPageError(PvisorError):
    """A request that another site's page made."""


@web.middleware
async def refuse_foreign(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let through what may change something only when no page of another site sent it. ForeignPageError."""
    if request.method not in SAFE_METHODS and _is_foreign(request):
        log.warning("%s %s was sent by a page of another site, from %s", request.method, request.path, request.remote)
        raise ForeignPageError(
            "a page of another site sent this", hint="open the page of this server, and use its buttons"
        )
    return await handler(request)


def _is_foreign(request: web.Request) -> bool:
    origin = request.headers.get("Origin")
    if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
        return True
    return origin is not None and _place(origin) != request.host.lower()


def _place(origin: str) -> str:
    """Its host and port; "" of one that has none, such as `null`."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
