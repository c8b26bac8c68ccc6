"""The order in which chunks were used, against a plain list."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from imaged.chunkstore.environment import INDEX_NAME
from imaged.chunkstore.index import Index
from imaged.chunkstore.uses import Uses
from imaged.ids import ChunkId

CHUNKS = [ChunkId.of(b"%d" % number) for number in range(12)]
some = st.lists(st.integers(0, 11), max_size=6)
steps = st.one_of(
    st.tuples(st.just("touch"), some),
    st.tuples(st.just("fetched"), some),
    st.tuples(st.just("forget"), some),
    st.tuples(st.just("flush"), st.just([])),
    st.tuples(st.just("clock"), st.lists(st.integers(-(10**9), 10**9), min_size=1, max_size=1)),
    st.tuples(st.just("reopen"), st.just([])),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(steps, max_size=30))
def test_the_oldest_are_those_used_longest_ago(history: list[tuple[str, list[int]]]) -> None:
    now = [10**18]
    with tempfile.TemporaryDirectory() as directory:
        index = Index.open(Path(directory) / INDEX_NAME)
        try:
            with index.write("have chunks") as txn:
                for chunk in CHUNKS:
                    index.put(txn, "chunks", chunk, b"a place")
            uses = Uses(index, lambda: None, clock=lambda: now[0])
            uses.record()
            order: list[int] = []
            given_chunks: set[int] = set()
            for step, numbers in history:
                chunks = [CHUNKS[number] for number in numbers] if step != "clock" else []
                if step == "clock":
                    # Within a process times go up; another one believes the clock, which does not go back here.
                    now[0] += numbers[0]
                elif step == "reopen":
                    uses.flush()
                    now[0] = max(now[0], 10**18) + 10**12
                    uses = Uses(index, lambda: None, clock=lambda: now[0])
                    uses.record()
                elif step == "flush":
                    uses.flush()
                elif step == "forget":
                    uses.flush()
                    uses.forget(chunks)
                    order = [number for number in order if number not in numbers]
                    given_chunks -= set(numbers)
                else:
                    (uses.touch if step == "touch" else uses.fetched)(chunks)
                    for number in numbers:
                        order = [other for other in order if other != number] + [number]
                    if step == "fetched":
                        given_chunks.update(numbers)
            uses.flush()
            expected = [CHUNKS[number] for number in order if number in given_chunks]
            assert uses.oldest(len(CHUNKS)) == expected
            assert uses.oldest(3) == expected[:3]
        finally:
            index.close()
