"""Who looks at the page: sessions that a token was given for, kept in a cookie that does not have the token.

    <expires, Unix seconds>.<SHA-256 of the token, hex>.<HMAC-SHA-256 of both, hex>

The key of the HMAC is a file of the store, so that all processes of a server, and the next ones, know the sessions. A
session ends with its time, and at once when its token is no longer in the token file.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from imaged.chunkstore.store import ChunkStore
from imaged.chunkstore.tenant import tenant_view
from imaged.errors import PvisorError, StoreFullError, StoreReadOnlyError
from imaged.faults import store_faults
from imaged.jobs.job import Job, Kind
from imaged.serving.access import Access
from imaged.serving.tokens import Scope, Token, digest_of

log = logging.getLogger(__name__)
COOKIE = "pvisor_session"
_KEY_NAME = "session.key"
_KEY_BYTES = 32
_LASTS_S = 12 * 3600


class SignInError(PvisorError):
    """Nobody has signed in, or the session is over."""


class ForeignFormError(PvisorError):
    """A form that is none of this server's pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """What whoever looks may see and do. `token` is None where no token is needed: then that is everything.

    `form_key` is what forms of the pages made for this viewer send back.
    """

    token: Token | None
    form_key: str

    @property
    def scope(self) -> Scope:
        return Scope.ADMIN if self.token is None else self.token.scope

    @property
    def namespace(self) -> str | None:
        return None if self.token is None else self.token.namespace

    @property
    def label(self) -> str:
        return "" if self.token is None else self.token.label or f"token {self.token.id}"

    def may_cancel(self, job: Job) -> bool:
        return self.scope >= Scope.WRITE if job.kind is Kind.CONVERT else self.may_collect

    @property
    def sees_store(self) -> bool:
        """What a store holds altogether is for those who may see all of it."""
        return self.namespace is None

    @property
    def may_collect(self) -> bool:
        return self.scope >= Scope.ADMIN and self.namespace is None

    def view(self, store: ChunkStore) -> ChunkStore:
        return tenant_view(store, self.namespace)


class Sessions:
    """Makes and reads the cookies of one store's server."""

    def __init__(self, root: Path, access: Access) -> None:
        self._root, self._access = root, access
        self._made_key: bytes | None = None

    @property
    def required(self) -> bool:
        """Whether one has to sign in."""
        return self._access.required

    def viewer(self, request: web.Request) -> Viewer:
        """SignInError."""
        cookie = request.cookies.get(COOKIE, "") if self.required else ""
        token = self._token(cookie) if self.required else None
        if self.required and token is None:
            raise SignInError("the session is over" if cookie else "this server wants a token")
        return Viewer(token=token, form_key=self._sign(f"form {cookie}"))

    def sign_in(self, request: web.Request, response: web.StreamResponse, secret: str) -> bool:
        """Begin a session, if that is the secret of a token."""
        token = self._access.token(secret)
        if token is None:
            return False
        said = f"{int(time.time()) + _LASTS_S}.{digest_of(secret).hex()}"
        secure = request.secure or request.headers.get("X-Forwarded-Proto") == "https"
        response.set_cookie(
            COOKIE, f"{said}.{self._sign(said)}", httponly=True, samesite="Strict", path="/", secure=secure
        )
        return True

    def check_form(self, viewer: Viewer, sent: str) -> None:
        """ForeignFormError for a form that was not made for this viewer."""
        if not hmac.compare_digest(sent.encode(), viewer.form_key.encode()):
            raise ForeignFormError("the form is out of date", hint="load the page again, and then send it")

    def _token(self, cookie: str) -> Token | None:
        said, _, signature = cookie.rpartition(".")
        expires, _, digest = said.partition(".")
        if not hmac.compare_digest(signature.encode(errors="replace"), self._sign(said).encode()):
            return None
        if int(expires) < time.time():
            return None
        return self._access.by_digest(bytes.fromhex(digest))

    def _sign(self, said: str) -> str:
        return hmac.new(self._key(), said.encode(errors="replace"), hashlib.sha256).hexdigest()

    def _key(self) -> bytes:
        if self._made_key is None:
            try:
                with store_faults("read the key of its sessions", self._root):
                    self._made_key = _read_or_make(self._root / _KEY_NAME)
            except (StoreFullError, StoreReadOnlyError) as error:
                log.warning("sessions are this process's own and end with it: %s", error.message)
                self._made_key = secrets.token_bytes(_KEY_BYTES)
        return self._made_key


def _read_or_make(path: Path) -> bytes:
    """The bytes of the key file, made by whoever comes first."""
    while True:
        try:
            key = path.read_bytes()
        except FileNotFoundError:
            key = b""
        if len(key) == _KEY_BYTES:
            return key
        partial = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
        try:
            partial.touch(mode=0o600)
            partial.write_bytes(secrets.token_bytes(_KEY_BYTES))
            if key:  # torn by a crash
                partial.replace(path)
            else:
                try:
                    os.link(partial, path)
                except FileExistsError:
                    continue
        finally:
            partial.unlink(missing_ok=True)
