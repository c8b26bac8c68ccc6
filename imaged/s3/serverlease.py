"""The lease of one host in a bucket: which condemned lists it goes by, and what it keeps; see docs/s3.md.

    leases/SERVER.json    {"version", "lease_s", "seen": [names of condemned lists], "keeps": [ids of records]}

It lasts `lease_s` from when it was written, by the S3 server's clock for those who look at it, and from before the
request by the clock of this host since its start for us. So clocks that are set wrong end none too early or too late.
`seen` are the lists that were known here when the oldest work that is still going on began: none of that relies on
what they condemn.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from imaged.chunkstore.index import Index
from imaged.errors import FormatError, ObjectMissingError
from imaged.ids import ChunkId
from imaged.publish import published
from imaged.s3.objects import Objects

LEASES = "leases/"
CLOCK_S = 2.0
"""Times of objects are rounded to a second, up or down."""
_VERSION = 1
_LAPSES = b"bucket_lapses"
_STATE = "bucketlease.json"
log = logging.getLogger(__name__)


class Wish(NamedTuple):
    """What a lease is to say."""

    seen: frozenset[str]
    keeps: frozenset[ChunkId]


class ServerState(NamedTuple):
    """A lease as others see it; `expires_s` is in Unix seconds of the S3 server's clock."""

    server: str
    seen: frozenset[str]
    keeps: frozenset[ChunkId]
    expires_s: float


class ServerLease:
    """Of this host; its processes share it through a file. Threads share it."""

    def __init__(
        self,
        root: Path,
        index: Index,
        objects: Objects,
        server: str,
        lease_s: float,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._root, self._index, self._objects, self.server, self._lease_s = root, index, objects, server, lease_s
        self._clock = clock
        self._lock = threading.Lock()
        self._ahead_s = 0.0
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    @property
    def key(self) -> str:
        return f"{LEASES}{self.server}.json"

    @property
    def renew_s(self) -> float:
        return self._lease_s / 4

    @property
    def lapses(self) -> int:
        """How often there was a time without a lease, in which collections went on without asking this host."""
        return self._index.counter(_LAPSES)

    def now_s(self) -> float:
        """By the S3 server's clock, as of the last `write` of this process."""
        return self._clock() + self._ahead_s

    def left_s(self) -> float:
        """How long it lasts; 0 when it is over."""
        try:
            state = json.loads((self._root / _STATE).read_bytes())
            return max(float(state["until"]) - self._clock(), 0.0) if state["boot"] == self._boot else 0.0
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return 0.0

    def written(self) -> Wish | None:
        """What it says now."""
        try:
            state = json.loads((self._root / _STATE).read_bytes())
            return Wish(frozenset(state["seen"]), frozenset(ChunkId.parse(one) for one in state["keeps"]))
        except (FileNotFoundError, ValueError, LookupError, TypeError, FormatError):
            return None

    def write(self, wish: Wish) -> None:
        """Make it last from now, saying this. BucketUnavailableError, StoreError; then it ends when it would have."""
        with self._lock:
            if not self.left_s():
                with self._index.write("note that the lease in the bucket lapsed") as txn:
                    self._index.bump(txn, _LAPSES)
            begun = self._clock()
            document = {
                "version": _VERSION,
                "lease_s": self._lease_s,
                "seen": sorted(wish.seen),
                "keeps": sorted(str(one) for one in wish.keeps),
            }
            server_s = self._objects.put(self.key, json.dumps(document).encode())
            self._ahead_s = server_s - self._clock()
            with published(self._root / _STATE) as file:
                file.write(json.dumps({**document, "until": begun + self._lease_s, "boot": self._boot}).encode())

    def end(self) -> None:
        """Nobody here works on the store any more."""
        with self._lock:
            (self._root / _STATE).unlink(missing_ok=True)
            self._objects.delete(self.key)


def live(objects: Objects, now_s: float) -> list[ServerState]:
    """The leases that are not over at `now_s`, of the S3 server's clock. One that can not be read has seen nothing."""
    found = []
    for entry in objects.list(LEASES):
        server = entry.key.removeprefix(LEASES).removesuffix(".json")
        try:
            state = _parse(server, objects.get(entry.key), entry.modified_s)
        except ObjectMissingError:
            continue
        if state.expires_s > now_s:
            found.append(state)
    return found


def _parse(server: str, raw: bytes, modified_s: float) -> ServerState:
    try:
        document = json.loads(raw)
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']!r}"[:80])
        seen = frozenset(str(one) for one in document["seen"])
        keeps = frozenset(ChunkId.parse(one) for one in document["keeps"])
        return ServerState(server, seen, keeps, modified_s + float(document["lease_s"]) + CLOCK_S)
    except (ValueError, LookupError, TypeError, FormatError, RecursionError) as error:
        log.warning("lease of %s: %s", server, error)
        return ServerState(server, frozenset(), frozenset(), modified_s + 24 * 3600)


def missing_from(states: Collection[ServerState], key: str) -> list[str]:
    """The servers that do not go by this condemned list yet."""
    return [state.server for state in states if key not in state.seen]
