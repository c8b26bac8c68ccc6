"""Records of running inits, and what is asked of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage.errors import StageBusyError
from stage.kept import running
from stage.kept.stages import Stages


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as started:
        yield started
        started.kill()


def test_a_process_that_runs(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    assert running.find(tmp_path) is None and running.ended(tmp_path, 0)
    running.record(tmp_path, process.pid)
    init = running.find(tmp_path)
    assert init is not None and init.pid == process.pid
    assert not running.ended(tmp_path, 0.01)
    running.end(init)
    assert running.ended(tmp_path, 10)
    assert running.find(tmp_path) is None  # though it is there, as a zombie
    assert process.wait(10) == -signal.SIGKILL
    running.end(init)
    running.forget(tmp_path)
    running.forget(tmp_path)
    assert running.ended(tmp_path, 0)


@pytest.mark.parametrize(
    "change", [{"started": 1}, {"boot": "another"}, {"pid": 1 << 30}, {"pid": "x"}, {"boot": None}]
)
def test_records_of_another_life_are_none(
    tmp_path: Path, process: subprocess.Popen[bytes], change: dict[str, object]
) -> None:
    running.record(tmp_path, process.pid)
    fields = json.loads((tmp_path / "init").read_text())
    (tmp_path / "init").write_text(json.dumps(fields | change))
    assert running.find(tmp_path) is None and running.ended(tmp_path, 0)
    started = running.start_time(process.pid)
    running.end(running.Init(pid=process.pid, started=started - 1))
    assert process.poll() is None


def test_processes_of_one_namespace_but_those_from_outside(process: subprocess.Popen[bytes]) -> None:
    here = running.Init(pid=os.getpid(), started=running.start_time(os.getpid()))
    assert process.pid in running.processes([here])[here]
    gone = running.Init(pid=1 << 30, started=0)
    assert running.processes([gone]) == {} == running.processes([])


def test_the_end_of_a_stage_waits_for_who_holds_it(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    stages, held, let_go = Stages(tmp_path), threading.Event(), threading.Event()

    def hold() -> None:
        with stages.use("fix", image="id") as stage:
            stage.record_init(process.pid)
            held.set()
            process.wait(20)
            let_go.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(10) and stages.settle("fix")  # it runs: it can be joined
        waiting = threading.Thread(target=lambda: stages.end("fix"))
        waiting.start()
        process.wait(10)
        assert waiting.is_alive()
        with pytest.raises(StageBusyError, match="in use"):
            stages.drop("fix")
    finally:
        let_go.set()
        thread.join(10)
    waiting.join(10)
    assert not waiting.is_alive()
    stages.drop("fix")


def test_a_new_start_waits_for_the_last_processes_of_a_killed_one(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is free already, and what ends still writes."""
    stages = Stages(tmp_path)
    with stages.use("fix", image="id") as stage:
        pass
    running.record(stage.path, process.pid)
    with monkeypatch.context() as impatient:
        impatient.setattr("stage.kept.stagelock.END_S", 0.05)
        for start in (lambda: stages.use("fix", image="id").__enter__(), lambda: stages.drop("fix")):
            with pytest.raises(StageBusyError, match="do not end"):
                start()
    process.kill()
    with stages.use("fix", image="id"):
        pass
    stages.drop("fix")
