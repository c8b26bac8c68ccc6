"""What is looked after every few seconds is looked after again when one look failed."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import BinaryIO

import pytest

from imaged.chunkstore.store import ChunkStore
from imaged.errors import PvisorError
from imaged.serving import guard, leaseapi, operationsapi, tls, tokens
from imaged.serving.blocking import Blocking
from imaged.serving.guard import Guard
from imaged.serving.leaseapi import LeaseApi
from imaged.serving.operationsapi import OperationsApi
from imaged.serving.repeating import repeating
from imaged.serving.tls import ServerTls
from imaged.serving.tokens import Scope, Token, TokenFile
from imaged.serving.watchedfiles import WatchedFiles

_LONGEST_S = 20.0


class Looks:
    """Fails the first time, and says when it was called again."""

    def __init__(self) -> None:
        self.count = 0
        self.again = asyncio.Event()

    def __call__(self, *_: object) -> None:
        self.count += 1
        if self.count == 1:
            raise KeyError("a look that fails")
        asyncio.get_running_loop().call_soon(self.again.set)


def _guard(store: ChunkStore, blocking: Blocking, looks: Looks) -> AbstractAsyncContextManager[None]:
    made = Guard()
    made.look = looks  # type: ignore[method-assign]
    return made.watching()


def _tls(store: ChunkStore, blocking: Blocking, looks: Looks) -> AbstractAsyncContextManager[None]:
    made = ServerTls.__new__(ServerTls)
    made.reload = looks  # type: ignore[method-assign]
    return made.watching()


def _metrics(store: ChunkStore, blocking: Blocking, looks: Looks) -> AbstractAsyncContextManager[None]:
    class Numbers:
        take = looks

    return OperationsApi(store, blocking, Numbers()).reporting()  # type: ignore[arg-type]


def _leases(store: ChunkStore, blocking: Blocking, looks: Looks) -> AbstractAsyncContextManager[None]:
    made = LeaseApi(store, blocking)
    loop = asyncio.get_running_loop()

    def expire() -> None:
        looks.count += 1
        if looks.count == 1:
            raise KeyError("a look that fails")
        loop.call_soon_threadsafe(looks.again.set)

    made._rolling.expire = expire  # type: ignore[method-assign]
    return made.running()


@pytest.mark.parametrize("kind", [_guard, _tls, _metrics, _leases])
def test_one_failure_does_not_end_the_looking(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: Callable[[ChunkStore, Blocking, Looks], AbstractAsyncContextManager[None]],
) -> None:
    for module, name in ((guard, "_LOOK_S"), (tls, "_LOOK_S"), (operationsapi, "_TAKE_S"), (leaseapi, "_EXPIRE_S")):
        monkeypatch.setattr(module, name, 0.01)

    async def run() -> None:
        blocking, looks = Blocking(), Looks()
        with ChunkStore.open(tmp_path / "store") as store:
            async with kind(store, blocking, looks):
                await asyncio.wait_for(looks.again.wait(), _LONGEST_S)
        blocking.close()

    asyncio.run(run())
    assert "a look that fails" in caplog.text


def test_a_look_that_fails_again_and_again_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[Exception | None] = [KeyError(), KeyError(), ValueError(), None, ValueError()]
    over: list[bool] = []

    async def run() -> None:
        done = asyncio.Event()

        async def look() -> None:
            if not errors:
                done.set()
            elif (error := errors.pop(0)) is not None:
                raise error

        async with repeating(look, 0.001, "a test"):
            await asyncio.wait_for(done.wait(), _LONGEST_S)
        over.append(all(task.get_name() != "a test" for task in asyncio.all_tasks()))

    asyncio.run(run())
    assert over == [True]
    told = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert told == [KeyError, ValueError, ValueError]


def test_a_file_that_could_not_be_read_is_tried_again_unchanged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    held: list[str] = []
    problems: list[Exception] = []

    def load() -> str:
        if problems:
            raise problems[-1]
        held.append(path.read_text())
        return "it was read again"

    caplog.set_level(logging.WARNING)
    watched = WatchedFiles("it stays as it was", (path,), load)
    watched.look()
    assert held == ["one"]
    path.write_text("another")
    for problem in (PvisorError("out of files", hint="close some"), KeyError("strange")):
        caplog.clear()
        problems.append(problem)
        for _ in range(3):
            watched.look()
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["it stays as it was"]
    problems.clear()
    watched.look()
    watched.look()
    assert held == ["one", "another"]
    path.unlink()
    watched.look()
    assert held == ["one", "another"]


def test_tokens_are_read_when_descriptors_are_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_LOOK_S", -1.0)
    path = tmp_path / "tokens"
    (_, old), (secret, new) = (Token.new(Scope.READ, namespace=None) for _ in range(2))
    path.write_text(old.line())
    path.chmod(0o600)
    file = TokenFile(path)
    path.write_text(new.line())

    def none_left(path: Path) -> BinaryIO:
        raise OSError(24, os.strerror(24))

    with monkeypatch.context() as patched:
        patched.setattr(tokens, "open_regular", none_left)
        assert file.find(secret) is None
    assert file.find(secret) == new


def test_tokens_are_read_once_their_mode_is_put_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_LOOK_S", -1.0)
    path = tmp_path / "tokens"
    (_, old), (secret, new) = (Token.new(Scope.READ, namespace=None) for _ in range(2))
    path.write_text(old.line())
    path.chmod(0o600)
    file = TokenFile(path)
    path.write_text(new.line())
    path.chmod(0o620)
    assert file.find(secret) is None
    path.chmod(0o600)
    assert file.find(secret) == new
