"""What `vm exec` does when what a command says can not be written."""

from __future__ import annotations

import os

import pytest

from cli.vmexec import _writer
from vmm.errors import VmSetupError


def test_a_full_disk_is_told_with_what_becomes_of_the_command() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(VmSetupError, match="stderr could not be written: No space left") as caught:
            _writer(fd, "web")(b"said")
    finally:
        os.close(fd)
    assert "`pvisor vm ps web`" in caught.value.hint


def test_a_reader_who_left_is_no_error_of_ours() -> None:
    """The command is told, by SIGPIPE."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        with pytest.raises(BrokenPipeError):
            _writer(writing, "web")(b"said")
    finally:
        os.close(writing)
