"""Processes that work on a chunk store, to be killed: `python -m tests.support.store_worker ROLE ROOT ...`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from imaged.chunkstore.store import ChunkStore
from imaged.collection.collect import collect
from tests.support.store_images import build_image, name_image, noise


def say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def write(root: Path, first: int) -> None:
    """Put and flush for ever; every line is the first seed that is not yet durable."""
    with ChunkStore.open(root) as store:
        seed = first
        while True:
            for _ in range(1 + seed % 40):
                store.put(noise(2000 + seed % 7 * 9000, seed))
                seed += 1
            store.flush()
            say(seed)


def put(root: Path, first: int, count: int) -> None:
    """Put some chunks and end."""
    with ChunkStore.open(root) as store:
        for seed in range(first, first + count):
            store.put(noise(3000, seed))


def name(root: Path, label: int) -> None:
    """Build images and name them, for ever; every line is a number of images that are durable."""
    with ChunkStore.open(root) as store:
        number = 0
        while True:
            record = build_image(store, range(number, number + 8))
            name_image(store, f"image{label}:{number % 5}", record)
            number += 1
            say(number)


def gc(root: Path) -> None:
    say("started")
    report = collect(root)
    say(report.removed_chunks)


def hold(root: Path) -> None:
    """Keep a store open until killed."""
    with ChunkStore.open(root):
        say("open")
        time.sleep(600)


def main(role: str, root: str, *numbers: str) -> None:
    roles = {"write": write, "put": put, "name": name, "gc": gc, "hold": hold}
    roles[role](Path(root), *map(int, numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
