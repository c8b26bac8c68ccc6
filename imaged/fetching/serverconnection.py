"""Requests to one server: what they carry, what its answers mean, and how often they are tried."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from imaged.errors import FormatError, NotFoundError, UpstreamError
from imaged.fetching.credentials import KNOWN, origin_of
from imaged.fetching.httpanswer import Answer
from imaged.fetching.httpcall import Call, HttpBrokenError, HttpCertificateError
from imaged.fetching.httppool import ConnectionPool
from imaged.fetching.retry import RetryPolicy, UpstreamIncompleteError, UpstreamRefusedError, UpstreamRetryError
from imaged.frame import HEADER_BYTES, Frame, FrameHeader

JSON_LIMIT_BYTES = 64 << 20
ANSWER_S = 60.0
"""How long an answer may take from its first byte on, unless who asks says otherwise: most are a few kilobytes, and the
timeout of the connection ends only those that bring nothing at all."""
VIA = "Pvisor-Via"
"""The servers that a request came through, and that would ask it again if it came back to them."""
_RETRY_STATUS = frozenset({408, 429, 500, 502, 503, 504})
T = TypeVar("T")


class ServerConnection:
    """One server. Threads may share it: each request has a connection of its own from a pool. A context manager."""

    def __init__(self, url: str, *, retry: RetryPolicy | None = None, timeout_s: float = 20.0) -> None:
        self.url = url.rstrip("/")
        self.retry = retry or RetryPolicy()
        self.via = ""
        self._lease = ""
        self._silence_s = math.inf
        self._origin = origin_of(self.url)
        self._pool = ConnectionPool(self.url, timeout_s=timeout_s)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def close(self) -> None:
        self._pool.close()

    def patient(self, retry: RetryPolicy, *, silence_s: float = math.inf) -> Self:
        """The same server over the same connections, asked with another patience: `silence_s` is how long one that is
        asked for an image or snapshot may say nothing."""
        other = copy.copy(self)
        other.retry, other._silence_s = retry, silence_s
        return other

    def under(self, lease: str) -> Self:
        """The same server, asked under a lease that it gave."""
        other = copy.copy(self)
        other._lease = lease
        return other

    def asked_via(self, via: str) -> Self:
        """The same server, asked for clients of the servers in `via`: ids with commas (`imaged.serving.through`)."""
        other = copy.copy(self)
        other.via = via
        return other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _read_frame(self, answer: Answer) -> Frame | None:
        """The next frame, None at a clean end. UpstreamRetryError, also when it is read outside `_request`'s block."""
        try:
            return self._frame(answer)
        except HttpBrokenError as error:
            raise self._broken(error) from error

    def _frame(self, answer: Answer) -> Frame | None:
        raw = answer.read(HEADER_BYTES)
        if not raw:
            return None
        try:
            header = FrameHeader.parse(raw)
        except FormatError as error:
            raise UpstreamRetryError(f"{self.url}: {error.message}") from error
        payload = answer.read(header.payload_bytes) if header.payload_bytes else b""
        if len(payload) != header.payload_bytes:
            raise UpstreamRetryError(
                f"{self.url}: the answer ends after {len(payload)} of {header.payload_bytes} bytes"
            )
        return Frame(header, payload)

    @contextlib.contextmanager
    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        accept_missing: bool = False,
        call: Call | None = None,
    ) -> Iterator[Answer]:
        """One attempt. The connection goes back to the pool only when the whole answer was read."""
        call = call or Call(longest_s=ANSWER_S)
        sent = dict(headers or ())
        if self.via:
            sent[VIA] = self.via
        if self._lease:
            sent["Pvisor-Lease"] = self._lease
        authorization = KNOWN.authorization(self._origin)
        if authorization:
            sent["Authorization"] = authorization
        if content_type:
            sent["Content-Type"] = content_type
        try:
            with self._pool.request(method, path, body, sent, call=call) as answer:
                if answer.status >= 400 and not (accept_missing and answer.status == 404):
                    self._refused(answer, path)
                yield answer
        except HttpBrokenError as error:
            raise self._broken(error) from error

    def _broken(self, error: HttpBrokenError) -> UpstreamError:
        if isinstance(error, HttpCertificateError):
            hint = (
                "SSL_CERT_FILE names a PEM file with the authority that signed it, if it is one of your own; a node "
                "daemon that runs takes it after `pvisor node stop`"
            )
            return UpstreamError(f"chunk server {self.url}: {error}", hint=hint)
        tls = "" if self.url.startswith("https:") else ", that it does not want https://"
        hint = f"check its URL{tls}, that it is running, and that it can be reached from here"
        return UpstreamRetryError(f"chunk server {self.url}: {error}", hint=hint)

    def _refused(self, answer: Answer, path: str) -> None:
        """Raise what the status means, with the server's own words."""
        text = answer.read(1 << 16)
        try:
            document = json.loads(text)
            message, hint = str(document["error"]), str(document.get("hint", ""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            message, hint = f"status {answer.status} for {path}", ""
        if answer.status == 401 and KNOWN.lacks(self._origin):
            hint = (
                f"PVISOR_TOKEN has none for {self.url}: a token is for the servers of PVISOR_SERVER or --server, "
                "or as URL=TOKEN for the one at that URL"
            )
        if answer.status in _RETRY_STATUS:
            wait_s = answer.retry_after_s(self.retry.total_s)
            raise UpstreamRetryError(f"chunk server {self.url}: {message}", hint=hint, retry_after_s=wait_s)
        if answer.status == 404:
            raise NotFoundError(f"chunk server {self.url}: {message}", hint=hint)
        if answer.status == 409:
            raise UpstreamIncompleteError(f"chunk server {self.url}: {message}", hint=hint)
        kind = UpstreamRefusedError if answer.status == 403 else UpstreamError
        raise kind(f"chunk server {self.url}: {message}", hint=hint)

    def _retry(self, attempt: Callable[[], T]) -> T:
        """What `attempt` gives, tried again while it may still succeed and time is left."""
        count, started = 0, time.monotonic()
        while True:
            try:
                return attempt()
            except UpstreamRetryError as error:
                count += 1
                self._pause(count, started, error)

    def _json(
        self, method: str, path: str, document: Mapping[str, Any] | None = None, *, raw: bytes | None = None
    ) -> dict[str, Any]:
        """A request whose answer is one JSON object, read whole within the attempt."""
        body = raw if document is None else json.dumps(document).encode()
        content_type = "application/json" if document is not None else "application/octet-stream" if raw else ""

        def attempt() -> bytes:
            with self._request(method, path, body, content_type) as answer:
                return answer.read(JSON_LIMIT_BYTES)

        text = self._retry(attempt)
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UpstreamError(f"chunk server {self.url}: {method} {path}: the answer is not JSON") from error
        if not isinstance(found, dict):
            raise UpstreamError(f"chunk server {self.url}: {method} {path}: the answer is not a JSON object")
        return found

    def _pause(self, attempt: int, started: float, error: UpstreamRetryError) -> None:
        """Sleep before the next attempt, or raise UpstreamError when the time is used up."""
        wait_s = self.retry.wait_s(attempt, error.retry_after_s)
        spent_s = time.monotonic() - started
        if spent_s + wait_s > self.retry.total_s:
            tried = f"{error.message} ({attempt} attempts in {spent_s:.1f} s)"
            raise UpstreamError(tried, hint=error.hint) from error
        time.sleep(wait_s)
