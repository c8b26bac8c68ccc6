"""Conversions that a server runs for its clients, each in a process of its own so that serving stays responsive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from imaged import submodule
from imaged.errors import NotFoundError
from imaged.names import ImageName, SourceName

log = logging.getLogger(__name__)
_KEPT_JOBS = 1000
_LINE_LIMIT_BYTES = 16 << 20
_STOP_WAIT_S = 5.0
Key = tuple[str, str, str]


@dataclass(slots=True, kw_only=True)
class Job:
    """One conversion: queued, running, then done (`image`) or failed (`error`, `hint`)."""

    id: str
    source: SourceName
    name: ImageName | None
    platform: str | None
    state: str = "queued"
    progress: dict[str, Any] = field(default_factory=dict)
    image: dict[str, Any] | None = None
    error: str = ""
    hint: str = ""

    @property
    def key(self) -> Key:
        return str(self.source), str(self.name or ""), self.platform or ""

    @property
    def finished(self) -> bool:
        return self.state in ("done", "failed")

    def fail(self, error: str, hint: str = "") -> None:
        """Unless it ended already: what its process does after its last word changes nothing."""
        if not self.finished:
            self.state, self.error, self.hint = "failed", error, hint

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "state": self.state,
            "source": str(self.source),
            "name": str(self.name) if self.name is not None else None,
            "platform": self.platform,
            "progress": self.progress,
            "image": self.image,
            "error": self.error,
            "hint": self.hint,
        }


class Jobs:
    """The jobs of one server, for its event loop alone. An async context manager: leaving it stops what still runs.

    Two requests for one source, name and platform share a job while it is not finished. The last thousand jobs are
    remembered.
    """

    def __init__(self, store: Path, *, running_limit: int = 2, worker: Sequence[str] = ()) -> None:
        self._store = store
        self._worker = tuple(worker or submodule.command("imaged.job_worker"))
        self._slots = asyncio.Semaphore(running_limit)
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._active: dict[Key, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self, source: SourceName, name: ImageName | None, platform: str | None) -> Job:
        """A new job, or the unfinished one that does the same."""
        job = Job(id=secrets.token_hex(8), source=source, name=name, platform=platform)
        running = self._active.get(job.key)
        if running is not None:
            return running
        self._active[job.key] = self._jobs[job.id] = job
        self._forget_oldest()
        task = asyncio.create_task(self._run(job), name=f"job {job.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    def get(self, job: str) -> Job:
        try:
            return self._jobs[job]
        except KeyError:
            raise NotFoundError(
                f"no job {job[:80]!r}", hint=f"a server remembers its last {_KEPT_JOBS} jobs until it restarts"
            ) from None

    def _forget_oldest(self) -> None:
        finished = (key for key, job in self._jobs.items() if job.finished)
        for key in list(finished)[: max(0, len(self._jobs) - _KEPT_JOBS)]:
            del self._jobs[key]

    async def _run(self, job: Job) -> None:
        try:
            async with self._slots:
                job.state = "running"
                await self._convert(job)
        except asyncio.CancelledError:
            job.fail("the server was stopped", hint="start the conversion again")
            raise
        except OSError as error:
            job.fail(f"the conversion process did not start: {error}")
        except Exception as error:
            log.exception("job %s, %s", job.id, job.source)
            job.fail(f"the server failed to run the conversion: {error}", hint="its log says why")
        finally:
            del self._active[job.key]
            if job.error:
                log.warning("job %s, %s: %s", job.id, job.source, job.error)

    async def _convert(self, job: Job) -> None:
        command = [*self._worker, "--store", str(self._store), str(job.source)]
        if job.name is not None:
            command.append(f"--name={job.name}")
        if job.platform is not None:
            command.append(f"--platform={job.platform}")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, limit=_LINE_LIMIT_BYTES, env=submodule.environment()
        )
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                _take_line(job, line)
            status = await process.wait()
            if not job.finished:
                how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
                job.fail(f"the conversion process {how} without a result", hint="the server's log may say why")
        finally:
            await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the process if it still runs: closing its stdin and SIGTERM ask, SIGKILL insists."""
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_WAIT_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _take_line(job: Job, line: bytes) -> None:
    """One line of the worker's report; a line that is not one is the log's."""
    try:
        report = json.loads(line)
        if "error" in report:
            job.fail(str(report["error"]), str(report.get("hint", "")))
        elif "image" in report:
            job.state, job.image = "done", dict(report["image"])
        else:
            job.progress = dict(report)
    except (ValueError, TypeError, AttributeError):
        log.warning("job %s: not a report line: %r", job.id, line[:200])
