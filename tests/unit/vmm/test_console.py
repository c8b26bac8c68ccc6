from __future__ import annotations

import socket
import time
from pathlib import Path

from vmm.console import Console

LONG_S = 60.0


def test_what_is_printed_is_read_without_being_asked_for(tmp_path: Path) -> None:
    """More than any socket holds, so that a writer would stand still."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "serial.sock"))
        listener.listen()
        console = Console(tmp_path / "serial.sock")
        line, _ = listener.accept()
        with line:
            line.settimeout(LONG_S)
            line.sendall(b"x" * (4 << 20) + b"pvisor: the end")
        text, deadline = "", time.monotonic() + LONG_S
        while not text.endswith("the end") and time.monotonic() < deadline:
            text += console.take()
        assert text.endswith("pvisor: the end")
        assert console.take() == ""
        console.close()


def test_a_line_that_is_let_go_ends_for_the_other_side(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "serial.sock"))
        listener.listen()
        console = Console(tmp_path / "serial.sock")
        line, _ = listener.accept()
        with line:
            console.close()
            line.settimeout(LONG_S)
            assert line.recv(10) == b""
