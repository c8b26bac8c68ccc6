"""What the node daemon does for the commands of this host: its part of the control socket (`fuse.control`)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, Self

from fuse import vmlease
from fuse.control import Operation
from fuse.files import BlockFiles
from fuse.fill import Filler
from fuse.keeping import Keeping
from fuse.opener import Opener
from fuse.snapshotopener import SnapshotOpener
from imaged.chunkstore.store import ChunkStore
from imaged.collection.eviction import Evictor
from imaged.config import Config
from imaged.fetching.fetch import Fetcher
from imaged.fetching.upstream import HttpUpstream
from imaged.ids import ChunkId
from imaged.signature import Trust

Request = dict[str, Any]


class Node:
    """The images and snapshots that are open on this host, and where their chunks come from.

    A context manager; leaving it ends what runs in the background, and stores what was fetched. Requests may come from
    many threads at once.
    """

    def __init__(self, config: Config, store: ChunkStore) -> None:
        self._config = config
        self._started = time.monotonic()
        self._fetcher = Fetcher(store, [HttpUpstream(url) for url in config.servers])
        self._evictor = Evictor(store, config.cache_max_bytes)
        self._fetcher.bound(self._evictor)
        self.files = BlockFiles(self._fetcher)
        self._keeping = Keeping(self._fetcher, self.files)
        self._opener = Opener(config, self._fetcher, self.files, self._keeping)
        self._snapshots = SnapshotOpener(config, self._fetcher, self.files, self._opener, self._keeping)
        self._filler = Filler(self._fetcher)
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        for part in (self._evictor, self._fetcher, self.files, self._opener, self._snapshots, self._filler):
            self._ends.callback(part.close)
        self._ends.callback(self._keeping.close)
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.close()

    def go_on(self) -> None:
        """With the fills that an earlier daemon has left, and with the bound of the cache."""
        self._filler.resume()
        if self._config.cache_max_bytes is not None:
            self._evictor.start()
        else:
            self._evictor.note()

    def answers(self) -> Mapping[str, Operation]:
        """Operations that wait for no other host; None where one would have to."""
        return {
            "open": self._open_here,
            "open_snapshot": self._open_snapshot_here,
            "check_snapshot": self._check_snapshot_here,
            "fill": self._fill,
            "limit_cache": self._limit_cache,
            "tidy": self._tidy,
            "status": self._status,
        }

    def waiting_answers(self) -> Mapping[str, Operation]:
        """Operations that ask servers."""
        return {
            "open": self._open,
            "open_snapshot": self._open_snapshot,
            "check_snapshot": self._check_snapshot,
            "pull": self._pull,
        }

    def _status(self, request: Request) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._started, 3),
            "home": str(self._config.home),
            "server": self._config.server,
            "mount": str(self._config.blocks),
            "images": self.files.status(),
            "snapshots": self.files.status(snapshots=True),
            "fills": self._filler.status(),
            "vms": vmlease.held(self._config),
            "cache": asdict(self._evictor.status()),
        }

    def _open_here(self, request: Request) -> dict[str, Any] | None:
        trust, start = Trust.parse(request.get("require")), request.get("start") is True
        found = self._opener.open_here(str(request["name"]), start=start, trust=trust)
        return None if found is None else found.to_json()

    def _open(self, request: Request) -> dict[str, Any]:
        trust, start = Trust.parse(request.get("require")), request.get("start") is True
        name, server = str(request["name"]), request.get("server")
        return self._opener.open(name, server=server, start=start, trust=trust).to_json()

    def _open_snapshot_here(self, request: Request) -> dict[str, Any] | None:
        found = self._snapshots.open_here(str(request["name"]))
        return None if found is None else found.to_json()

    def _open_snapshot(self, request: Request) -> dict[str, Any]:
        return self._snapshots.open(str(request["name"]), server=request.get("server")).to_json()

    def _check_snapshot_here(self, request: Request) -> dict[str, Any] | None:
        return {} if self._snapshots.check_here(str(request["name"])) else None

    def _check_snapshot(self, request: Request) -> dict[str, Any]:
        self._snapshots.check(str(request["name"]))
        return {}

    def _pull(self, request: Request) -> dict[str, Any]:
        trust = Trust.parse(request.get("require"))
        return self._opener.pull(str(request["name"]), server=str(request["server"]), trust=trust)

    def _fill(self, request: Request) -> dict[str, Any]:
        self._filler.want(ChunkId.parse(str(request["image"])), request.get("bytes_per_s"))
        return {}

    def _tidy(self, request: Request) -> dict[str, Any]:
        self._keeping.tidy()
        return {}

    def _limit_cache(self, request: Request) -> dict[str, Any]:
        self._evictor.limit(int(request["max_bytes"]))
        self._fetcher.bound(self._evictor)
        return {}
