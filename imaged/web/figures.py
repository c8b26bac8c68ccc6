"""What is dear to count, counted at most once for each state of the names: while pages show what was known before."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from imaged import catalog, submodule
from imaged.catalog import Entry
from imaged.chunkstore.refs import Ref
from imaged.chunkstore.store import ChunkStore
from imaged.ids import ChunkId
from imaged.profile import Profile
from imaged.record import ImageRecord

log = logging.getLogger(__name__)
_LONGEST_S = 600.0
_PROFILES = 4096
_RECORDS = 4096
K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class _Count:
    """Of one namespace: what is known, of which names, and who finds out more."""

    signature: int | None = None
    own: Mapping[str, int] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class Sharing:
    """The bytes that are each image's and snapshot's own (`imaged.serving.sharing`). For one event loop; `close` it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._counts: dict[str | None, _Count] = {}

    def own(self, namespace: str | None, signature: int) -> Mapping[str, int] | None:
        """By id, as last counted; None while that goes on for the first time. `signature` is of the names there are."""
        count = self._counts.setdefault(namespace, _Count())
        if count.signature != signature and count.task is None:
            count.task = asyncio.create_task(self._run(namespace, count, signature))
        return count.own if count.signature is not None else None

    async def close(self) -> None:
        tasks = [count.task for count in self._counts.values() if count.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, namespace: str | None, count: _Count, signature: int) -> None:
        try:
            count.own = await self._ask(namespace)
        except (OSError, ValueError, TimeoutError) as error:
            log.warning("what images share is not counted: %s", error)
        finally:
            count.signature = signature
            count.task = None

    async def _ask(self, namespace: str | None) -> dict[str, int]:
        command = [*submodule.command("imaged.serving.sharing"), f"--store={self._root}"]
        command += [f"--namespace={namespace}"] if namespace is not None else []
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=submodule.environment(),
        )
        try:
            async with asyncio.timeout(_LONGEST_S):
                printed, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise ValueError(f"its process ended with status {process.returncode}")
        return dict(json.loads(printed))


@dataclass(frozen=True, slots=True)
class Startup:
    """A startup profile in figures; `stored_bytes` of those chunks that are here."""

    entries: int
    runs: int
    stored_bytes: int


class Known:
    """Records and profiles of images that pages have shown. Threads may share it: what two find is the same."""

    def __init__(self) -> None:
        self._startups: dict[tuple[str | None, ChunkId], tuple[int, Startup | None]] = {}
        self._records: dict[ChunkId, ImageRecord] = {}

    def entry(self, store: ChunkStore, name: str, ref: Ref) -> Entry:
        """As `catalog.load`."""
        record = self._records.get(ref.record)
        if record is None:
            entry = catalog.load(store, name, ref)
            _keep(self._records, ref.record, entry.record, _RECORDS)
            return entry
        return Entry(name, ref, record)

    def startup(self, store: ChunkStore, namespace: str | None, image: ChunkId) -> Startup | None:
        """Of a block image; None when no run was recorded."""
        raw = store.profiles.raw(image)
        if raw is None:
            return None
        key, digest = (namespace, image), hash(raw)
        known = self._startups.get(key)
        if known is not None and known[0] == digest:
            return known[1]
        profile = store.profiles.get(image)
        found = None if profile is None else _startup(store, profile)
        _keep(self._startups, key, (digest, found), _PROFILES)
        return found


def _startup(store: ChunkStore, profile: Profile) -> Startup:
    sizes = (store.sizes(chunk) for chunk in profile.chunks)
    return Startup(len(profile.chunks), profile.runs, sum(size[1] for size in sizes if size is not None))


def _keep(known: dict[K, V], key: K, value: V, limit: int) -> None:
    """The oldest goes when there are too many."""
    if len(known) >= limit and key not in known:
        with contextlib.suppress(StopIteration, KeyError):
            del known[next(iter(known))]
    known[key] = value
