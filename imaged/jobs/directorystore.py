"""Where the documents of a server's jobs are: seen by all processes that serve the store, and by the next ones.

`<store>/jobs/` has for each job

    ID.json      the document (`imaged.jobs.job`), replaced atomically and durably when the state changes
    ID.progress  how far it is, replaced a few times a second and never synced
    ID.owner     locked (flock) by the process that runs the job, and by that process's child: free once both are gone

and `lock`, held for the moment of each change, and `slot-*`, each locked by one running job of this host.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from imaged.collection import reserve
from imaged.errors import FormatError, NotFoundError, StoreBusyError
from imaged.faults import store_faults
from imaged.flock import is_held, try_lock
from imaged.jobs.job import Job, Kind, State, is_job_id
from imaged.jobs.jobstore import KEPT_JOBS, QUEUE_LIMIT, START_LIMIT, JobEndedError, QueueFullError, no_job
from imaged.publish import published

log = logging.getLogger(__name__)
DIRECTORY = "jobs"
_LOCK_S = 10.0
_PROGRESS_LIMIT_BYTES = 4096


class DirectoryJobStore:
    """A JobStore in a directory of the store, for the processes of one host."""

    def __init__(self, store: Path, *, running_limit: int = 2, queue_limit: int = QUEUE_LIMIT) -> None:
        self._root = store / DIRECTORY
        self._running_limit, self._queue_limit = running_limit, queue_limit
        self._finished: dict[str, Job] = {}
        """Documents that change no more, by id."""
        self._damaged: set[str] = set()
        """Ids of which it was said that their documents can not be read."""
        self._has_reserve = False

    def submit(self, job: Job) -> Job:
        if job.kind is Kind.GC:  # what notes it needs some room, too
            self._has_reserve = False
            reserve.give_up_when_scarce(self._root.parent)
        with self._changing():
            unfinished = self._unfinished()
            for other in unfinished:
                if other.key == job.key:
                    return other
            self._refuse_too_many(job, [other for other in unfinished if other.state is State.QUEUED])
            self._write(job)
            self._forget_oldest()
        return job

    def _refuse_too_many(self, job: Job, waiting: Sequence[Job]) -> None:
        """QueueFullError. No namespace may take all the room."""
        own = [other for other in waiting if other.namespace == job.namespace]
        limit = self._queue_limit if job.namespace is None else max(1, self._queue_limit // 4)
        if len(waiting) >= self._queue_limit or len(own) >= limit:
            hint = "try again when some have ended; `pvisor job ls` lists them, `pvisor job cancel ID` ends one"
            raise QueueFullError(f"{len(own)} jobs wait already, and this server takes no more", hint=hint)

    def claim(self) -> DirectoryClaim | None:
        if not self._has_reserve:
            self._has_reserve = reserve.take(self._root.parent)
        try:
            if all(name in self._finished for name in self._ids()):
                return None
        except FileNotFoundError:
            return None
        with self._changing():
            for job in self._unfinished():
                owner = _try_lock(self._path(job.id, "owner"))
                if owner is None:
                    continue
                try:
                    claimed = self._claim(job, owner)
                except BaseException:
                    os.close(owner)
                    raise
                if claimed is not None:
                    return claimed
                os.close(owner)
        return None

    def _claim(self, job: Job, owner: int) -> DirectoryClaim | None:
        """With the lock of its owner in hand: take it, or put down what became of it."""
        if job.starts >= START_LIMIT:
            error = f"the server ended {job.starts} times while it ran this job, which is not started again"
            self._end(job.failed(error, "its log may say why; then ask again"))
            log.error("job %s, %s: %s", job.id, job.title, error)
            return None
        slot = self._slot(job.kind)
        if slot is None:
            if job.state is State.RUNNING:
                self._write(job.queued_again())
            return None
        try:
            job = job.begun()
            self._write(job)
        except BaseException:
            os.close(slot)
            raise
        return DirectoryClaim(self, job, (owner, slot))

    def _slot(self, kind: Kind) -> int | None:
        """Conversions share some; a collection, which makes room for them, waits for none."""
        names = ["slot-gc"] if kind is Kind.GC else [f"slot-{number}" for number in range(self._running_limit)]
        for name in names:
            slot = _try_lock(self._root / name)
            if slot is not None:
                return slot
        return None

    def get(self, job: str) -> Job:
        found = self._read(job) if is_job_id(job) else None
        if found is None:
            raise no_job(job)
        return self._with_progress(found)

    def all(self) -> list[Job]:
        with store_faults("list its jobs", self._root), contextlib.suppress(FileNotFoundError):
            found = [job for name in sorted(self._ids(), reverse=True) if (job := self._read(name)) is not None]
            return [self._with_progress(job) for job in found]
        return []

    def cancel(self, job: str) -> Job:
        self.get(job)
        with self._changing():
            found = self.get(job)
            if found.state is State.CANCELLED:
                return found
            if found.finished:
                raise JobEndedError(f"job {job} has ended already: {found.state}")
            cancelled = found.cancelled()
            self._write(cancelled)
            if not self.is_owned(job):
                self._tidy(job)
            return cancelled

    def is_owned(self, job: str) -> bool:
        return is_held(self._path(job, "owner"))

    def finish(self, job: str, change: Callable[[Job], Job]) -> Job:
        """For the owner of this job."""
        with self._changing():
            found = self._read(job)
            if found is None:
                raise NotFoundError(f"no job {job}: its document is gone from {self._root}")
            if not found.finished:
                found = change(replace(found, progress=self._progress(job)))
                self._write(found)
            if found.finished:
                self._tidy(job)
            return found

    def report(self, job: str, progress: Mapping[str, Any]) -> None:
        """For the owner of this job."""
        path = self._path(job, "progress")
        partial = path.with_suffix(".progress-part")
        try:
            partial.write_text(json.dumps(progress))
            partial.replace(path)
        except OSError as error:
            log.debug("job %s: its progress is not told: %s", job, error)

    def unfinished(self) -> list[Job]:
        """The oldest first."""
        try:
            return self._unfinished()
        except FileNotFoundError:
            return []

    def take_over(self, job: Job) -> None:
        """A job that another host was asked for, and that waits here from now on."""
        with self._changing():
            if self._read(job.id) is None:
                self._write(job)

    def state(self, job: str) -> State | None:
        found = self._read(job)
        return None if found is None else found.state

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Alone among all processes. StoreBusyError, StoreError."""
        with store_faults("note a job", self._root):
            self._root.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                deadline = time.monotonic() + _LOCK_S
                while not try_lock(lock):
                    if time.monotonic() > deadline:
                        raise StoreBusyError(
                            f"the jobs in {self._root} are locked by another process", hint="try again"
                        )
                    time.sleep(random.uniform(0.0005, 0.004))
                yield
            finally:
                os.close(lock)

    def _end(self, job: Job) -> None:
        self._write(job)
        self._tidy(job.id)

    def _write(self, job: Job) -> None:
        with published(self._path(job.id, "json")) as file:
            file.write(json.dumps(job.to_document()).encode())

    def _read(self, job: str) -> Job | None:
        """None when it is not there, or damaged."""
        known = self._finished.get(job)
        if known is not None:
            return known
        try:
            found = Job.from_document(json.loads(self._path(job, "json").read_bytes()))
        except FileNotFoundError:
            return None
        except (FormatError, ValueError, RecursionError) as error:
            if job not in self._damaged:
                log.warning("job %s is left out: %s", job, error)
                self._damaged.add(job)
            return None
        self._damaged.discard(job)
        if found.finished:
            self._finished[job] = found
        return found

    def _with_progress(self, job: Job) -> Job:
        return replace(job, progress=self._progress(job.id)) if job.state is State.RUNNING else job

    def _progress(self, job: str) -> dict[str, Any]:
        try:
            raw = self._path(job, "progress").read_bytes()[:_PROGRESS_LIMIT_BYTES]
            found = json.loads(raw)
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _unfinished(self) -> list[Job]:
        """The oldest first."""
        names = sorted(name for name in self._ids() if name not in self._finished)
        return [job for name in names if (job := self._read(name)) is not None and not job.finished]

    def _ids(self) -> list[str]:
        names = (path.name for path in self._root.iterdir() if path.suffix == ".json")
        found = [stem for name in names if is_job_id(stem := name.removesuffix(".json"))]
        if len(self._finished) > len(found):  # another process has forgotten some
            for name in self._finished.keys() - set(found):
                self._finished.pop(name, None)
        return found

    def _forget_oldest(self) -> None:
        for partial in self._root.glob(".pvisor-*.part"):  # of a process that was killed while it wrote
            partial.unlink(missing_ok=True)
        names = sorted(self._ids())
        surplus = len(names) - KEPT_JOBS
        for name in names:
            if surplus <= 0:
                return
            job = self._read(name)
            if job is None or job.finished:
                self._tidy(name)
                self._path(name, "json").unlink(missing_ok=True)
                self._finished.pop(name, None)
                self._damaged.discard(name)
                surplus -= 1

    def _tidy(self, job: str) -> None:
        """What only a running job needs."""
        for kind in ("owner", "progress", "progress-part"):
            self._path(job, kind).unlink(missing_ok=True)

    def _path(self, job: str, kind: str) -> Path:
        return self._root / f"{job}.{kind}"


@dataclass(frozen=True, slots=True)
class DirectoryClaim:
    """A Claim on a job in a directory. A context manager."""

    store: DirectoryJobStore
    job: Job
    inherited: tuple[int, ...]

    def report(self, progress: Mapping[str, Any]) -> None:
        self.store.report(self.job.id, progress)

    def is_cancelled(self) -> bool:
        return self.store.state(self.job.id) in (State.CANCELLED, None)

    def finish(self, change: Callable[[Job], Job]) -> Job:
        return self.store.finish(self.job.id, change)

    def close(self) -> None:
        for descriptor in self.inherited:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock of this file; None while another does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if try_lock(descriptor):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
