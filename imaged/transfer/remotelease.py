"""Leases at a chunk server, as its clients hold them: renewed in the background while they last."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from imaged.errors import NotFoundError, PvisorError, UpstreamError
from imaged.fetching.retry import UpstreamIncompleteError
from imaged.fetching.upstream import HttpUpstream
from imaged.ids import ChunkId

TTL_S = 600.0
_TRIES = 3
log = logging.getLogger(__name__)


def publish_complete(
    upstream: HttpUpstream,
    chunks: Sequence[ChunkId],
    send: Callable[[HttpUpstream, Sequence[ChunkId]], None],
    publish: Callable[[HttpUpstream], None],
    *,
    holder: str,
) -> int:
    """Send what the server lacks of `chunks`, then publish what stands on them; how many chunks were sent.

    That is under a lease. When the server says that chunks are missing after all, because the lease was lost or it
    found some damaged, they are sent, and it is asked again, twice at most. UpstreamError.
    """
    sent = 0
    with leased(upstream, holder) as server:
        for attempt in range(1, _TRIES + 1):
            missing = server.missing(chunks)
            send(server, missing)
            sent += len(missing)
            try:
                publish(server)
                break
            except UpstreamIncompleteError as error:
                if attempt == _TRIES:
                    raise
                log.info("%s; sending what is missing", error.message)
    return sent


@contextlib.contextmanager
def leased(upstream: HttpUpstream, holder: str) -> Iterator[HttpUpstream]:
    """The server, asked under a lease for uploads. One that has no leases, or gives none just now, is asked without:
    then it may ask for some chunks again."""
    try:
        lease = upstream.new_lease(holder, ttl_s=TTL_S)
    except NotFoundError:
        yield upstream
        return
    ended = threading.Event()
    thread = threading.Thread(target=_renew, args=(upstream, lease, ended), name="lease", daemon=True)
    thread.start()
    try:
        yield upstream.under(lease)
    finally:
        ended.set()
        try:
            upstream.end_lease(lease)
        except PvisorError as error:
            log.info("lease at %s is left to expire: %s", upstream.url, error.message)


def _renew(upstream: HttpUpstream, lease: str, ended: threading.Event) -> None:
    while not ended.wait(TTL_S / 3):
        try:
            upstream.renew_lease(lease, ttl_s=TTL_S)
        except NotFoundError as error:
            log.warning("the lease at %s is lost: %s", upstream.url, error.message)
            return
        except UpstreamError as error:
            log.warning("the lease at %s was not renewed: %s", upstream.url, error.message)
