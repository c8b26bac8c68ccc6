"""The chunk server: what a store holds, over HTTP. docs/http.md and /v1/openapi.json describe the interface."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from aiohttp import web

from imaged.chunkstore.store import MIRROR_NAME, ChunkStore
from imaged.collection.eviction import Evictor
from imaged.ids import ChunkId
from imaged.jobs.directorystore import DirectoryJobStore
from imaged.jobs.jobprocess import Workers
from imaged.jobs.jobstore import JobStore
from imaged.jobs.running import Jobs
from imaged.serving.access import ACCESS, VIEWS, Access
from imaged.serving.blocking import Blocking
from imaged.serving.chunkapi import ChunkApi
from imaged.serving.chunkprotocol import FastPath
from imaged.serving.denser import Denser
from imaged.serving.foreign import refuse_foreign
from imaged.serving.guard import Guard
from imaged.serving.httperrors import errors
from imaged.serving.imageapi import ImageApi
from imaged.serving.jobapi import JobApi
from imaged.serving.leaseapi import LeaseApi
from imaged.serving.listening import accepting, base_url, listen, until_stopped
from imaged.serving.logformat import configure
from imaged.serving.metrics import Metrics, Sources
from imaged.serving.openapi import document
from imaged.serving.operationsapi import OperationsApi
from imaged.serving.profileapi import ProfileApi
from imaged.serving.serveconfig import ServeOptions
from imaged.serving.snapshotapi import SnapshotApi
from imaged.serving.supervisor import supervise
from imaged.serving.through import Through
from imaged.serving.tls import ServerTls
from imaged.serving.tokens import TokenFile
from imaged.serving.traffic import Traffic
from imaged.web.session import Sessions
from imaged.web.site import Site

_BODY_LIMIT_BYTES = 4 << 20
_WAITING_THREADS = 64
"""For requests that wait for an upstream."""


def serve(options: ServeOptions, *, announce: Callable[[str], None]) -> None:
    """Serve a store until SIGTERM or SIGINT.

    `announce` gets the base URL once requests are accepted. On the signal /readyz says no; after `drain_s` there are no
    new connections, answers under way get ten seconds, conversions are stopped. StoreError; PvisorError when the
    address is not free.
    """
    configure(options)
    tls = options.tls_cert is not None
    with contextlib.closing(listen(options.host, options.port)) as listener:
        url = base_url(listener, options.host, tls=tls)
        if options.workers > 1:
            supervise(listener, options, announce=lambda: announce(url))
        else:
            serve_on(listener, options, announce=lambda: announce(url))


def serve_on(listener: socket.socket, options: ServeOptions, *, announce: Callable[[], None]) -> None:
    """As `serve`, for one process, maybe of several that share a listening socket."""
    tls = None
    if options.tls_cert is not None and options.tls_key is not None:
        tls = ServerTls(Path(options.tls_cert), Path(options.tls_key))
    with ChunkStore.open(Path(options.store)) as opened:
        asyncio.run(_serve(opened, options, listener, tls, announce))


async def _serve(
    store: ChunkStore,
    options: ServeOptions,
    listener: socket.socket,
    tls: ServerTls | None,
    announce: Callable[[], None],
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with application(store, options) as app, accepting(app, listener, app[FAST], tls, processes=options.workers):
        announce()
        await until_stopped(stop, app[_OPERATIONS].stop, options.drain_s)


@contextlib.asynccontextmanager
async def application(store: ChunkStore, options: ServeOptions | None = None) -> AsyncIterator[web.Application]:
    """The app over one store, with its thread pool and jobs."""
    options = options or ServeOptions(store=str(store.root))
    tokens = TokenFile(Path(options.token_file)) if options.token_file is not None else None
    access = Access(tokens, store, rate_per_s=options.rate_limit)
    blocking = Blocking(_WAITING_THREADS) if options.upstreams else Blocking()
    denser, traffic, guard = Denser(store), Traffic(), Guard()
    documents = _job_documents(store)
    try:
        async with (
            caching(store, options) as through,
            Jobs(store.root, documents, Workers(gc=options.gc_command)) as jobs,
            Site(store, jobs, Sessions(store.root, access), blocking) as site,
        ):
            leases = LeaseApi(store, blocking)
            chunks = ChunkApi(store, blocking, leases)
            images = ImageApi(store, jobs, chunks, blocking)
            middlewares = [errors, refuse_foreign, access.middleware]
            app = web.Application(middlewares=middlewares, client_max_size=_BODY_LIMIT_BYTES)
            app[ACCESS] = access
            if through is not None:
                app[VIEWS] = through
            fast = FastPath(
                planner=store.planner(),
                gate=access.fast,
                traffic=traffic,
                used=_used(store, through),
                guard=guard,
                head=FastPath.head_of(access.immutable),
            )
            sources = Sources(
                store=store,
                jobs=lambda: _states(documents),
                leases=lambda: len(store.leases.live()),
                cache=through.counters if through is not None else dict,
            )
            operations = OperationsApi(store, blocking, Metrics(sources, traffic, lambda: guard.open_connections))
            app[FAST], app[_OPERATIONS] = fast, operations
            app.add_routes(chunks.routes())
            app.add_routes(images.routes())
            app.add_routes(leases.routes())
            app.add_routes(JobApi(jobs).routes())
            app.add_routes(site.routes())
            app.add_routes(SnapshotApi(store, chunks, blocking).routes())
            app.add_routes(ProfileApi(store, blocking, denser).routes())
            app.add_routes(operations.routes())
            app.add_routes([web.get("/v1/openapi.json", _openapi)])
            async with operations.reporting(), leases.running():
                yield app
    finally:
        blocking.close()
        denser.close()


@contextlib.asynccontextmanager
async def caching(store: ChunkStore, options: ServeOptions) -> AsyncIterator[Through | None]:
    """What bounds the store, and what it is a cache of."""
    with contextlib.ExitStack() as ends:
        evictor = None
        if options.cache_max_bytes is not None:
            evictor = ends.enter_context(Evictor(store, options.cache_max_bytes))
        yield ends.enter_context(Through(store, options.upstreams, evictor)) if options.upstreams else None


def _used(store: ChunkStore, through: Through | None) -> Callable[[Sequence[ChunkId]], None]:
    """Who is to know what was answered without the store being asked."""
    if through is None:
        return store.uses.touch

    def used(chunks: Sequence[ChunkId]) -> None:
        store.uses.touch(chunks)
        through.tally.count(hits=len(chunks))

    return used


FAST = web.AppKey("fast", FastPath)
"""What its connections share."""
_OPERATIONS = web.AppKey("operations", OperationsApi)


def _job_documents(store: ChunkStore) -> JobStore:
    """Of this host's server processes, or of all servers of the bucket that the store mirrors."""
    local = DirectoryJobStore(store.root)
    if not (store.root / MIRROR_NAME).exists():
        return local
    from imaged.s3.jobs import BucketJobStore
    from imaged.s3.store import MirrorStore

    return BucketJobStore(local, store.bucket.objects) if isinstance(store, MirrorStore) else local


def _states(documents: JobStore) -> Mapping[str, int]:
    return Counter(str(job.state) for job in documents.all())


async def _openapi(request: web.Request) -> web.Response:
    return web.json_response(document())
