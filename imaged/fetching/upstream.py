"""A chunk server over HTTP: frames in one batch, records of images and snapshots, conversion jobs, uploads.

Retrying is done here and, over several servers, in `imaged.fetching.fetch`: a broken batch goes on at the frame where
it broke.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar
from urllib.parse import quote

from imaged.errors import ChunkError, ChunkMissingError, FormatError, NotFoundError, UpstreamError
from imaged.fetching.credentials import KNOWN, origin_of
from imaged.fetching.httppool import Answer, Call, ConnectionPool, HttpBrokenError, HttpCertificateError
from imaged.fetching.remote import Job, RemoteImage, RemoteSnapshot
from imaged.frame import HEADER_BYTES, Codec, Frame, FrameHeader
from imaged.ids import ChunkId
from imaged.names import ImageName, snapshot_name
from imaged.profile import Profile
from imaged.record import ImageRecord
from imaged.signature import Signature, entity_tag
from imaged.snapshot import SnapshotRecord

BATCH_LIMIT = 4096
"""Ids in one batch; the server refuses more."""
_JSON_LIMIT_BYTES = 64 << 20
_PROFILE_LIMIT_BYTES = 1 << 20
_FIRST_LIMIT_BYTES = 64 << 20
"""Of a boot answer, before the chunks of the profile: a hundred times what an image of 500 MB needs."""
_FIRST_LIMIT_S = 10.0
_AHEAD_LIMIT_S = 600.0
"""How long the parts of a boot answer may take, counted from its first byte; what did not come by then is asked for."""
_MOST_FRAMES = sys.maxsize
"""What itertools takes: a count in a header may be any number."""
VIA = "Pvisor-Via"
"""The servers that a request came through, and that would ask it again if it came back to them."""
_RETRY_STATUS = frozenset({408, 429, 500, 502, 503, 504})
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to go on after failures that may pass: refused or broken connections, 5xx, 429."""

    total_s: float = 20.0
    first_wait_s: float = 0.05
    longest_wait_s: float = 2.0

    def wait_s(self, attempt: int, retry_after_s: float = 0.0) -> float:
        """Before attempt 1, 2, ...: exponential with jitter, at least what the server asked for."""
        grown = min(self.longest_wait_s, self.first_wait_s * 2 ** (attempt - 1))
        return max(random.uniform(grown / 2, grown), retry_after_s)


class UpstreamRefusedError(UpstreamError):
    """Something that this server does not do for us: its token, if there is one, is not for this."""


class UpstreamRetryError(UpstreamError):
    """A failure that may pass: another attempt, here or at another server, is worth it."""

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class UpstreamWrongError(UpstreamRetryError):
    """Another chunk than the one that was asked for."""


class UpstreamIncompleteError(UpstreamError):
    """What was to be named, or its name, is not as the server needs it: status 409."""


class HttpUpstream:
    """One chunk server. Threads may share it: each request has a connection of its own from a pool. A context manager.

    Satisfies `ChunkReader`. Frames are not verified here (`Frame.open` does), but they are the ones that were asked
    for, in order, and no length is believed beyond the frame limit.
    """

    def __init__(self, url: str, *, retry: RetryPolicy | None = None, timeout_s: float = 20.0) -> None:
        self.url = url.rstrip("/")
        self.retry = retry or RetryPolicy()
        self.via = ""
        self._lease = ""
        self._silence_s = math.inf
        self._origin = origin_of(self.url)
        self._pool = ConnectionPool(self.url, timeout_s=timeout_s)

    def __repr__(self) -> str:
        return f"HttpUpstream({self.url!r})"

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

    # Chunks

    def get(self, chunk: ChunkId) -> bytes:
        """The verified bytes of one chunk. ChunkMissingError, ChunkCorruptError, UpstreamError."""
        frame = next(iter(self.frames([chunk])))
        if frame.header.codec is Codec.MISSING:
            raise ChunkMissingError(chunk, f"not at {self.url}")
        return frame.open()

    def frames(self, chunks: Sequence[ChunkId]) -> Iterator[Frame]:
        """A frame for each id in order, in batches; goes on after a break where the stream stopped. UpstreamError."""
        position, attempt, started = 0, 0, time.monotonic()
        while position < len(chunks):
            before = position
            try:
                for frame in self.fetch(chunks[position : position + BATCH_LIMIT]):
                    position += 1
                    yield frame
            except UpstreamRetryError as error:
                if position > before:
                    attempt, started = 0, time.monotonic()
                attempt += 1
                self._pause(attempt, started, error)

    def fetch(self, chunks: Sequence[ChunkId], call: Call | None = None) -> Iterator[Frame]:
        """One attempt at one batch, frames as they arrive. UpstreamRetryError when trying again is worth it.

        Through `call` other threads may watch and end it.
        """
        return self._fetch(chunks, {}, call)

    def refetch(self, chunks: Sequence[ChunkId], call: Call | None = None) -> Iterator[Frame]:
        """As `fetch`, for chunks that came corrupt: caches on the way are passed by, and the server looks again whether
        its own copy is sound."""
        return self._fetch(chunks, {"Cache-Control": "no-cache"}, call)

    def _fetch(self, chunks: Sequence[ChunkId], headers: Mapping[str, str], call: Call | None) -> Iterator[Frame]:
        if len(chunks) == 1:
            yield self._fetch_one(chunks[0], headers, call)
            return
        body = b"".join(chunks)
        kind = "application/octet-stream"
        with self._request("POST", "/v1/chunks/batch", body, kind, headers=headers, call=call) as answer:
            for chunk in chunks:
                frame = self._read_frame(answer)
                if frame is None or frame.id != chunk:
                    found = "the end of the answer" if frame is None else f"a frame of {frame.id}"
                    kind_of = UpstreamRetryError if frame is None else UpstreamWrongError
                    raise kind_of(f"{self.url}: batch: expected chunk {chunk}, found {found}")
                yield frame
            answer.finish()

    def _fetch_one(self, chunk: ChunkId, headers: Mapping[str, str], call: Call | None) -> Frame:
        """A plain GET: one packet out, and what caches on the way understand."""
        with self._request("GET", f"/v1/chunks/{chunk}", headers=headers, accept_missing=True, call=call) as answer:
            if answer.status == 404:
                answer.read(_JSON_LIMIT_BYTES)
                return Frame.missing(chunk)
            frame = self._read_frame(answer)
            if frame is None or frame.id != chunk:
                raise UpstreamWrongError(f"{self.url}: asked for chunk {chunk}, got something else")
            answer.finish()
            return frame

    def missing(self, chunks: Sequence[ChunkId]) -> list[ChunkId]:
        """Those of `chunks` that the server does not have."""
        absent: list[ChunkId] = []
        for start in range(0, len(chunks), BATCH_LIMIT):
            ids = [str(chunk) for chunk in chunks[start : start + BATCH_LIMIT]]
            document = self._json("POST", "/v1/chunks/missing", {"ids": ids})
            absent += [ChunkId.parse(str(text)) for text in document.get("missing", ())]
        return absent

    def upload(self, frames: Sequence[Frame]) -> None:
        """Store these frames at the server; it verifies each one. Sending them again does no harm."""
        body = b"".join(frame.pack() for frame in frames)
        self._json("PUT", "/v1/chunks", raw=body)

    # Leases

    def new_lease(self, holder: str, *, keeps: Sequence[ChunkId] | None = None, ttl_s: float) -> str:
        """Its id: a lease for uploads, with `keeps` one that only keeps these. NotFoundError for a server that has no
        leases."""
        document = {"holder": holder[:200], "ttl_s": ttl_s, **_kept(keeps)}
        lease = self._json("POST", "/v1/leases", document).get("id")
        if not isinstance(lease, str):
            raise UpstreamError(f"chunk server {self.url}: a lease without an id")
        return lease

    def renew_lease(self, lease: str, *, keeps: Sequence[ChunkId] | None = None, ttl_s: float) -> None:
        """It lasts `ttl_s` from now, and keeps these. NotFoundError when it has ended."""
        self._json("PUT", f"/v1/leases/{quote(lease, safe='')}", {"ttl_s": ttl_s, **_kept(keeps)})

    def end_lease(self, lease: str) -> None:
        self._json("DELETE", f"/v1/leases/{quote(lease, safe='')}")

    # Images, snapshots and jobs

    def images(self) -> list[RemoteImage]:
        document = self._json("GET", "/v1/images")
        return [RemoteImage.parse(entry) for entry in document.get("images", ())]

    def image(self, name: str) -> RemoteImage:
        """By name or image id. NotFoundError, InvalidNameError."""
        return RemoteImage.parse(self._json("GET", _image_path(name)))

    @contextlib.contextmanager
    def boot(
        self, name: str, *, known: RemoteImage | None = None, ahead: bool = False
    ) -> Iterator[BootStream[RemoteImage] | None]:
        """The image and, in the same answer, every small chunk a first mount needs. None: `known` is still current,
        and its signatures are.

        With `ahead` the chunks that the image's profile names follow. What a server sends without end breaks off.
        """
        path = f"{_image_path(name)}?view=boot&profile={'chunks' if ahead else 'frame'}"

        def parse(document: Mapping[str, Any], record: bytes) -> RemoteImage:
            return RemoteImage.parse(document, ImageRecord.parse(record))

        tag = entity_tag(known.id, known.signatures) if known is not None else None
        with self._boot(path, f"image {name}", "pvisor-image", parse, tag) as stream:
            yield stream

    @contextlib.contextmanager
    def boot_snapshot(self, name: str, *, known: ChunkId | None = None) -> Iterator[BootStream[RemoteSnapshot] | None]:
        """As `boot`, for a snapshot: records, device state, metadata, roots, leaves of its profile."""
        path = f"{_snapshot_path(name)}?view=boot&profile=frame"

        def parse(document: Mapping[str, Any], record: bytes) -> RemoteSnapshot:
            return RemoteSnapshot.parse(document, SnapshotRecord.parse(record))

        tag = entity_tag(known, ()) if known is not None else None
        with self._boot(path, f"snapshot {name}", "pvisor-snapshot", parse, tag) as stream:
            yield stream

    @contextlib.contextmanager
    def _boot(
        self,
        path: str,
        what: str,
        header: str,
        parse: Callable[[Mapping[str, Any], bytes], T],
        tag: str | None,
    ) -> Iterator[BootStream[T] | None]:
        headers = {"If-None-Match": tag} if tag is not None else {}
        with contextlib.ExitStack() as stack:
            call = Call()

            def attempt() -> Answer:
                nonlocal call
                call = Call(longest_s=_FIRST_LIMIT_S)
                with self._given_up(call):
                    return stack.enter_context(self._request("GET", path, headers=headers, call=call))

            # What breaks once there is an answer is the caller's to see.
            answer = self._retry(attempt)
            if answer.status == 304:
                if tag is None:
                    raise UpstreamError(f"{self.url}: {what}: status 304, and nothing was said to be known")
                answer.read(0)
                yield None
                return
            try:
                document = json.loads(answer.header(header))
                stated_profile, count = document.get("profile"), int(document.get("frames", _MOST_FRAMES))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                raise UpstreamError(f"{self.url}: {what}: no {header.title()} header in the answer") from error
            frame, profile = self._read_frame(answer), None
            if frame is not None and stated_profile is not None and str(frame.id) != document.get("id"):
                profile = self._profile(frame)
                frame = self._read_frame(answer)
            if frame is None:
                raise UpstreamRetryError(f"{self.url}: {what}: an empty answer")
            found = parse(document, frame.open())
            rest = self._rest(answer)
            first = itertools.islice(rest, min(max(0, count - 1), _MOST_FRAMES))
            yield BootStream(found, profile, frame, self._bounded(first, call), rest)

    @contextlib.contextmanager
    def _given_up(self, call: Call) -> Iterator[None]:
        """End the call when its answer has not begun in time."""
        if self._silence_s == math.inf:
            yield
            return
        timer = threading.Timer(self._silence_s, call.cancel)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _bounded(self, frames: Iterator[Frame], call: Call) -> Iterator[Frame]:
        """The first part of a boot answer; then there is more time for what follows it."""
        room = _FIRST_LIMIT_BYTES
        for frame in frames:
            room -= frame.stored_bytes
            if room < 0:
                raise UpstreamError(f"{self.url}: more than {_FIRST_LIMIT_BYTES} bytes before an image can start")
            yield frame
        call.longest_s = _AHEAD_LIMIT_S

    def _profile(self, frame: Frame) -> Profile | None:
        """None when it is none: an image starts without, too."""
        try:
            return Profile.parse(frame.open())
        except (ChunkError, FormatError) as error:
            log.warning("%s: %s", self.url, error.message)
            return None

    def _rest(self, answer: Answer) -> Iterator[Frame]:
        while (frame := self._read_frame(answer)) is not None:
            yield frame

    def publish(self, name: str, chunk: ChunkId, signatures: Sequence[Signature] = ()) -> None:
        """Name an image whose chunks are all at the server; UpstreamError says how many are not. `signatures` are of
        this name; those that the server has of the same image stay."""
        signed = {"signatures": [signature.to_json() for signature in signatures]} if signatures else {}
        self._json("PUT", _image_path(name), {"id": str(chunk), **signed})

    def snapshots(self) -> list[RemoteSnapshot]:
        """Those that can be parsed: what is not as this version knows it is left out, and logged."""
        document = self._json("GET", "/v1/snapshots")
        found = []
        for entry in document.get("snapshots", ()):
            try:
                found.append(RemoteSnapshot.parse(entry))
            except FormatError as error:
                name = repr(entry.get("name"))[:140] if isinstance(entry, dict) else "one"
                log.error("snapshot %s of %s is not listed: %s", name, self.url, error.message)
        return found

    def snapshot(self, name: str) -> RemoteSnapshot:
        """By name or id. NotFoundError, InvalidNameError."""
        return RemoteSnapshot.parse(self._json("GET", _snapshot_path(name)))

    def publish_snapshot(self, name: str, snapshot: ChunkId, *, replaces: ChunkId | Literal["*"] | None = None) -> None:
        """As `publish`, for a snapshot. UpstreamError also when the name stands for another than `replaces`, of which
        "*" is any."""
        document = {"id": str(snapshot)} | ({"replaces": str(replaces)} if replaces is not None else {})
        self._json("PUT", _snapshot_path(name), document)

    def profile(self, image: ChunkId) -> Profile | None:
        """The profile of an image or snapshot; None when the server has none, or not the image. UpstreamError."""

        def attempt() -> bytes | None:
            with self._request("GET", f"/v1/profiles/{image}", accept_missing=True) as answer:
                raw = answer.read(_PROFILE_LIMIT_BYTES)
                return raw if answer.status == 200 else None

        raw = self._retry(attempt)
        try:
            return None if raw is None else Profile.parse(raw)
        except FormatError as error:
            raise UpstreamError(f"chunk server {self.url}: {error.message}") from error

    def merge_profile(self, image: ChunkId, touched: Sequence[ChunkId]) -> None:
        """Add one recorded run to the server's profile of an image or snapshot."""
        self._json("PUT", f"/v1/profiles/{image}", raw=b"".join(touched))

    def convert(self, source: str, *, name: str | None = None, platform: str | None = None) -> Job:
        """Start a conversion at the server, or join the one that runs."""
        body = {"source": source, "name": name, "platform": platform}
        wanted = {key: value for key, value in body.items() if value is not None}
        return self.job(str(self._json("POST", "/v1/images", wanted).get("job", "")))

    def job(self, job: str) -> Job:
        """NotFoundError."""
        return Job.parse(self.job_document(job))

    def job_document(self, job: str) -> dict[str, Any]:
        """All that the server says of a job. NotFoundError."""
        return self._json("GET", _job_path(job))

    def jobs(self) -> list[dict[str, Any]]:
        """All that the server says of the jobs it remembers, the newest first."""
        found = self._json("GET", "/v1/jobs").get("jobs")
        return [job for job in found if isinstance(job, dict)] if isinstance(found, list) else []

    def cancel_job(self, job: str) -> dict[str, Any]:
        """End a job; what the server then says of it. NotFoundError, UpstreamError when it has ended another way."""
        return self._json("DELETE", _job_path(job))

    def remove_image(self, name: str) -> str:
        """Take a name away, and say which it was. NotFoundError."""
        return str(self._json("DELETE", _image_path(name)).get("removed", name))

    def remove_snapshot(self, name: str) -> str:
        """As `remove_image`."""
        return str(self._json("DELETE", _snapshot_path(name)).get("removed", name))

    # Requests

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
            hint = "SSL_CERT_FILE names a PEM file with the authority that signed it, if it is one of your own"
            return UpstreamError(f"chunk server {self.url}: {error}", hint=hint)
        hint = "check its URL, that it is running, and that it can be reached from here"
        return UpstreamRetryError(f"chunk server {self.url}: {error}", hint=hint)

    def _refused(self, answer: Answer, path: str) -> None:
        """Raise what the status means, with the server's own words."""
        text = answer.read(1 << 16)
        try:
            document = json.loads(text)
            message, hint = str(document["error"]), str(document.get("hint", ""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            message, hint = f"status {answer.status} for {path}", ""
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
                return answer.read(_JSON_LIMIT_BYTES)

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


def _kept(keeps: Sequence[ChunkId] | None) -> dict[str, list[str]]:
    return {} if keeps is None else {"keeps": [str(record) for record in keeps]}


def _image_path(name: str) -> str:
    """Where the server has the image of this name or id. InvalidNameError when it can be neither."""
    ImageName.parse(name)
    return f"/v1/images/{quote(name, safe='/:')}"


def _job_path(job: str) -> str:
    return f"/v1/jobs/{quote(job, safe='', errors='backslashreplace')}"


def _snapshot_path(name: str) -> str:
    """As `_image_path`, for a snapshot."""
    return f"/v1/snapshots/{name if ChunkId.is_id(name) else snapshot_name(name)}"


@dataclass(frozen=True, slots=True)
class BootStream(Generic[T]):
    """The image or snapshot that was `found`, its profile if it has one, the frame of its record, and the frames that
    follow, which are unverified: `first` what it starts with, then `rest` those that the profile names."""

    found: T
    profile: Profile | None
    record_frame: Frame
    first: Iterator[Frame]
    rest: Iterator[Frame]
