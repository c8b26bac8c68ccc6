"""`BlockFiles` as a FUSE file system: a thin adapter between libfuse and what the files are."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import stat
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

try:
    ctypes.CDLL("libfuse3.so.3")
    os.environ.setdefault("FUSE_LIBRARY_PATH", "libfuse3.so.3")
except OSError:  # of another version: found by asking ldconfig and the compiler, which takes longer
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")

import mfusepy

from imaged.config import Config
from imaged.errors import NotFoundError, PvisorError

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


def run(config: Config, operations: BlockOperations) -> None:
    """Mount, and serve until it is unmounted or a signal ends the process."""
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
