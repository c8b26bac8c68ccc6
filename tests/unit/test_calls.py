"""What programs give to run a process: taken as it is meant, or refused in the words of the package."""

from __future__ import annotations

import io
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from imaged import calls
from imaged.errors import InvalidNameError, PvisorError


class RefusedError(PvisorError):
    pass


def test_what_makes_sense_is_taken(tmp_path: Path) -> None:
    assert calls.image_name("debian:12", RefusedError) == "debian:12"
    assert calls.words(["sh", "-c", "true"], RefusedError) == ("sh", "-c", "true")
    assert calls.words((), RefusedError) == ()
    assert calls.variables({"A": "b=c", "D": ""}, RefusedError) == ("A=b=c", "D=")
    assert calls.variables(None, RefusedError) == ()
    assert [calls.seconds(given, RefusedError) for given in (None, 0, 2, 0.5, 1e9)] == [None, 0.0, 2.0, 0.5, 1e9]
    with open(tmp_path / "file", "wb") as stream:
        assert calls.descriptor(stream, RefusedError) == stream.fileno()
    assert (calls.descriptor(None, RefusedError, 2), calls.descriptor(7, RefusedError)) == (2, 7)


@pytest.mark.parametrize("given", [math.nan, math.inf, -math.inf, -1, -0.1, 1e10, 10**400, True, "3", b"3", [], 2j])
def test_what_is_no_time_is_refused(given: object) -> None:
    with pytest.raises(RefusedError, match="is no time"):
        calls.seconds(given, RefusedError)


@pytest.mark.parametrize("argv", ["true", b"true", 7, None, ["sh", 7], [b"sh"]])
def test_what_is_no_command_is_refused(argv: Any) -> None:
    with pytest.raises(RefusedError, match="argv"):
        calls.words(argv, RefusedError)


@pytest.mark.parametrize("env", [["A=b"], {"A": 1}, {1: "A"}, {"": "x"}, {"A=B": "x"}, "A=b"])
def test_what_are_no_variables_is_refused(env: Any) -> None:
    with pytest.raises(RefusedError, match="env"):
        calls.variables(env, RefusedError)


def test_other_nonsense_is_refused() -> None:
    with pytest.raises(RefusedError, match="no text"):
        calls.image_name(7, RefusedError)
    with pytest.raises(InvalidNameError):
        calls.image_name("Not A Name", RefusedError)
    for stream in (io.BytesIO(), "file", object()):
        with pytest.raises(RefusedError, match="no descriptor"):
            calls.descriptor(stream, RefusedError)  # type: ignore[arg-type]
    none: dict[str, Any] = {"input": None, "stdin": None, "stdout": None, "stderr": None, "capture_output": False}
    calls.check_streams(**none, refusal=RefusedError)
    for wrong in ({"input": "text"}, {"input": b"x", "stdin": 0}, {"capture_output": True, "stderr": 2}):
        with pytest.raises(RefusedError):
            calls.check_streams(**{**none, **wrong}, refusal=RefusedError)


def test_a_writer_writes_all_it_is_given() -> None:
    reading, writing = os.pipe()
    calls.writer(writing)(b"all of it")
    calls.writer(None)(b"nowhere")
    os.close(writing)
    with open(reading, "rb") as stream:
        assert stream.read() == b"all of it"


def test_a_writer_waits_for_a_descriptor_that_does_not_block() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(reading, True)
    data = os.urandom(1 << 20)

    def write() -> None:
        calls.writer(writing)(data)
        os.close(writing)

    thread = threading.Thread(target=write)
    thread.start()
    with open(reading, "rb") as stream:
        assert stream.read() == data
    thread.join()


def test_a_writer_that_waits_for_a_reader_who_left_is_told() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    leaving = threading.Timer(0.1, os.close, (reading,))
    leaving.start()
    try:
        with pytest.raises(BrokenPipeError):
            calls.writer(writing)(bytes(1 << 20))
    finally:
        leaving.join()
        os.close(writing)
