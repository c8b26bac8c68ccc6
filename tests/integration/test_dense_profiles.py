"""A server makes what a startup profile names shorter, and answers with the same chunks meanwhile and afterwards."""

from __future__ import annotations

from pathlib import Path
from random import Random

from imaged import catalog
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.fetching.upstream import HttpUpstream
from imaged.ids import ChunkId
from tests.support.chunkserver import ask, chunk_server
from tests.support.node import convert_tree, wait_for


def test_a_recorded_run_makes_its_chunks_shorter(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(6):
        random = Random(number)
        words = b" ".join(b"word%d" % random.randrange(900) for _ in range(20_000))
        (tree / f"file{number}").write_bytes(words)
    convert_tree(tmp_path / "store", tree, "text:1")
    with ChunkStore.open(tmp_path / "store") as store:
        data = BlockImage.open(store, catalog.find(store, "text:1").record.data)
        leaf = data.leaf_ids()[0]
        chunks = list(data.chunk_ids())
        touched, others = chunks[:4], chunks[4:]
        before = {chunk: store.get(chunk) for chunk in chunks}
        sizes = {chunk: store.sizes(chunk) for chunk in chunks}

        def is_shorter(chunk: ChunkId) -> bool:
            found, first = store.sizes(chunk), sizes[chunk]
            return found is not None and first is not None and found[1] < first[1]

        with chunk_server(tmp_path / "store") as server, HttpUpstream(server.url) as upstream:
            body = b"".join((leaf, *touched))
            status, _, _ = ask(server, "PUT", "/v1/profiles/text:1", body, Content_Type="application/octet-stream")
            assert status == 200
            wait_for(lambda: all(map(is_shorter, touched)))
            frames = list(upstream.frames(chunks))
            assert {frame.id: frame.open() for frame in frames} == before
            assert [is_shorter(chunk) for chunk in others] == [False] * len(others)
            assert sum(frame.stored_bytes for frame in frames[:4]) < sum(
                size[1] for chunk in touched if (size := sizes[chunk]) is not None
            )
