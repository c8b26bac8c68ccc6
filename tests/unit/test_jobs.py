"""Jobs: what a worker process may do to its parent's idea of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from imaged.errors import NotFoundError
from imaged.jobs import Job, Jobs
from imaged.names import ImageName, SourceName

SOURCE = SourceName.parse("oci:/nowhere:latest")


def run_job(store: Path, worker: Sequence[str]) -> Job:
    """The finished job of this command in the place of a worker."""

    async def run() -> Job:
        async with asyncio.timeout(20), Jobs(store, worker=worker) as jobs:
            job = jobs.start(SOURCE, None, None)
            while not job.finished:
                await asyncio.sleep(0.01)
            return job

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("kill -9 $$", "signal 9"),
        ("echo nonsense; echo '[]'; exit 3", "status 3"),
        ("exit 0", "status 0"),
        ("""echo '{"error": "no space", "hint": "make some"}'; exit 1""", "no space"),
    ],
)
def test_a_worker_that_fails(tmp_path: Path, script: str, error: str) -> None:
    job = run_job(tmp_path, ["/bin/sh", "-c", script])
    assert job.state == "failed"
    assert error in job.error


def test_a_worker_that_does_not_start(tmp_path: Path) -> None:
    job = run_job(tmp_path, ["/nothing/here"])
    assert (job.state, "did not start" in job.error) == ("failed", True)


def test_a_worker_that_succeeds_has_told_how_far_it_is(tmp_path: Path) -> None:
    script = (
        """echo '{"step": "a", "done_bytes": 5, "total_bytes": null}'; echo '{"image": {"name": "n:1", "id": "i"}}'"""
    )
    job = run_job(tmp_path, ["/bin/sh", "-c", script])
    assert job.state == "done"
    assert job.image == {"name": "n:1", "id": "i"}
    assert job.progress == {"step": "a", "done_bytes": 5, "total_bytes": None}


def test_modules_in_the_servers_directory_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("imaged", "json"):
        (tmp_path / "here" / name).mkdir(parents=True)
        (tmp_path / "here" / name / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "here/imaged/job_worker.py").touch()
    monkeypatch.chdir(tmp_path / "here")
    job = run_job(tmp_path / "store", [])
    assert (job.state, "/nowhere" in job.error) == ("failed", True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("platform", ["linux/\0", "linux/\ud800"])
def test_what_can_not_be_passed_to_a_worker_fails_the_job(tmp_path: Path, platform: str) -> None:
    async def run() -> Job:
        async with asyncio.timeout(20), Jobs(tmp_path) as jobs:
            job = jobs.start(SOURCE, None, platform)
            while not job.finished:
                await asyncio.sleep(0.01)
            assert jobs.start(SOURCE, None, platform) is not job
            return job

    job = asyncio.run(run())
    assert (job.state, "failed to run" in job.error) == ("failed", True)


def test_stopping_a_worker_that_has_told_its_result_changes_nothing(tmp_path: Path) -> None:
    job = run_job(tmp_path, ["/bin/sh", "-c", """echo '{"image": {"name": "n:1", "id": "i"}}'; cat >/dev/null"""])
    assert (job.state, job.error) == ("done", "")


def test_a_report_line_without_end_fails_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imaged.jobs._LINE_LIMIT_BYTES", 1000)
    job = run_job(tmp_path, ["/bin/sh", "-c", "head -c 5000 /dev/zero; exec sleep 60"])
    assert (job.state, "failed to run" in job.error) == ("failed", True)


def test_equal_requests_share_a_job_until_it_is_finished(tmp_path: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(20), Jobs(tmp_path, worker=["/bin/sh", "-c", "cat >/dev/null; exit 1"]) as jobs:
            one = jobs.start(SOURCE, ImageName.parse("a"), None)
            assert jobs.start(SOURCE, ImageName.parse("a:latest"), None) is one
            assert jobs.start(SOURCE, ImageName.parse("b"), None) is not one
            assert jobs.get(one.id) is one
            with pytest.raises(NotFoundError):
                jobs.get("x")

    asyncio.run(run())


def test_leaving_stops_the_workers(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    async def run() -> Job:
        async with asyncio.timeout(20), Jobs(tmp_path, worker=[sys.executable, "-c", code]) as jobs:
            job = jobs.start(SOURCE, None, None)
            while not (pid_file.exists() and pid_file.read_text()):
                await asyncio.sleep(0.01)
            return job

    job = asyncio.run(run())
    assert (job.state, job.error) == ("failed", "the server was stopped")
    assert not Path(f"/proc/{pid_file.read_text()}").exists()
