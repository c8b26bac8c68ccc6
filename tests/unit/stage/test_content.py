"""Hunks, and the names that git has for contents."""

from __future__ import annotations

import os

import pytest

from stage.edits import content
from stage.edits.content import Content, counts, hunks


def of(data: bytes) -> Content:
    fd = os.memfd_create("test")
    os.write(fd, data)
    return Content(fd, data)


NO_END = b"\\ No newline at end of file\n"


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (b"", b"", b""),
        (b"a\n", b"a\n", b""),
        (b"", b"a\n", b"@@ -0,0 +1 @@\n+a\n"),
        (b"", b"\n\n", b"@@ -0,0 +1,2 @@\n+\n+\n"),
        (b"", b"a\nb", b"@@ -0,0 +1,2 @@\n+a\n+b\n" + NO_END),
        (b"a\nb\n", b"", b"@@ -1,2 +0,0 @@\n-a\n-b\n"),
        (b"a\nb\n", b"a\nc\n", b"@@ -1,2 +1,2 @@\n a\n-b\n+c\n"),
        (b"a", b"a\n", b"@@ -1 +1 @@\n-a\n" + NO_END + b"+a\n"),
        (b"a\r\n", b"b\r\n", b"@@ -1 +1 @@\n-a\r\n+b\r\n"),
        (b"\xff\n", b"\xfe\n", b"@@ -1 +1 @@\n-\xff\n+\xfe\n"),
    ],
)
def test_hunks(old: bytes, new: bytes, text: bytes) -> None:
    assert hunks(of(old), of(new)) == text


def test_counts_are_of_lines_and_not_of_what_is_in_them() -> None:
    assert counts(hunks(of(b"-- a\n++ b\nc\n"), of(b"-- a\n+++ d\n"))) == (1, 2)


def test_what_takes_too_long_is_replaced_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_compare", lambda old, new: None)
    text = hunks(of(b"a\nb\n"), of(b"a\nc"))
    assert text == b"@@ -1,2 +1,2 @@\n-a\n-b\n+a\n+c\n" + NO_END


def test_blob_names_are_those_of_git() -> None:
    assert of(b"").blob_id == b"e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert of(b"q\n").blob_id == b"bca70f35318f31dd1d1d1d2d2e64c19b880899ff"


def test_text_has_no_nul() -> None:
    assert of(b"a\xff\n").is_text and not of(b"a" * 10_000 + b"\0").is_text and not Content(0, None).is_text
