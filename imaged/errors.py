"""Errors of the imaged package.

PvisorError                 every error a user may see: a fact, and a hint that is the next step
+-- FormatError             bytes are not what a format says (expected, found)
+-- InvalidNameError        a name or source text that does not parse
+-- NotFoundError           nothing has this name
+-- NameTakenError          the name stands for something else, which is not to be replaced
+-- StoreError              the local chunk store
|   +-- StoreBusyError      another process holds a lock that excludes this, or no descriptors are left
|   |   +-- BucketUnavailableError  an S3 server does not answer, after retries
|   +-- StoreFullError      no space, or quota reached; nothing half-written stays
|   +-- StoreReadOnlyError  the directory can not be written
|   +-- NameMovedError      another server of the bucket changed the name meanwhile
|   +-- BucketError         an S3 server refuses, or holds nonsense
|       +-- ObjectMissingError  it has no object of this key
+-- ChunkError              one chunk (carries its id)
|   +-- ChunkMissingError   no store that was asked has it
|   +-- ChunkCorruptError   bytes do not match the id
|       +-- ChunkUnreadableError  the disk does not give them now
+-- SignatureError          an image without a signature that was required, or a key file that is none
+-- UpstreamError           a chunk server that fails, after retries
+-- SourceError             an OCI source
|   +-- RegistryError       the registry answers an error or nonsense, or does not answer
|   |   +-- RegistryAuthError   401/403 after every way to authenticate
|   +-- DigestMismatchError     digest or size of a blob differs from its descriptor
|   +-- UnsupportedImageError   media type, schema or platform that can not be converted
+-- LayerError              a layer that can not be applied (carries layer and entry)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from imaged.ids import ChunkId


class PvisorError(Exception):
    """A failure told to the user: `message` is the fact with its numbers, `hint` the next step (may be empty)."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class FormatError(PvisorError):
    """Bytes or text that do not follow their format."""

    def __init__(self, what: str, *, expected: str, found: str, hint: str = "") -> None:
        super().__init__(f"{what}: expected {expected}, found {found}", hint=hint)
        self.what, self.expected, self.found = what, expected, found


class InvalidNameError(PvisorError):
    """A name, source or address that does not parse: wrong usage, as the exit code says."""

    exit_code = 2


class NotFoundError(PvisorError):
    """Nothing has this name."""


class NameTakenError(PvisorError):
    """The name stands for something else, which is not to be replaced."""


class StoreError(PvisorError):
    """The local chunk store can not do what was asked."""


class StoreBusyError(StoreError):
    """Another process holds a lock that excludes this operation, or there are no descriptors or memory for it now."""


class BucketUnavailableError(StoreBusyError):
    """The S3 server of a store does not answer, after retries: it may later."""


class NameMovedError(StoreError):
    """Another server of the bucket changed a name meanwhile; the change that this stopped can be tried again."""


class BucketError(StoreError):
    """The S3 server of a store refuses what was asked, or holds what no store would write."""


class ObjectMissingError(BucketError):
    """The bucket has no object of this key."""


class StoreFullError(StoreError):
    """No space is left for the store; what was committed before is sound."""


class StoreReadOnlyError(StoreError):
    """The store directory can not be written."""


class ChunkError(PvisorError):
    """Something about one chunk."""

    def __init__(self, chunk: ChunkId, message: str, *, hint: str = "") -> None:
        super().__init__(f"chunk {chunk}: {message}", hint=hint)
        self.chunk = chunk


class ChunkMissingError(ChunkError):
    """No store that was asked has this chunk."""

    def __init__(self, chunk: ChunkId, message: str = "not in the store", *, hint: str = "") -> None:
        super().__init__(chunk, message, hint=hint)


class ChunkCorruptError(ChunkError):
    """Bytes that do not match the id they came under."""


class ChunkUnreadableError(ChunkCorruptError):
    """Bytes that the disk does not give now, of a pack that is gone or behind an I/O error: they may come back."""


class SignatureError(PvisorError):
    """An image has no signature that was required, or a file is no key to sign or check one with."""


class UpstreamError(PvisorError):
    """A chunk server failed, after retries."""


class SourceError(PvisorError):
    """An OCI source can not be read."""


class RegistryError(SourceError):
    """A registry that answers an error or nonsense, or does not answer."""


class RegistryAuthError(RegistryError):
    """A registry refused every credential that was at hand."""


class DigestMismatchError(SourceError):
    """A blob whose digest or size differs from its descriptor."""


class UnsupportedImageError(SourceError):
    """A media type, schema or platform that can not be converted."""


class LayerError(PvisorError):
    """A layer that can not be read or applied."""

    def __init__(self, message: str, *, layer: str = "", entry: bytes | None = None, hint: str = "") -> None:
        where = f"layer {layer}: " if layer else ""
        name = f"entry {entry.decode(errors='backslashreplace')[:200]!r}: " if entry is not None else ""
        super().__init__(where + name + message, hint=hint)
        self.reason, self.layer, self.entry = message, layer, entry
