"""A bound for what a store keeps of servers: chunks that were not used for longest go, and only those that a server
gave and that no name promises to be here.

An eviction is a small collection (`imaged.chunkstore.condemned`): it is alone with the collection lock, it condemns
before it removes, and it removes nothing on which the holder of a lease may rely. So while something is converted,
pulled whole or published on this store nothing is evicted, and what then does not fit is served without being kept. A
chunk leaves the index before its bytes go; who finds it gone fetches it again. A kill leaves at most bytes in which no
chunk lies, which the next one gives back.

The bound is for the packs, as they take room on the disk; the index comes on top, some 200 bytes for each chunk.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from imaged.chunkstore.index import Index
from imaged.chunkstore.lease import least_epoch
from imaged.chunkstore.pack import disk_bytes, pack_numbers
from imaged.chunkstore.store import ChunkStore
from imaged.chunkstore.storelock import CollectionLock
from imaged.collection import compact
from imaged.collection.victims import Victims
from imaged.errors import PvisorError, StoreError, StoreFullError

KEPT_SHARE = 0.9
"""What is left of the bound after an eviction: so there is one for each tenth of it that comes."""
EARLY_SHARE = 0.97
"""One begins in the background when the store is so full, so that as a rule nobody waits for it."""
LOOK_S = 5.0
"""How often the store is looked at without anybody asking: other processes fill it, too."""
_PAUSE_S = 1.0
"""After an eviction that was held back, or found nothing more to give away."""
_FLUSH_S = 30.0
_ROUNDS = 4
_CLOSE_WAIT_S = 30.0
_FEW = 64
_BOUND = b"cache_max"
_LIVE_SHARE = 0.125
"""A pack with less in it is joined with others, so that there are not ever more files with little in them."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatus:
    """`max_bytes` is the bound, None without one, `used_bytes` what the packs take. What was `evicted_*` counts since
    the process started; `held_back` says why the last eviction did not give away what it should."""

    max_bytes: int | None
    used_bytes: int
    evicted_chunks: int
    evicted_bytes: int
    held_back: str


def used_bytes(root: Path) -> int:
    """What the packs of a store take on disk."""
    return sum(disk_bytes(root, number) for number in pack_numbers(root))


def noted_bound(index: Index) -> int | None:
    """The bound that the last process had which bounded this store."""
    raw = index.get("meta", _BOUND)
    return None if raw is None else int.from_bytes(raw, "big")


class _HeldBackError(Exception):
    """Nothing can be evicted now."""


class Evictor:
    """Keeps one store below its bound. Threads may share it; a context manager.

    Without a bound it does nothing. With one it also makes room when the file system is full before that is reached.
    """

    def __init__(self, store: ChunkStore, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._store = store
        self._turn = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._victims = Victims(store)
        self._not_before_s = self._flush_s = 0.0
        self._is_first = True
        self._evicted_chunks = self._evicted_bytes = 0
        self._held_back = ""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look after the store from now on, on a thread of its own. StoreError."""
        self.note()
        if self.max_bytes is not None:
            self._store.uses.record()
        if self._thread is None:
            lock = CollectionLock.alone_if_free(self._store.root)  # its file is there before the disk is full
            if lock is not None:
                lock.release()
            self._thread = threading.Thread(target=self._run, name="evict", daemon=True)
            self._thread.start()

    def note(self) -> None:
        """Say in the store what its bound is, for `store df`. StoreError."""
        if self.max_bytes == noted_bound(self._store.index):
            return
        with self._store.index.write("note the bound of the cache") as txn:
            if self.max_bytes is None:
                self._store.index.delete(txn, "meta", _BOUND)
            else:
                self._store.index.put(txn, "meta", _BOUND, self.max_bytes.to_bytes(8, "big"))

    def limit(self, max_bytes: int | None) -> None:
        """Another bound from now on."""
        self.max_bytes = max_bytes
        self.start()
        self.poke()

    def close(self) -> None:
        """End the thread after what it is at, and keep which chunks were used when."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_WAIT_S)
        self._flush_uses()

    def __enter__(self) -> Evictor:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def used_bytes(self) -> int:
        return used_bytes(self._store.root)

    @property
    def left_bytes(self) -> int | None:
        """Below the bound; None without one."""
        return None if self.max_bytes is None else self.max_bytes - self.used_bytes

    def status(self) -> CacheStatus:
        return CacheStatus(
            max_bytes=self.max_bytes,
            used_bytes=self.used_bytes,
            evicted_chunks=self._evicted_chunks,
            evicted_bytes=self._evicted_bytes,
            held_back=self._held_back,
        )

    def poke(self) -> None:
        """The store is nearly full: look soon."""
        self._wake.set()

    def make_room(self, byte_count: int, *, lacking_bytes: int = 0) -> bool:
        """So many bytes are to be kept, for which the file system lacks `lacking_bytes`: evict, if that is of use now;
        whether anything was given back."""
        if self.max_bytes is None:
            return False
        with self._turn:
            used = self.used_bytes
            targets = [used - max(lacking_bytes * 2, used // 10)] if lacking_bytes else []
            if used + byte_count > self.max_bytes:
                targets.append(int(self.max_bytes * KEPT_SHARE) - byte_count)
            if not targets or time.monotonic() < self._not_before_s:
                return False
            return self._evict(min(targets)) > 0

    # On its thread

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(LOOK_S)
            self._wake.clear()
            try:
                self._look()
            except Exception:
                log.exception("eviction")

    def _look(self) -> None:
        now_s = time.monotonic()
        if self._store.uses.is_full or now_s - self._flush_s >= _FLUSH_S:
            self._flush_uses()
        if self.max_bytes is None or self._closing:
            return
        with self._turn:
            if self.used_bytes > self.max_bytes * EARLY_SHARE and now_s >= self._not_before_s:
                self._evict(int(self.max_bytes * KEPT_SHARE))

    def _flush_uses(self) -> None:
        self._flush_s = time.monotonic()
        try:
            if not self._store.readonly:
                self._store.uses.flush()
        except StoreError as error:
            log.warning("when chunks were used is not noted: %s", error.message)

    # One eviction

    def _evict(self, target_bytes: int) -> int:
        """Until the packs take no more than this; what was given back. Under the turn."""
        began = self.used_bytes
        try:
            self._flush_uses()
            given = self._store.evict_copies(began - target_bytes)
            if given is None:
                left = self._evict_chunks(target_bytes)
                why = "the rest is promised to images that need no server, or just in use"
            else:  # no chunk left the index
                left, why = began - given, "the rest is not in the bucket yet"
            if left > target_bytes:
                raise _HeldBackError(why)
            self._held_back = ""
        except _HeldBackError as error:
            self._hold_back(str(error))
        except PvisorError as error:
            self._hold_back(error.message)
        freed_bytes = max(0, began - self.used_bytes)
        self._evicted_bytes += freed_bytes
        return freed_bytes

    def _evict_chunks(self, target_bytes: int) -> int:
        """What the packs take then. PvisorError, _HeldBackError."""
        lock = CollectionLock.alone_if_free(self._store.root)
        if lock is None:
            raise _HeldBackError("a collection or a check of the store is going on")
        with lock:
            if self._is_first:  # what a killed process took from the index and not from the disk
                compact.punch_dead(self._store.root, self._store.index)
                self._is_first = False
            used = self.used_bytes
            for _ in range(_ROUNDS):
                if used <= target_bytes or self._closing:
                    break
                before = used
                self._round(used - target_bytes)
                used = self.used_bytes
                if used >= before:
                    break
        return used

    def _hold_back(self, why: str) -> None:
        self._not_before_s = time.monotonic() + _PAUSE_S
        if self._held_back != why:
            log.warning("the cache stays larger than it should be: %s", why)
        self._held_back = why

    def _round(self, byte_count: int) -> None:
        """Give away the chunks used longest ago, to so many bytes. PvisorError, _HeldBackError."""
        store = self._store
        if least_epoch(store.leases.live()) is not None:
            raise _HeldBackError("something is being converted, pulled whole or published")
        with contextlib.suppress(StoreFullError):  # what is not in the index yet stays
            store.flush()
        self._flush_uses()
        victims = self._victims.choose(byte_count)
        if victims:
            try:
                removed = self._victims.remove(victims)
            except StoreFullError:  # the index takes some pages for it
                removed = self._victims.remove(dict(islice(victims.items(), _FEW)))
            self._evicted_chunks += removed
        compact.punch_dead(store.root, store.index, only={place.pack for place in victims.values()})
        compact.remove_empty(store.root, store.index)
        compact.compact(store.root, store.index, share=_LIVE_SHARE)
