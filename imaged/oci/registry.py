"""Pulling from a registry: the read half of the OCI distribution specification.

No library does this part for us: oras-py and python-dxf neither resume a broken blob, nor honour Retry-After, nor
verify a blob while it streams. So it is built on urllib3's connections.
"""

from __future__ import annotations

import hashlib
import json
import os
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from urllib3.exceptions import HTTPError

from imaged.errors import DigestMismatchError, FormatError, InvalidNameError, RegistryError, SourceError
from imaged.ids import OciDigest
from imaged.names import SourceName
from imaged.oci.auth import Credentials, find_credentials
from imaged.oci.blob import ByteStream
from imaged.oci.descriptor import DOCUMENT_LIMIT_BYTES, Descriptor
from imaged.oci.download import Download
from imaged.oci.http import Answer, Http, RetryPolicy, allows_plain_http
from imaged.oci.manifest import ACCEPTED_TYPES, Document
from imaged.oci.tokens import Authorizer

_DOCKER_HUB = ("docker.io", "registry-1.docker.io", "https://index.docker.io/v1/")
"""Docker Hub as users name it, where its registry API is, and what credential files call it."""
_AUTHORIZATION_ROUNDS = 3
_ERROR_LIMIT_BYTES = 64 << 10


@contextmanager
def open_repository(
    source: SourceName,
    *,
    auth: Credentials | None = None,
    policy: RetryPolicy | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Repository]:
    """The repository a docker:// source names, with its connections, until the context ends."""
    http = Http(policy, environ)
    try:
        yield Repository(source, http, auth=auth, environ=environ)
    finally:
        http.close()


class Repository:
    """One repository of one registry. May be shared by threads."""

    def __init__(
        self, source: SourceName, http: Http, *, auth: Credentials | None, environ: Mapping[str, str] = os.environ
    ) -> None:
        host, _, name = source.location.partition("/")
        hub = host == _DOCKER_HUB[0]
        endpoint = _DOCKER_HUB[1] if hub else host
        aliases = _DOCKER_HUB[1:] if hub else ()

        def credentials() -> Credentials | None:
            return auth or find_credentials(host, name, aliases=aliases, environ=environ)

        self._host, self._reference, self._http = host, source.reference, http
        scheme = "http" if allows_plain_http(endpoint, environ) else "https"
        self._base = f"{scheme}://{endpoint}/v2/{name}"
        self._what = str(source)
        self._authorizer = Authorizer(http, host, name, credentials)

    def root(self) -> Document:
        """The manifest or index that the tag or digest names."""
        if ":" in self._reference:
            try:
                return self._manifest(OciDigest.parse(self._reference))
            except FormatError as error:
                raise InvalidNameError(f"{self._what}: {error}", hint="digests are sha256:<64 hex digits>") from error
        return self._manifest(self._reference)

    def manifest(self, descriptor: Descriptor) -> Document:
        """Another manifest of this repository by its descriptor, verified."""
        document = self._manifest(descriptor.digest)
        if len(document.raw) != descriptor.size_bytes:
            raise DigestMismatchError(
                f"manifest {descriptor.digest} of {self._what} has {len(document.raw)} bytes, "
                f"not the {descriptor.size_bytes} its descriptor says"
            )
        return document

    @contextmanager
    def blob(self, descriptor: Descriptor) -> Iterator[ByteStream]:
        """A blob's bytes, not verified; from its `urls` when the registry does not have it (foreign layers)."""
        what = f"blob {descriptor.digest} of {self._what}"
        download = Download(self._requester(descriptor, what), descriptor.size_bytes, what, self._http.policy)
        try:
            yield download
        finally:
            download.close()

    def ping(self) -> None:
        """RegistryError unless a registry answers at this host, authorized or not."""
        parts = urllib.parse.urlsplit(self._base)
        answer = self._http.get(f"{parts.scheme}://{parts.netloc}/v2/", {})
        answer.close()
        if answer.status not in (200, 401, 403):
            raise RegistryError(
                f"{self._host} does not answer as a registry: /v2/ gives status {answer.status}",
                hint="check the host name and port",
            )

    def _manifest(self, wanted: OciDigest | str) -> Document:
        what = f"manifest of {self._what}" if isinstance(wanted, str) else f"manifest {wanted} of {self._what}"
        answer = self._get(f"{self._base}/manifests/{wanted}", {"Accept": ", ".join(ACCEPTED_TYPES)})
        if answer.status != 200:
            error = self._error(answer, what)
            if answer.status == 404 and not answer.header("Docker-Distribution-Api-Version"):
                self.ping()  # a better error when this is no registry at all
            raise error
        raw = self._read_document(answer, what)
        media_type = answer.header("Content-Type")
        if not raw.lstrip().startswith(b"{"):
            raise RegistryError(
                f"{self._host} answers with {media_type or 'no media type'} in place of the {what}",
                hint="check that the host is a registry and no proxy or login page is in between",
            )
        stated = wanted if isinstance(wanted, OciDigest) else _digest_header(answer)
        digest = f"{stated.algorithm}:{hashlib.new(stated.algorithm, raw).hexdigest()}" if stated else ""
        if stated is not None and digest != str(stated):
            raise DigestMismatchError(f"{what} has digest {digest}, not {stated}", hint="push the image again")
        return Document(raw, media_type, digest or f"sha256:{hashlib.sha256(raw).hexdigest()}")

    def _read_document(self, answer: Answer, what: str) -> bytes:
        try:
            raw = answer.body(DOCUMENT_LIMIT_BYTES)
        except (HTTPError, OSError) as error:
            answer.response.close()
            raise RegistryError(f"{what} broke off: {str(error)[:200]}", hint="try again") from error
        if len(raw) > DOCUMENT_LIMIT_BYTES:
            raise SourceError(f"{what} has more than the {DOCUMENT_LIMIT_BYTES} bytes allowed")
        return raw

    def _get(self, url: str, headers: Mapping[str, str]) -> Answer:
        """GET with authorization, renewed when the registry does not take it."""
        for _ in range(_AUTHORIZATION_ROUNDS):
            used = self._authorizer.header()
            answer = self._http.get(url, {**headers, **({"Authorization": used} if used else {})})
            if answer.status not in (401, 403) or answer.elsewhere:
                return answer
            answer.close()
            self._authorizer.challenge(answer, used)
        raise self._authorizer.refused()

    def _requester(self, descriptor: Descriptor, what: str) -> Callable[[int], Answer]:
        """What a Download asks: the registry first, then the descriptor's urls, without authorization there."""
        registry = f"{self._base}/blobs/{descriptor.digest}"
        places = [registry, *(url for url in descriptor.urls if url.startswith(("http://", "https://")))]

        def request(offset: int) -> Answer:
            headers = {"Range": f"bytes={offset}-"} if offset else {}
            while True:
                own = places[0] == registry
                missing = not own
                try:
                    answer = self._get(registry, headers) if own else self._http.get(places[0], headers)
                    if answer.status in (200, 206, 416):
                        return answer
                    missing = missing or answer.status == 404
                    failure = self._error(answer, what)
                except RegistryError as error:
                    failure = error
                if len(places) == 1 or not missing:
                    raise failure
                del places[0]

        return request

    def _error(self, answer: Answer, what: str) -> RegistryError:
        """What an answer that is not a success says, from the errors document of the specification if it has one."""
        host = urllib.parse.urlsplit(answer.url).netloc.rpartition("@")[2]
        try:
            reasons = _reasons(answer.body(_ERROR_LIMIT_BYTES))
        except (HTTPError, OSError):
            answer.response.close()
            reasons = ""
        said = f" ({reasons})" if reasons else ""
        if answer.status == 404:
            return RegistryError(f"{host} does not have the {what}{said}", hint="check the name and the tag")
        hint = "the registry limits pulls: log in, or try later" if answer.status == 429 else "try again later"
        return RegistryError(f"{host} answers {answer.status} for the {what}{said}", hint=hint)


def _digest_header(answer: Answer) -> OciDigest | None:
    try:
        return OciDigest.parse(answer.header("Docker-Content-Digest"))
    except FormatError:
        return None


def _reasons(raw: bytes) -> str:
    """The codes and messages of an errors document; "" for anything else."""
    try:
        errors = json.loads(raw)["errors"]
        said = [f"{one['code']}: {one.get('message', '')}" for one in errors]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return ""
    return "".join(char if char.isprintable() else " " for char in "; ".join(said))[:300]
