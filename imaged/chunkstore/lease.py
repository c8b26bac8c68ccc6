"""Leases: who goes to name chunks that are here, or uses what has no name, says so, and no collection takes them.

A lease is a file `<store>/leases/<id>` (docs/formats/lease.md). It has an epoch, the value of the counter
`collections` of the index when it began, or none; and `keeps`, ids of image and snapshot records. A lease of a process
of this host is flocked by it: the kernel ends it with its holder. A lease of a client elsewhere ends when its time is
over, by the wall clock. Whoever looks removes the files of leases that have ended.

The invariant: no collection removes a chunk that hangs below a name, below the record that a lease keeps, or on which
the holder of a lease with an epoch relies. How it is kept:

 1. To rely on a chunk is to treat it as being here: not to put it, not to say that it is missing, to publish a name
    above it. Who relies holds a lease with epoch E from before the first time until the name is durable, and relies
    only on chunks that are not condemned, or with a stamp of at least E (`imaged.chunkstore.condemned.unreliable`). Any
    other one it puts, and the commit takes the row out of `condemned` in the transaction that gives the chunk its new
    place.
 2. Rows with stamp n are written while the counter is n. So they are all there before a lease of a greater epoch
    begins, and its holder never relies on a chunk of which it could have seen such a row.
 3. A collection condemns with stamp n, lets the counter go up to n+1, and then reads which leases there are. It removes
    only chunks with stamps below the epochs of all of these. A lease whose file it did not see has looked at the
    counter after its file was there, saw n+1 or more, and by 2 does not rely on what is removed.
 4. After it has read the leases it looks again at what names, and what leases keep, and pardons that. A transaction
    that removes chunks checks the counter `names` of the index, which each change of a name moves: so what a lease of
    step 3 that has ended since has named is seen too.
 5. What moves from a name to the keeps of a lease: the holder adds it to its keeps, and then looks that it still has
    its name (`imaged.collection.holding`). The collection reads keeps after names. So at least one of the two looks
    sees it.

The clock can only take a lease of step 1 from a client that is elsewhere. Its requests do not rely on it: the server
publishes under a lease of its own, and says 409 when chunks are missing after all.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from imaged.chunkstore import leasefile
from imaged.chunkstore.index import Index
from imaged.chunkstore.leasefile import LEASES_DIRECTORY, LONGEST_TTL_S
from imaged.chunkstore.leaseformat import LeaseState, changing_line, first_line, is_lease_id
from imaged.errors import NotFoundError, StoreError
from imaged.faults import store_faults
from imaged.flock import try_lock
from imaged.ids import ChunkId

__all__ = ["KEEPS_LIMIT", "LONGEST_TTL_S", "Lease", "LeaseState", "Leases", "least_epoch"]
KEEPS_LIMIT = 4096
_HOLDER_LIMIT = 200
log = logging.getLogger(__name__)


def least_epoch(leases: Iterable[LeaseState]) -> int | None:
    """What is condemned with a stamp below this may be removed; None: everything."""
    return min((lease.epoch for lease in leases if lease.epoch is not None), default=None)


class Lease:
    """A lease of this process, which ends with it at the latest. A context manager; threads may share it."""

    def __init__(
        self,
        path: Path,
        fd: int,
        epoch: int | None,
        ended: Callable[[Lease], None],
        make: Callable[[Iterable[ChunkId]], tuple[Path, int]] | None,
        keeps: Iterable[ChunkId],
    ) -> None:
        """Use `Leases.begin` or `Leases.keeping`. `make` gives another file, for one that lasts for long."""
        self.epoch = epoch
        self._path, self._fd, self._ended, self._make = path, fd, ended, make
        self._lock = threading.Lock()
        self._keeps = set(keeps)
        _held.add(self)

    @property
    def id(self) -> str:
        return self._path.name

    def keep(self, *records: ChunkId) -> None:
        """Keep these images or snapshots too. StoreError; then none of them."""
        with self._lock:
            fresh = [record for record in records if record not in self._keeps]
            if fresh and self._fd >= 0:
                with store_faults("note what a lease keeps", self._path.parent.parent):
                    leasefile.append(self._fd, changing_line(keeps=fresh))
                self._keeps.update(fresh)
                self._shorten()

    def drop(self, *records: ChunkId) -> None:
        """Keep these no longer."""
        with self._lock:
            known = [record for record in records if record in self._keeps]
            if known and self._fd >= 0:
                with store_faults("note what a lease drops", self._path.parent.parent):
                    leasefile.append(self._fd, changing_line(drops=known))
                self._keeps.difference_update(known)
                self._shorten()

    def _shorten(self) -> None:
        """A new file in place of one that has grown long, which everybody who looks at the leases would read. Both are
        there for a moment, so that who looks sees one of them."""
        if self._make is None or not leasefile.is_long(os.fstat(self._fd).st_size, self._keeps):
            return
        try:
            path, fd = self._make(self._keeps)
        except StoreError as error:  # it grows on
            log.info("%s", error.message)
            return
        old_path, old_fd = self._path, self._fd
        self._path, self._fd = path, fd
        _remove(old_path, old_fd)

    def release(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            self._ended(self)
            _held.discard(self)
            _remove(self._path, fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _forget(self) -> None:
        """In a child after fork: the lease is the parent's, and must not live on with the child's descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Leases:
    """The leases of one store. Threads may share it.

    `clock` gives Unix seconds; it may jump.
    """

    def __init__(self, root: Path, index: Index, clock: Callable[[], float] = time.time) -> None:
        self._root, self._directory, self._index, self._clock = root, root / LEASES_DIRECTORY, index, clock
        self._lock = threading.Lock()
        self._epochs: tuple[int, ...] = ()
        self._thread = threading.local()

    @property
    def newest_epoch(self) -> int | None:
        """The epoch to rely with: in a block of `relying` or `under` its own, else that of the newest lease that this
        process holds. None when there is none."""
        own: int | None = getattr(self._thread, "epoch", None)
        if own is not None:
            return own
        epochs = self._epochs  # replaced, never changed
        return max(epochs) if epochs else None

    # Of this process

    def begin(self, holder: str, keeps: Sequence[ChunkId] = ()) -> Lease:
        """A lease to rely with, for as long as it takes to put something and name it. StoreError.

        It holds back the removal of what is condemned from now on.
        """
        epoch = self._index.collections()
        path, fd = leasefile.create(self._root, first_line(holder, epoch=epoch, keeps=keeps))
        try:
            # Only a file that was there before the counter is read is surely seen by who moves it.
            while (now := self._index.collections()) != epoch:
                epoch = now
                with store_faults("note the epoch of a lease", self._root):
                    leasefile.append(fd, changing_line(epoch=epoch))
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        self._remember(epoch)
        return Lease(path, fd, epoch, self._forget_epoch, None, keeps)

    def keeping(self, holder: str, keeps: Sequence[ChunkId] = ()) -> Lease:
        """A lease that only keeps, for however long: it holds back nothing else. StoreError."""

        def make(kept: Iterable[ChunkId]) -> tuple[Path, int]:
            path, fd = leasefile.create(self._root, first_line(holder, epoch=None, keeps=kept))
            leasefile.reserve(fd)
            return path, fd

        return Lease(*make(keeps), None, lambda lease: None, make, keeps)

    def _forget_epoch(self, lease: Lease) -> None:
        if lease.epoch is not None:
            self._forget(lease.epoch)

    def _remember(self, epoch: int) -> None:
        with self._lock:
            self._epochs = (*self._epochs, epoch)

    def _forget(self, epoch: int) -> None:
        with self._lock:
            epochs = list(self._epochs)
            epochs.remove(epoch)
            self._epochs = tuple(epochs)

    # Of clients elsewhere

    def grant(
        self, holder: str, *, keeps: Sequence[ChunkId] | None, ttl_s: float, namespace: str | None = None
    ) -> LeaseState:
        """A lease for `ttl_s`, durable: with an epoch, or with `keeps` one that only keeps these. StoreError."""
        epoch = self._index.collections() if keeps is None else None
        first = first_line(
            holder[:_HOLDER_LIMIT],
            epoch=epoch,
            keeps=keeps or (),
            expires_at=self._clock() + _bounded(ttl_s),
            namespace=namespace,
        )
        path, fd = leasefile.create(self._root, first, durable=True)
        try:
            with store_faults("note the epoch of a lease", self._root):
                if epoch is not None:
                    self._follow(fd, epoch)
                return leasefile.read(path.name, fd)
        finally:
            os.close(fd)

    def _follow(self, fd: int, epoch: int) -> None:
        while (now := self._index.collections()) != epoch:
            epoch = now
            leasefile.append(fd, changing_line(epoch=epoch))
            os.fsync(fd)

    def renew(
        self, lease: str, *, keeps: Sequence[ChunkId] | None = None, ttl_s: float, namespace: str | None = None
    ) -> tuple[LeaseState, frozenset[ChunkId]]:
        """It lasts `ttl_s` from now; with `keeps` it keeps these and no others. Gives what it is now, and what it keeps
        only from now on. NotFoundError when it has ended, and when its file has grown long: it stays until it ends by
        itself, and another one takes its place."""
        with self._held(lease, namespace) as held:
            if held is None:
                raise NotFoundError(f"no lease {lease[:40]}", hint="it has ended: ask for a new one")
            fd, state = held
            if state.epoch is None and leasefile.is_long(os.fstat(fd).st_size, state.keeps):
                raise NotFoundError(f"lease {lease} was renewed too often", hint="ask for a new one")
            fresh = state.keeps if keeps is None else frozenset(keeps)
            expires_at = self._clock() + _bounded(ttl_s)
            line = changing_line(drops=state.keeps - fresh, keeps=fresh - state.keeps, expires_at=expires_at)
            with store_faults("renew a lease", self._root):
                leasefile.append(fd, line)
                os.fsync(fd)
                return leasefile.read(lease, fd), fresh - state.keeps

    def revoke(self, lease: str, *, namespace: str | None = None) -> bool:
        """End it; whether it was there."""
        with self._held(lease, namespace) as held:
            if held is None:
                return False
            with store_faults("end a lease", self._root):
                (self._directory / lease).unlink(missing_ok=True)
            return True

    @contextlib.contextmanager
    def relying(self, lease: str | None, *, namespace: str | None = None) -> Iterator[LeaseState | None]:
        """Work for the client that names this lease: it lasts until the end of the block, and this thread relies with
        its epoch if it has one.

        None, and nothing changes, when it names none, or one that has ended.
        """
        if lease is None:
            yield None
            return
        with self._held(lease, namespace) as held:
            state = held[1] if held is not None else None
            with self.under(state.epoch if state is not None else None):
                yield state

    @contextlib.contextmanager
    def under(self, epoch: int | None) -> Iterator[None]:
        """This thread relies with this epoch, which is of a lease that lasts until the end of the block."""
        before: int | None = getattr(self._thread, "epoch", None)
        self._thread.epoch = epoch if epoch is not None else before
        try:
            yield
        finally:
            self._thread.epoch = before

    @contextlib.contextmanager
    def _held(self, lease: str, namespace: str | None) -> Iterator[tuple[int, LeaseState] | None]:
        """A client's lease, locked, so that nobody finds meanwhile that its time is over."""
        if not is_lease_id(lease):
            yield None
            return
        try:
            fd = os.open(self._directory / lease, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        try:
            state = None
            # A process of this host does not let go of its own, and that is nobody else's to use.
            if leasefile.peek(lease, fd).expires_at is not None:
                fcntl.flock(fd, fcntl.LOCK_SH)
                state = leasefile.peek(lease, fd)
                if not os.fstat(fd).st_nlink or state.namespace != namespace or self._is_over(state):
                    state = None
            yield None if state is None else (fd, state)
        finally:
            os.close(fd)

    # Of everyone

    def live(self) -> list[LeaseState]:
        """Every lease there is, by id; one that is not among them began after this was called, or has ended. The files
        of those that have ended are removed."""
        states: dict[str, LeaseState | None] = {}
        with store_faults("read its leases", self._root):
            # Until none has come meanwhile: it may have taken the place of one that went before it was read.
            while fresh := self._names() - states.keys():
                states |= {name: self._look(name) for name in fresh}
        return [state for _, state in sorted(states.items()) if state is not None]

    def _names(self) -> set[str]:
        try:
            return {path.name for path in self._directory.iterdir()}
        except FileNotFoundError:
            return set()

    def _look(self, name: str) -> LeaseState | None:
        """What a file says; None when that is over, and the file removed, or it is not in use yet."""
        path = self._directory / name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            free = try_lock(fd)
            if not is_lease_id(name):
                if free:
                    path.unlink(missing_ok=True)
                return None
            state = leasefile.peek(name, fd)
            if free and (state.expires_at is None or self._is_over(state)):
                log.info("lease %s of %s has ended", name, state.holder)
                path.unlink(missing_ok=True)
                return None
            return state
        finally:
            os.close(fd)

    def _is_over(self, state: LeaseState) -> bool:
        """Also when more is left than anybody is given: then the clock was wrong when that was."""
        left_s = (state.expires_at or 0.0) - self._clock()
        return left_s <= 0 or left_s > 2 * LONGEST_TTL_S


def _remove(path: Path, fd: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    os.close(fd)


def _bounded(ttl_s: float) -> float:
    return min(max(ttl_s, 1.0), LONGEST_TTL_S)


def _forget_after_fork() -> None:
    for lease in list(_held):
        lease._forget()


_held: weakref.WeakSet[Lease] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_after_fork)
