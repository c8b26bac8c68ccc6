"""User names and numbers against the image's own files."""

from __future__ import annotations

import pytest

from stage.boundary.users import Credentials, lookup
from stage.errors import StageSetupError
from tests.support.busybox import GROUP, PASSWD

PASSWD_BYTES, GROUP_BYTES = PASSWD.encode(), GROUP.encode()


@pytest.mark.parametrize(
    ("user", "identity"),
    [
        ("", Credentials(uid=0, gid=0, groups=(10,), home="/root")),
        ("0", Credentials(uid=0, gid=0, groups=(10,), home="/root")),
        ("root", Credentials(uid=0, gid=0, groups=(10,), home="/root")),
        ("agent", Credentials(uid=1000, gid=1000, groups=(10, 50), home="/home/agent")),
        ("1000", Credentials(uid=1000, gid=1000, groups=(10, 50), home="/home/agent")),
        ("agent:", Credentials(uid=1000, gid=1000, groups=(10, 50), home="/home/agent")),
        ("agent:staff", Credentials(uid=1000, gid=50, home="/home/agent")),
        ("agent:7", Credentials(uid=1000, gid=7, home="/home/agent")),
        (":staff", Credentials(uid=0, gid=50, home="/root")),
        ("77", Credentials(uid=77, gid=0)),
        ("4294967294:4294967294", Credentials(uid=2**32 - 2, gid=2**32 - 2)),
    ],
)
def test_known_users(user: str, identity: Credentials) -> None:
    assert lookup(user, PASSWD_BYTES, GROUP_BYTES) == identity


@pytest.mark.parametrize("user", ["nobody", "agent:nogroup", "4294967295", "99999999999", "-1", "1000:-1", "١"])
def test_unknown_users_are_a_clear_error(user: str) -> None:
    with pytest.raises(StageSetupError) as caught:
        lookup(user, PASSWD_BYTES, GROUP_BYTES)
    assert "not in the image" in caught.value.message and caught.value.hint


def test_no_files_at_all() -> None:
    assert lookup("", b"", b"") == Credentials(uid=0, gid=0)
    assert lookup("5:6", b"", b"") == Credentials(uid=5, gid=6)


def test_junk_lines_are_skipped() -> None:
    passwd = b"\n# c\n+::::::\nbroken\nbad:x:abc:1::/:\n\xff\xfe:x:5:6::/weird:\nlast:x:9:x::"
    assert lookup("5", passwd, b"").home == "/weird"
    assert lookup("last", passwd, b"a\nb:x\nc:x:3:last,other\n") == Credentials(uid=9, gid=0, groups=(3,))


def test_a_name_of_digits_is_found_as_a_name_first() -> None:
    assert lookup("1000", b"other:x:1000:1::/a:\n1000:x:5:5::/b:\n", b"").uid == 5
