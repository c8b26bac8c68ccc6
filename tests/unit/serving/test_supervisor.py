"""Serving processes that do not start are not left behind."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from imaged import submodule
from imaged.errors import PvisorError
from imaged.serving import supervisor
from imaged.serving.supervisor import _Supervisor

_PROCESS = """
import json, os, sys, time
directory = sys.argv[1]
open(f"{directory}/{os.getpid()}", "x").close()
try:
    open(f"{directory}/first", "x").close()
except FileExistsError:
    time.sleep(600)
if sys.argv[2] == "says why":
    while len(os.listdir(directory)) < 3:
        time.sleep(0.01)
    print(json.dumps({"error": "no room", "hint": "make some"}), flush=True)
time.sleep(600)
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[_Supervisor]:
    """One whose two processes never answer; the first may say why."""
    command = [sys.executable, "-c", _PROCESS, str(tmp_path), request.param]
    monkeypatch.setattr(submodule, "command", lambda module: command)
    options = SimpleNamespace(workers=2, drain_s=0.0, to_json=dict)
    with socket.socket() as listener:
        yield _Supervisor(listener, cast(Any, options), tmp_path)


def pids(directory: Path) -> list[int]:
    return [int(path.name) for path in directory.iterdir() if path.name.isdigit()]


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("made", ["says nothing"], indirect=True)
def test_one_that_does_not_start_in_time_is_ended(
    made: _Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would answer later, beside the one that was started instead of it, and nobody would wait for it."""
    monkeypatch.setattr(supervisor, "_START_S", 0.5)

    async def start() -> None:
        with pytest.raises(PvisorError, match="did not start"):
            await made._start()
        assert made._running == set()

    asyncio.run(start())
    assert not any(map(is_there, pids(tmp_path)))


@pytest.mark.parametrize("made", ["says why"], indirect=True)
def test_when_one_says_why_it_can_not_start_the_others_are_ended(made: _Supervisor, tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(PvisorError, match="no room"):
            await made.run(lambda: pytest.fail("they do not answer"))
        assert made._running == set()

    asyncio.run(run())
    assert len(pids(tmp_path)) == 2
    assert not any(map(is_there, pids(tmp_path)))
