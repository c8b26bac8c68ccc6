"""Several processes that answer on one listening socket, started again when they die.

They are started, not forked: nothing of an open index or of a thread may be used after a fork. Each gets its options as
one JSON line on stdin, says a line when it answers, and ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from imaged import submodule
from imaged.errors import PvisorError
from imaged.serving import metricsfiles
from imaged.serving.metrics import forget_process
from imaged.serving.serveconfig import ServeOptions

log = logging.getLogger(__name__)
_START_S = 60.0
_END_S = 20.0
"""Answers under way have ten seconds, conversions five."""
_LIVED_S = 10.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0


def supervise(listener: socket.socket, options: ServeOptions, *, announce: Callable[[], None]) -> None:
    """Until SIGTERM or SIGINT, which every process gets then. PvisorError when one does not start at first."""
    with metricsfiles.directory() as metrics:
        asyncio.run(_Supervisor(listener, options, metrics).run(announce))


class _Supervisor:
    def __init__(self, listener: socket.socket, options: ServeOptions, metrics: Path) -> None:
        self._listener, self._options, self._metrics = listener, options, metrics
        self._stop = asyncio.Event()
        self._running: set[asyncio.subprocess.Process] = set()

    async def run(self, announce: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        try:
            starting = [asyncio.create_task(self._start()) for _ in range(self._options.workers)]
            try:
                first = await asyncio.gather(*starting)
            finally:
                await _cancelled(starting)
            announce()
            async with asyncio.TaskGroup() as group:
                for process in first:
                    group.create_task(self._keep(process))
        finally:
            await self._end_all()

    def _end(self) -> None:
        """Also for a second signal, which ends a process's patience."""
        self._stop.set()
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    async def _end_all(self) -> None:
        for process in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        """A process that answers. PvisorError with its own words when it does not; then it is ended: nobody would wait
        for it, and it must not answer later beside the one that is started instead."""
        fd = self._listener.fileno()
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *submodule.command("imaged.serving.server_worker"),
            stdin=pipe,
            stdout=pipe,
            env={**submodule.environment(), metricsfiles.MULTIPROCESS: str(self._metrics)},
            pass_fds=(fd,),
            start_new_session=True,  # Ctrl-C is for this process, which tells the others
        )
        self._running.add(process)
        try:
            await self._answer(process, fd)
        except BaseException as error:
            if not isinstance(error, PvisorError) or not self._stop.is_set():
                await self._kill(process)
                raise
        if self._stop.is_set():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        return process

    async def _answer(self, process: asyncio.subprocess.Process, fd: int) -> None:
        """Tell it what it is to do, and wait until it does it. PvisorError."""
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"listener": fd, "options": self._options.to_json()}).encode() + b"\n")
        try:
            line = await asyncio.wait_for(process.stdout.readline(), _START_S)
            document = json.loads(line)
            if "error" in document:
                raise PvisorError(str(document["error"]), hint=str(document.get("hint", "")))
        except (TimeoutError, ValueError, TypeError) as error:
            raise PvisorError("a serving process did not start", hint="what it logged says why") from error

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        self._forget(process)

    def _forget(self, process: asyncio.subprocess.Process) -> None:
        self._running.discard(process)
        forget_process(process.pid, self._metrics)

    async def _keep(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the process's end, and start another, until all is to end."""
        wait_s = _FIRST_WAIT_S
        while True:
            began_s = time.monotonic()
            await self._ended(process)
            if self._stop.is_set():
                return
            how = f"signal {-(process.returncode or 0)}" if (process.returncode or 0) < 0 else process.returncode
            log.error("serving process %d ended with %s; another is started", process.pid, how)
            while True:
                wait_s = _FIRST_WAIT_S if time.monotonic() - began_s > _LIVED_S else min(2 * wait_s, _LONGEST_WAIT_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), wait_s)
                    return
                began_s = time.monotonic()
                try:
                    process = await self._start()
                    break
                except (PvisorError, OSError) as error:
                    log.error("a serving process did not start: %s", error)

    async def _ended(self, process: asyncio.subprocess.Process) -> None:
        waiting = asyncio.ensure_future(process.wait())
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([waiting, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        try:
            await asyncio.wait_for(waiting, self._options.drain_s + _END_S if self._stop.is_set() else None)
        except TimeoutError:
            log.error("serving process %d did not end, and is killed", process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self._forget(process)


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
