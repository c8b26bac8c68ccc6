"""Ctrl-C and a reader that leaves: whenever they come, a command ends with its code and without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ROOT, Host, busybox_layout, host

pytestmark = [pytest.mark.root, pytest.mark.fuse]

# Interrupts its own process when the first of these modules is imported that is named on the command line.
INTERRUPTED = """
import os, signal, sys
wanted = sys.argv.pop(1)
def hook(event, arguments):
    if event == "import" and arguments[0] == wanted:
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
from cli.main import main
main()
"""
MODULES = (
    "click",
    "click.types",
    "cli.common",
    "cli.group",
    "fuse.node",
    "stage.boundary.launch",
    "stage.boundary.init",
)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    scratch = tmp_path_factory.mktemp("interrupt")
    with host(scratch / "host") as made:
        made.run("convert", f"oci:{busybox_layout(scratch)}:v1")
        yield made


def run_interrupted(worker: Host, module: str, *argv: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", INTERRUPTED, module, *argv]
    return subprocess.run(command, env=worker.env, cwd=ROOT, capture_output=True, timeout=60, **options)


@pytest.mark.parametrize("module", MODULES)
def test_an_interrupt_while_a_command_starts_is_quiet(worker: Host, module: str) -> None:
    done = run_interrupted(worker, module, "run", "box:v1", "--", "echo", "ran")
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_an_interrupt_that_the_caller_ignores_is_ignored(worker: Host) -> None:
    done = run_interrupted(
        worker,
        "cli.group",
        "run",
        "box:v1",
        "--",
        "echo",
        "ran",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ran\n", b"")


def test_an_interrupt_of_a_command_at_work_lets_it_put_things_in_order(worker: Host) -> None:
    """Its exception comes up through the command: what it was about to do when it imports this is not done."""
    done = run_interrupted(worker, "fuse.doctor", "doctor")
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, b"", b"")


@pytest.mark.parametrize("argv", [["image", "ls"], ["image", "ls", "--json"], ["--help"], ["node", "status"]])
def test_a_reader_that_left_ends_a_command_as_it_ends_git(worker: Host, argv: list[str], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        process = worker.start(*argv, stdout=writing)
    finally:
        os.close(writing)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (141, b"")
