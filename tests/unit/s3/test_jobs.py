"""Jobs of several servers of a bucket, each with a directory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from imaged.errors import BucketUnavailableError, NotFoundError
from imaged.jobs.directorystore import DirectoryJobStore
from imaged.jobs.job import Job, State
from imaged.jobs.jobstore import Claim, JobEndedError
from imaged.s3.jobs import GONE_S, BucketJobStore
from tests.support.memory_objects import MemoryObjects


class Servers:
    """Two servers, and their clock."""

    def __init__(self, root: Path) -> None:
        self.objects, self.now_s, self._root = MemoryObjects(), 1000.0, root
        self.one, self.other = self.started("one"), self.started("other")

    def started(self, name: str, *, running_limit: int = 2) -> BucketJobStore:
        """A server of this name: the first, or again."""
        (self._root / name).mkdir(exist_ok=True)
        local = DirectoryJobStore(self._root / name, running_limit=running_limit)
        return BucketJobStore(local, self.objects, lambda: self.now_s)

    def refuse(self, *operations: str) -> None:
        """The bucket does not answer these."""

        def fail(operation: str, key: str) -> None:
            if operation in operations:
                raise BucketUnavailableError("no answer")

        self.objects.before = fail

    def taken_over(self, by: BucketJobStore) -> Claim | None:
        """What this one claims once it has looked for a while at a bucket in which nobody writes."""
        for _ in range(int(GONE_S / 30) + 1):
            assert by.claim() is None
            self.later(30)
        return by.claim()

    def later(self, seconds: float) -> None:
        self.now_s += seconds
        self.objects.now_s += seconds


@pytest.fixture
def servers(tmp_path: Path) -> Servers:
    return Servers(tmp_path)


def asked(name: str = "x") -> Job:
    return Job.conversion(f"docker://h.test/{name}:1", name=None, platform=None)


def test_a_job_is_known_joined_and_followed_at_another_server(servers: Servers) -> None:
    job = servers.one.submit(asked())
    assert servers.other.get(job.id).state == "queued"
    assert servers.other.submit(asked()).id == job.id
    claim = servers.one.claim()
    assert claim is not None
    servers.later(5)
    claim.report({"step": "half"})
    servers.later(5)
    (seen,) = servers.other.all()
    assert (seen.state, seen.progress) == ("running", {"step": "half"})
    assert servers.other.claim() is None
    assert servers.other.is_owned(job.id)
    claim.finish(Job.done)
    claim.close()
    assert servers.other.get(job.id).state == "done"
    assert not servers.other.is_owned(job.id)
    with pytest.raises(JobEndedError):
        servers.other.cancel(job.id)
    assert servers.other.submit(asked()).id != job.id
    with pytest.raises(NotFoundError):
        servers.other.get("0" * 20)


def test_a_job_is_cancelled_at_another_server(servers: Servers) -> None:
    job = servers.one.submit(asked())
    claim = servers.one.claim()
    assert claim is not None
    assert servers.other.cancel(job.id).state == "cancelled"
    assert not claim.is_cancelled()
    servers.later(5)
    servers.one.claim()
    assert claim.is_cancelled()
    claim.finish(Job.done)
    claim.close()
    assert servers.other.get(job.id).state == "cancelled"
    assert [key for key in servers.objects.objects if key.endswith(".cancel")] == []


def test_what_a_server_that_is_gone_had_is_taken_over(servers: Servers) -> None:
    job = servers.one.submit(asked())
    claim = servers.one.claim()
    assert claim is not None
    taken = servers.taken_over(by=servers.other)
    assert taken is not None
    assert (taken.job.id, taken.job.starts) == (job.id, 2)
    taken.finish(Job.done)
    assert servers.other.get(job.id).state == "done"
    for held in (claim, taken):
        held.close()


def test_a_server_that_is_there_keeps_its_jobs(servers: Servers) -> None:
    servers.one.submit(asked())
    claim = servers.one.claim()
    assert claim is not None
    for _ in range(10):
        servers.later(40)
        servers.one.claim()
        assert servers.other.claim() is None
    claim.close()


def test_a_job_that_says_nothing_beside_one_that_says_much_is_kept(servers: Servers) -> None:
    """Whether it waits or runs: each is shown for itself."""
    told, silent, waiting = (servers.one.submit(asked(letter)) for letter in "abc")
    claims = [servers.one.claim() for _ in range(2)]
    assert [claim and claim.job.id for claim in claims] == [told.id, silent.id]
    for step in range(60):
        servers.later(4)
        assert claims[0] is not None
        claims[0].report({"step": f"{step}"})
        assert servers.one.claim() is None
        assert servers.other.claim() is None
    assert {job.id for job in servers.other.all() if not job.finished} == {told.id, silent.id, waiting.id}
    for claim in claims:
        assert claim is not None
        claim.close()


def test_who_looks_at_the_jobs_often_keeps_the_server_from_nothing(servers: Servers) -> None:
    job = servers.one.submit(asked())
    claim = servers.one.claim()
    assert claim is not None
    servers.other.cancel(job.id)
    for _ in range(4):
        servers.later(3)
        servers.one.all()
        servers.one.claim()
    assert claim.is_cancelled()
    claim.close()


def test_who_took_a_job_over_may_be_gone_before_it_was_begun(servers: Servers) -> None:
    job = servers.one.submit(asked())
    assert servers.taken_over(by=servers.started("third", running_limit=0)) is None
    claim = servers.taken_over(by=servers.other)
    assert claim is not None
    assert (claim.job.id, claim.job.starts) == (job.id, 1)
    claim.close()


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("state", [State.DONE, State.CANCELLED])
def test_an_end_that_the_bucket_did_not_take_is_written_when_it_does(
    servers: Servers, state: State, is_restarted: bool
) -> None:
    job = servers.one.submit(asked())
    claim = servers.one.claim()
    assert claim is not None
    assert servers.other.claim() is None
    servers.refuse("put")
    if state is State.CANCELLED:
        servers.one.cancel(job.id)
    claim.finish(Job.done)
    claim.close()
    servers.refuse()
    if is_restarted:
        servers.one = servers.started("one")
    assert servers.other.get(job.id).state is State.RUNNING
    for _ in range(8):
        servers.later(30)
        assert servers.one.claim() is servers.other.claim() is None
    assert servers.other.get(job.id).state is state
    assert servers.other.submit(asked()).id != job.id


def test_an_outage_of_the_bucket_makes_nobody_gone(servers: Servers) -> None:
    servers.one.submit(asked())
    claim = servers.one.claim()
    assert claim is not None
    assert servers.other.claim() is None
    servers.refuse("put", "get", "list")
    for _ in range(10):
        servers.later(GONE_S)
        assert servers.one.claim() is servers.other.claim() is None
    servers.refuse()
    for _ in range(10):  # the other one is always the first to look
        servers.later(30)
        assert servers.other.claim() is servers.one.claim() is None
    claim.close()


def test_jobs_go_on_while_the_bucket_does_not_answer(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    job = servers.one.submit(asked())

    def fail(operation: str, key: str) -> None:
        raise BucketUnavailableError("no answer")

    servers.objects.before = fail
    servers.later(60)
    claim = servers.one.claim()
    assert claim is not None
    for _ in range(5):
        for later_s in (60, 0):  # an outage, and a look that is not due meanwhile
            servers.later(later_s)
            assert servers.one.claim() is None
    assert [record.getMessage() for record in caplog.records] == [
        f"job {job.id} is not shown to other servers: no answer",
        "jobs of other servers are not heard of: no answer",
    ]
    claim.report({"step": "half"})
    servers.objects.before = None
    for _ in range(2):
        servers.later(60)
        assert servers.one.claim() is None
    assert [record.getMessage() for record in caplog.records[2:]] == ["jobs of other servers are heard of again"]
    claim.finish(Job.done)
    claim.close()
    assert servers.other.get(job.id).state == "done"
