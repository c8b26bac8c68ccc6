"""What is said of chunks that did not come."""

from __future__ import annotations

from imaged.errors import ChunkMissingError
from imaged.fetching.download import Download
from imaged.fetching.upstream import HttpUpstream
from imaged.ids import ChunkId
from tests.support.crooked import FAST, Crooked

pytest_plugins = ("tests.support.fetching",)
ABSENT = ChunkId.of(b"nobody has it")


def test_a_chunk_that_no_server_has_is_told_with_the_servers(server: Crooked, second: Crooked) -> None:
    download = Download([ABSENT], FAST)
    with HttpUpstream(server.url) as one, HttpUpstream(second.url) as other:
        assert download.run([one, other], lambda frame, data: None)
    error = download.error(ABSENT)
    assert isinstance(error, ChunkMissingError)
    assert error.message == f"chunk {ABSENT}: neither in the local store nor at {server.url}, {second.url}"
    assert "PVISOR_SERVER" in error.hint


def test_a_chunk_that_no_server_was_asked_for_is_only_not_here() -> None:
    download = Download([ABSENT], FAST)
    assert download.run([], lambda frame, data: None)
    error = download.error(ABSENT)
    assert (error.message, error.hint) == (f"chunk {ABSENT}: not in the store", "")
