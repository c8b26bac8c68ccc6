"""The node daemon: `python -m fuse.daemon`, started by `fuse.starter`. One FUSE mount, one control socket."""

from __future__ import annotations

import argparse
import ctypes
import errno
import faulthandler
import json
import logging
import os
import stat
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

try:
    ctypes.CDLL("libfuse3.so.3")
    os.environ.setdefault("FUSE_LIBRARY_PATH", "libfuse3.so.3")
except OSError:  # of another version: found by asking ldconfig and the compiler, which takes longer
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")

import mfusepy

from fuse import rundir
from imaged.config import Config
from imaged.errors import NotFoundError, PvisorError
from imaged.fetching.credentials import KNOWN, VARIABLE

if TYPE_CHECKING:
    from fuse.files import BlockFiles

log = logging.getLogger(__name__)
_THREADS = 64
_READ_AHEAD_BYTES = 64 << 10
"""By the kernel, of who reads through the page cache of this mount: a VM's memory and disks, `PVISOR_EROFS=file`.

Around each page that a machine touches: until it had resumed, a Debian guest of 256 MiB made 533 reads of its memory
with 32 KiB, 370 with 64, 253 with 128, and 21, 26 and 33 MiB were cached. A chunk of memory is 64 KiB. Long runs are
`fuse.readahead`'s."""
_NOT_TO_READ = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND
_LOG_BYTES = 4 << 20
_FOREVER_S = 365 * 86400.0
"""How long the kernel may believe names and sizes: a file's name is the hash of what it holds."""


class _FileInfo(Protocol):
    """The part of libfuse's fuse_file_info that is used here."""

    fh: int
    flags: int
    keep_cache: int


class BlockOperations(mfusepy.Operations):
    """`BlockFiles` as libfuse wants it. Called from many threads at once."""

    use_ns = True

    def __init__(self, files: BlockFiles, on_mounted: Any) -> None:
        self._files = files
        self._on_mounted = on_mounted
        self._owner = {"st_uid": os.geteuid(), "st_gid": os.getegid(), "st_nlink": 1}
        self._started_ns = time.time_ns()
        self._thread = threading.local()

    def init_with_config(self, conn_info: Any, config_3: Any) -> None:
        # libfuse's own limits keep about ten reads in flight; a slow one would hold up the rest.
        conn_info.max_background = conn_info.congestion_threshold = _THREADS
        conn_info.max_readahead = _READ_AHEAD_BYTES
        config_3.entry_timeout = config_3.attr_timeout = _FOREVER_S
        config_3.kernel_cache = 1
        config_3.nullpath_ok = 1
        self._on_mounted()

    def getattr(self, path: str | None, fh: Any = None) -> dict[str, int]:
        times = dict.fromkeys(("st_mtime", "st_ctime", "st_atime"), self._started_ns)
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o500, **self._owner, **times, "st_nlink": 2}
        size_bytes = self._lookup(path, fh)
        return {"st_mode": stat.S_IFREG | 0o400, "st_size": size_bytes, **self._owner, **times}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *self._files.names()]

    def open(self, path: str, fi: _FileInfo) -> int:
        if fi.flags & _NOT_TO_READ and not self._is_memory_of_qemu(path, fi.flags):
            raise mfusepy.FuseOSError(errno.EROFS)
        try:
            fi.fh = self._files.open(path[1:])
        except NotFoundError as error:
            raise mfusepy.FuseOSError(errno.ENOENT) from error
        except Exception as error:
            raise _input_output_error(f"open {path}", error) from error
        fi.keep_cache = 1
        return 0

    def _is_memory_of_qemu(self, path: str, flags: int) -> bool:
        """QEMU opens the file that its guest's memory is mapped on for reading and writing, though it maps it privately
        (7.2 does not know the option not to)."""
        return flags & _NOT_TO_READ == os.O_RDWR and self._files.is_memory(path[1:])

    def write(self, path: str | None, data: bytes, offset: int, fi: _FileInfo) -> int:
        """Refused. When the kernel sends a page that somebody changed through a shared mapping, it is taken out of the
        cache too, so that nobody goes on to read it: FUSE has no way to refuse the mapping."""
        file = self._files.file(fi.fh)
        log.error("write of %d bytes at %d to %s refused", len(data), offset, file.image.id)
        self._forget_pages(f"/{file.image.id}")
        raise mfusepy.FuseOSError(errno.EROFS)

    def _refuse(self, *arguments: Any) -> int:
        raise mfusepy.FuseOSError(errno.EROFS)

    truncate = utimens = chmod = chown = create = mknod = mkdir = unlink = rmdir = rename = link = symlink = _refuse
    setxattr = removexattr = _refuse

    def release(self, path: str | None, fi: _FileInfo) -> int:
        self._files.release(fi.fh)
        return 0

    def read(self, path: str | None, size: int, offset: int, fi: _FileInfo) -> bytes:
        self._keep_thread_state()
        try:
            return self._files.file(fi.fh).read(offset, size)
        except Exception as error:
            raise _input_output_error(f"read of {size} bytes at {offset}", error) from error

    def _keep_thread_state(self) -> None:
        """Let Python know this thread for ever, once: else each call makes a thread state, and drops it with all that
        is thread-local (zstd contexts). That was a fifth of a read. libfuse keeps its threads, so nothing leaks.
        """
        if not hasattr(self._thread, "known"):
            self._thread.known = True
            ctypes.pythonapi.PyGILState_Ensure()

    def _forget_pages(self, path: str) -> None:
        """Soon, on another thread: the kernel waits for this operation's answer before it lets go of the pages."""
        context = mfusepy._libfuse.fuse_get_context()
        fuse = ctypes.c_void_p(context.contents.fuse)
        forget = mfusepy._libfuse.fuse_invalidate_path
        threading.Thread(target=forget, args=(fuse, path.encode()), name="forget-pages", daemon=True).start()

    def statfs(self, path: str) -> dict[str, int]:
        return {"f_bsize": 4096, "f_frsize": 4096, "f_namemax": 64}

    def _lookup(self, path: str | None, fi: _FileInfo | None) -> int:
        try:
            file = self._files.file(fi.fh) if path is None and fi is not None else self._files.lookup((path or "")[1:])
        except NotFoundError as error:
            raise mfusepy.FuseOSError(errno.ENOENT) from error
        except Exception as error:
            raise _input_output_error(f"look up {path}", error) from error
        return file.size_bytes


def _input_output_error(what: str, error: Exception) -> mfusepy.FuseOSError:
    """EIO for whatever went wrong: the kernel asks again later. Never fewer bytes, never zeros in their place."""
    if isinstance(error, PvisorError):
        log.error("%s: %s", what, error.message)
    else:
        log.error("%s", what, exc_info=error)
    return mfusepy.FuseOSError(errno.EIO)


def serve(config: Config, ready: Any) -> None:
    """Until the mount is unmounted or a signal ends the process. `ready()` is called once requests are answered."""
    from fuse import mounts, vmlease
    from fuse.control import ControlServer
    from fuse.files import BlockFiles
    from fuse.fill import Filler
    from fuse.keeping import Keeping
    from fuse.opener import Opener
    from fuse.snapshotopener import SnapshotOpener
    from imaged.chunkstore.store import ChunkStore
    from imaged.collection.eviction import Evictor
    from imaged.fetching.fetch import Fetcher
    from imaged.fetching.upstream import HttpUpstream
    from imaged.ids import ChunkId
    from imaged.signature import Trust

    started = time.monotonic()
    with ChunkStore.open(config.store) as store:
        fetcher = Fetcher(store, [HttpUpstream(url) for url in config.servers])
        evictor = Evictor(store, config.cache_max_bytes)
        fetcher.bound(evictor)
        files = BlockFiles(fetcher)
        keeping = Keeping(fetcher, files)
        opener = Opener(config, fetcher, files, keeping)
        snapshots = SnapshotOpener(config, fetcher, files, opener, keeping)
        filler = Filler(fetcher)

        def status(request: dict[str, Any]) -> dict[str, Any]:
            return {
                "pid": os.getpid(),
                "uptime_s": round(time.monotonic() - started, 3),
                "home": str(config.home),
                "server": config.server,
                "mount": str(config.blocks),
                "images": files.status(),
                "snapshots": files.status(snapshots=True),
                "fills": filler.status(),
                "vms": vmlease.held(config),
                "cache": asdict(evictor.status()),
            }

        def open_here(request: dict[str, Any]) -> dict[str, Any] | None:
            trust = Trust.parse(request.get("require"))
            found = opener.open_here(str(request["name"]), start=request.get("start") is True, trust=trust)
            return None if found is None else found.to_json()

        def open_image(request: dict[str, Any]) -> dict[str, Any]:
            trust, start = Trust.parse(request.get("require")), request.get("start") is True
            return opener.open(str(request["name"]), server=request.get("server"), start=start, trust=trust).to_json()

        def open_snapshot_here(request: dict[str, Any]) -> dict[str, Any] | None:
            found = snapshots.open_here(str(request["name"]))
            return None if found is None else found.to_json()

        def open_snapshot(request: dict[str, Any]) -> dict[str, Any]:
            return snapshots.open(str(request["name"]), server=request.get("server")).to_json()

        def check_snapshot_here(request: dict[str, Any]) -> dict[str, Any] | None:
            return {} if snapshots.check_here(str(request["name"])) else None

        def check_snapshot(request: dict[str, Any]) -> dict[str, Any]:
            snapshots.check(str(request["name"]))
            return {}

        def pull_image(request: dict[str, Any]) -> dict[str, Any]:
            trust = Trust.parse(request.get("require"))
            return opener.pull(str(request["name"]), server=str(request["server"]), trust=trust)

        def fill_image(request: dict[str, Any]) -> dict[str, Any]:
            filler.want(ChunkId.parse(str(request["image"])), request.get("bytes_per_s"))
            return {}

        def tidy(request: dict[str, Any]) -> dict[str, Any]:
            keeping.tidy()
            return {}

        def limit_cache(request: dict[str, Any]) -> dict[str, Any]:
            evictor.limit(int(request["max_bytes"]))
            fetcher.bound(evictor)
            return {}

        operations = {
            "open": open_here,
            "open_snapshot": open_snapshot_here,
            "check_snapshot": check_snapshot_here,
            "fill": fill_image,
            "limit_cache": limit_cache,
            "tidy": tidy,
            "status": status,
        }
        waiting = {
            "open": open_image,
            "open_snapshot": open_snapshot,
            "check_snapshot": check_snapshot,
            "pull": pull_image,
        }
        control = ControlServer(config, operations, waiting)

        def mounted() -> None:
            control.start()
            ready()
            try:
                filler.resume()
                if config.cache_max_bytes is not None:
                    evictor.start()
                else:
                    evictor.note()
            except Exception:  # else libfuse drops it without a word
                log.exception("what was being filled is not gone on with, or the cache grows without bound")

        with ExitStack() as ends:
            for end in (evictor.close, fetcher.close, files.close, opener.close, snapshots.close, filler.close):
                ends.callback(end)
            ends.callback(keeping.close)
            ends.callback(mounts.detach_all, config)
            ends.callback(control.close)
            ends.callback(log.info, "unmounted; ending")
            control.bind()  # here, because libfuse swallows what `mounted` raises
            _run_fuse(config, BlockOperations(files, mounted))


def _run_fuse(config: Config, operations: BlockOperations) -> None:
    options: dict[str, Any] = {"allow_other": True} if os.geteuid() == 0 else {}
    mfusepy.FUSE(
        operations,
        str(config.blocks),
        raw_fi=True,
        foreground=True,
        default_permissions=True,
        nosuid=True,
        nodev=True,
        fsname="pvisor",
        subtype="blocks",
        max_threads=_THREADS,
        max_idle_threads=_THREADS,
        **options,
    )


def _lock_pid(config: Config) -> None:
    """Held until the process ends, however it ends. A daemon that is just ending is waited for."""
    path = rundir.pid_path(config)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    rundir.lock(fd, path, wait_s=30.0)
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)


def _log_to(path: Path) -> None:
    handler = RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=1, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    faulthandler.enable()


def main() -> None:
    """Fork off, serve; what goes wrong before the mount is up is one JSON line on descriptor `--ready-fd`."""
    parser = argparse.ArgumentParser(prog="fuse.daemon")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--server")
    parser.add_argument("--cache-max", type=int)
    parser.add_argument("--ready-fd", type=int, required=True)
    arguments = parser.parse_args()
    if os.fork():
        os._exit(0)
    config = Config(
        home=arguments.home, run=arguments.run, server=arguments.server, cache_max_bytes=arguments.cache_max
    )
    KNOWN.learn(config.server or "", os.environ.pop(VARIABLE, ""))
    ready_fd = arguments.ready_fd
    os.umask(0o077)

    def report(**document: Any) -> None:
        nonlocal ready_fd
        if ready_fd >= 0:
            os.write(ready_fd, json.dumps(document).encode() + b"\n")
            os.close(ready_fd)
            ready_fd = -1

    _log_to(rundir.log_path(config))
    try:
        _lock_pid(config)
        serve(config, lambda: report(ok=True))
        # Everything is stored and unmounted; a thread that still waits for a server must not hold up the end.
        logging.shutdown()
        os._exit(0)
    except PvisorError as error:
        log.error("%s", error.message)
        report(ok=False, error=error.message, hint=error.hint)
        sys.exit(1)
    except Exception as error:
        log.exception("node daemon failed")
        report(ok=False, error=f"{type(error).__name__}: {error}", hint=f"see {rundir.log_path(config)}")
        sys.exit(1)
    finally:
        report(ok=False, error="the daemon ended before it was ready", hint=f"see {rundir.log_path(config)}")


if __name__ == "__main__":
    main()
