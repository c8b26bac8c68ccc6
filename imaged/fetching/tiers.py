"""Looking a name up at several chunk servers in order: peers, a cache in the rack, the origin.

The first that has the name counts. One that is down must not cost a start much: all but the last are asked once, and
given up when they are silent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from imaged.errors import NotFoundError, PvisorError, SignatureError, UpstreamError
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream

log = logging.getLogger(__name__)
SILENCE_S = 1.0
"""A peer that says nothing for so long is passed over."""
_ONCE = RetryPolicy(total_s=0.0)
T = TypeVar("T")


def tiers(servers: Iterable[HttpUpstream], retry: RetryPolicy) -> list[HttpUpstream]:
    """The same servers as a lookup asks them: the last with this patience, those before it with little."""
    found = list(servers)
    return [server.patient(_ONCE, silence_s=SILENCE_S) for server in found[:-1]] + [
        server.patient(retry) for server in found[-1:]
    ]


def first(servers: Sequence[HttpUpstream], attempt: Callable[[HttpUpstream], T]) -> T:
    """What `attempt` gives of the first server that has what is looked up.

    What the last server says is raised when none has it: NotFoundError, UpstreamError, SignatureError.
    """
    silent: list[str] = []
    for server in servers[:-1]:
        try:
            return attempt(server)
        except (NotFoundError, SignatureError) as error:
            log.info("%s", error.message)
        except UpstreamError as error:
            log.warning("asking the next server: %s", error.message)
            silent.append(server.url)
    try:
        return attempt(servers[-1])
    except (NotFoundError, SignatureError, UpstreamError) as error:
        if silent:
            more = f"({', '.join(silent)} did not answer either)" if isinstance(error, UpstreamError) else ""
            more = more or f"({', '.join(silent)}, asked before, did not answer)"
            raise _with(error, more) from error
        raise


def _with(error: PvisorError, more: str) -> PvisorError:
    return type(error)(f"{error.message} {more}", hint=error.hint)
