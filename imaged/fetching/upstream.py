"""A chunk server over HTTP: frames in one batch, records of images and snapshots, conversion jobs, uploads.

Retrying is done here and, over several servers, in `imaged.fetching.fetch`: a broken batch goes on at the frame where
it broke.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from imaged.errors import ChunkMissingError, FormatError, UpstreamError
from imaged.fetching.bootstream import BootConnection, BootStream
from imaged.fetching.httpcall import Call
from imaged.fetching.remote import Job, RemoteImage, RemoteSnapshot
from imaged.fetching.retry import UpstreamRetryError, UpstreamWrongError
from imaged.fetching.serverconnection import JSON_LIMIT_BYTES
from imaged.frame import Codec, Frame
from imaged.ids import ChunkId
from imaged.names import ImageName, snapshot_name
from imaged.profile import Profile
from imaged.record import ImageRecord
from imaged.signature import Signature, entity_tag
from imaged.snapshot import SnapshotRecord

BATCH_LIMIT = 4096
"""Ids in one batch; the server refuses more."""
FRAME_S = 120.0
"""How long one frame, of at most a chunk, may take: a batch takes as long as the link needs for all of its frames."""
_PROFILE_LIMIT_BYTES = 1 << 20
S = TypeVar("S")
T = TypeVar("T")
log = logging.getLogger(__name__)


class HttpUpstream(BootConnection):
    """One chunk server. Shared, and closed, as its connections are.

    Satisfies `ChunkReader`. Frames are not verified here (`Frame.open` does), but they are the ones that were asked
    for, in order, and no length is believed beyond the frame limit.
    """

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
        call = call or Call()
        call.longest_s = FRAME_S
        with self._request("POST", "/v1/chunks/batch", body, kind, headers=headers, call=call) as answer:
            for chunk in chunks:
                call.give(FRAME_S)
                frame = self._read_frame(answer)
                if frame is None or frame.id != chunk:
                    found = "the end of the answer" if frame is None else f"a frame of {frame.id}"
                    kind_of = UpstreamRetryError if frame is None else UpstreamWrongError
                    raise kind_of(f"{self.url}: batch: expected chunk {chunk}, found {found}")
                yield frame
            answer.finish()

    def _fetch_one(self, chunk: ChunkId, headers: Mapping[str, str], call: Call | None) -> Frame:
        """A plain GET: one packet out, and what caches on the way understand."""
        call = call or Call()
        call.longest_s = FRAME_S
        with self._request("GET", f"/v1/chunks/{chunk}", headers=headers, accept_missing=True, call=call) as answer:
            if answer.status == 404:
                answer.read(JSON_LIMIT_BYTES)
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
            found = self._json("POST", "/v1/chunks/missing", {"ids": ids}).get("missing")
            if not isinstance(found, list):
                raise UpstreamError(f"chunk server {self.url}: it does not say which chunks are missing")
            absent += self._parsed(lambda found: [ChunkId.parse(str(text)) for text in found], found)
        return absent

    def _parsed(self, parse: Callable[[S], T], said: S) -> T:
        """What this server said. UpstreamError, which names it, when that is not what this version knows."""
        try:
            return parse(said)
        except FormatError as error:
            raise UpstreamError(f"chunk server {self.url}: {error.message}") from error

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
        """Those that can be parsed: what is not as this version knows it is left out, and logged."""
        return self._listed("image", RemoteImage.parse)

    def image(self, name: str) -> RemoteImage:
        """By name or image id. NotFoundError, InvalidNameError."""
        return self._parsed(RemoteImage.parse, self._json("GET", _image_path(name)))

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

    def publish(self, name: str, chunk: ChunkId, signatures: Sequence[Signature] = ()) -> None:
        """Name an image whose chunks are all at the server; UpstreamError says how many are not. `signatures` are of
        this name; those that the server has of the same image stay."""
        signed = {"signatures": [signature.to_json() for signature in signatures]} if signatures else {}
        self._json("PUT", _image_path(name), {"id": str(chunk), **signed})

    def snapshots(self) -> list[RemoteSnapshot]:
        """As `images`."""
        return self._listed("snapshot", RemoteSnapshot.parse)

    def _listed(self, what: str, parse: Callable[[Mapping[str, Any]], T]) -> list[T]:
        entries = self._json("GET", f"/v1/{what}s").get(f"{what}s")
        found = []
        for entry in entries if isinstance(entries, list) else ():
            try:
                found.append(parse(entry))
            except FormatError as error:
                name = repr(entry.get("name"))[:140] if isinstance(entry, dict) else "one"
                log.error("%s %s of %s is not listed: %s", what, name, self.url, error.message)
        return found

    def snapshot(self, name: str) -> RemoteSnapshot:
        """By name or id. NotFoundError, InvalidNameError."""
        return self._parsed(RemoteSnapshot.parse, self._json("GET", _snapshot_path(name)))

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
        return None if raw is None else self._parsed(Profile.parse, raw)

    def merge_profile(self, image: ChunkId, touched: Sequence[ChunkId]) -> None:
        """Add one recorded run to the server's profile of an image or snapshot."""
        self._json("PUT", f"/v1/profiles/{image}", raw=b"".join(touched))

    def convert(self, source: str, *, name: str | None = None, platform: str | None = None) -> Job:
        """Start a conversion at the server, or join the one that runs."""
        body = {"source": source, "name": name, "platform": platform}
        wanted = {key: value for key, value in body.items() if value is not None}
        return self.job(str(self._json("POST", "/v1/images", wanted).get("job", "")))

    def collect(self) -> Job:
        """Start a collection at the server, or join the one that runs."""
        return self.job(str(self._json("POST", "/v1/gc", {}).get("job", "")))

    def job(self, job: str) -> Job:
        """NotFoundError."""
        return self._parsed(Job.parse, self.job_document(job))

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
