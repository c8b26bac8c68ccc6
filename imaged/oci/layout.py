"""OCI image layouts (image-spec image-layout.md), whether in a directory or in a tar."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from imaged.document import parse_json
from imaged.errors import DigestMismatchError, NotFoundError, SourceError
from imaged.oci.blob import ByteStream, FileSlice, read_document
from imaged.oci.descriptor import DOCUMENT_LIMIT_BYTES, Descriptor, take
from imaged.oci.manifest import OCI_INDEX, Document, Index, parse

REF_NAME = "org.opencontainers.image.ref.name"


class Files(Protocol):
    """Named files to read: a directory, or the members of a tar."""

    def open(self, name: str) -> AbstractContextManager[FileSlice]:
        """FileNotFoundError when there is none of this name; other OSErrors are SourceErrors."""
        ...


class DirectoryFiles:
    """The files of a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        hint = "oci: takes the directory of an OCI layout; check the path"
        try:
            if not stat.S_ISDIR(path.stat().st_mode):
                raise SourceError(f"{path} is not a directory", hint=hint)
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}", hint=hint) from error

    @contextmanager
    def open(self, name: str) -> Iterator[FileSlice]:
        try:
            fd = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(name) from error
        except OSError as error:
            raise SourceError(f"{self.path / name}: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise SourceError(f"{self.path / name} is not a regular file")
            yield FileSlice(fd, 0, status.st_size, str(self.path / name))
        finally:
            os.close(fd)


def read_file(files: Files, name: str, where: str) -> bytes:
    """A small file whole; FileNotFoundError, and SourceError above DOCUMENT_LIMIT_BYTES."""
    with files.open(name) as stream:
        if stream.size_bytes > DOCUMENT_LIMIT_BYTES:
            raise SourceError(f"{name} in {where} has {stream.size_bytes} bytes; {DOCUMENT_LIMIT_BYTES} are allowed")
        pieces = []
        while piece := stream.read(DOCUMENT_LIMIT_BYTES):
            pieces.append(piece)
        return b"".join(pieces)


class Layout:
    """The images of a layout. May be shared by threads."""

    def __init__(self, files: Files, where: str, reference: str) -> None:
        self.where = where
        self._files, self._reference = files, reference
        try:
            version = take(
                parse_json(read_file(files, "oci-layout", where), "oci-layout"), "imageLayoutVersion", str, ""
            )
            index = read_file(files, "index.json", where)
        except FileNotFoundError as error:
            raise SourceError(
                f"{where} is not an OCI layout: it has no {error.args[0]}",
                hint="`skopeo copy docker://... oci:DIR:TAG` makes one; docker save makes docker-archive: files",
            ) from None
        if not version.startswith("1."):
            raise SourceError(f"{where} is an OCI layout of version {version[:20]!r}; only version 1 can be read")
        self._index = Document(index, OCI_INDEX, "")

    def root(self) -> Document:
        """The manifest or index that the reference names, or the only one there is."""
        entries, chosen = self._choose()
        tags = sorted({str(one.annotations[REF_NAME]) for one in entries if REF_NAME in one.annotations})
        if not self._reference and not tags and len(entries) > 1:
            return self._index  # the layout itself is the multi-platform index
        if len({one.digest for one in chosen}) == 1:
            return self.manifest(chosen[0])
        listed = ", ".join(tags[:20]) or "none"
        if self._reference and not chosen:
            raise NotFoundError(f"{self.where} has no image {self._reference!r}", hint=f"its tags: {listed}")
        if self._reference:
            raise SourceError(f"{self.where} has {len(chosen)} images {self._reference!r}", hint="name it by digest")
        raise NotFoundError(f"{self.where} has {len(entries)} images", hint=f"add :TAG to say which; tags: {listed}")

    @property
    def tag(self) -> str:
        """What the layout calls the image that `root` gives; "" when it has no or several names for it."""
        _, chosen = self._choose()
        names = {str(one.annotations.get(REF_NAME, "")) for one in chosen}
        names = names & {self._reference} or names
        return names.pop() if len(names) == 1 else ""

    def _choose(self) -> tuple[tuple[Descriptor, ...], list[Descriptor]]:
        """All entries of the index, and those that the reference means."""
        found = parse(self._index, f"index.json of {self.where}")
        entries = found.manifests if isinstance(found, Index) else ()
        if not self._reference:
            return entries, list(entries)
        return entries, [one for one in entries if self._reference in (one.annotations.get(REF_NAME), str(one.digest))]

    def manifest(self, descriptor: Descriptor) -> Document:
        """A manifest or index by its descriptor, verified."""
        what = f"manifest {descriptor.digest} of {self.where}"
        with self.blob(descriptor) as stream:
            return Document(read_document(stream, descriptor, what), descriptor.media_type, str(descriptor.digest))

    @contextmanager
    def blob(self, descriptor: Descriptor) -> Iterator[ByteStream]:
        """A blob's bytes, not verified but for its size."""
        name = f"blobs/{descriptor.digest.algorithm}/{descriptor.digest.hex}"
        try:
            opened = self._files.open(name)
            with opened as stream:
                if stream.size_bytes != descriptor.size_bytes:
                    raise DigestMismatchError(
                        f"blob {descriptor.digest} of {self.where} has {stream.size_bytes} bytes, "
                        f"not the {descriptor.size_bytes} its descriptor says",
                        hint="the source is damaged or was changed: fetch or push the image again",
                    )
                yield stream
        except FileNotFoundError as error:
            if error.args != (name,):
                raise
            raise SourceError(
                f"{self.where} has no blob {descriptor.digest}", hint="the layout is incomplete: copy the image again"
            ) from None
