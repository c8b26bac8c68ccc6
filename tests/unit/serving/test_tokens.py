"""The token file: what it takes, what it refuses without showing it, and that a server follows its changes."""

from __future__ import annotations

import concurrent.futures
import errno
import os
import stat
from pathlib import Path
from typing import NoReturn

import pytest

from imaged.errors import FormatError, InvalidNameError, NotFoundError, PvisorError
from imaged.serving import tokens as module
from imaged.serving.tokenfile import add_token, revoke_token
from imaged.serving.tokens import Scope, Token, TokenFile, digest_of, parse_tokens, read_tokens

CANARY = "pvisor_canary-canary-canary-canary-canary-canary-1"
LINE = f"{'ab' * 32} read - 2026-01-31"


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is looked at for every question."""
    monkeypatch.setattr(module, "_LOOK_S", -1.0)


def test_a_secret_finds_its_token_and_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    made = [Token.new(scope, namespace=space, label="a b  c") for scope in Scope for space in (None, "team-a")]
    for _, token in made:
        add_token(path, token)
    file = TokenFile(path)
    for secret, token in made:
        assert file.find(secret) == token
        assert file.by_digest(token.digest) == token
        assert secret not in path.read_text()
        assert len(secret) > 43
        for other in (secret[:-1], secret + "x", secret.upper(), "", token.digest.hex(), "\udcff"):
            assert file.find(other) is None
    assert file.by_digest(b"") is None
    assert len({secret for secret, _ in made}) == len(made)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (CANARY, "1 fields"),
        (f"{CANARY} read - 2026-01-31", "64 lower-case hex digits"),
        (f"{'AB' * 32} read - 2026-01-31", "64 lower-case hex digits"),
        (f"{'ab' * 32} {CANARY} - 2026-01-31", "read, write, admin"),
        (f"{'ab' * 32} read {CANARY}.x 2026-01-31", "letters, digits"),
        (f"{'ab' * 32} read - {CANARY}", "YYYY-MM-DD"),
        (LINE, "another token"),
    ],
)
def test_a_bad_line_is_named_and_never_shown(line: str, says: str) -> None:
    with pytest.raises(FormatError, match="line 4") as caught:
        parse_tokens(f"# comment\n\n{LINE} label {CANARY}\n{line}\n", "F")
    assert says in str(caught.value)
    assert CANARY not in f"{caught.value}{caught.value.hint}{caught.value!r}"


def test_what_is_no_text_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(LINE.encode() + b"\n\xff\xfe\n")
    with pytest.raises(FormatError, match="line 2"):
        read_tokens(path)


def test_changes_are_followed_and_broken_ones_keep_the_old(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"
    first, one = Token.new(Scope.READ, namespace=None)
    second, two = Token.new(Scope.WRITE, namespace="a")
    add_token(path, one)
    file = TokenFile(path)
    assert file.find(second) is None
    add_token(path, two)
    assert file.find(second) == two
    path.write_text(f"{CANARY} nonsense\n")
    caplog.clear()
    assert file.find(first) == one
    assert file.find(second) == two
    assert [record.levelname for record in caplog.records] == ["ERROR"]  # said once
    path.unlink()
    assert file.find(first) == one
    add_token(path, two)
    assert file.find(first) is None
    assert file.find(second) == two
    path.chmod(0o666)
    os.utime(path, ns=(1, 1))
    assert file.find(second) == two
    assert "can be written by others" in caplog.text
    assert CANARY not in caplog.text
    path.chmod(0o600)
    revoke_token(path, two.id)
    assert file.find(second) is None


def test_a_server_does_not_start_with_a_bad_file(tmp_path: Path) -> None:
    with pytest.raises(PvisorError, match="No such file"):
        TokenFile(tmp_path / "none")
    for other in (Path("/dev/null"), tmp_path, pipe(tmp_path / "pipe")):
        with pytest.raises(PvisorError, match="not a regular file") as caught:
            TokenFile(other)
        assert "pvisor token new" in caught.value.hint
    path = tmp_path / "tokens"
    path.write_text(LINE)
    path.chmod(0o620)
    with pytest.raises(PvisorError, match="0620"):
        TokenFile(path)


def pipe(path: Path) -> Path:
    """A FIFO that nobody writes to."""
    os.mkfifo(path)
    return path


def test_a_pipe_in_place_of_the_file_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"
    secret, token = Token.new(Scope.READ, namespace=None)
    add_token(path, token)
    file = TokenFile(path)
    path.rename(tmp_path / "aside")
    pipe(path)
    assert file.find(secret) == token
    assert "not a regular file" in caplog.text
    with pytest.raises(PvisorError, match="not a regular file"):
        add_token(path, token)
    with pytest.raises(PvisorError, match="not a regular file"):
        revoke_token(path, token.id)


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "chmod 0640"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "pvisor token new"),
        (OSError(errno.EMFILE, "Too many open files"), ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_hint_is_of_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, hint: str
) -> None:
    def refuse(path: Path) -> NoReturn:
        raise error

    monkeypatch.setattr(module, "open_regular", refuse)
    with pytest.raises(PvisorError, match=error.strerror) as caught:
        read_tokens(tmp_path / "tokens")
    assert hint in caught.value.hint
    assert bool(hint) == bool(caught.value.hint)


def test_a_file_keeps_what_is_in_it_and_its_mode(tmp_path: Path) -> None:
    path, link = tmp_path / "tokens", tmp_path / "link"
    link.symlink_to(path)
    _, one = Token.new(Scope.READ, namespace=None)
    add_token(link, one)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("# ours\n" + one.line().rstrip())  # by hand, without a line end
    path.chmod(0o640)
    _, two = Token.new(Scope.ADMIN, namespace="b", label="x")
    add_token(path, two)
    assert path.read_text() == f"# ours\n{one.line()}{two.line()}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert revoke_token(path, one.id) == one
    assert path.read_text() == f"# ours\n{two.line()}"
    for wrong in (one.id, two.id[:7], CANARY, ""):
        with pytest.raises(NotFoundError) as caught:
            revoke_token(path, wrong)
        assert CANARY not in str(caught.value)
    broken = path.read_text() + "x\n"
    path.write_text(broken)
    with pytest.raises(FormatError, match="line 3"):
        add_token(path, one)
    assert path.read_text() == broken


def test_tokens_made_at_once_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    made = [Token.new(Scope.READ, namespace=None)[1] for _ in range(24)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda token: add_token(path, token), made))
    assert {token.digest for token in read_tokens(path).tokens} == {token.digest for token in made}


@pytest.mark.parametrize("namespace", ["", "a.b", "a/b", "-a", "a b", "ä", "a\n", "x" * 64])
def test_what_is_no_namespace_is_refused(namespace: str) -> None:
    with pytest.raises(InvalidNameError):
        Token.new(Scope.READ, namespace=namespace)


@pytest.mark.parametrize("label", ["a\nb", "\x1b[0m", "x" * 201, "\ud800", "a\u2028b"])
def test_a_label_is_one_line_of_text(label: str) -> None:
    with pytest.raises(InvalidNameError):
        Token.new(Scope.READ, namespace=None, label=label)


def test_lines_come_back_as_they_were() -> None:
    for label in ("", "two  words", "# no comment", "ünï"):
        _, token = Token.new(Scope.WRITE, namespace="Team_1", label=label)
        assert Token.parse(token.line()) == token
    assert digest_of("abc").hex().startswith("ba7816bf")
