"""The text of files as it is compared line by line."""

from __future__ import annotations

import hashlib
import mmap
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stage.edits.tree import Node, vanished
from stage.errors import StageError

# What is larger is named, not shown.
TEXT_LIMIT_BYTES = 64 << 20
# Bad cases take n^1.5 steps. What takes longer than this is shown as replaced from the first line to the last.
COMPARE_LIMIT_S = 5
_READ_BYTES = 1 << 20
_NO_NEWLINE = b"\n\\ No newline at end of file\n"


@dataclass(frozen=True, slots=True)
class Content:
    """A file's bytes as they were at one moment (the stage may be running), in memory; `fd` is for other programs.

    A symbolic link's bytes are its target. `data` is None when there is too much of it.
    """

    fd: int
    data: mmap.mmap | bytes | None

    @property
    def is_text(self) -> bool:
        return self.data is not None and self.data.find(b"\0") < 0

    @property
    def blob_id(self) -> bytes:
        """The name of these bytes in git, with which `git apply --3way` finds what a patch is against."""
        assert self.data is not None
        digest = hashlib.sha1(b"blob %d\0" % len(self.data), usedforsecurity=False)
        digest.update(self.data)
        return digest.hexdigest().encode()

    @property
    def line_count(self) -> int:
        data = self.data[:] if self.data is not None else b""
        return data.count(b"\n") + (data[-1:] not in (b"", b"\n"))

    def lines(self, sign: bytes) -> bytes:
        """All lines, as the body of a hunk."""
        data = self.data[:] if self.data is not None else b""
        if not data:
            return b""
        if data.endswith(b"\n"):
            return sign + data[:-1].replace(b"\n", b"\n" + sign) + b"\n"
        return sign + data.replace(b"\n", b"\n" + sign) + _NO_NEWLINE


@contextmanager
def content(node: Node | None) -> Iterator[Content]:
    """The content of a regular file or symbolic link; empty when there is none, or it vanished meanwhile."""
    with _memory() as fd:
        if node is not None and node.type == "symlink":
            os.write(fd, node.target)
        elif node is not None and not _copy(node, fd):
            yield Content(fd, None)
            return
        size = os.fstat(fd).st_size
        if size == 0:
            yield Content(fd, b"")
            return
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as data:
            yield Content(fd, data)


@contextmanager
def _memory() -> Iterator[int]:
    fd = os.memfd_create("content", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _copy(node: Node, target: int) -> bool:
    """False when it is more than can be shown."""
    try:
        with node.reading() as source:
            if os.fstat(source).st_size > TEXT_LIMIT_BYTES:
                return False
            while piece := os.read(source, _READ_BYTES):
                os.write(target, piece)
                if os.fstat(target).st_size > TEXT_LIMIT_BYTES:
                    return False
    except OSError as error:
        if not vanished(error):
            raise
    return True


def hunks(old: Content, new: Content) -> bytes:
    """What turns one text into the other, in unified form; nothing when they are equal."""
    if not old.data or not new.data:
        return _whole(old, new)
    compared = _compare(old.fd, new.fd)
    return _whole(old, new) if compared is None else compared


def counts(text: bytes) -> tuple[int, int]:
    """How many lines hunks add and remove. Their first line is a header, and no line of a file has a newline inside."""
    return text.count(b"\n+"), text.count(b"\n-")


def _whole(old: Content, new: Content) -> bytes:
    body = old.lines(b"-") + new.lines(b"+")
    if not body:
        return b""
    return b"@@ -%s +%s @@\n" % (_range(old.line_count), _range(new.line_count)) + body


def _range(count: int) -> bytes:
    return b"0,0" if count == 0 else b"1" if count == 1 else b"1,%d" % count


def _compare(old: int, new: int) -> bytes | None:
    """By diffutils: Python's difflib either takes quadratic time or gives up on files whose lines repeat.

    None when it takes too long.
    """
    argv = ["diff", "--text", "--unified", "--label=a", "--label=b", f"/dev/fd/{old}", f"/dev/fd/{new}"]
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(old, new),
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )
    except FileNotFoundError as error:
        raise StageError("the program diff is not there", hint="install diffutils, or use --name-only") from error
    with process:
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (COMPARE_LIMIT_S, COMPARE_LIMIT_S))
        output, _ = process.communicate()
    if process.returncode < 0:
        return None
    if process.returncode > 1:
        raise StageError(f"diff: {output.decode(errors='replace').strip()}")
    return output.split(b"\n", 2)[2] if output else b""
