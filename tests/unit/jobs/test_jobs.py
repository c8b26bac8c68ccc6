"""Jobs: what the process of a job may do to its server's idea of it, and what becomes of it when either ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from imaged.errors import NotFoundError, StoreFullError
from imaged.jobs.directorystore import DirectoryClaim, DirectoryJobStore
from imaged.jobs.job import Job, State
from imaged.jobs.jobprocess import Workers
from imaged.jobs.jobstore import JobEndedError
from imaged.jobs.running import Jobs

SOURCE = "oci:/nowhere:latest"
RESULT = """echo '{"image": {"name": "n:1", "id": "i"}}'"""
T = TypeVar("T")


def asked(name: str | None = None, platform: str | None = None) -> Job:
    return Job.conversion(SOURCE, name=name, platform=platform)


def with_jobs(store: Path, worker: Sequence[str], use: Callable[[Jobs], Awaitable[T]]) -> T:
    async def run() -> T:
        workers = Workers(convert=worker, gc=worker)
        async with asyncio.timeout(20), Jobs(store, DirectoryJobStore(store), workers) as jobs:
            return await use(jobs)

    return asyncio.run(run())


async def until(jobs: Jobs, job: str, wanted: Callable[[Job], bool]) -> Job:
    while not wanted(found := await jobs.get(job)):
        await asyncio.sleep(0.01)
    return found


def run_job(store: Path, worker: Sequence[str], job: Job | None = None) -> Job:
    """The finished job of this command in the place of a worker."""

    async def use(jobs: Jobs) -> Job:
        return await until(jobs, (await jobs.submit(job or asked())).id, lambda found: found.finished)

    return with_jobs(store, worker, use)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("kill -9 $$", "signal 9"),
        ("echo nonsense; echo '[]'; exit 3", "status 3"),
        ("exit 0", "status 0"),
        ("""echo '{"error": "no space", "hint": "make some"}'; exit 1""", "no space"),
        ("""echo '{"error": "the first word counts"}'; """ + RESULT, "the first word"),
        ("head -c 5000 /dev/zero; exec sleep 60", "failed to run"),
    ],
)
def test_a_worker_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: str) -> None:
    monkeypatch.setattr("imaged.jobs.jobprocess._LINE_LIMIT_BYTES", 1000)
    job = run_job(tmp_path, ["/bin/sh", "-c", script])
    assert job.state == "failed"
    assert error in job.error


def test_a_worker_that_does_not_start(tmp_path: Path) -> None:
    job = run_job(tmp_path, ["/nothing/here"])
    assert (job.state, "did not start" in job.error) == ("failed", True)


def test_a_worker_that_succeeds_has_told_how_far_it_is(tmp_path: Path) -> None:
    script = """echo '{"step": "a", "done_bytes": 5, "total_bytes": null}'; """ + RESULT
    job = run_job(tmp_path, ["/bin/sh", "-c", script])
    assert job.state == "done"
    assert job.image == {"name": "n:1", "id": "i"}
    assert job.progress == {"step": "a", "done_bytes": 5, "total_bytes": None}
    assert sorted(path.name for path in (tmp_path / "jobs").iterdir()) == [f"{job.id}.json", "lock", "slot-0"]


def test_progress_is_seen_while_the_job_runs(tmp_path: Path) -> None:
    script = """echo '{"step": "half", "done_bytes": 5, "total_bytes": 10}'; cat >/dev/null"""

    async def use(jobs: Jobs) -> Job:
        job = await jobs.submit(asked())
        return await until(jobs, job.id, lambda found: found.progress.get("step") == "half")

    assert with_jobs(tmp_path, ["/bin/sh", "-c", script], use).state == "running"


def test_modules_in_the_servers_directory_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("imaged", "json"):
        (tmp_path / "here" / name).mkdir(parents=True)
        (tmp_path / "here" / name / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "here/imaged/jobs").mkdir()
    (tmp_path / "here/imaged/jobs/job_worker.py").touch()
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    job = run_job(tmp_path / "store", [])
    assert (job.state, "/nowhere" in job.error) == ("failed", True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("platform", ["linux/\0", "linux/\ud800"])
def test_what_can_not_be_passed_to_a_worker_fails_the_job(tmp_path: Path, platform: str) -> None:
    job = run_job(tmp_path, [], asked(platform=platform))
    assert (job.state, "failed to run" in job.error) == ("failed", True)


class Failing:
    """Once, in a way that nobody thought of."""

    def __init__(self, real: Callable[[Any], Any]) -> None:
        self.real, self.failed = real, False

    def __call__(self, held: Any) -> Any:
        if not self.failed:
            self.failed = True
            raise LookupError("strange")
        return self.real(held)


@pytest.mark.parametrize("held", [(DirectoryJobStore, "claim"), (DirectoryClaim, "is_cancelled")])
def test_a_look_that_fails_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: tuple[type, str]
) -> None:
    """It neither ends the looking for jobs, nor the job that was looked at."""
    failing = Failing(getattr(*held))
    monkeypatch.setattr(*held, lambda self: failing(self))
    job = run_job(tmp_path, ["/bin/sh", "-c", f"sleep 1; {RESULT}"])
    assert failing.failed
    assert job.state == "done"


def test_a_collection_is_a_job(tmp_path: Path) -> None:
    script = """echo "{\\"report\\": {\\"asked\\": \\"$*\\"}}" """
    job = run_job(tmp_path, ["/bin/sh", "-c", script, "worker"], Job.collection())
    assert (job.state, job.report) == ("done", {"asked": f"--store={tmp_path} --gc"})


def test_equal_requests_share_a_job_until_it_is_finished(tmp_path: Path) -> None:
    async def use(jobs: Jobs) -> None:
        one = await jobs.submit(asked("a:latest"))
        assert (await jobs.submit(asked("a:latest"))).id == one.id
        assert (await jobs.submit(asked("b:latest"))).id != one.id
        assert (await jobs.get(one.id)).key == one.key
        with pytest.raises(NotFoundError):
            await jobs.get("x")
        await jobs.cancel(one.id)
        assert (await jobs.submit(asked("a:latest"))).id != one.id

    with_jobs(tmp_path, ["/bin/sh", "-c", "cat >/dev/null; exit 1"], use)


def _writes_its_pid(path: Path, then: str) -> list[str]:
    code = f"import os, time, pathlib; pathlib.Path({str(path)!r}).write_text(str(os.getpid())); {then}"
    return [sys.executable, "-c", code]


async def _pid(path: Path) -> int:
    while not (path.exists() and path.read_text()):
        await asyncio.sleep(0.01)
    return int(path.read_text())


def test_leaving_stops_the_workers_and_the_next_server_goes_on(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    async def leave(jobs: Jobs) -> tuple[str, int]:
        job = await jobs.submit(asked())
        return job.id, await _pid(pid)

    job, process = with_jobs(tmp_path, _writes_its_pid(pid, "time.sleep(60)"), leave)
    assert not Path(f"/proc/{process}").exists()
    held = DirectoryJobStore(tmp_path).get(job)
    assert (held.state, held.starts) == ("queued", 0)

    async def resume(jobs: Jobs) -> Job:
        return await until(jobs, job, lambda found: found.finished)

    assert with_jobs(tmp_path, ["/bin/sh", "-c", RESULT], resume).state == "done"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_cancelled_job_has_no_process_left(tmp_path: Path, elsewhere: bool) -> None:
    pid = tmp_path / "pid"

    async def use(jobs: Jobs) -> tuple[Job, int]:
        job = await jobs.submit(asked())
        process = await _pid(pid)
        if elsewhere:  # as another process of the server does
            DirectoryJobStore(tmp_path).cancel(job.id)
            while await jobs._blocking(jobs._documents.is_owned, job.id):
                await asyncio.sleep(0.01)
        else:
            await jobs.cancel(job.id)
        return await jobs.get(job.id), process

    job, process = with_jobs(tmp_path, _writes_its_pid(pid, "time.sleep(60)"), use)
    assert (job.state, job.error) == ("cancelled", "the job was cancelled")
    assert not Path(f"/proc/{process}").exists()
    assert DirectoryJobStore(tmp_path).cancel(job.id) == job


def test_a_job_that_has_ended_is_not_cancelled(tmp_path: Path) -> None:
    job = run_job(tmp_path, ["/bin/sh", "-c", RESULT])
    with pytest.raises(JobEndedError, match="done"):
        DirectoryJobStore(tmp_path).cancel(job.id)


def test_a_result_that_can_not_be_noted_is_noted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imaged.jobs.running._RETRY_S", 0.01)
    finish, failures = DirectoryJobStore.finish, [StoreFullError("no space")] * 3

    def failing(self: DirectoryJobStore, job: str, change: Callable[[Job], Job]) -> Job:
        if failures:
            raise failures.pop()
        return finish(self, job, change)

    monkeypatch.setattr(DirectoryJobStore, "finish", failing)
    job = run_job(tmp_path, ["/bin/sh", "-c", RESULT])
    assert (job.state, job.starts, failures) == (State.DONE, 1, [])
