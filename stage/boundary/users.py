"""Who a process runs as, from the text of the stage's own /etc/passwd and /etc/group.

The host's name services are never asked: the libraries they load would come from the image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from stage.errors import StageSetupError

_ID_LIMIT = 2**32 - 1  # (uid_t) -1 means "leave as it is"


class Credentials(NamedTuple):
    """`home` is what HOME becomes when the environment has none."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    home: str = "/"


def lookup(user: str, passwd: bytes, group: bytes) -> Credentials:
    """`user` is `""` (uid 0), `name` or `uid`, either with `:group` or `:gid`.

    As container engines do: a number without an entry is taken as it is, with gid 0; a name without an entry is an
    error; supplementary groups are those that list the user, and none when a group is given.
    """
    name, has_group, group_name = user.partition(":")
    wanted = name or "0"
    entry = next((row for row in _rows(passwd, 7, 2) if row[0] == wanted), None)
    if entry is None and _number(wanted) is not None:
        entry = next((row for row in _rows(passwd, 7, 2) if _number(row[2]) == _number(wanted)), None)
    if entry is not None:
        uid, gid, home, login = int(entry[2]), _number(entry[3]) or 0, entry[5] or "/", entry[0]
    else:
        number = _number(wanted)
        if number is None:
            raise StageSetupError(
                f"user {wanted!r} is not in the image's /etc/passwd", hint="give -u a name from there, or a number"
            )
        uid, gid, home, login = number, 0, "/", None
    if has_group and group_name:
        return Credentials(uid=uid, gid=_group(group_name, group), home=home)
    groups = sorted({int(row[2]) for row in _rows(group, 4, 2) if login is not None and login in row[3].split(",")})
    return Credentials(uid=uid, gid=gid, groups=tuple(groups), home=home)


def _group(name: str, group: bytes) -> int:
    rows = list(_rows(group, 4, 2))
    for row in rows:
        if row[0] == name:
            return int(row[2])
    number = _number(name)
    if number is None:
        raise StageSetupError(
            f"group {name!r} is not in the image's /etc/group", hint="give -u USER:GROUP a name from there, or a number"
        )
    return number


def _rows(text: bytes, fields: int, id_field: int) -> Iterator[list[str]]:
    """Well-formed lines, padded to `fields`; comments, NIS lines and those without a usable id are skipped."""
    for line in text.splitlines():
        row = line.decode("utf-8", "surrogateescape").strip().split(":")
        if len(row) > id_field and not row[0].startswith(("#", "+", "-")) and _number(row[id_field]) is not None:
            yield row + [""] * (fields - len(row))


def _number(text: str) -> int | None:
    if not (text.isascii() and text.isdigit()) or len(text) > 10:
        return None
    value = int(text)
    return value if value < _ID_LIMIT else None
