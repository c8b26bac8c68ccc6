"""Where work that blocks is done for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_THREADS = 4
P = ParamSpec("P")
T = TypeVar("T")


class Blocking:
    """A bounded pool for what blocks: disk reads, verification. For one event loop."""

    def __init__(self, threads: int = _THREADS) -> None:
        """More `threads` for work that also waits for other hosts."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="store")

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=True)
