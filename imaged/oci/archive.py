"""Archives of images: tars read in place, and the docker-archive format (`docker save`).

A plain tar is read where it stands, by offset. A compressed one, or one that can not be seeked, goes to an unlinked
temporary file first.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from imaged.errors import InvalidNameError, LayerError, NotFoundError, SourceError, StoreFullError
from imaged.oci.blob import READ_BYTES, FileSlice
from imaged.oci.decompress import decompress

_LINK_LIMIT = 40


@dataclass(frozen=True, slots=True)
class _Member:
    """Where a file's bytes are in the tar, or the name it is a link to."""

    offset: int
    size_bytes: int
    link: str | None


class TarFiles:
    """The files of a tar by name; links are followed inside it. May be shared by threads."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        self.where = where
        self._fd = file.fileno()
        self._members: dict[str, _Member] = {}
        end = os.fstat(self._fd).st_size
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for info in archive:
                    self._add(info, end)
        except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
            raise SourceError(f"{where} is not a tar archive ({error})", hint="check the path and the file") from error

    def _add(self, info: tarfile.TarInfo, end: int) -> None:
        name = posixpath.normpath(info.name).lstrip("/")
        if info.issym():
            self._members[name] = _Member(
                0, 0, posixpath.normpath(posixpath.join(posixpath.dirname(name), info.linkname))
            )
        elif info.islnk():
            self._members[name] = _Member(0, 0, posixpath.normpath(info.linkname))
        elif info.isreg() and not info.issparse():
            if info.offset_data + info.size > end:
                missing = info.offset_data + info.size - end
                raise SourceError(
                    f"{self.where} is cut off: {missing} bytes of {info.name[:200]!r} are missing",
                    hint="export or download the archive again",
                )
            self._members[name] = _Member(info.offset_data, info.size, None)

    def __contains__(self, name: str) -> bool:
        try:
            self._find(name)
        except FileNotFoundError:
            return False
        return True

    def _find(self, name: str) -> _Member:
        path = posixpath.normpath(name).lstrip("/")
        for _ in range(_LINK_LIMIT):
            member = self._members.get(path)
            if member is None:
                raise FileNotFoundError(name)
            if member.link is None:
                return member
            path = member.link.lstrip("/")
        raise SourceError(f"{self.where}: {name[:200]!r} is a link that leads to itself")

    @contextmanager
    def open(self, name: str) -> Iterator[FileSlice]:
        member = self._find(name)
        yield FileSlice(self._fd, member.offset, member.size_bytes, f"{name[:200]} in {self.where}")


@contextmanager
def open_tar(path: Path) -> Iterator[TarFiles]:
    """The tar at path, plain or compressed; SourceError."""
    try:
        file = path.open("rb")
    except IsADirectoryError:
        raise SourceError(f"{path} is a directory, not an archive", hint="use oci:DIR or dir:DIR") from None
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}", hint="check the path of the archive") from error
    with file:
        if _is_plain(file):
            yield TarFiles(file, str(path))
            return
        with tempfile.TemporaryFile(prefix="pvisor-archive-") as spool:
            _unpack(file, spool, path)
            yield TarFiles(spool, str(path))


def _is_plain(file: BinaryIO) -> bool:
    return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and os.pread(file.fileno(), 8, 257).startswith(b"ustar")


def _unpack(file: BinaryIO, spool: BinaryIO, path: Path) -> None:
    """Decompress an archive into a temporary file."""
    try:
        stream = decompress(file)
        while data := stream.read(READ_BYTES):
            spool.write(data)
        spool.seek(0)
    except LayerError as error:
        raise SourceError(f"{path} {error.reason}", hint="export or download the archive again") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise SourceError(f"{path}: {error.strerror}") from error
        raise StoreFullError(
            f"no space in {tempfile.gettempdir()} to unpack {path}", hint="set TMPDIR, or decompress the archive"
        ) from error


def choose_tag(reference: str, images: Sequence[tuple[str, ...]], where: str) -> int:
    """Which image of a docker archive is meant, of images given by their RepoTags.

    The reference is `REPO:TAG`, either alone, or `@N` for the N-th; without one the archive must hold one image.
    """
    listed = ", ".join(tag for tags in images for tag in tags) or "none"
    if not reference:
        if len(images) == 1:
            return 0
        raise NotFoundError(f"{where} has {len(images)} images", hint=f"add :REPO:TAG or :@N to say which: {listed}")
    if reference.startswith("@"):
        if reference[1:].isdecimal() and int(reference[1:]) < len(images):
            return int(reference[1:])
        raise NotFoundError(f"{where} has no image {reference}; it has {len(images)}, from @0 on")
    wanted = (reference, f"{reference}:latest")
    ways = (
        lambda tag: tag in wanted,
        lambda tag: tag.endswith(tuple("/" + one for one in wanted)),
        lambda tag: tag.rpartition(":")[2] == reference,
    )
    for way in ways:
        matches = [at for at, tags in enumerate(images) if any(map(way, tags))]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise InvalidNameError(f"{reference!r} names {len(matches)} images of {where}", hint=f"it has: {listed}")
    raise NotFoundError(f"{where} has no image {reference!r}", hint=f"it has: {listed}")
