"""What a server looks after every few seconds: a look that fails is in the log, and the next one comes all the same."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def repeating(look: Callable[[], Awaitable[None] | None], every_s: float, name: str) -> AsyncIterator[None]:
    """Within the block `look` is called at once and then every so many seconds, in this event loop."""
    task = asyncio.create_task(_repeat(look, every_s, name), name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _repeat(look: Callable[[], Awaitable[None] | None], every_s: float, name: str) -> None:
    told: type[Exception] | None = None
    while True:
        try:
            waiting = look()
            if waiting is not None:
                await waiting
            told = None
        except Exception as error:
            if type(error) is not told:  # else the log is full of it by tomorrow
                log.exception("%s: a look failed; the next one is in %g s", name, every_s)
            told = type(error)
        await asyncio.sleep(every_s)
