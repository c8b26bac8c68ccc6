"""Jobs of all servers of a bucket: each runs its own, in its directory, and shows and tells the others of them.

    jobs/ID.json    the document, as it was when its server last wrote it: at each change, and now and then in between
    jobs/ID.cancel  somebody asked another server than the job's to end it
    jobs/ID.taken-T somebody took the job over, whose document had not changed since T, where there is conditional PUT

A document that waits or runs and was not written for long is of a server that is gone: another one takes the job over.
Two that do so at once both convert, which does no harm; so do two that are asked for the same in the same moment.
The end of a job that the bucket did not take is written again by its server until it does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from imaged.errors import FormatError, NotFoundError, ObjectMissingError, StoreError
from imaged.jobs.directorystore import DirectoryJobStore
from imaged.jobs.job import Job, State, is_job_id
from imaged.jobs.jobstore import KEPT_JOBS, START_LIMIT, Claim, JobEndedError
from imaged.s3.objects import Entry, Made, Objects

log = logging.getLogger(__name__)
PREFIX = "jobs/"
SHOWN_S = 3.0
"""How old what is known of other servers' jobs may be, and how far a running job has been shown to them."""
GONE_S = 120.0
_BEAT_S = 30.0
_IDLE_S = 30.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """A document as it was listed, and for how long it has been seen unwritten: by our clock, as that of the bucket is
    heard of only when somebody writes. While the bucket does not answer nobody can, so a long time between two looks
    counts as a usual one."""

    entry: Entry
    job: Job
    silent_s: float = 0.0


class BucketJobStore:
    """A JobStore for the servers of a bucket. Threads may share it. `clock` is monotonic."""

    def __init__(self, local: DirectoryJobStore, objects: Objects, clock: Callable[[], float] = time.monotonic) -> None:
        self._local, self._objects, self._clock = local, objects, clock
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}
        self._shown_s: dict[str, float] = {}
        """When each unfinished job of this server was written last: for each alone, as one may say nothing for long."""
        self._looked_s = self._heard_s = -_IDLE_S
        self._is_deaf = False
        self._unshown: set[str] = set()
        """Of which it was said, since the bucket last took them."""

    def submit(self, job: Job) -> Job:
        for other in self._others(fresh=True):
            if not other.finished and other.key == job.key:
                return other
        taken = self._local.submit(job)
        if taken.id == job.id:
            self._show(taken)
            self._forget_oldest()
        return taken

    def claim(self) -> Claim | None:
        try:
            heard = self._hear()
            if heard and self._is_deaf:
                log.warning("jobs of other servers are heard of again")
            self._is_deaf = self._is_deaf and not heard
        except StoreError as error:  # what is asked for here goes on
            if not self._is_deaf:
                log.warning("jobs of other servers are not heard of: %s", error.message)
            self._is_deaf = True
        claim = self._local.claim()
        if claim is None:
            return None
        self._show(claim.job)
        return _BucketClaim(self, claim)

    def get(self, job: str) -> Job:
        try:
            return self._local.get(job)
        except NotFoundError:
            found = self._fetch(job) if is_job_id(job) else None
            if found is None:
                raise
            return found

    def all(self) -> list[Job]:
        found = {job.id: job for job in self._others()} | {job.id: job for job in self._local.all()}
        return [found[job] for job in sorted(found, reverse=True)][:KEPT_JOBS]

    def cancel(self, job: str) -> Job:
        if is_job_id(job) and self._local.state(job) is not None:
            cancelled = self._local.cancel(job)
            self._show(cancelled)
            return cancelled
        found = self.get(job)
        if found.state is State.CANCELLED:
            return found
        if found.finished:
            raise JobEndedError(f"job {job} has ended already: {found.state}")
        self._objects.put(_cancel_key(job), b"cancel")
        return found.cancelled()

    def is_owned(self, job: str) -> bool:
        if self._local.state(job) is not None:
            return self._local.is_owned(job)
        found = self._fetch(job)
        return found is not None and not found.finished

    def tell(self, job: Job) -> None:
        """Show how far a job of this server is, if that was not shown just now."""
        if self._is_due(job.id, SHOWN_S):
            self._show(job)

    def ended(self, job: Job) -> None:
        self._show(job)
        self._objects.delete(_cancel_key(job.id))

    def _hear(self) -> bool:
        """What other servers want of this one, and which of them are gone. False: it is too soon to look again."""
        own = {job.id: job for job in self._local.unfinished()}
        with self._lock:
            wait_s = SHOWN_S if own else _IDLE_S
            if self._clock() < self._heard_s + wait_s:
                return False
            self._heard_s = self._clock()
            self._shown_s = {name: at_s for name, at_s in self._shown_s.items() if name in own}
            self._unshown &= own.keys() | self._seen.keys()
        for name in own:
            if self._is_due(name, _BEAT_S):
                with contextlib.suppress(NotFoundError):
                    self._show(self._local.get(name))
        asked = self._look()
        for name in asked & own.keys():
            with contextlib.suppress(NotFoundError, JobEndedError):
                self._show(self._local.cancel(name))
            self._objects.delete(_cancel_key(name))
        for seen in list(self._seen.values()):
            if not seen.job.finished:
                self._settle(seen)
        return True

    def _settle(self, seen: _Seen) -> None:
        """A job that the bucket has as unfinished: it has ended here, which was not written, or its server is gone."""
        try:
            known = self._local.get(seen.job.id)
        except NotFoundError:
            if seen.silent_s > GONE_S:
                self._take_over(seen)
            return
        if known.finished:
            self._show(known)

    def _is_due(self, job: str, after_s: float) -> bool:
        with self._lock:
            return self._clock() >= self._shown_s.get(job, -after_s) + after_s

    def _take_over(self, seen: _Seen) -> None:
        job = seen.job
        if job.starts >= START_LIMIT:
            error = f"the servers that ran this job ended {job.starts} times, and it is not started again"
            self._show(job.failed(error, "their logs may say why; then ask again"))
            return
        if self._objects.put_new(_taken_key(seen), job.id.encode()) is Made.TAKEN:
            return
        log.warning("job %s, %s: its server is gone, this one goes on", job.id, job.title)
        waiting = job.queued_again()
        self._local.take_over(waiting)
        self._show(waiting)

    def _others(self, *, fresh: bool = False) -> list[Job]:
        with self._lock:
            old = fresh or self._clock() >= self._looked_s + SHOWN_S
        if old:
            self._look()
        return [seen.job for seen in self._seen.values() if self._local.state(seen.job.id) is None]

    def _look(self) -> set[str]:
        """Read what has changed in the bucket; the jobs that somebody wants to end."""
        asked: set[str] = set()
        seen: dict[str, _Seen] = {}
        with self._lock:
            before, now_s = self._seen, self._clock()
            since_s = min(now_s - self._looked_s, _IDLE_S)
        for entry in self._objects.list(PREFIX):
            job, _, kind = entry.key.removeprefix(PREFIX).partition(".")
            if kind == "cancel":
                asked.add(job)
            if kind != "json" or not is_job_id(job):
                continue
            known = before.get(job)
            if known is not None and known.entry.etag == entry.etag:
                is_silent = known.entry.modified_s == entry.modified_s
                seen[job] = _Seen(entry, known.job, known.silent_s + since_s if is_silent else 0.0)
            elif (found := self._fetch(job)) is not None:
                seen[job] = _Seen(entry, found)
        with self._lock:
            self._seen, self._looked_s = seen, now_s
        return asked

    def _fetch(self, job: str) -> Job | None:
        try:
            return Job.from_document(json.loads(self._objects.get(_key(job))))
        except ObjectMissingError:
            return None
        except (FormatError, ValueError, RecursionError) as error:
            log.warning("job %s in the bucket is left out: %s", job, error)
            return None

    def _show(self, job: Job) -> None:
        """What the others see is late when the bucket does not answer; the job goes on."""
        with self._lock:
            if job.finished:
                self._shown_s.pop(job.id, None)
            else:
                self._shown_s[job.id] = self._clock()
        try:
            self._objects.put(_key(job.id), json.dumps(job.to_document()).encode())
            self._unshown.discard(job.id)
        except StoreError as error:
            if job.id not in self._unshown:
                log.warning("job %s is not shown to other servers: %s", job.id, error.message)
            self._unshown.add(job.id)

    def _forget_oldest(self) -> None:
        ended = sorted(seen.job.id for seen in self._seen.values() if seen.job.finished)
        for job in ended[: max(0, len(self._seen) - KEPT_JOBS)]:
            self._objects.delete(_key(job))


@dataclass(frozen=True, slots=True)
class _BucketClaim:
    """A local claim that the other servers hear of."""

    store: BucketJobStore
    claim: Claim

    @property
    def job(self) -> Job:
        return self.claim.job

    @property
    def inherited(self) -> Sequence[int]:
        return self.claim.inherited

    def report(self, progress: Mapping[str, Any]) -> None:
        self.claim.report(progress)
        self.store.tell(replace(self.job, progress=progress))

    def is_cancelled(self) -> bool:
        return self.claim.is_cancelled()

    def finish(self, change: Callable[[Job], Job]) -> Job:
        ended = self.claim.finish(change)
        self.store.ended(ended)
        return ended

    def close(self) -> None:
        self.claim.close()


def _key(job: str) -> str:
    return f"{PREFIX}{job}.json"


def _cancel_key(job: str) -> str:
    return f"{PREFIX}{job}.cancel"


def _taken_key(seen: _Seen) -> str:
    """Another one for each time that it is taken over: who did so may be gone, too, before it was begun."""
    return f"{PREFIX}{seen.job.id}.taken-{int(seen.entry.modified_s)}"
