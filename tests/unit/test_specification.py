"""Every test and benchmark that SPECIFICATION.md names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_ROW = re.compile(r"^\|.*\|([^|]*)\|$")
_NAMED = re.compile(r"`([^`]+)`")


def rows() -> list[tuple[int, list[str]]]:
    """Number and what is named in the last cell of each row of a table that names something."""
    found = []
    for number, line in enumerate((ROOT / "SPECIFICATION.md").read_text().splitlines(), start=1):
        row = _ROW.match(line)
        named = _NAMED.findall(row[1]) if row else []
        if named:
            found.append((number, named))
    return found


def named(texts: list[str]) -> list[tuple[Path, str]]:
    """File, and the test in it or "". A name without a directory is in that of the one before."""
    found = []
    directory = ROOT
    for text in texts:
        name, _, test = text.partition("::")
        path = ROOT / name if "/" in name else directory / name
        directory = path.parent
        found.append((path, test))
    return found


@pytest.mark.parametrize(("number", "texts"), rows())
def test_what_shows_a_promise_is_there(number: int, texts: list[str]) -> None:
    for path, test in named(texts):
        where = f"SPECIFICATION.md, line {number}: {path.relative_to(ROOT)}"
        assert path.exists(), where
        if test:
            assert f"def {test}(" in path.read_text(), f"{where}::{test}"
        elif path.name.startswith("test_"):
            assert "def test_" in path.read_text() or "TestCase" in path.read_text(), where


def test_the_tables_are_found() -> None:
    assert len(rows()) > 100
