"""Bearer tokens of a chunk server: a file with a line for each, which has the hash of its secret and what it may do.

    # sha256 of the secret                                            scope  namespace  created     label
    0b1c...64 hex digits...e5                                         write  team-a     2026-01-31  the build hosts

A secret is 256 random bits, so that one plain hash of it can not be turned round: who reads the file can not use it.
Who can write to it is an administrator of the server. docs/auth.md is for users.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from imaged.errors import FormatError, InvalidNameError, PvisorError
from imaged.regularfile import open_regular
from imaged.serving.watchedfiles import WatchedFiles, hint_of

log = logging.getLogger(__name__)
_SECRET_PREFIX = "pvisor_"
"""So that whoever finds one in a log or a repository, or a program that looks for them, knows what it is."""
_SECRET_BYTES = 32
_FILE_LIMIT_BYTES = 8 << 20
_LOOK_S = 1.0
_ID_DIGITS = 12
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_CREATED = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_LABEL = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{0,200}")
_NO_NAMESPACE = "-"
_HINT = "`pvisor token new` writes such lines; `#` begins a comment"


class Scope(enum.IntEnum):
    """What a token may do; each may do what those before it may."""

    READ = 1
    WRITE = 2
    ADMIN = 3

    @classmethod
    def parse(cls, text: str) -> Self:
        try:
            return cls[text.upper()]
        except KeyError:
            raise FormatError("scope", expected=", ".join(map(str, cls)), found="another word") from None

    def __str__(self) -> str:
        return self.name.lower()


def parse_namespace(text: str) -> str:
    """The text, when it can be a namespace. InvalidNameError.

    No dots: `NS.` begins the names of its snapshots, `NS/` those of its images, and no registry's host looks like it.
    """
    if not _is_namespace(text):
        hint = "up to 63 letters, digits, dashes and underscores, not localhost; the first is a letter or a digit"
        raise InvalidNameError(f"{text[:80]!r} is not a namespace", hint=hint)
    return text


def _is_namespace(text: str) -> bool:
    return _NAMESPACE.fullmatch(text) is not None and text != "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token; its secret is not known here, only the SHA-256 of it."""

    digest: bytes
    scope: Scope
    namespace: str | None
    created: str = ""
    label: str = ""

    @property
    def id(self) -> str:
        """What to call it, also in logs: the start of the hash, of which nothing leads back to the secret."""
        return self.digest.hex()[:_ID_DIGITS]

    def line(self) -> str:
        """As in the file, with its line end."""
        fields = [self.digest.hex(), str(self.scope), self.namespace or _NO_NAMESPACE, self.created, self.label]
        return " ".join(fields).rstrip() + "\n"

    @classmethod
    def parse(cls, line: str) -> Self:
        """From a line of the file. FormatError, which never has the text that was found: it may be a secret."""
        fields = line.split(maxsplit=4)
        if len(fields) < 4:
            raise FormatError("line", expected="hash, scope, namespace or -, date", found=f"{len(fields)} fields")
        digest, scope, namespace, created = fields[:4]
        if _DIGEST.fullmatch(digest) is None:
            raise FormatError("hash", expected="64 lower-case hex digits", found=f"{len(digest)} characters")
        if namespace != _NO_NAMESPACE and not _is_namespace(namespace):
            raise FormatError("namespace", expected="letters, digits, - and _", found=f"{len(namespace)} characters")
        if _CREATED.fullmatch(created) is None:
            raise FormatError("date", expected="YYYY-MM-DD", found=f"{len(created)} characters")
        return cls(
            digest=bytes.fromhex(digest),
            scope=Scope.parse(scope),
            namespace=None if namespace == _NO_NAMESPACE else namespace,
            created=created,
            label=fields[4].rstrip() if len(fields) > 4 else "",
        )

    @classmethod
    def new(cls, scope: Scope, *, namespace: str | None, label: str = "") -> tuple[str, Self]:
        """A secret, and the token that it is. InvalidNameError for a label that is not one line of text."""
        if _LABEL.fullmatch(label) is None:
            raise InvalidNameError("the label is not a line of text", hint="up to 200 characters, none of control")
        secret = _SECRET_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        created = time.strftime("%Y-%m-%d", time.gmtime())
        space = None if namespace is None else parse_namespace(namespace)
        return secret, cls(digest=digest_of(secret), scope=scope, namespace=space, created=created, label=label.strip())


def digest_of(secret: str) -> bytes:
    """What a file has of a secret. Any text has one."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


class TokenSet:
    """The tokens of one state of a file, found by hash. Immutable; threads may share it.

    The table is keyed with a hash under a key of this process alone, and what is found is compared in constant time:
    how long an answer takes says nothing about any part of any token's hash.
    """

    def __init__(self, tokens: Sequence[Token] = ()) -> None:
        self.tokens = tuple(tokens)
        self._key = secrets.token_bytes(32)
        self._by_key = {self._blind(token.digest): token for token in tokens}

    def find(self, digest: bytes) -> Token | None:
        token = self._by_key.get(self._blind(digest))
        return token if token is not None and hmac.compare_digest(token.digest, digest) else None

    def _blind(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._key, digest_size=16).digest()


def parse_tokens(text: str, name: str) -> TokenSet:
    """The tokens of a file called `name`. FormatError says which line and why, and nothing of what is in it."""
    tokens: list[Token] = []
    lines: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            token = Token.parse(line)
        except FormatError as error:
            what = f"token file {name}, line {number}, {error.what}"
            raise FormatError(what, expected=error.expected, found=error.found, hint=_HINT) from None
        if token.digest in lines:
            what = f"token file {name}, line {number}"
            raise FormatError(what, expected="another token", found=f"that of line {lines[token.digest]}", hint=_HINT)
        lines[token.digest] = number
        tokens.append(token)
    return TokenSet(tokens)


class TokenFile:
    """The tokens of a file as it is now, within a second. Threads may share it.

    A file that is changed to something that is no token file changes nothing but the log, so that a slip of an editor
    locks nobody out. A token is revoked when its line is gone.
    """

    def __init__(self, path: Path) -> None:
        """PvisorError, FormatError when it can not be read now."""
        self.path = path
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._set = TokenSet()
        self._files = WatchedFiles("the tokens stay as they were", (path,), self._load)
        if not self._set.tokens:
            log.warning("token file %s has no tokens: every request is refused", path)

    def find(self, secret: str) -> Token | None:
        """The token that this is the secret of."""
        return self.by_digest(digest_of(secret))

    def by_digest(self, digest: bytes) -> Token | None:
        """The token whose secret has this SHA-256."""
        if time.monotonic() - self._looked_s > _LOOK_S:
            self.reload()
        return self._set.find(digest)

    def reload(self) -> None:
        """Look whether the file has changed; one thread does, the others go on with what is known."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._looked_s = time.monotonic()
            self._files.look()
        finally:
            self._lock.release()

    def _load(self) -> str:
        self._set = read_tokens(self.path)
        return f"token file {self.path} was read again: {len(self._set.tokens)} tokens"


def read_tokens(path: Path) -> TokenSet:
    """PvisorError, FormatError."""
    return parse_tokens(read_text(path), str(path))


def read_text(path: Path) -> str:
    """What is in a token file, once nobody else can write to it. PvisorError, FormatError."""
    try:
        with open_regular(path) as file:
            _refuse_writable(path, os.fstat(file.fileno()))
            raw = file.read(_FILE_LIMIT_BYTES + 1)
    except OSError as error:
        hint = hint_of(error, "`pvisor token new --file F` makes one")
        raise PvisorError(f"token file {path}: {error.strerror}", hint=hint) from error
    if len(raw) > _FILE_LIMIT_BYTES:
        raise FormatError(f"token file {path}", expected=f"at most {_FILE_LIMIT_BYTES} bytes", found="more")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        what = f"token file {path}, line {line}"
        raise FormatError(what, expected="UTF-8 text", found="other bytes", hint=_HINT) from None


def _refuse_writable(path: Path, status: os.stat_result) -> None:
    """Whoever can write to the file can give himself any right."""
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PvisorError(
            f"token file {path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o})",
            hint=f"chmod go-w {path}",
        )
