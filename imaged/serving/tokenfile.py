"""Changes of a token file: a token more, a token less. The file is replaced whole, with its owner and mode."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from imaged.errors import NotFoundError, PvisorError
from imaged.publish import published
from imaged.serving.tokens import Token, parse_tokens, read_text, read_tokens

_NEW_MODE = 0o600
_ID = re.compile(r"[0-9a-f]{8,64}")
_HINT = "`pvisor token ls --file F` lists them; give 8 digits or more"


def add_token(path: Path, token: Token) -> None:
    """Append it durably; a file that is not there is made, for its owner alone. PvisorError, FormatError."""
    path = path.resolve()
    with _changing(path):
        text = _text(path)
        ended = text if not text or text.endswith("\n") else text + "\n"
        _replace(path, ended + token.line())


def revoke_token(path: Path, token_id: str) -> Token:
    """Take away the one token whose hash begins so. NotFoundError, PvisorError, FormatError."""
    path = path.resolve()
    if _ID.fullmatch(token_id) is None:  # it may be a secret, which no error shows
        raise NotFoundError("that is not the id of a token", hint=_HINT)
    with _changing(path):
        held = read_tokens(path)
        found = [token for token in held.tokens if token.digest.hex().startswith(token_id)]
        if len(found) != 1:
            what = f"{len(found)} tokens begin with {token_id}" if found else f"no token {token_id}"
            raise NotFoundError(f"{what} in {path}", hint=_HINT)
        gone = found[0].digest.hex()
        _replace(path, "".join(line for line in _text(path).splitlines(True) if line.split()[:1] != [gone]))
        return found[0]


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Alone among those who change files of this directory."""
    try:
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise PvisorError(f"token file {path}: {path.parent}: {error.strerror}", hint="make the directory") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    except OSError as error:
        raise PvisorError(
            f"token file {path}: {error.strerror}", hint="see that its directory can be written"
        ) from error
    finally:
        os.close(fd)


def _text(path: Path) -> str:
    """What is there; "" when there is none."""
    return read_text(path) if path.exists() else ""


def _replace(path: Path, text: str) -> None:
    parse_tokens(text, str(path))
    held = path.stat() if path.exists() else None
    with published(path) as file:
        os.fchmod(file.fileno(), _NEW_MODE if held is None else held.st_mode & 0o777)
        if held is not None and (held.st_uid, held.st_gid) != (os.geteuid(), os.getegid()):
            os.fchown(file.fileno(), held.st_uid, held.st_gid)
        file.write(text.encode())
