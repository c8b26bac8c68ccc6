"""What guests, servers and records say does not command the terminal it is shown on."""

from __future__ import annotations

import logging

import pytest

from cli.common import Settings, log_to_stderr, printable, table, warn
from cli.group import report

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b2J\x7f\r\x00b"
SHOWN = r"a\x1b]0;title\x07\x1b[2J\x9b2J\x7f\x0d\x00b"


def test_control_characters_are_shown_and_the_rest_stays() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("two\nlines\tof täxt, 日本") == "two\nlines\tof täxt, 日本"


def test_tables_are_as_wide_as_they_are_shown() -> None:
    assert table(["VM", "STATE"], [[HOSTILE, "running"]]).splitlines() == [
        "VM" + " " * len(SHOWN) + "STATE",
        f"{SHOWN}  running",
    ]


def test_a_line_end_in_a_cell_makes_no_row() -> None:
    """Names and sources come from servers, and paths may have any byte."""
    header, row = table(["NAME", "ID"], [["good\nfake\tbox:1", "aa"]]).splitlines()
    assert row == r"good\x0afake\x09box:1  aa"
    assert header.index("ID") == row.index("aa")


def test_every_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    warn(HOSTILE)
    report(HOSTILE, HOSTILE)
    Settings(None, False, False).emit(None, HOSTILE)
    Settings(None, False, False).emit(None, lambda: HOSTILE)
    told = capsys.readouterr()
    assert told.err == f"pvisor: warning: {SHOWN}\npvisor: error: {SHOWN}\nhint: {SHOWN}\n"
    assert told.out == f"{SHOWN}\n" * 2


def test_what_is_logged(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "root", logging.RootLogger(logging.WARNING))
    log_to_stderr()
    logging.root.error("VM %s: %s", "web", HOSTILE)
    assert capsys.readouterr().err == f"pvisor: ERROR: VM web: {SHOWN}\n"
