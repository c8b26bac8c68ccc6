"""What to take along with a miss, when a request costs more than the bytes it brings.

Files that a program reads one after another mostly lie near each other on the disk: a directory of Python modules, the
libraries of one package. So where round trips are long, a request for a missed chunk also asks for what lies around it:
about as many bytes as the link carries in most of a round trip. A program that is only starting gets little and one
that goes on missing gets more; and what is asked for grows while it turns out useful, and shrinks while it does not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from imaged.blockformat import Leaf
from imaged.blockimage import BlockImage
from imaged.ids import ChunkId

FIRST_BYTES = 128 << 10
STEPS_TO_DOUBLE = 2
SHARE = 0.7
"""Of a round trip, for what is taken along."""
QUIET_S = 2.0
"""Who has missed nothing for so long starts anew."""
MOST_CHUNKS = 256
_LEAF_BYTES = 3 << 10
_CHUNK_BYTES = 16 << 10
"""What a leaf and a chunk take on the wire, before any has come."""
_LOOK = 4
"""For each chunk wanted, so many are looked at: most of a neighbourhood may be here already."""
_JUDGE = 64
"""Guesses between two judgements of how good they are."""
_MOST_COMING = 1.5
"""Round trips' worth of bytes that are taken along at the same time, at most."""
_TABLES = 512
_LEAST, _MOST = 1 / 16, 2.0


class Neighbourhood:
    """Of the chunks of one block image. Threads may share it. Nothing here fetches.

    `peek` gives a chunk that is on this host, else None. The lock guards the numbers only and is held for nothing that
    may take another: `came` and `used` are called under the fetcher's.
    """

    def __init__(self, image: BlockImage, peek: Callable[[ChunkId], bytes | None]) -> None:
        self._image, self._peek = image, peek
        self._lock = threading.Lock()
        self._numbers: dict[ChunkId, int] = {}
        self._tables: dict[int, list[ChunkId]] = {}
        self._factor = 1.0
        self._steps = 0
        self._missed_s = 0.0
        self._guessed = self._used = 0.0
        self._came = self._came_bytes = 0

    def came(self, chunk: ChunkId, stored_bytes: int) -> None:
        """A chunk that was chosen here has arrived."""
        if chunk not in self._numbers:
            with self._lock:
                self._came += 1
                self._came_bytes += stored_bytes

    def used(self) -> None:
        """A chunk that was chosen here has been read."""
        with self._lock:
            self._used += 1

    def choose(
        self, missed: Sequence[ChunkId], spare_bytes: int, is_known: Callable[[ChunkId], bool], *, coming: int = 0
    ) -> list[ChunkId]:
        """What to ask for besides `missed`, nearest first, if `spare_bytes` come in a round trip of the link.

        `coming` chunks that were taken along before are still on their way: they are in the way of what is missed next.
        """
        if not self._numbers:
            self._numbers = {leaf: number for number, leaf in enumerate(self._image.root.leaves) if leaf is not None}
        if missed[0] in self._numbers:
            count = max(0, min(MOST_CHUNKS, spare_bytes // 2 // _LEAF_BYTES - coming))
            near = self._leaves_near(self._numbers[missed[0]])
            return list(islice((leaf for leaf in near if not is_known(leaf)), count))
        with self._lock:
            size_bytes = self._came_bytes // self._came if self._came else _CHUNK_BYTES
            # What is on its way now comes while this request travels; only what is more than that is in the way.
            room_bytes = min(self._room_bytes(spare_bytes), int(_MOST_COMING * spare_bytes) - coming * size_bytes)
            count = max(0, min(MOST_CHUNKS, room_bytes // size_bytes))
        # A chunk that crosses the end of a leaf is in the tables of two.
        around = dict.fromkeys(islice(self._chunks_near(missed[-1]), _LOOK * count))
        around.pop(missed[-1], None)
        chosen = list(islice((chunk for chunk in around if not is_known(chunk)), count))
        with self._lock:
            self._judge(len(chosen), size_bytes / spare_bytes)
        return chosen

    def _room_bytes(self, spare_bytes: int) -> int:
        now_s = time.monotonic()
        if now_s - self._missed_s > QUIET_S:
            self._steps = 0
        self._missed_s = now_s
        grown = FIRST_BYTES * 2.0 ** min(32.0, self._steps / STEPS_TO_DOUBLE)
        self._steps += 1
        return int(min(grown, spare_bytes * SHARE * self._factor))

    def _judge(self, count: int, price: float) -> None:
        """`price` is what one chunk costs as a part of a round trip, and a round trip is what a used one saves: so at
        `price` used chunks in one guessed, guessing breaks even."""
        self._guessed += count
        if self._guessed >= _JUDGE:
            share = self._used / self._guessed
            if share > 8 * price:
                self._factor = min(_MOST, self._factor * 1.4)
            elif share < 2 * price:
                self._factor = max(_LEAST, self._factor / 1.4)
            self._guessed /= 2
            self._used /= 2

    def _leaves_near(self, number: int) -> Iterator[ChunkId]:
        leaves = self._image.root.leaves
        for distance in range(1, len(leaves)):
            for other in (number + distance, number - distance):
                if 0 <= other < len(leaves) and (leaf := leaves[other]) is not None:
                    yield leaf

    def _chunks_near(self, chunk: ChunkId) -> Iterator[ChunkId]:
        """In disk order from the chunk's place in the leaf it was found through: two after it for each one before."""
        for leaf_id, leaf in self._image.recent_leaves():
            if leaf.raw.find(chunk) >= 0:
                number = self._numbers[leaf_id]
                break
        else:
            return
        table = self._tables[number] = leaf.chunks()
        place = table.index(chunk) if chunk in table else 0
        after, before = self._walk(number, place, 1), self._walk(number, place, -1)
        while True:
            found = [*islice(after, 2), *islice(before, 1)]
            if not found:
                return
            yield from found

    def _walk(self, number: int, place: int, step: int) -> Iterator[ChunkId]:
        """From one place on, through the leaves that are here; ends with the id of the first that is not."""
        while True:
            table = self._table(number)
            place += step
            if table is not None and 0 <= place < len(table):
                yield table[place]
                continue
            number += step
            if not 0 <= number < len(self._image.root.leaves):
                return
            leaf = self._image.root.leaves[number]
            following = self._table(number)
            if following is None:
                if leaf is not None:
                    yield leaf
                return
            place = -1 if step > 0 else len(following)

    def _table(self, number: int) -> list[ChunkId] | None:
        """The chunks of one leaf in disk order, none for a hole; None when the leaf is not here."""
        table = self._tables.get(number)
        if table is None:
            leaf = self._image.root.leaves[number]
            raw = b"" if leaf is None else self._peek(leaf)
            if raw is None:
                return None
            if len(self._tables) >= _TABLES:
                self._tables.clear()
            table = self._tables[number] = Leaf.parse(raw).chunks() if raw else []
        return table
