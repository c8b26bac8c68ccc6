"""Sessions that convert, name, keep and die beside collections that are killed: what is referenced is always there."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from imaged.chunkstore import condemned
from imaged.chunkstore.fsck import check
from imaged.chunkstore.lease import Lease
from imaged.chunkstore.store import ChunkStore
from imaged.collection import collect as collecting
from imaged.collection import compact
from imaged.collection.holding import unsafe
from imaged.ids import ChunkId
from imaged.reach import reachable
from imaged.record import ImageRecord
from tests.support.store_images import build_image, name_image, noise

NAMES = ("a:1", "b:1", "c:1")
ACTIONS = ("begin", "build", "name", "die", "remove", "copy", "keep", "drop", "garbage", "missing")
STEPS = ("begin", "condemn", "finish", "remove", "pardon")


class KilledError(Exception):
    """The collection ends here."""


@dataclass
class Session:
    """One process: a store of its own, a lease while it works, and what it has built under that."""

    store: ChunkStore
    lease: Lease | None = None
    built: list[ImageRecord] = field(default_factory=list)
    present: set[ChunkId] = field(default_factory=set)
    """What it was told is not missing."""


class LeaseMachine(RuleBasedStateMachine):
    """`named` and `kept` are what must be whole; so must be what a session has built, while its lease lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="pvisor-leases-"))
        self.sessions = [Session(self._open()) for _ in range(2)]
        self.daemon = self._open()
        self.keeping = self.daemon.keeping("daemon")
        self.named: dict[str, ImageRecord] = {}
        self.kept: list[ImageRecord] = []

    def _open(self) -> ChunkStore:
        return ChunkStore.open(self.root, commit_s=None)

    def teardown(self) -> None:
        for session in self.sessions:
            session.store.close()
        self.daemon.close()
        assert check(self.root).errors == []
        shutil.rmtree(self.root)

    def act(self, data: st.DataObject) -> None:
        """Something that one of the processes does."""
        session = data.draw(st.sampled_from(self.sessions), label="session")
        getattr(self, f"_{data.draw(st.sampled_from(ACTIONS), label='action')}")(session, data)

    def _begin(self, session: Session, data: st.DataObject) -> None:
        if session.lease is None:
            session.lease = session.store.lease("a session")

    def _build(self, session: Session, data: st.DataObject) -> None:
        self._begin(session, data)
        first, count = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 3))
        session.built.append(build_image(session.store, range(first, first + count)))

    def _name(self, session: Session, data: st.DataObject) -> None:
        if session.lease is not None and session.built:
            record, name = data.draw(st.sampled_from(session.built)), data.draw(st.sampled_from(NAMES))
            name_image(session.store, name, record)
            self.named[name] = record
            session.lease.release()
            session.lease, session.built, session.present = None, [], set()

    def _die(self, session: Session, data: st.DataObject) -> None:
        """What it has not flushed is gone, and its lease with it."""
        if session.lease is not None:
            session.lease.release()
        session.lease, session.built, session.present = None, [], set()
        session.store.close()
        session.store = self._open()

    def _remove(self, session: Session, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(NAMES))
        session.store.refs.delete(name)
        self.named.pop(name, None)

    def _copy(self, session: Session, data: st.DataObject) -> None:
        name, new = data.draw(st.sampled_from(NAMES)), data.draw(st.sampled_from(NAMES))
        if session.store.refs.copy(name, new) is not None:
            self.named[new] = self.named[name]

    def _keep(self, session: Session, data: st.DataObject) -> None:
        """The daemon opens an image by its name, or one that was built and may be gone by its id."""
        record = data.draw(st.sampled_from([None, *self.named.values(), *session.built, *self.kept]))
        if record is not None and record not in self.kept:
            self.keeping.keep(record.id)
            if unsafe(self.daemon, [record.id]):
                self.keeping.drop(record.id)
            else:
                self.kept.append(record)

    def _drop(self, session: Session, data: st.DataObject) -> None:
        if self.kept:
            self.keeping.drop(self.kept.pop().id)

    def _garbage(self, session: Session, data: st.DataObject) -> None:
        session.store.put(noise(2000, data.draw(st.integers(0, 20))))
        session.store.flush()

    def _missing(self, session: Session, data: st.DataObject) -> None:
        self._begin(session, data)
        wanted = [ChunkId.of(noise(2000, seed)) for seed in range(21)]
        missing = set(session.store.missing(wanted))
        session.present |= {chunk for chunk in wanted if chunk not in missing}

    @rule(data=st.data())
    def anybody(self, data: st.DataObject) -> None:
        self.act(data)

    @rule(data=st.data(), killed_after=st.none() | st.integers(0, 12))
    def collect(self, data: st.DataObject, killed_after: int | None) -> None:
        """One collection, with something done by others before each of its steps; it may be killed at any of them."""
        left = [killed_after]

        def step() -> None:
            if left[0] is not None:
                left[0] -= 1
                if left[0] < 0:
                    raise KilledError
            for _ in range(data.draw(st.integers(0, 2), label="meanwhile")):
                self.act(data)

        def keep() -> list[ChunkId]:
            step()
            return []

        with _stepping(step), contextlib.suppress(KilledError):
            collecting.collect(self.root, keep=keep)

    @precondition(lambda self: all(session.lease is None for session in self.sessions))
    @rule()
    def collect_all(self) -> None:
        """With nobody at work nothing stays but what is referenced."""
        report = collecting.collect(self.root)
        referenced = {chunk for record in self._referenced() for chunk in reachable(self.daemon, record.id)}
        assert (report.kept_chunks, report.waiting_chunks) == (len(referenced), 0)

    def _referenced(self) -> list[ImageRecord]:
        return [*self.named.values(), *self.kept, *(one for session in self.sessions for one in session.built)]

    @invariant()
    def what_is_referenced_is_there(self) -> None:
        for record in self._referenced():
            for chunk in reachable(self.daemon, record.id):
                self.daemon.get(chunk)
        for session in self.sessions:
            assert session.store.absent(session.present) == []


class _stepping:  # noqa: N801
    """Calls `step` before each change that a collection makes."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step

    def __enter__(self) -> None:
        self._real = {(condemned, name): getattr(condemned, name) for name in STEPS}
        self._real |= {(compact, "_remove"): compact._remove, (compact, "_places"): compact._places}
        for (module, name), real in self._real.items():

            def before(*arguments: object, _real: Callable[..., object] = real, **options: object) -> object:
                self._step()
                return _real(*arguments, **options)

            setattr(module, name, before)

    def __exit__(self, *error: object) -> None:
        for (module, name), real in self._real.items():
            setattr(module, name, real)


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(
    max_examples=15, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
)
