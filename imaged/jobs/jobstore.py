"""What a server needs of the place where its jobs are remembered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from imaged.errors import NotFoundError, PvisorError
from imaged.jobs.job import Job

START_LIMIT = 3
"""A job whose server was killed so often while it ran is not begun again: it may be what kills it."""
KEPT_JOBS = 1000
QUEUE_LIMIT = 100


class QueueFullError(PvisorError):
    """More jobs wait than a server takes."""


class JobEndedError(PvisorError):
    """The job has ended already, another way than was asked for."""


class Claim(Protocol):
    """The right to run one job, until `close`. Its child holds it too, through `inherited` descriptors."""

    @property
    def job(self) -> Job:
        """As it was when the claim was made: running."""
        ...

    @property
    def inherited(self) -> Sequence[int]: ...

    def report(self, progress: Mapping[str, Any]) -> None:
        """Tell how far the job is. Not durable; what can not be told is not an error."""
        ...

    def is_cancelled(self) -> bool:
        """Whether someone cancelled the job meanwhile. Cheap enough to be asked a few times a second."""
        ...

    def finish(self, change: Callable[[Job], Job]) -> Job:
        """Put down how the job ended, or that it waits again: unless it was cancelled meanwhile. StoreError."""
        ...

    def close(self) -> None: ...


class JobStore(Protocol):
    """Threads may share it. What it raises is a StoreError unless it says otherwise."""

    def submit(self, job: Job) -> Job:
        """The unfinished job of the same key, or this one from now on. QueueFullError."""
        ...

    def claim(self) -> Claim | None:
        """The oldest job that nobody runs, if one more may run. What a gone process left is settled here."""
        ...

    def get(self, job: str) -> Job:
        """NotFoundError."""
        ...

    def all(self) -> list[Job]:
        """Those that are remembered, the newest first."""
        ...

    def cancel(self, job: str) -> Job:
        """End a job, or see to it that who runs it does. NotFoundError, JobEndedError."""
        ...

    def is_owned(self, job: str) -> bool:
        """Whether a process that runs it, or ran it until now, is still there."""
        ...


def no_job(job: str) -> NotFoundError:
    """The same for one that never was and for one that whoever asks may not know of."""
    return NotFoundError(
        f"no job {job[:80]!r}",
        hint=f"give the whole id, as `pvisor job ls` shows it; a server remembers its last {KEPT_JOBS} jobs",
    )
