"""What long work says where there is no terminal."""

from __future__ import annotations

import pytest

from cli.progress import LOG_INTERVAL_S, ProgressLog


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_line_now_and_then(capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    log = ProgressLog(clock)
    log.start("layer 1 of 2", 3 << 20)
    log.advance(1 << 20)
    assert capfd.readouterr().err == ""  # short work is done without a word
    clock.now_s += LOG_INTERVAL_S
    log.advance(1 << 20)
    log.advance(1)
    assert capfd.readouterr() == ("", "pvisor: layer 1 of 2: 2.0 MiB of 3.0 MiB\n")
    clock.now_s += LOG_INTERVAL_S
    log.start("layer 2 of 2\r\x1b[K", None)
    log.advance(10)
    assert capfd.readouterr().err == "pvisor: layer 2 of 2\\x0d\\x1b[K\n"
    clock.now_s += LOG_INTERVAL_S
    log.advance(90)
    assert capfd.readouterr().err == "pvisor: layer 2 of 2\\x0d\\x1b[K: 100 B\n"
