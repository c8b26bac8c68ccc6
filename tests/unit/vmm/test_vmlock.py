"""Directories of VMs are taken away while others look at them, who need no lock for that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from vmm.errors import VmNotFoundError
from vmm.held import remove_run
from vmm.vmlock import LOCK_NAME, release, remove_empty, try_lock

ROUNDS = 300


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """The work again and again, in a thread, while the block goes on."""
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_who_tries_the_lock_meanwhile_does_not_keep_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rmdir, tried = tmp_path / "one", Path.rmdir, []

    def rmdir_late(which: Path) -> None:
        if len(tried) < 3:
            fd = try_lock(path)
            assert fd is not None
            release(fd)
            tried.append(which)
        rmdir(which)

    path.mkdir()
    monkeypatch.setattr(Path, "rmdir", rmdir_late)
    remove_empty(path)
    assert tried == [path] * 3
    assert not path.exists()
    with pytest.raises(VmNotFoundError):
        try_lock(path)


def test_who_writes_into_the_run_directory_meanwhile_does_not_keep_it(tmp_path: Path) -> None:
    path = tmp_path / "one"

    def write() -> None:
        with suppress(FileNotFoundError):
            (path / "qemu.ended").write_text("{}")

    with meanwhile(write):
        for _ in range(ROUNDS):
            path.mkdir()
            remove_run(path)
            assert not path.exists()


def test_what_else_is_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).touch()
    (tmp_path / "else").touch()
    with pytest.raises(OSError, match="not empty"):
        remove_empty(tmp_path)
