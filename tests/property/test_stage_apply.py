"""Random work done in a directory, and done in a stage and then applied, gives the same tree."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.staged import Staged, staged

pytestmark = pytest.mark.root
BASE = """
mkdir -p a/b c; echo one > a/x; echo two > a/y; echo three > a/b/z; echo four > c/w; echo five > f
echo six > g; ln -s x a/link; mkfifo c/pipe; mkdir e; printf '' > c/empty; chmod 640 f; chmod 750 c
"""
NAMES = (b"a", b"b", b"c", b"e", b"f", b"g", b"x", b"y", b"z", b"w", b"hard", b"link", b"new\n\xff", b"n")
paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(b"/".join)
times = st.integers(1_000_000_000, 1_700_000_000).map(lambda second: second * 10**9 + 7)


def write(top: bytes, path: bytes, data: bytes) -> None:
    with open(os.path.join(top, path), "wb") as file:
        file.write(data)


def append(top: bytes, path: bytes, data: bytes) -> None:
    with open(os.path.join(top, path), "r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(data)


def replace(top: bytes, path: bytes, data: bytes) -> None:
    """As editors save."""
    real = os.path.join(top, path)
    write(top, path + b".tmp", data)
    try:
        os.rename(real + b".tmp", real)  # noqa: PTH104 (bytes)
    except OSError:
        os.unlink(real + b".tmp")  # noqa: PTH108
        raise


def remove(top: bytes, path: bytes) -> None:
    real = os.path.join(top, path)
    if os.path.isdir(real) and not os.path.islink(real):  # noqa: PTH112, PTH114
        shutil.rmtree(real)
    else:
        os.unlink(real)  # noqa: PTH108


def touch(path: bytes, time: int) -> None:
    """The time of a directory follows what is applied in it."""
    if not os.path.isdir(path):  # noqa: PTH112
        os.utime(path, ns=(time, time), follow_symlinks=False)


def on(function: Callable[..., Any], *rest: Any, second: bool = False) -> Callable[..., None]:
    def call(top: bytes, *given: Any) -> None:
        ends = [os.path.join(top, path) for path in given[: 2 if second else 1]]
        function(*ends, *given[len(ends) :], *rest)

    return call


OPERATIONS: dict[str, Callable[..., None]] = {
    "write": write,
    "append": append,
    "replace": replace,
    "remove": remove,
    "mkdir": on(os.mkdir),
    "rename": on(os.rename, second=True),
    "link": on(lambda old, new: os.link(old, new, follow_symlinks=False), second=True),
    "symlink": lambda top, path, target: os.symlink(target, os.path.join(top, path)),  # noqa: PTH211
    "chmod": lambda top, path, mode: os.chmod(os.path.join(top, path), mode),  # noqa: PTH101
    "chown": on(lambda path: os.lchown(path, 1234, 5678)),
    "touch": on(touch),
    "mkfifo": on(os.mkfifo),
    "xattr": on(lambda path, value: os.setxattr(path, "user.test", value)),
}
data = st.binary(max_size=20)
operations = st.one_of(
    st.tuples(st.sampled_from(("write", "append", "replace")), paths, data),
    st.tuples(st.sampled_from(("remove", "mkdir", "remove", "mkdir", "mkfifo", "chown")), paths),
    st.tuples(st.just("rename"), paths, paths),
    st.tuples(st.just("symlink"), paths, st.sampled_from(NAMES)),
    st.tuples(st.just("chmod"), paths, st.sampled_from((0o600, 0o755, 0o4711, 0o1777))),
    st.tuples(st.just("touch"), paths, times),
    st.tuples(st.just("xattr"), paths, data),
)
links = st.tuples(st.just("link"), paths, paths)


def work(top: Path, todo: list[tuple[Any, ...]]) -> list[int]:
    """Does what can be done; returns the error of each."""
    errors = []
    for name, *arguments in todo:
        try:
            OPERATIONS[name](os.fsencode(top), *arguments)
            errors.append(0)
        except OSError as error:
            errors.append(error.errno or 0)
    return errors


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("apply")


def apply_and_compare(made: Staged, todo: list[tuple[Any, ...]]) -> None:
    with made.mounted() as merged:
        errors = work(merged, todo)
    assert work(made.direct, todo) == errors
    made.apply()
    made.assert_as_direct()
    made.assert_shown()
    assert made.applied() == []
    made.assert_clean()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(st.lists(operations, min_size=1, max_size=8), min_size=1, max_size=3))
def test_applied_equals_done_directly(scratch: Path, rounds: list[list[tuple[Any, ...]]]) -> None:
    made = staged(Path(tempfile.mkdtemp(dir=scratch)), BASE)
    for todo in rounds:
        apply_and_compare(made, todo)
    shutil.rmtree(made.root)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(todo=st.lists(operations | links, min_size=1, max_size=8))
def test_files_with_several_names(scratch: Path, todo: list[tuple[Any, ...]]) -> None:
    """Once a stage: after an apply, the stage has the names of what it changed as files of their own."""
    made = staged(Path(tempfile.mkdtemp(dir=scratch)), BASE + "ln a/x a/hard; ln -f c/w g; ln c/w c/z")
    apply_and_compare(made, todo)
    shutil.rmtree(made.root)
