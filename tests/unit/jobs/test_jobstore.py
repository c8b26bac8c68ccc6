"""Documents of jobs: one job a key, across processes; what a killed process leaves; how many may wait and are kept."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from imaged.errors import FormatError, NotFoundError
from imaged.jobs.directorystore import DirectoryJobStore
from imaged.jobs.job import Job
from imaged.jobs.jobstore import QueueFullError
from tests.support.command import ROOT

_CLAIM = """
import sys
from pathlib import Path
from imaged.jobs.directorystore import DirectoryJobStore
claim = DirectoryJobStore(Path(sys.argv[1])).claim()
print(claim.job.id if claim else "none", flush=True)
sys.stdin.read()
"""


def asked(source: str = "docker://h.test/asked:1") -> Job:
    return Job.conversion(source, name=None, platform=None)


def killed_while_it_ran(store: Path) -> str:
    """A process takes the next job and is killed; which job that was."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CLAIM, str(store)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with process:
        assert process.stdout is not None
        taken = process.stdout.readline().strip()
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    return taken


def test_fifty_at_once_are_one_job(tmp_path: Path) -> None:
    stores = [DirectoryJobStore(tmp_path) for _ in range(5)]
    with ThreadPoolExecutor(50) as pool:
        found = list(pool.map(lambda number: stores[number % 5].submit(asked()).id, range(50)))
    assert len(set(found)) == 1
    assert [job.id for job in stores[0].all()] == found[:1]


def test_one_that_runs_is_not_taken_again(tmp_path: Path) -> None:
    one, other = DirectoryJobStore(tmp_path), DirectoryJobStore(tmp_path)
    job = one.submit(asked())
    with one.claim() as claim:  # type: ignore[union-attr]
        assert (claim.job.id, claim.job.state, claim.job.starts) == (job.id, "running", 1)
        assert other.claim() is None
        assert other.is_owned(job.id)
        assert other.submit(asked()).id == job.id
        claim.report({"step": "s", "done_bytes": 1})
        assert other.get(job.id).progress == {"step": "s", "done_bytes": 1}
        assert claim.finish(Job.put_back).state == "queued"
    assert not other.is_owned(job.id)


def test_so_many_run_and_a_collection_beside_them(tmp_path: Path) -> None:
    store = DirectoryJobStore(tmp_path, running_limit=2)
    jobs = [store.submit(asked(f"docker://h.test/x:{number}")) for number in range(3)]
    claims = [store.claim() for _ in range(3)]
    assert [claim and claim.job.id for claim in claims] == [jobs[0].id, jobs[1].id, None]
    gc = store.submit(Job.collection())
    claims.append(store.claim())
    assert claims[-1] is not None
    assert claims[-1].job.id == gc.id
    assert store.submit(Job.collection()).id == gc.id
    for claim in claims:
        if claim is not None:
            claim.finish(Job.done)
            claim.close()
    again = store.claim()
    assert again is not None
    assert again.job.id == jobs[2].id
    again.close()


def test_what_a_killed_server_ran_is_run_again_three_times(tmp_path: Path) -> None:
    store = DirectoryJobStore(tmp_path)
    job = store.submit(asked())
    other = store.submit(asked("docker://h.test/other:1"))
    for start in (1, 2, 3):
        assert killed_while_it_ran(tmp_path) == job.id
        assert (store.get(job.id).state, store.get(job.id).starts) == ("running", start)
    with store.claim() as claim:  # type: ignore[union-attr]
        assert claim.job.id == other.id
    failed = store.get(job.id)
    assert (failed.state, "3 times" in failed.error, bool(failed.hint)) == ("failed", True, True)
    assert store.submit(asked()).id != job.id


def test_an_abandoned_job_waits_when_no_more_may_run(tmp_path: Path) -> None:
    store = DirectoryJobStore(tmp_path, running_limit=1)
    job = store.submit(asked())
    killed_while_it_ran(tmp_path)
    taken = (tmp_path / "jobs/slot-0").open("r+")
    fcntl.flock(taken, fcntl.LOCK_EX)
    assert store.claim() is None
    assert (store.get(job.id).state, store.get(job.id).starts) == ("queued", 1)
    taken.close()
    with store.claim() as claim:  # type: ignore[union-attr]
        assert (claim.job.id, claim.job.starts) == (job.id, 2)


def test_more_than_may_wait_are_refused(tmp_path: Path) -> None:
    store = DirectoryJobStore(tmp_path, queue_limit=3)
    jobs = [store.submit(asked(f"docker://h.test/x:{number}")) for number in range(3)]
    with pytest.raises(QueueFullError, match="3 jobs wait") as refused:
        store.submit(asked())
    assert "job cancel" in refused.value.hint
    assert store.submit(asked("docker://h.test/x:2")).id == jobs[2].id
    store.cancel(jobs[0].id)
    store.submit(asked())


def test_the_oldest_ended_jobs_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imaged.jobs.directorystore.KEPT_JOBS", 3)
    store, other = DirectoryJobStore(tmp_path), DirectoryJobStore(tmp_path)
    waiting = store.submit(asked())
    ended = [store.submit(asked(f"docker://h.test/x:{number}")) for number in range(3)]
    for job in ended:
        store.cancel(job.id)
    assert len(other.all()) == 4
    (tmp_path / "jobs/.pvisor-00.part").touch()
    last = store.submit(asked("docker://h.test/y:1"))
    assert {job.id for job in other.all()} == {waiting.id, ended[2].id, last.id}
    with pytest.raises(NotFoundError):
        store.get(ended[0].id)
    assert not list((tmp_path / "jobs").glob(".*"))
    assert len(other._finished) <= 3


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"version": 1, "id": 5}', b"[" * 100_000])
def test_a_damaged_document_hides_no_other(tmp_path: Path, raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = DirectoryJobStore(tmp_path)
    job = store.submit(asked())
    hurt = f"{0:020x}"
    (tmp_path / f"jobs/{hurt}.json").write_bytes(raw)
    assert [found.id for found in store.all()] == [job.id]
    with pytest.raises(NotFoundError):
        store.get(hurt)
    claim = store.claim()
    assert claim is not None
    for _ in range(3):  # it is looked at each second
        assert store.claim() is None
    assert len([record for record in caplog.records if hurt in record.getMessage()]) == 1
    claim.close()


@pytest.mark.parametrize("text", ["", "..", "../../etc/passwd", "lock", "0" * 19, "0" * 21, "\0" * 20, "G" * 20])
def test_only_ids_are_looked_up(tmp_path: Path, text: str) -> None:
    store = DirectoryJobStore(tmp_path)
    store.submit(asked())
    for look in (store.get, store.cancel):
        with pytest.raises(NotFoundError):
            look(text)


def test_a_document_says_which_field_is_wrong() -> None:
    good = asked().to_document()
    assert Job.from_document(json.loads(json.dumps(good))).to_document() == good
    for field, value in (("starts", True), ("state", "lost"), ("progress", None), ("id", "x"), ("kind", "")):
        with pytest.raises(FormatError):
            Job.from_document({**good, field: value})


def test_nothing_is_made_where_nobody_asked(tmp_path: Path) -> None:
    store = DirectoryJobStore(tmp_path)
    assert (store.claim(), store.all()) == (None, [])
    assert not (tmp_path / "jobs").exists()
