"""What a server does for a client, a conversion or a collection: asked for, followed, and what it came to."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from imaged.errors import PvisorError, UpstreamError
from imaged.fetching.remote import Job
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.ids import ChunkId
from imaged.names import ImageName, SourceName
from imaged.progress import Progress

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 0.5
_PATIENCE = RetryPolicy(total_s=60.0)
"""With a server that stopped answering after it took the job: a restart of it loses none."""


class JobGoesOn(KeyboardInterrupt):
    """Ctrl-C while a job was followed: it ends the following, not the job."""

    def __init__(self, server: str, job: str) -> None:
        super().__init__()
        self.server, self.job = server, job


class ConvertedThere(NamedTuple):
    """The image that is at the server now, and the job that made it."""

    name: str
    id: ChunkId
    warnings: tuple[str, ...]
    job: str


def convert_there(
    upstream: HttpUpstream, source: SourceName, *, name: ImageName, platform: str | None, progress: Progress
) -> ConvertedThere:
    """Have the server convert, or join what it does already. JobGoesOn; PvisorError as the job fails, UpstreamError."""
    job = _follow(upstream, upstream.convert(str(source), name=str(name), platform=platform), progress)
    if job.image is None:
        raise PvisorError(f"server {upstream.url}: {job.error or 'the conversion failed'}", hint=job.hint)
    warnings = job.image.get("warnings", ())
    return ConvertedThere(
        name=str(name),  # whatever the server calls it
        id=ChunkId.parse(str(job.image.get("id", ""))),
        warnings=tuple(str(warning) for warning in warnings if isinstance(warnings, list)),
        job=job.id,
    )


def collect_there(upstream: HttpUpstream, progress: Progress) -> dict[str, Any]:
    """Have the server collect its store; its report. JobGoesOn; PvisorError as the job fails, UpstreamError."""
    job = _follow(upstream, upstream.collect(), progress)
    if job.report is None:
        raise PvisorError(f"server {upstream.url}: {job.error or 'the collection failed'}", hint=job.hint)
    return dict(job.report)


def _follow(upstream: HttpUpstream, job: Job, progress: Progress) -> Job:
    """The job when it is finished. JobGoesOn, UpstreamError."""
    try:
        return _watch(upstream, job, progress)
    except KeyboardInterrupt as interrupt:
        raise JobGoesOn(upstream.url, job.id) from interrupt
    except UpstreamError as error:
        hint = f"the job goes on: `pvisor job inspect {job.id}` tells of it"
        raise UpstreamError(error.message, hint=hint) from error


def _watch(upstream: HttpUpstream, job: Job, progress: Progress) -> Job:
    follower, patient, wait_s = _Follower(progress), upstream.patient(_PATIENCE), _FIRST_WAIT_S
    follower.show(job)
    while not job.finished:
        time.sleep(wait_s)
        wait_s = min(wait_s * 1.5, _LONGEST_WAIT_S)
        job = patient.job(job.id)
        follower.show(job)
    return job


class _Follower:
    """Tells this host's progress what a server tells of a job: a step begins once, and then only grows."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._step = ""
        self._done_bytes = 0

    def show(self, job: Job) -> None:
        waiting = "waits at the server for other jobs" if job.state == "queued" else ""
        step, done_bytes = str(job.progress.get("step") or waiting), _count(job.progress.get("done_bytes"))
        if not step:
            return
        if step != self._step or done_bytes < self._done_bytes:
            self._progress.start(step, _count(job.progress.get("total_bytes")) or None)
            self._step, self._done_bytes = step, 0
        self._progress.advance(done_bytes - self._done_bytes)
        self._done_bytes = done_bytes


def _count(value: Any) -> int:
    """What a server says are bytes; 0 for what is none."""
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else 0
