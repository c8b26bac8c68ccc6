"""Who may do what: the scope that each route takes, tokens, namespaces, and how often a client may ask.

Without a token file everybody may do everything, and is limited by address only. docs/auth.md is for users.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from imaged.chunkstore.store import ChunkStore
from imaged.chunkstore.tenant import tenant_view
from imaged.errors import PvisorError
from imaged.frame import IMMUTABLE
from imaged.ids import ChunkId
from imaged.serving.tokens import Scope, Token, TokenFile

log = logging.getLogger(__name__)
_BURST_S = 2.0
"""A client that was quiet may ask so many seconds' requests at once: a start of an image is a burst."""
_CLIENTS = 10_000
_SCHEME = "bearer"
_TOKEN_HINT = "set PVISOR_TOKEN; `pvisor token new` makes one, for the file that the server was given"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Need(enum.Enum):
    """What a request takes. WHOLE_: also that its token is of no namespace, because it is about the whole store."""

    OPEN = enum.auto()
    PAGE = enum.auto()
    """Nothing here: the web page has sessions of its own."""
    READ = enum.auto()
    WRITE = enum.auto()
    ADMIN = enum.auto()
    WHOLE_READ = enum.auto()
    WHOLE_ADMIN = enum.auto()

    @property
    def scope(self) -> Scope:
        return Scope[self.name.removeprefix("WHOLE_")]

    @property
    def is_whole(self) -> bool:
        return self.name.startswith("WHOLE_")


ROUTES: dict[tuple[str, str], Need] = {
    ("GET", "/healthz"): Need.OPEN,
    ("GET", "/readyz"): Need.OPEN,
    ("GET", "/v1/openapi.json"): Need.OPEN,
    ("GET", "/metrics"): Need.WHOLE_READ,
    ("GET", "/v1/images"): Need.READ,
    ("POST", "/v1/images"): Need.WRITE,
    ("GET", "/v1/images/{name}"): Need.READ,
    ("PUT", "/v1/images/{name}"): Need.WRITE,
    ("DELETE", "/v1/images/{name}"): Need.ADMIN,
    ("GET", "/v1/snapshots"): Need.READ,
    ("GET", "/v1/snapshots/{name}"): Need.READ,
    ("PUT", "/v1/snapshots/{name}"): Need.WRITE,
    ("DELETE", "/v1/snapshots/{name}"): Need.ADMIN,
    ("GET", "/v1/profiles/{name}"): Need.READ,
    ("PUT", "/v1/profiles/{name}"): Need.WRITE,
    ("GET", "/v1/chunks/{id}"): Need.READ,
    ("POST", "/v1/chunks/batch"): Need.READ,
    ("POST", "/v1/chunks/missing"): Need.READ,
    ("PUT", "/v1/chunks"): Need.WRITE,
    ("POST", "/v1/leases"): Need.READ,
    ("PUT", "/v1/leases/{id}"): Need.READ,
    ("DELETE", "/v1/leases/{id}"): Need.READ,
    ("GET", "/v1/jobs"): Need.READ,
    ("GET", "/v1/jobs/{id}"): Need.READ,
    ("DELETE", "/v1/jobs/{id}"): Need.WRITE,
    ("POST", "/v1/gc"): Need.WHOLE_ADMIN,
    ("GET", "/"): Need.PAGE,
    ("GET", "/images/{name}"): Need.PAGE,
    ("GET", "/snapshots"): Need.PAGE,
    ("GET", "/snapshots/{name}"): Need.PAGE,
    ("GET", "/jobs"): Need.PAGE,
    ("GET", "/jobs/{id}"): Need.PAGE,
    ("POST", "/jobs/{id}/cancel"): Need.PAGE,
    ("GET", "/store"): Need.PAGE,
    ("POST", "/store/collect"): Need.PAGE,
    ("GET", "/login"): Need.PAGE,
    ("POST", "/login"): Need.PAGE,
    ("POST", "/logout"): Need.PAGE,
}
"""Every route of the server; a test holds it against the application. HEAD is as GET. A lease for uploads, one without
`keeps`, takes WRITE: its handler says so."""


class AccessError(PvisorError):
    """A request that is not allowed, with the headers that its answer gets."""

    def __init__(self, message: str, *, hint: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__(message, hint=hint)
        self.headers = headers or {}


class UnauthorizedError(AccessError):
    """No token, or none of this server's."""


class ForbiddenError(AccessError):
    """A token that may not do this."""


class TooManyError(AccessError):
    """More requests than one client may make; the answer says when to come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a request may do. `client` is who makes it: the id of its token, or an address."""

    scope: Scope
    namespace: str | None
    client: str


_GRANT = web.RequestKey("grant", Grant)


def grant(request: web.Request) -> Grant:
    """What this request was granted. KeyError on a page's route, which has no grant of this kind."""
    return request[_GRANT]


def require(request: web.Request, scope: Scope) -> None:
    """For what the route alone does not tell. ForbiddenError."""
    _require_scope(grant(request), scope)


class Views(Protocol):
    """What makes more of a store for a request than it has (`imaged.serving.through`)."""

    def seen_by(self, request: web.Request) -> ChunkStore: ...


VIEWS = web.AppKey("views", Views)
"""For requests of no namespace: a namespace has what was put into it."""


def view(request: web.Request, store: ChunkStore) -> ChunkStore:
    """The store as whoever asks may see it."""
    namespace = grant(request).namespace
    if namespace is None and VIEWS in request.app:
        return request.app[VIEWS].seen_by(request)
    return tenant_view(store, namespace)


class Access:
    """Decides over every request to one store. For one event loop."""

    def __init__(self, tokens: TokenFile | None, store: ChunkStore, *, rate_per_s: float = 0.0) -> None:
        """`rate_per_s` requests of each client; 0 is without limit."""
        self._tokens, self._store = tokens, store
        self._rates = _Rates(rate_per_s) if rate_per_s else None

    @property
    def required(self) -> bool:
        """Whether a token is needed."""
        return self._tokens is not None

    @property
    def immutable(self) -> str:
        """The Cache-Control of what never changes: a cache that does not know who may have it must not share it."""
        return IMMUTABLE.replace("public", "private") if self.required else IMMUTABLE

    def token(self, secret: str) -> Token | None:
        """The token that this is the secret of."""
        return None if self._tokens is None else self._tokens.find(secret)

    def by_digest(self, digest: bytes) -> Token | None:
        """The token whose secret has this SHA-256: for one who has seen the secret before and not kept it."""
        return None if self._tokens is None else self._tokens.by_digest(digest)

    def fast(self, authorization: str, peer: str, chunks: Sequence[ChunkId]) -> bool:
        """Whether this client may have all these chunks, now; then it is counted as a request."""
        if self._tokens is None:
            return self._rates is None or not self._rates.wait_s(peer)
        try:
            granted = self._granted(authorization, peer)
        except UnauthorizedError:
            return False
        if granted.namespace is not None and not self._store.owned.has_all(granted.namespace, chunks):
            return False
        return self._rates is None or not self._rates.wait_s(granted.client)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let through what may pass. UnauthorizedError, ForbiddenError, TooManyError."""
        need = self._need(request)
        if need is Need.OPEN:
            return await handler(request)
        peer = request.remote or ""
        try:
            granted = None if need is Need.PAGE else self._granted(request.headers.get("Authorization", ""), peer)
        except UnauthorizedError:
            self._count(peer)
            raise
        client = granted.client if granted is not None else peer
        try:
            self._count(client)
            if granted is not None and need is not None:
                _require_scope(granted, need.scope)
                if need.is_whole and granted.namespace is not None:
                    raise ForbiddenError(
                        "this is about the whole store, and the token is of a namespace",
                        hint="use a token without a namespace",
                    )
        except AccessError as error:
            log.info("%s %s is refused to %s: %s", request.method, request.path, client, error.message)
            raise
        if granted is not None:
            request[_GRANT] = granted
        return await handler(request)

    def _need(self, request: web.Request) -> Need | None:
        """None for a path, or a method, that there is none of: only who has a token hears that."""
        resource = request.match_info.route.resource
        if resource is None or request.match_info.http_exception is not None:
            return None
        method = "GET" if request.method == "HEAD" else request.method
        need = ROUTES.get((method, resource.canonical))
        if need is None:
            log.error("%s %s is in no table of routes", method, resource.canonical)
            raise ForbiddenError("nobody may do this", hint="this is a fault of the server: it does not know the route")
        return need

    def _granted(self, authorization: str, peer: str) -> Grant:
        if self._tokens is None:
            return Grant(scope=Scope.ADMIN, namespace=None, client=peer)
        scheme, _, secret = authorization.strip().partition(" ")
        if not authorization:
            raise _unauthorized("this server takes a token, and the request has none")
        if scheme.lower() != _SCHEME or not secret:
            raise _unauthorized("this server takes a token as `Authorization: Bearer TOKEN`")
        token = self._tokens.find(secret.strip())
        if token is None:
            raise _unauthorized("the token is none of this server's", ', error="invalid_token"')
        return Grant(scope=token.scope, namespace=token.namespace, client=token.id)

    def _count(self, client: str) -> None:
        wait_s = 0.0 if self._rates is None else self._rates.wait_s(client)
        if wait_s:
            raise TooManyError(
                "more requests than one client may make here",
                hint="the server's --rate-limit says how many a second",
                headers={"Retry-After": str(math.ceil(wait_s))},
            )


def _unauthorized(message: str, more: str = "") -> UnauthorizedError:
    return UnauthorizedError(message, hint=_TOKEN_HINT, headers={"WWW-Authenticate": f'Bearer realm="pvisor"{more}'})


def _require_scope(granted: Grant, scope: Scope) -> None:
    if granted.scope < scope:
        raise ForbiddenError(
            f"this takes a token of scope {scope}, and it is one of scope {granted.scope}",
            hint=f"`pvisor token new --scope {scope}` makes one",
            headers={"WWW-Authenticate": f'Bearer realm="pvisor", error="insufficient_scope", scope="{scope}"'},
        )


ACCESS = web.AppKey("access", Access)


class _Rates:
    """How often each client has asked: for each, when it would have asked as often as now at the steady rate."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1.0 / per_s
        self._due_s: dict[str, float] = {}

    def wait_s(self, client: str) -> float:
        """0 when it may ask now, and then it has; else how long it must wait."""
        now_s = time.monotonic()
        due_s = max(now_s, self._due_s.get(client, 0.0))
        wait_s = due_s - now_s - _BURST_S
        if wait_s > 0:
            return wait_s
        if len(self._due_s) >= _CLIENTS:
            self._due_s = {one: at for one, at in self._due_s.items() if at > now_s}
        self._due_s[client] = due_s + self._interval_s
        return 0.0
