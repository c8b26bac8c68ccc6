"""A thread that keeps the mirror of a bucket up to date, and the lease of this host alive."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from pathlib import Path

from imaged.chunkstore.lease import Leases, least_epoch
from imaged.errors import PvisorError
from imaged.flock import try_lock
from imaged.s3.address import Patience
from imaged.s3.serverlease import ServerLease, Wish
from imaged.s3.sync import Sync
from imaged.s3.uploads import Uploads

_WHOLE_EVERY = 12
"""One look in so many is a whole one."""
_BUSY_SHARE = 2
"""No more than one part in so many of the time is spent on looking."""
log = logging.getLogger(__name__)


class Keeper:
    """Of one process. Of all processes of a host one keeps; when it ends, another goes on."""

    def __init__(
        self, root: Path, sync: Sync, uploads: Uploads, lease: ServerLease, leases: Leases, patience: Patience
    ) -> None:
        self._root, self._sync, self._uploads = root, sync, uploads
        self._lease, self._leases, self._patience = lease, leases, patience
        self._renewing = threading.Lock()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._presence = _lock_file(root / "present.lock")
        fcntl.flock(self._presence, fcntl.LOCK_SH)
        self._duty = _lock_file(root / "keeper.lock")
        self._thread = threading.Thread(target=self._work, name="s3-keeper", daemon=True)

    def start(self) -> None:
        """Be up to date, and have a lease. BucketUnavailableError, StoreError."""
        if self._sync.age_s() > _WHOLE_EVERY * self._patience.poll_s or not self._lease.left_s():
            if not self._lease.left_s():
                # Before the look at the lists: a collection that begins later waits for us.
                self._lease.write(Wish(frozenset(), frozenset()))
            self._sync.everything()
            self.renew()
        self._uploads.run()
        self._thread.start()

    def renew(self) -> None:
        """Make the lease last from now. BucketUnavailableError, StoreError."""
        with self._renewing:
            self._lease.write(self._wish())

    def renew_if_changed(self) -> None:
        """As `renew`, when the lease does not say what is true now, or has not long to go."""
        if self._wish() != self._lease.written() or self._lease.left_s() < 2 * self._lease.renew_s:
            self.renew()

    def _wish(self) -> Wish:
        # In this order: a lease that begins in between has an epoch that knows all of these lists.
        applied = self._sync.applied()
        leases = self._leases.live()
        oldest = least_epoch(leases)
        seen = frozenset(key for key, stamp in applied.items() if oldest is None or stamp < oldest)
        return Wish(seen, frozenset(record for lease in leases for record in lease.keeps))

    def require(self) -> None:
        """There is a lease for a while yet. BucketUnavailableError, StoreError."""
        if self._lease.left_s() < self._lease.renew_s:
            self.renew()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            if try_lock(self._presence) and self._lease.left_s() and not self._leases.live():
                self._lease.end()
        except PvisorError as error:
            log.info("the lease in the bucket ends by itself: %s", error.message)
        finally:
            os.close(self._presence)
            os.close(self._duty)

    def _work(self) -> None:
        rounds = 0
        failing = False
        while not self._stop.is_set():
            begun = time.monotonic()
            try:
                if self._is_ours():
                    rounds += 1
                    self._round(whole=rounds % _WHOLE_EVERY == 0)
                    if failing:
                        log.warning("the bucket answers again")
                    failing = False
            except PvisorError as error:
                if not failing:
                    log.warning("the mirror of the bucket is not up to date: %s", error.message)
                failing = True
            except Exception:
                log.exception("keeping the mirror of the bucket up to date")
            took_s = time.monotonic() - begun
            self._wake.wait(max(self._patience.poll_s, _BUSY_SHARE * took_s if not failing else 0.0))

    def _is_ours(self) -> bool:
        return try_lock(self._duty)

    def _round(self, *, whole: bool) -> None:
        # The lease first: looking may take long.
        if self._lease.left_s() < self._patience.lease_s - self._lease.renew_s:
            self.renew()
        if whole:
            self._sync.everything()
        else:
            self._sync.often()
        self._uploads.run()
        self.renew_if_changed()


def _lock_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
