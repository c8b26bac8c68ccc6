"""File names in patches: what git itself prints is the reference."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.edits.names import quoted, word


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (b"plain/name.txt", b"plain/name.txt"),
        (b"with space", b"with space"),
        (b"new\nline\ttab\r", rb'"new\nline\ttab\r"'),
        (b'"quote\\', rb'"\"quote\\"'),
        (b"\xc3\xa9\xff\x01\x7f", rb'"\303\251\377\001\177"'),
        (b"\a\b\v\f", rb'"\a\b\v\f"'),
    ],
)
def test_quoted(name: bytes, text: bytes) -> None:
    assert quoted(name) == text


def test_a_word_has_no_bare_space() -> None:
    assert word(b"a/x y") == b'"a/x y"' and word(b"a/x") == b"a/x" and word(b"a/\n x") == rb'"a/\n x"'


@settings(max_examples=20, deadline=None)
@given(names=st.sets(st.binary(min_size=1, max_size=20).map(lambda name: name.translate(None, b"\0/")), max_size=30))
def test_as_git_does(names: set[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    names -= {b"", b".", b".."}
    names = {name for name in names if name.lower() != b".git"}
    top = tmp_path_factory.mktemp("names")
    subprocess.run(["git", "init", "-q", "."], cwd=top, check=True)
    for name in names:
        Path(top, "x").with_name(name.decode(errors="surrogateescape")).touch()
    listed = subprocess.run(["git", "ls-files", "--others"], cwd=top, capture_output=True, check=True)
    assert set(listed.stdout.splitlines()) == {quoted(name) for name in names}
