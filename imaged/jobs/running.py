"""Jobs that a server runs for its clients, each in a process of its own so that serving stays responsive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from imaged.errors import PvisorError, StoreError
from imaged.jobs.job import Job, State
from imaged.jobs.jobprocess import Outcome, Workers, run_job
from imaged.jobs.jobstore import Claim, JobStore, no_job

log = logging.getLogger(__name__)
_POLL_S = 1.0
"""How soon a job is noticed that another process of this store was asked for, or left."""
_WATCH_S = 0.25
_RETRY_S = 2.0
_ENDING_S = 8.0
P = ParamSpec("P")
T = TypeVar("T")


class Jobs:
    """The jobs of one store, as one server process sees and runs them. For its event loop alone.

    An async context manager. While it is entered it runs what waits, of this process or another; leaving it stops what
    still runs here and puts that back, for the other processes or the next start of the server.
    """

    def __init__(self, store: Path, documents: JobStore, workers: Workers | None = None) -> None:
        self._store, self._documents, self._workers = store, documents, workers or Workers()
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="jobs")
        self._wake = asyncio.Event()
        self._cancelled: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._start(self._schedule(), "jobs")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.shutdown(wait=True)

    async def submit(self, job: Job) -> Job:
        """This job, or the unfinished one that does the same. QueueFullError, StoreError."""
        taken = await self._blocking(self._documents.submit, job)
        if taken.id == job.id:
            log.info("job %s, %s: asked for", job.id, job.title)
            self._wake.set()
        return taken

    async def get(self, job: str, *, namespace: str | None = None) -> Job:
        """NotFoundError, also for one that a token of this namespace may not know of."""
        found = await self._blocking(self._documents.get, job)
        if not found.is_visible_to(namespace):
            raise no_job(job)
        return found

    async def all(self) -> list[Job]:
        """Those that are remembered, the newest first."""
        return await self._blocking(self._documents.all)

    async def cancel(self, job: str) -> Job:
        """End a job; back when its process is gone, or after some seconds. NotFoundError, JobEndedError."""
        cancelled = await self._blocking(self._documents.cancel, job)
        if job in self._cancelled:
            self._cancelled[job].set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_S):
                while await self._blocking(self._documents.is_owned, job):
                    await asyncio.sleep(0.05)
        log.info("job %s, %s: cancelled", job, cancelled.title)
        return cancelled

    async def _schedule(self) -> None:
        """Begin whatever may run, now and whenever that may have changed."""
        while True:
            self._wake.clear()
            try:
                while (claim := await self._claim()) is not None:
                    self._start(self._run(claim), f"job {claim.job.id}")
            except (PvisorError, OSError) as error:
                log.error("jobs can not be begun: %s", error)
            except Exception:
                log.exception("jobs can not be begun")
            await _wait(self._wake, _POLL_S)

    async def _claim(self) -> Claim | None:
        """As the documents say; a claim that comes after we are to stop is given back."""
        asked = self._pool.submit(self._documents.claim)
        try:
            return await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(_give_back)
            raise

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, claim: Claim) -> None:
        job = claim.job
        cancelled = self._cancelled[job.id] = asyncio.Event()
        try:
            log.info("job %s, %s: start %d", job.id, job.title, job.starts)
            outcome = await self._until_cancelled(claim, cancelled)
            ended = await self._finish(claim, outcome)
            level = logging.WARNING if ended.state is State.FAILED else logging.INFO
            log.log(level, "job %s, %s: %s", job.id, job.title, ended.error or ended.state)
        except asyncio.CancelledError:
            await asyncio.shield(self._put_back(claim))
            raise
        except PvisorError as error:
            log.error("job %s, %s: %s", job.id, job.title, error.message)
        finally:
            del self._cancelled[job.id]
            claim.close()
            self._wake.set()

    async def _until_cancelled(self, claim: Claim, cancelled: asyncio.Event) -> Outcome:
        """What its process came to, ended early once the job is cancelled, here or at another process."""
        work = asyncio.create_task(self._work(claim))
        watch = asyncio.create_task(self._watch(claim, cancelled))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Job.cancelled
            return work.result()
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    async def _work(self, claim: Claim) -> Outcome:
        try:
            command = self._workers.command(self._store, claim.job)
            return await run_job(claim, command, blocking=self._blocking)
        except OSError as error:
            return partial(Job.failed, error=f"the process of the job did not start: {error}")
        except Exception as error:
            log.exception("job %s, %s", claim.job.id, claim.job.title)
            return partial(Job.failed, error=f"the server failed to run the job: {error}", hint="its log says why")

    async def _watch(self, claim: Claim, cancelled: asyncio.Event) -> None:
        while not cancelled.is_set():
            await _wait(cancelled, _WATCH_S)
            try:
                if await self._blocking(claim.is_cancelled):
                    return
            except (PvisorError, OSError) as error:
                log.warning("job %s: whether it is cancelled can not be read: %s", claim.job.id, error)
            except Exception:  # it must not look as if it were cancelled
                log.exception("job %s: whether it is cancelled can not be read", claim.job.id)

    async def _finish(self, claim: Claim, outcome: Outcome) -> Job:
        """However long the document can not be written, on a full disk for one: what is done is not done again."""
        while True:
            try:
                return await self._blocking(claim.finish, outcome)
            except StoreError as error:
                log.error("job %s has ended, which can not be noted: %s", claim.job.id, error.message)
                await asyncio.sleep(_RETRY_S)

    async def _put_back(self, claim: Claim) -> None:
        try:
            await self._blocking(claim.finish, Job.put_back)
        except PvisorError as error:  # the next process that looks finds it without an owner
            log.error("job %s: %s", claim.job.id, error.message)

    async def _blocking(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *args, **kwargs))


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Until it is set, for so long. Unlike `asyncio.wait_for` it does not swallow a cancellation that comes with it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _give_back(asked: Future[Claim | None]) -> None:
    if not asked.cancelled() and asked.exception() is None and (claim := asked.result()) is not None:
        with contextlib.suppress(PvisorError):
            claim.finish(Job.put_back)
        claim.close()
