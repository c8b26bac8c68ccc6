from __future__ import annotations

import socket
import time
from pathlib import Path

from vmm.console import Console, killed_for_memory, panic, trim

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


def test_the_end_of_a_long_file_is_kept_and_a_panic_found_in_it(tmp_path: Path) -> None:
    log = tmp_path / "console.log"
    assert panic(log) == killed_for_memory(log, 0) == ""
    trim(log)
    log.write_bytes(b"[ 1.0] Out of memory: Killed process 12 (perl) total-vm:1kB\r\n")
    assert (killed_for_memory(log, 0), killed_for_memory(log, log.stat().st_size)) == ("perl", "")
    log.write_bytes(b"[    1.0] Kernel panic - not syncing: the first\r\n")
    assert panic(log) == "the first"
    with open(log, "ab") as stream:
        stream.write(b"x" * (2 << 20) + b"\r\n[    2.0] Kernel panic - not syncing: Out of memory\r\nand more\r\n")
        trim(log)
        assert log.stat().st_size == 64 << 10
        stream.write(b"then this")  # QEMU goes on appending
    assert panic(log) == "Out of memory"
    assert log.read_bytes().endswith(b"and more\r\nthen this")
    size = log.stat().st_size
    trim(log)
    assert log.stat().st_size == size
