"""Work that is put aside: bounded, waited for, and its failures said."""

from __future__ import annotations

import logging
import threading

import pytest

from stage.errors import StageBusyError
from stage.kept import disposal


def test_work_aside_runs_in_another_thread() -> None:
    gate, ran = threading.Event(), list[str]()

    def work() -> None:
        gate.wait(20)
        ran.append(threading.current_thread().name)

    disposal.aside(work)
    assert ran == []
    gate.set()
    disposal.wait()
    assert ran == ["stage-removal"]


def test_no_more_than_a_few_at_once() -> None:
    """The caller does the next one itself."""
    gate, ran = threading.Event(), list[str]()

    def work() -> None:
        gate.wait(20)

    for _ in range(4):
        disposal.aside(work)
    disposal.aside(lambda: ran.append(threading.current_thread().name))
    assert ran == [threading.current_thread().name]
    gate.set()
    disposal.wait()
    disposal.aside(lambda: ran.append(threading.current_thread().name))
    disposal.wait()
    assert ran[1:] == ["stage-removal"]


def test_a_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        raise StageBusyError("cgroup /x still has processes")

    with caplog.at_level(logging.WARNING):
        disposal.aside(work)
        disposal.wait()
    assert "until the next start: cgroup /x still has processes" in caplog.text
