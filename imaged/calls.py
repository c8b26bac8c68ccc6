"""What a program gives to the Python API to run a process: checked, and as the rest of pVisor takes it.

Each function raises the `refusal` of its caller's package for what makes no sense.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

from imaged.errors import PvisorError
from imaged.names import ImageName

Stream = int | IO[Any] | None
LONGEST_S = 1e9
"""Waits of the kernel, and of Perl and Python, take more; nobody waits longer."""
Refusal = type[PvisorError]


def image_name(image: object, refusal: Refusal) -> str:
    """A name or an id. InvalidNameError for a text that is neither."""
    if not isinstance(image, str):
        raise refusal(f"image {image!r} is no text", hint="give a name or an id as a str")
    ImageName.parse(image)  # a bad name is wrong usage; the daemon could only say that it failed
    return image


def words(argv: Sequence[str], refusal: Refusal) -> tuple[str, ...]:
    """A command and its arguments."""
    if isinstance(argv, str | bytes):
        raise refusal(f"argv {argv!r} is one word, not a list", hint="give a list, such as ['sh', '-c', 'a | b']")
    if not isinstance(argv, Iterable):
        raise refusal(f"argv {argv!r} is no list", hint="give a list of str")
    found = tuple(argv)
    for word in found:
        if not isinstance(word, str):
            raise refusal(f"argv has {word!r}, which is no text", hint="give str; os.fsdecode makes one of bytes")
    return found


def variables(env: Mapping[str, str] | None, refusal: Refusal) -> tuple[str, ...]:
    """NAME=value of each."""
    if env is None:
        return ()
    if not isinstance(env, Mapping):
        raise refusal(f"env is {type(env).__name__}, not a mapping", hint="give a dict of names and values")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise refusal(f"env has {name!r}: {value!r}, which is no text", hint="give names and values as str")
        if not name or "=" in name:
            raise refusal(f"env has {name!r}, which no variable can be called")
    return tuple(f"{name}={value}" for name, value in env.items())


def seconds(timeout_s: object, refusal: Refusal) -> float | None:
    """A time to wait, or None for no end."""
    if timeout_s is None:
        return None
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 <= timeout_s <= LONGEST_S:  # type: ignore[operator]
        hint = f"give seconds, 0 to {LONGEST_S:.0f}; without it a process may take for ever"
        raise refusal(f"a timeout of {timeout_s!r} is no time", hint=hint)
    return float(timeout_s)  # type: ignore[arg-type]


def check_streams(
    *, input: object, stdin: Stream, stdout: Stream, stderr: Stream, capture_output: bool, refusal: Refusal
) -> None:
    """What excludes one another, and an input that is not bytes."""
    if capture_output and (stdout is not None or stderr is not None):
        raise refusal("capture_output goes with neither stdout nor stderr")
    if input is not None and stdin is not None:
        raise refusal("input goes without stdin")
    if input is not None and not isinstance(input, bytes | bytearray | memoryview):
        raise refusal(f"input is {type(input).__name__}, not bytes", hint="encode text first")


def descriptor(given: Stream, refusal: Refusal, default: int | None = None) -> int | None:
    """Of an open file."""
    if given is None:
        return default
    try:
        return given if isinstance(given, int) else given.fileno()
    except (AttributeError, OSError, ValueError) as error:  # text, an io.BytesIO, or a file that is closed
        raise refusal(f"{given!r} has no descriptor", hint="give an open file, or capture_output=True") from error


def writer(fd: int | None) -> Callable[[bytes], None]:
    """Writes all it is given; with no descriptor, nothing. BrokenPipeError when nobody reads it any more.

    A descriptor that does not block, as one may be that was inherited, is waited for.
    """

    def write(data: bytes) -> None:
        left = memoryview(data)
        while left and fd is not None:
            try:
                left = left[os.write(fd, left) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                poll.poll()

    return write
