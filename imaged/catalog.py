"""Looking images up in a store by what a user types: a name, a short name, or an image id."""

from __future__ import annotations

import re
from dataclasses import dataclass

from imaged.chunkstore.refs import Ref
from imaged.chunkstore.store import ChunkStore
from imaged.errors import NotFoundError
from imaged.ids import ChunkId
from imaged.names import ImageName
from imaged.record import ImageRecord
from imaged.signature import Trust

_BEGINS_ID = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One named image of a store."""

    name: str
    ref: Ref
    record: ImageRecord


def load(store: ChunkStore, name: str, ref: Ref) -> Entry:
    """The entry of a ref, with its record read from the store."""
    return Entry(name, ref, ImageRecord.parse(store.get(ref.record)))


def resolve(store: ChunkStore, text: str) -> tuple[str, Ref]:
    """The full name and ref that a user means by a name, the unique end of a name, an id, or the start of an id.

    The record is not read, so a damaged image can be named too. NotFoundError; a name comes before an id.
    """
    by_id = _BEGINS_ID.fullmatch(text) is not None
    if not ChunkId.is_id(text):
        asked = ImageName.parse(text)
        exact = store.refs.get(str(asked))
        if exact is not None:
            return str(asked), exact
        refs = dict(store.refs.items())
        try:
            full = asked.find(refs)
            return full, refs[full]
        except NotFoundError:
            if not by_id:
                raise
    matches = [(name, ref) for name, ref in store.refs.items() if str(ref.record).startswith(text)]
    if not matches:
        raise NotFoundError(f"no image {text}", hint="`pvisor image ls` lists images, `pvisor pull` fetches one")
    if len({ref.record for _, ref in matches}) > 1:
        names = ", ".join(name for name, _ in matches[:5])
        raise NotFoundError(f"image id {text} is ambiguous: {names}", hint="give more of its digits")
    return matches[0]


def find(store: ChunkStore, text: str) -> Entry:
    """What `resolve` says, with its record. ChunkError, FormatError when the record is damaged."""
    return load(store, *resolve(store, text))


def require_signed(store: ChunkStore, text: str, entry: Entry, trust: Trust) -> None:
    """SignatureError unless the image that `text` means is signed under its name; of an image that was asked for by its
    id, unless it is under any of its names."""
    if trust and not _names(text, entry.name):
        image = entry.ref.record
        named = ((name, ref) for name, ref in store.refs.items() if ref.record == image)
        if any(trust.accepts(name, image, ref.signatures) for name, ref in named):
            return
    trust.check(entry.name, entry.ref.record, entry.ref.signatures)


def _names(text: str, name: str) -> bool:
    """Whether text is this name or the end of it, and not an id."""
    return not ChunkId.is_id(text) and f"/{name}".endswith(f"/{ImageName.parse(text)}")
