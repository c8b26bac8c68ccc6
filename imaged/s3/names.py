"""Names in a bucket: each is a row of immutable versions, the greatest of which counts; docs/formats/refs-on-s3.md.

    refs/KIND/QUOTED/NNNNNNNNNNNN-RRRR.json     version N: what the name stands for
    refs/KIND/QUOTED/NNNNNNNNNNNN-RRRR.gone     version N: the name was removed
    refs/KIND/QUOTED/NNNNNNNNNNNN-RRRR.claim    somebody is about to write version N

Where the server has conditional PUT, version N is written as NNNNNNNNNNNN.json, and only one can. Elsewhere a claim
comes first: who finds itself alone, with no version as new and no other claim, may write; all others withdraw and begin
again from what they then find. So no version is built on one that it has not seen.

    refs.changed    other bytes after each change of a name, written once that is done

So that servers need not list thousands of names every few seconds to hear that none has moved.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from imaged.errors import BucketUnavailableError, FormatError, ObjectMissingError, StoreError
from imaged.s3.objects import Entry, Made, Objects

REFS = "refs/"
CHANGED = "refs.changed"
CLAIM_S = 60.0
"""A claim this old was left by somebody who was killed."""
_DIGITS = 12
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
_GIVE_UP_S = 120.0
_CONSISTENT_S, _EVENTUAL_S = 2.0, 30.0
log = logging.getLogger(__name__)
Document = dict[str, Any]


class Version(NamedTuple):
    """One key below a name, without the name; they are ordered as they count."""

    number: int
    tail: str
    kind: str

    @property
    def key(self) -> str:
        return f"{self.number:0{_DIGITS}d}{self.tail}.{self.kind}"


class Held(NamedTuple):
    """What a name stands for: `document` is None when it was removed, or never was. `version` ends its key."""

    version: str
    document: Document | None


class Keep(Exception):  # noqa: N818
    """Raised by who decides about a change: leave the name as it is."""


def directory(kind: str, name: str) -> str:
    return f"{REFS}{kind}/{quote(name, safe='')}/"


def parse_key(key: str) -> tuple[str, str, Version] | None:
    """(kind of name, name, version); None for a key that is none of a name."""
    parts = key.split("/")
    if len(parts) != 4 or f"{parts[0]}/" != REFS:
        return None
    stem, dot, kind = parts[3].rpartition(".")
    number, tail = stem[:_DIGITS], stem[_DIGITS:]
    if not dot or len(number) != _DIGITS or not (number.isascii() and number.isdigit()):
        return None
    if kind not in ("json", "gone", "claim") or (tail and not tail.startswith("-")):
        return None
    return parts[1], unquote(parts[2]), Version(int(number), tail, kind)


def current(versions: Iterable[Version]) -> Version | None:
    """The one that counts."""
    return max((version for version in versions if version.kind != "claim"), default=None)


class Names:
    """The names of one store in its bucket. Threads share it."""

    def __init__(
        self,
        objects: Objects,
        *,
        settle_s: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`settle_s` is for how long a listing may lack what was written; None is "as the server seems to be"."""
        self._objects, self._settle_s, self._sleep, self._clock = objects, settle_s, sleep, clock
        self._listed: str | None = None
        self._settled_s = 0.0
        self._random = random.Random()
        self.conditional: bool | None = None
        """Whether the server has conditional PUT; None until it was tried."""

    def settle_s(self) -> float:
        """How long a listing may lack what was written: what has conditional PUT is consistent, as a rule."""
        if self._settle_s is None and self.conditional is None:
            key = f"probe/{secrets.token_hex(8)}"
            self.conditional = self._objects.put_new(key, key.encode()) is not Made.UNSUPPORTED
            if self.conditional:
                self._objects.delete(key)
        return self._lag_s()

    def _lag_s(self) -> float:
        if self._settle_s is not None:
            return self._settle_s
        return _CONSISTENT_S if self.conditional else _EVENTUAL_S

    @contextmanager
    def all(self, *, whole: bool) -> Iterator[list[Entry] | None]:
        """Every version of every name; None when no name has changed since a block like this was last left without an
        error, unless `whole`. For one thread at a time.

        The change of a server that was killed before it told of it is noticed by who asks for the whole.
        """
        told = self._told()  # before the listing: what is told of later is listed again
        now_s = self._clock()
        if told is not None and told == self._listed and now_s >= self._settled_s and not whole:
            yield None
            return
        yield self._objects.list(REFS)
        if told != self._listed:
            self._settled_s = now_s + self._lag_s()
        self._listed = told

    def tell(self) -> None:
        """Of a change that is done. That stays, whether or not others hear of it at once."""
        try:
            self._objects.put(CHANGED, secrets.token_hex(8).encode())
        except StoreError as error:
            log.warning("others hear late that a name has changed: %s", error.message)

    def _told(self) -> str | None:
        try:
            return self._objects.get(CHANGED).decode(errors="replace")
        except ObjectMissingError:
            return None

    def change(self, kind: str, name: str, decide: Callable[[Document | None], Document | None]) -> Held:
        """Write the next version, which `decide` makes from the current one; None removes the name. What then counts.

        `decide` may be called again when others change the name meanwhile; what it raises ends the change, `Keep`
        without an error. BucketUnavailableError when others never let us, or the server does not answer.
        """
        place = directory(kind, name)
        wait_s, deadline = _FIRST_WAIT_S, time.monotonic() + _GIVE_UP_S
        while True:
            entries = self._objects.list(place)
            try:
                held = self.read(place, current(_versions(entries)))
                document = decide(held.document)
            except Keep:
                return held
            except ObjectMissingError:  # the listing is older than a collection
                self._pause(name, wait_s, deadline)
                continue
            if document is None and held.document is None:
                return held
            number = max([version.number for version in _versions(entries) if version.kind != "claim"], default=0) + 1
            written = self._write(place, number, document, entries)
            if written is not None:
                return Held(written.key, document)
            self._pause(name, wait_s, deadline)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _pause(self, name: str, wait_s: float, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise BucketUnavailableError(f"name {name}: others have kept changing it", hint="try again")
        self._sleep(wait_s * self._random.uniform(0.3, 1.0))

    def read(self, place: str, version: Version | None) -> Held:
        """What a version says. ObjectMissingError when it was superseded, and removed, since it was listed."""
        if version is None:
            return Held("", None)
        if version.kind == "gone":
            return Held(version.key, None)
        return Held(version.key, parse_document(self._objects.get(place + version.key), place))

    def _write(self, place: str, number: int, document: Document | None, before: list[Entry]) -> Version | None:
        """None when somebody else was at it."""
        kind = "gone" if document is None else "json"
        body = _body(document)
        if self.conditional is not False:
            # Removal has the key that a value would have: there is one version of each number.
            version = Version(number, "", "json")
            made = self._objects.put_new(place + version.key, body)
            self.conditional = made is not Made.UNSUPPORTED
            if made is not Made.UNSUPPORTED:
                return version if made is Made.YES else None
        mine = Version(number, f"-{secrets.token_hex(8)}", kind)
        claim = mine._replace(kind="claim")
        begun_s = time.monotonic()
        now_s = self._objects.put(place + claim.key, body)
        try:
            if not self._may_write(place, claim, now_s) or time.monotonic() - begun_s > CLAIM_S / 3:
                return None
            self._objects.put(place + mine.key, body)
            return self._settled(place, mine)
        finally:
            self._withdraw(place + claim.key)

    def _may_write(self, place: str, claim: Version, now_s: float) -> bool:
        for entry in self._objects.list(place):
            found = parse_key(entry.key)
            if found is None or found[2] == claim:
                continue
            other = found[2]
            if other.kind != "claim" and other.number >= claim.number:
                return False
            if other.kind == "claim" and entry.modified_s > now_s - CLAIM_S:
                return False
        return True

    def _settled(self, place: str, mine: Version) -> Version | None:
        """Look again: where listings lag two may have written. The lesser of both knows, and begins again."""
        rivals = [version for version in _versions(self._objects.list(place)) if version.kind != "claim"]
        if any(other.number == mine.number and other > mine for other in rivals):
            return None
        return mine

    def _withdraw(self, key: str) -> None:
        try:
            self._objects.delete(key)
        except BucketUnavailableError as error:
            log.warning("a claim stays for %d s: %s", CLAIM_S, error.message)


def parse_document(raw: bytes, what: str) -> Document | None:
    """What a version says; None for a removal. FormatError."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(what, expected="JSON", found=str(error)[:80]) from error
    if not isinstance(document, dict):
        raise FormatError(what, expected="a JSON object", found=type(document).__name__)
    value = document.get("value")
    if value is not None and not isinstance(value, dict):
        raise FormatError(what, expected="a JSON object as value", found=type(value).__name__)
    return value


def _body(document: Document | None) -> bytes:
    """With a nonce: no two writers write the same bytes, so that each recognizes its own."""
    return json.dumps({"value": document, "nonce": secrets.token_hex(8)}, sort_keys=True).encode()


def _versions(entries: Iterable[Entry]) -> list[Version]:
    return [found[2] for entry in entries if (found := parse_key(entry.key)) is not None]
