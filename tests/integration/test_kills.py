"""kill -9 at random points of a conversion, an upload, a seal and a collection, several at once on one store."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from imaged.chunkstore import appender, index, lease, leasefile, pack
from imaged.chunkstore.fsck import check
from imaged.chunkstore.store import ChunkStore
from imaged.collection import collect as collecting
from imaged.collection import compact
from imaged.collection.collect import collect
from imaged.conversion.convert import convert
from imaged.errors import NotFoundError, StoreBusyError
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.measure import measure
from imaged.names import ImageName, SourceName
from imaged.reach import reachable
from tests.support.memory_store import MemoryStore
from tests.support.store_images import build_image, name_image, noise

KILLS = 200
NAMES = 6
_STEPS: tuple[tuple[Any, str], ...] = (
    (os, "pwritev"),
    (os, "fdatasync"),
    (os, "fsync"),
    (os, "ftruncate"),
    (os, "write"),
    (os, "close"),
    (Path, "unlink"),
    (Path, "rename"),
    (Path, "replace"),
    (pack, "fallocate"),
    (index.Index, "write"),
    (index.Index, "commit"),
    (lease.Leases, "live"),
    (collecting.condemned, "finish"),
    (compact, "_remove"),
)
"""Where a process is killed: just before such a call, or in the middle of a call of Index.write (before its commit)."""


def arm(countdown: int | None) -> None:
    """Let this process dawdle at some of its steps, so that others come in between, and be killed at its
    `countdown`-th one."""
    left = [countdown or 0]

    def step() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if random.random() < 0.04:
            time.sleep(random.uniform(0.001, 0.012))

    for owner, name in _STEPS:
        real = getattr(owner, name)

        def before(*arguments: Any, _real: Callable[..., Any] = real, **options: Any) -> Any:
            step()
            return _real(*arguments, **options)

        setattr(owner, name, before)


def in_child(work: Callable[[], object], dice: random.Random, *, step: int | None, after_s: float | None) -> int:
    """Its pid: a process that does this, and is killed at a step, or by a timer wherever it is then."""
    seed = dice.random()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        random.seed(seed)
        appender.PACK_LIMIT_BYTES = 48 << 10  # so that packs are sealed all the time
        arm(step)
        if after_s is not None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends a process as SIGKILL does
            signal.setitimer(signal.ITIMER_REAL, after_s)
        work()
        status = 0
    except (NotFoundError, StoreBusyError):
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def converting(root: Path, tree: Path, name: str) -> None:
    with ChunkStore.open(root) as store:
        convert(store, SourceName.parse(f"dir:{tree}"), name=ImageName.parse(name))


def uploading(root: Path, first: int, name: str) -> None:
    """As a server does it: what is missing is stored, and what is complete is named, all under one lease."""
    memory = MemoryStore()
    record = build_image(memory, range(first, first + 6))
    with ChunkStore.open(root) as store:
        granted = store.leases.grant("an upload", keeps=None, ttl_s=600)
        with store.relying(granted.id):
            chunks = list(reachable(memory, record.id))
            for chunk in store.missing(chunks):
                store.put_frame(Frame.of(memory.get(chunk), chunk=chunk))
            store.flush()
        with store.relying(granted.id):
            measure(store, "image", record.id, reachable)
            name_image(store, name, record)
        store.leases.revoke(granted.id)


def removing(root: Path, name: str) -> None:
    with ChunkStore.open(root) as store:
        store.put(noise(9000, random.randrange(1000)))
        store.refs.delete(name)


def assert_whole(root: Path) -> int:
    """Every chunk below every name, read and verified; how many names there are."""
    with ChunkStore.open(root) as store:
        refs = dict(store.refs.items())
        for name, ref in refs.items():
            for chunk in reachable(store, ref.record):
                assert ChunkId.of(store.get(chunk)) == chunk, name
        return len(refs)


@pytest.fixture
def trees(tmp_path: Path) -> list[Path]:
    """Directories that share two thirds of their files with the next one."""
    made = []
    for number in range(NAMES):
        tree = tmp_path / f"tree{number}"
        tree.mkdir()
        for seed in range(number, number + 3):
            (tree / f"file{seed}").write_bytes(noise(20_000, seed) + bytes(20_000))
        made.append(tree)
    return made


@pytest.mark.timeout(1200)
def test_nothing_referenced_is_lost(tmp_path: Path, trees: list[Path]) -> None:
    """Three processes at a time, two or three of them killed, until there were 200 kills."""
    dice, root = random.Random(20), tmp_path / "store"
    ChunkStore.open(root).close()
    killed = rounds = most = 0
    while killed < KILLS:
        rounds += 1
        number, other = dice.randrange(NAMES), dice.randrange(NAMES)
        removing(root, f"upload:{number}")  # so that the same chunks are garbage, and wanted again
        works: list[Callable[[], object]] = [
            partial(collect, root),
            dice.choice(
                [
                    partial(converting, root, trees[other], f"tree:{other}"),
                    partial(uploading, root, other, f"upload:{other}"),
                ]
            ),
            dice.choice(
                [
                    partial(uploading, root, number, f"upload:{number}"),
                    partial(removing, root, f"tree:{number}"),
                ]
            ),
        ]
        pids = []
        for work in works:
            by_step = dice.random() < 0.55
            step = dice.randrange(1, 70) if by_step else None
            after_s = dice.uniform(0.001, 0.08) if not by_step and dice.random() < 0.5 else None
            pids.append(in_child(work, dice, step=step, after_s=after_s))
        for pid in pids:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status in (0, -signal.SIGKILL, -signal.SIGALRM), status
            killed += status < 0
        most = max(most, assert_whole(root))
        if rounds % 25 == 0:
            assert check(root).errors == []
    assert most >= 4
    assert check(root).errors == []
    collect(root)
    with ChunkStore.open(root) as store:
        for clients in store.leases.live():
            assert store.leases.revoke(clients.id)
    report = collect(root)
    assert report.waiting_chunks == 0
    with ChunkStore.open(root) as store:
        kept = {chunk for _, ref in store.refs.items() for chunk in reachable(store, ref.record)}
        assert report.kept_chunks == len(kept)
        assert list((root / leasefile.LEASES_DIRECTORY).iterdir()) == []
        assert pack.pack_numbers(root) == list(store.index.packs())
    assert check(root).errors == []
