"""What clients and guests sent writes no line of its own into a log, and commands no terminal."""

from __future__ import annotations

import io
import logging

import pytest

from imaged.loglines import LineFormatter, one_line
from imaged.serving import logformat
from imaged.serving.serveconfig import ServeOptions

FORGED = "x\r\npvisor: ERROR: forged\x1b[31m\x9b2J\u2028\u202e\ud800"
SHOWN = r"x\x0d\x0apvisor: ERROR: forged\x1b[31m\x9b2J\u2028\u202e\ud800"


def logged(formatter: logging.Formatter, text: str, *, error: Exception | None = None) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    handler.handle(
        logging.makeLogRecord(
            {"msg": "GET %s", "args": (text,), "exc_info": error and (type(error), error, error.__traceback__)}
        )
    )
    return stream.getvalue()


def test_a_message_is_one_line() -> None:
    assert logged(LineFormatter("%(message)s"), FORGED) == f"GET {SHOWN}\n"
    assert one_line("täxt, 日本") == "täxt, 日本"
    assert one_line("\U000e0001") == r"\U000e0001"


def test_a_traceback_begins_no_line_at_the_margin() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as raised:
        lines = logged(LineFormatter("%(message)s"), "x", error=raised).splitlines()
    assert lines[0] == "GET x"
    assert all(line.startswith("  ") and line.isprintable() for line in lines[1:])
    assert lines[-1].endswith(r"\u2028\u202e\ud800")


@pytest.mark.parametrize("kind", ["text", "json"])
def test_a_server_logs_lines_of_its_own_alone(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "root", logging.RootLogger(logging.WARNING))
    logformat.configure(ServeOptions(store="", host="", port=0, log_format="json" if kind == "json" else "text"))
    logging.root.error("%s", FORGED)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said[:-1].isprintable()
