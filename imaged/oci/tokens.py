"""Answering a registry's challenge: Basic, or a bearer token from its token server.

Follows the distribution project's token authentication specification (spec/auth/token.md and oauth.md).
"""

from __future__ import annotations

import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence

from imaged.document import parse_json
from imaged.errors import FormatError, RegistryAuthError, RegistryError
from imaged.oci.auth import Credentials
from imaged.oci.descriptor import DOCUMENT_LIMIT_BYTES
from imaged.oci.http import Answer, Http, allows_plain_http, origin

_CLIENT_ID = "pvisor"
_RENEW_EARLY_S = 10.0
_PARAMETER = re.compile(r'\s*([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*))\s*(?:,|$)')
_SCHEME = re.compile(r"\s*,?\s*([A-Za-z][A-Za-z0-9_-]*)(?:\s*,|\s+|$)")


def parse_challenges(header: str) -> list[tuple[str, dict[str, str]]]:
    """The schemes of a WWW-Authenticate header (RFC 9110 11.6.1), lower case, each with its parameters."""
    challenges: list[tuple[str, dict[str, str]]] = []
    at = 0
    while at < len(header):
        parameter = _PARAMETER.match(header, at) if challenges else None
        if parameter is not None:
            quoted = parameter[2]
            value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else parameter[3]
            challenges[-1][1][parameter[1].lower()] = value
            at = parameter.end()
        elif scheme := _SCHEME.match(header, at):
            challenges.append((scheme[1].lower(), {}))
            at = scheme.end()
        else:
            break
    return challenges


class Authorizer:
    """The Authorization header for one repository, renewed as the registry asks. May be shared by threads.

    `credentials` is called once, when the registry first asks for them or a token server is asked.
    """

    def __init__(self, http: Http, host: str, repository: str, credentials: Callable[[], Credentials | None]) -> None:
        self._http, self._host, self._repository = http, host, repository
        self._find, self._found = credentials, False
        self._credentials: Credentials | None = None
        self._challenges: Sequence[tuple[str, dict[str, str]]] = ()
        self._header: str | None = None
        self._expires_at: float | None = None
        self._lock = threading.Lock()

    def header(self) -> str | None:
        """What to send now; a token known to have run out is renewed first."""
        with self._lock:
            if self._expires_at is not None and time.monotonic() >= self._expires_at:
                self._renew()
            return self._header

    def challenge(self, answer: Answer, used: str | None) -> None:
        """Take in a 401 or 403 to a request that was sent with the header `used`.

        A header to try next is there afterwards; RegistryAuthError when there is nothing to try.
        """
        challenges = parse_challenges(answer.header("WWW-Authenticate"))
        with self._lock:
            if challenges:
                self._challenges = challenges
            if self._header == used:
                self._renew()

    def _renew(self) -> None:
        schemes = dict(reversed(self._challenges))
        credentials = self._known_credentials()
        if "bearer" in schemes:
            self._header, self._expires_at = self._token(schemes["bearer"], credentials)
        elif "basic" in schemes and credentials is not None and credentials.username:
            if self._header == credentials.basic:
                raise self.refused()
            self._header = credentials.basic
        else:
            raise self.refused()

    def _known_credentials(self) -> Credentials | None:
        if not self._found:
            self._credentials, self._found = self._find(), True
        return self._credentials

    def refused(self) -> RegistryAuthError:
        """The error for a registry that took nothing we had."""
        if self._credentials is None:
            return RegistryAuthError(
                f"{self._host} gives no anonymous access to {self._repository}",
                hint=f"check the name, or log in with `podman login {self._host}` or `docker login {self._host}`",
            )
        return RegistryAuthError(
            f"{self._host} refused access to {self._repository} with the credentials of "
            f"{self._credentials.username or 'an identity token'}",
            hint="check that the user may pull it, and log in again",
        )

    def _token(self, challenge: dict[str, str], credentials: Credentials | None) -> tuple[str, float | None]:
        """Ask the token server; the header and when to renew it (None: when it is refused)."""
        realm = challenge.get("realm", "")
        scheme, realm_host, _ = origin(realm)
        if scheme not in ("http", "https") or not realm_host:
            raise RegistryError(f"{self._host} names no token server: realm {realm[:100]!r}")
        netloc = urllib.parse.urlsplit(realm).netloc.rpartition("@")[2]
        if credentials is not None and scheme == "http" and not allows_plain_http(netloc):
            raise RegistryAuthError(
                f"{self._host} wants the credentials sent to {netloc} without TLS",
                hint="list that host in PVISOR_INSECURE_REGISTRIES if it is right",
            )
        service = challenge.get("service", "")
        scope = challenge.get("scope") or f"repository:{self._repository}:pull"
        if credentials is not None and credentials.identity_token:
            fields = {"grant_type": "refresh_token", "service": service, "scope": scope, "client_id": _CLIENT_ID}
            answer = self._http.post_form(realm, {**fields, "refresh_token": credentials.identity_token})
        else:
            query = [("scope", one) for one in scope.split()]
            if service:
                query.insert(0, ("service", service))
            separator = "&" if urllib.parse.urlsplit(realm).query else "?"
            headers = {"Authorization": credentials.basic} if credentials is not None else {}
            answer = self._http.get(realm + separator + urllib.parse.urlencode(query), headers)
        return self._parse_token(answer, realm_host)

    def _parse_token(self, answer: Answer, realm_host: str) -> tuple[str, float | None]:
        status, raw = answer.status, answer.body(DOCUMENT_LIMIT_BYTES)
        if status in (400, 401, 403):
            raise self.refused()
        if status != 200:
            raise RegistryError(f"token server {realm_host} of {self._host} answers {status}")
        try:
            document = parse_json(raw, "token")
        except FormatError:
            raise RegistryError(f"token server {realm_host} of {self._host} does not answer with JSON") from None
        token = document.get("token") or document.get("access_token")
        if not isinstance(token, str) or re.fullmatch(r"[\x21-\x7e]+", token) is None:
            raise RegistryError(f"token server {realm_host} of {self._host} answers without a token")
        lifetime = document.get("expires_in")
        if not isinstance(lifetime, int | float) or lifetime <= _RENEW_EARLY_S:
            return f"Bearer {token}", None
        return f"Bearer {token}", time.monotonic() + lifetime - _RENEW_EARLY_S
